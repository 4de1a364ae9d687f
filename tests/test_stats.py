"""Intervals, differences, plans and choices: properties for any values, coverage and power by simulation."""

import math
import random
import re
from pathlib import Path
from statistics import fmean

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from normgauge.errors import InputError
from normgauge.stats import choose, interval, leads, natural_bounds, paired_difference, seeds_to_decide

DRAWS, SEEDS = 2000, 8
ENDS = {(None, None): (-1e6, 1e6), (0.0, None): (0.0, 1e6), (None, 2.0): (-1e6, 2.0), (0.0, 1.0): (0.0, 1.0)}


@pytest.mark.parametrize("bounds", ENDS)
@settings(deadline=None)  # the first one imports scipy
@given(st.data())
def test_intervals_stay_inside_the_bounds_and_contain_the_mean(bounds, data):
    values = data.draw(st.lists(st.floats(*ENDS[bounds]), min_size=2, max_size=12))
    found = interval(values, bounds=bounds)
    slack = 1e-9 * max(1.0, *map(abs, values))  # of rounding
    assert found.low - slack <= found.mean <= found.high + slack
    assert bounds[0] is None or found.low >= bounds[0]
    assert bounds[1] is None or found.high <= bounds[1]
    assert found.n == len(values) and found.mean == fmean(values)


def test_interval_against_scipy():
    from scipy import stats

    values = [0.3, 0.1, 0.7, 0.4]
    found = interval(values)
    low, high = stats.t.interval(0.95, 3, loc=found.mean, scale=stats.sem(values))
    assert (found.low, found.high) == pytest.approx((low, high))
    assert math.isnan(interval([1.0]).low) and interval([]).n == 0 and str(interval([1.0])) == "1"
    assert str(found) == f"{found.mean:.3g} ({low:.3g}..{high:.3g})"


@pytest.mark.parametrize("value", [math.nan, math.inf, -0.1, 1.1])
def test_what_is_no_measurement_is_refused(value):
    with pytest.raises(InputError, match="values are numbers from 0 to 1"):
        interval([0.5, value], bounds=(0, 1))


DISTRIBUTIONS = {
    "accuracies around 0.83": ((0.0, 1.0), lambda source: source.beta(10, 2, (DRAWS, SEEDS)), 10 / 12),
    "accuracies around 0.97": ((0.0, 1.0), lambda source: source.beta(60, 2, (DRAWS, SEEDS)), 60 / 62),
    "losses": ((0.0, None), lambda source: source.lognormal(0, 0.5, (DRAWS, SEEDS)), math.exp(0.125)),
}


@pytest.mark.parametrize("name", DISTRIBUTIONS)
def test_bounded_intervals_cover_the_mean_as_often_as_they_say(name):
    bounds, draw, truth = DISTRIBUTIONS[name]
    found = [interval(row, bounds=bounds) for row in draw(np.random.default_rng(0)).tolist()]
    share = fmean(one.low <= truth <= one.high for one in found)
    print(f"{name}: coverage {share:.3f}")
    assert 0.90 <= share <= 0.98


def test_pairing_removes_what_seeds_share():
    noisy = {seed: 10.0 * seed for seed in range(4)}
    better = {seed: value + 1.0 + 0.01 * (-1) ** seed for seed, value in noisy.items()}
    assert paired_difference(better, noisy).excludes_zero
    assert not paired_difference({0: 1.0, 1: 1.0}, {2: 0.0}).n
    wide = paired_difference({0: 1.0, 1: 0.9}, {0: 0.0, 1: 0.1}, bounds=(0, 1))
    assert wide.high <= 1.0


def test_leads_hold_all_at_once():
    best = {seed: 1.0 + 0.1 * seed for seed in range(5)}
    others = {f"arm {k}": {seed: 0.9 + 0.09 * seed + 0.01 * (seed * k % 3) for seed in range(5)} for k in range(4)}
    together = leads({"best": best, **others}, "best", higher=True)
    alone = leads({"best": best, "arm 1": others["arm 1"]}, "best", higher=True)
    assert set(together) == set(others) and together["arm 1"].low < alone["arm 1"].low
    assert together["arm 1"].mean == pytest.approx(alone["arm 1"].mean)
    turned = leads({"best": best, "arm 1": others["arm 1"]}, "best", higher=False)
    assert turned["arm 1"].mean == pytest.approx(-alone["arm 1"].mean)


@pytest.mark.parametrize("size", [0.5, 1.0, 2.0])
def test_the_planned_seeds_decide_as_often_as_planned(size):
    """Values of this mean and spread plan n; of simulated sets of n 80 % must exclude zero, of n - 1 not more."""
    pilot = [size - math.sqrt(0.5), size + math.sqrt(0.5)]  # sample deviation 1
    planned = seeds_to_decide(pilot)
    source = np.random.default_rng(1)

    def decided(count):
        sets = source.normal(size, 1.0, (DRAWS, count))
        half = [interval(row) for row in sets.tolist()]
        return fmean(one.low > 0 for one in half)

    shares = decided(planned), decided(planned - 1)
    print(f"mean {size}: {planned} seeds, power {shares[0]:.3f}; one fewer {shares[1]:.3f}")
    assert shares[0] >= 0.77 and shares[1] <= 0.83


def test_plans_that_cannot_be_made():
    assert seeds_to_decide([1.0]) is None and seeds_to_decide([1.0, -1.0]) is None
    assert seeds_to_decide([1.0, math.nan]) is None and seeds_to_decide([2.0, 2.0]) == 2
    assert seeds_to_decide([1e-6, 2.0, -2.0]) is None, "more than 10,000"


# -- the choice --------------------------------------------------------------------------------------------------

rows = st.lists(
    st.fixed_dictionaries(
        {
            "norm": st.sampled_from(["none", "batch"]),
            "lr": st.sampled_from([0.01, 0.1, 1.0, 10]),
            "seed": st.integers(0, 3),
            "status": st.sampled_from(["ok", "ok", "ok", "diverged", "error"]),
            "fit": st.one_of(st.none(), st.sampled_from([0.0, 0.25, 0.5, 1.0]), st.just(math.nan)),
        }
    ),
    min_size=1,
    max_size=30,
)


def by_arm(choices):
    return {choice.arm["norm"]: choice for choice in choices}


@given(rows, st.randoms(use_true_random=False), st.booleans())
def test_the_order_of_rows_does_not_matter(table, mixer, higher):
    options = {"by": "fit", "over": ["lr"], "within": ["norm"], "higher": higher}
    shuffled = random.Random(mixer.random()).sample(table, len(table))
    assert by_arm(choose(table, **options)) == by_arm(choose(shuffled, **options))


@given(rows, st.booleans())
def test_more_finished_seeds_come_before_the_score_and_failed_runs_never_count(table, higher):
    for choice in choose(table, by="fit", over=["lr"], within=["norm"], higher=higher):
        scores = {}
        for row in table:
            if row["norm"] == choice.arm["norm"]:
                scored = row["status"] == "ok" and row["fit"] is not None and not math.isnan(row["fit"])
                scores.setdefault(row["lr"], []).extend([row["fit"]] if scored else [])
        mine = scores[choice.setting["lr"]]
        assert choice.finished == len(mine) == max(map(len, scores.values())) > 0
        assert choice.score == pytest.approx(fmean(mine))
        equals = {lr: fmean(other) for lr, other in scores.items() if len(other) == len(mine)}
        best = (max if higher else min)(equals.values())
        assert choice.score == best
        tied = sorted(lr for lr, score in equals.items() if score == best)
        assert [choice.setting["lr"], *(tie["lr"] for tie in choice.ties)] == tied
        at_edge = len(scores) > 1 and choice.setting["lr"] in (min(scores), max(scores))
        assert choice.edges == (("lr",) if at_edge else ())


def test_a_choice_says_what_a_reader_should_know():
    table = [{"lr": lr, "seed": seed, "fit": 0.5} for lr in (0.1, 1.0, 10.0) for seed in (0, 1)]
    table[-1]["status"] = "diverged"
    (choice,) = choose(table, by="fit", over=["lr"])
    assert (choice.setting, choice.finished, choice.tried, choice.ties) == ({"lr": 0.1}, 2, 2, ({"lr": 1.0},))
    assert choice.remarks() == [
        "the runs: lr 0.1 ties with lr 1; the first is taken.",
        "the runs: the chosen lr 0.1 is at the edge of the grid (lr).",
    ]
    (short,) = choose([*table[-2:]], by="fit", over=["lr"])
    assert short.remarks() == ["the runs: only 1 of 2 tuning runs finished at the chosen lr 10."]
    assert choose([{"lr": 1.0, "status": "error", "fit": 1.0}], by="fit", over=["lr"]) == []


def test_no_committed_page_shows_an_interval_outside_what_its_quantity_can_be():
    pages = (Path(__file__).parents[1] / "docs" / "_generated" / "studies").glob("*.md")
    for page in pages:
        head: list[str] = []
        for line in page.read_text(encoding="utf-8").splitlines():
            cells = [cell.strip() for cell in line.strip("|").split(" | ")] if line.startswith("|") else []
            head = head or cells if cells else []
            for name, cell in zip(head, cells, strict=False):
                low, high = natural_bounds(name.replace(" ", "_"))
                for ends in re.findall(r"\((\S+)\.\.(\S+)\)", cell):
                    assert low is None or float(ends[0]) >= low, f"{page.name}: {name} {cell}"
                    assert high is None or float(ends[1]) <= high, f"{page.name}: {name} {cell}"
