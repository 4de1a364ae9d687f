"""The ledger is complete: every claim of the list is there, judged or honestly not run."""

import importlib.util
import re
from dataclasses import replace
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
            assert claim.criterion and (claim.study or claim.outcome == "not_run"), claim.id


def test_a_claim_without_judge_or_study_says_what_is_missing():
    judged = [claim for claim in ng.claims.ledger() if claim.kind == "empirical"]
    assert all(claim.study for claim in judged)
    waiting = replace(judged[0], study="", contrasts=(), premise=(), missing="nobody measures it yet", given=None)
    assert waiting.result.status == "not_run"
    assert waiting.result.sentence == "no study decides it: nobody measures it yet."


def test_every_fault_is_of_a_kind_and_has_a_reason():
    told = [claim.fault.partition(": ") for claim in ng.claims.ledger() if claim.fault]
    assert {kind for kind, _, _ in told} == set(ng.claims.FAULTS) and all(len(why) > 20 for _, _, why in told)


@pytest.mark.parametrize("paper", ["S2", "P"])
def test_what_is_false_as_stated_and_nothing_else_has_a_fault(paper):
    for claim in ng.claims.ledger(paper=paper):
        assert bool(claim.fault) == (claim.verdict == "false_as_stated") == bool(claim.flaw), claim.id


def test_five_sentences_of_practice_are_judged_as_the_papers_are():
    assert [claim.id for claim in ng.claims.ledger(paper="P")] == ["P-1", "P-2", "P-3", "P-4", "P-5"]


def test_the_tally_is_that_of_the_claims_and_splits_the_false_ones():
    ledger = ng.claims.ledger(paper="S2")
    words = ", ".join(f"{n} {flaw}" for flaw, n in ledger.faults().items() if n)
    assert f"{ledger.counts()['S2']['false_as_stated']} false as stated ({words})" in ledger.tally()
    assert sum(ledger.faults().values()) == ledger.counts()["S2"]["false_as_stated"]
    assert ledger.tally("S2") == ledger.tally() and ledger.tally() in ledger.meaning()


def test_the_readme_counts_what_is_there():
    ids = [claim.id for claim in ng.claims.ledger()]
    papers = sum(not id.startswith("P-") for id in ids)
    text = (Path(__file__).parents[3] / "README.md").read_text(encoding="utf-8")
    assert f"[{papers} claims of five papers and {len(ids) - papers} of practice](docs/_generated/ledger.md)" in text


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
            assert script.typeset_sentence(claim, part) in section, f"{claim.id}: run make generated"


@pytest.mark.heavy
def test_the_docs_page_has_the_verdicts_of_today(script):
    def headings(page):
        return re.findall(r"^### .*$|^\| .* \| \d+ \|$", page, flags=re.MULTILINE)

    assert headings(script.PAGE.read_text(encoding="utf-8")) == headings(
        script.page(ng.claims.ledger().judge(workers=2))
    )


def test_the_ledger_is_a_result_with_readings_and_a_meaning():
    ledger = ng.claims.ledger(paper="S4")
    assert sum(reading.value for reading in ledger.readings()) == len(ledger)
    assert ledger.meaning().startswith(f"Of {len(ledger)} claims: ") and ledger.meaning() in ledger._repr_html_()
