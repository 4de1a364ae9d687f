"""The ledger is complete: every claim of the list is there, judged or honestly not run."""

import importlib.util
import re
from pathlib import Path

import pytest

import normgauge as ng

LISTED = (Path(__file__).parent / "listed_claims.txt").read_text(encoding="utf-8").split()
ADDED_BY_NAME = {"S1-noise", "S1-random", "S1-l1", "S3-GDNP-data", "S3-dropout", "S3-init", "S0-decay", "S0-sgd"}


def test_every_listed_claim_is_in_the_ledger_once():
    ids = [claim.id for claim in ng.claims.ledger()]
    assert len(ids) == len(set(ids))
    assert len(LISTED) == 139 and set(LISTED) <= set(ids)
    assert set(ids) >= ADDED_BY_NAME


def test_every_claim_says_where_it_stands_and_how_it_is_judged():
    for claim in ng.claims.ledger():
        assert claim.printed and claim.place and claim.cite, claim.id
        if claim.kind == "empirical":
            assert claim.study and claim.criterion, claim.id


@pytest.fixture(scope="module")
def script():
    path = Path(__file__).parents[3] / "docs" / "generate_ledger.py"
    spec = importlib.util.spec_from_file_location("generate_ledger", path)
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


def test_the_docs_page_has_every_claim_in_its_present_words(script):
    page = script.PAGE.read_text(encoding="utf-8")
    assert re.findall(r"^### (\S+):", page, flags=re.MULTILINE) == [claim.id for claim in ng.claims.ledger()]
    for claim in ng.claims.ledger():
        section = page.partition(f"\n### {claim.id}: ")[2].partition("\n### ")[0]
        for part in ("printed", "corrected", "hypotheses", "note"):
            assert script._sentence(claim, part) in section, f"{claim.id}: run make generated"


@pytest.mark.heavy
def test_the_docs_page_has_the_verdicts_of_today(script):
    def headings(page):
        return re.findall(r"^### .*$|^\| S\d \|.*$", page, flags=re.MULTILINE)

    assert headings(script.PAGE.read_text(encoding="utf-8")) == headings(
        script.page(ng.claims.ledger().judge(workers=2))
    )


def test_the_ledger_is_a_result_with_readings_and_a_meaning():
    ledger = ng.claims.ledger(paper="S4")
    assert sum(reading.value for reading in ledger.readings()) == len(ledger)
    assert ledger.meaning().startswith(f"Of {len(ledger)} claims: ") and ledger.meaning() in ledger._repr_html_()
