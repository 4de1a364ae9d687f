"""The page beside peers says what the stored numbers say, and its intervals are intervals."""

import json
import runpy
from pathlib import Path

import pytest
import torch
from scipy import stats

ROOT = Path(__file__).parents[1]
BOOK = runpy.run_path(str(ROOT / "benchmarks" / "book.py"))
PAGE = runpy.run_path(str(ROOT / "docs" / "generate_benchmarks.py"))


def test_page_is_written_from_the_stored_numbers():
    assert (ROOT / "docs" / "_generated" / "benchmarks.md").read_text(encoding="utf-8") == PAGE["page"]()


def test_losses_are_counted_and_shown():
    page = PAGE["page"]()
    rows = [r for s in json.loads(BOOK["RESULTS"].read_text())["sections"].values() for r in s["rows"]]
    faster = [r for r in rows if "faster" in PAGE["verdict"](r)]
    assert faster, "the stored runs hold peers that are faster; a page without them would hide something"
    assert page.count("**faster than us**") == len(faster)


@pytest.mark.parametrize("n", [6, 9, 25])
def test_order_statistics_hold_the_median(n):
    draws = torch.rand(4000, n, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
    kept = 0
    for row in draws.tolist():
        found = BOOK["median_interval"](row)
        assert found["low"] <= found["ratio"] <= found["high"]
        kept += found["low"] <= 0.5 <= found["high"]
    exact = 1 - 2 * stats.binom.cdf(int(stats.binom.ppf(0.025, n, 0.5)) - 1, n, 0.5)
    assert kept / len(draws) >= 0.95 - 0.012
    assert abs(kept / len(draws) - exact) < 0.02


def test_ratios_are_taken_within_rounds():
    rows = BOOK["contest"]({"normgauge": lambda: sum(range(200_000)), "twice": lambda: sum(range(400_000))}, 7)
    assert rows["normgauge"]["ratio"] == 1.0
    assert rows["twice"]["low"] > 1.0
