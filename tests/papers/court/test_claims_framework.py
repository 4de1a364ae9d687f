"""The rule that turns numbers into words, the registry, the ledger and its command."""

import json
import math

import pytest
import torch
import typer
from typer.testing import CliRunner

from normgauge.cli._claims import claims as command
from normgauge.errors import InputError, UnknownNameError
from normgauge.papers.court import Claim, Contrast, Evidence, StudyTable, Verdict, ledger, poll, registry, weigh
from normgauge.papers.court.checks import (
    Check,
    broken,
    conclusion,
    corrected,
    excess,
    fact,
    gap,
    gather,
    printed,
    unsaid,
)
from normgauge.papers.court.ledger import judge_many
from normgauge.rng import generator

ROUNDING, OFF, BETWEEN = 1e-15, 0.3, 1e-6


def verdict_of(**values):
    """Weigh one check per role; the value of a role left out is not there."""
    return weigh([Evidence(role, role, value) for role, value in values.items()])


@pytest.mark.parametrize(
    ("values", "word"),
    [
        ({"printed": ROUNDING}, "holds"),
        ({"printed": ROUNDING, "corrected": ROUNDING}, "holds"),
        ({"printed": OFF, "corrected": ROUNDING, "conclusion": ROUNDING}, "holds_with_correction"),
        ({"printed": OFF, "corrected": ROUNDING, "conclusion": OFF}, "false_as_stated"),
        ({"printed": OFF, "corrected": ROUNDING}, "false_as_stated"),
        ({"printed": OFF}, "false_as_stated"),
        ({"printed": math.inf, "corrected": ROUNDING}, "false_as_stated"),
    ],
)
def test_the_verdict_follows_from_the_discrepancies(values, word):
    found = verdict_of(**values)
    assert (found.verdict, found.status, found.outcome) == (word, "judged", None)


@pytest.mark.parametrize(
    ("values", "words"),
    [
        ({"corrected": ROUNDING}, "no check of the printed statement"),
        ({"printed": BETWEEN}, "undecided"),
        ({"printed": OFF, "corrected": BETWEEN}, "undecided"),
        ({"printed": OFF, "corrected": OFF, "conclusion": ROUNDING}, "the correction fails"),
        ({"printed": OFF, "conclusion": ROUNDING}, "not tested"),
    ],
)
def test_the_ledgers_own_mistakes_are_errors_not_verdicts(values, words):
    found = verdict_of(**values)
    assert (found.verdict, found.status) == (None, "error")
    assert words in found.sentence


def test_the_worst_instance_speaks_and_not_a_number_never_passes():
    evidence = gather(
        [printed("a", 1e-12), printed("a", 0.5), printed("a", 1e-3), printed("b", math.nan), fact("c", -2)]
    )
    assert [(item.name, item.value, item.instances) for item in evidence] == [
        ("a", 0.5, 3),
        ("b", math.inf, 1),
        ("c", -2.0, 1),
    ]
    assert evidence[1].fails


def test_discrepancies():
    a = torch.tensor([1.0, 2.0])
    assert gap(a, a) == 0
    assert gap(a, 2 * a) == 0.5
    assert gap(a, torch.ones(3)) == math.inf
    assert gap(torch.tensor(math.nan), 1.0) == math.inf
    assert excess(a, 2 * a) == 0
    assert excess(1.0, math.inf) == 0
    assert excess(math.nan, 1.0) == excess(1.0, math.nan) == excess(math.inf, 1.0) == math.inf
    assert excess(2 * a, a) == 0.5
    assert excess(torch.tensor([1.0, 3.0]), torch.tensor([2.0, 2.0])) == pytest.approx(1 / 3)
    assert (broken(True), broken(False)) == (0.0, 1.0)
    assert unsaid("Linear\n rate", ["linear rate", "sublinear"]) == 0.5


@pytest.mark.parametrize(
    ("margins", "outcome"),
    [
        ({"a": [1.0, 1.1, 0.9]}, "reproduced"),
        ({"a": [-1.0, -1.1, -0.9]}, "contradicted"),
        ({"a": [1.0, -1.0, 0.1]}, "too_small_to_tell"),
        ({"a": [1.0, 1.1]}, "too_small_to_tell"),
        ({"a": [1.0, 1.1, 0.9], "b": [-1.0, -1.1, -0.9]}, "contradicted"),
        ({"a": [1.0, 1.1, 0.9], "b": [0.5, -0.5, 0.1]}, "too_small_to_tell"),
        ({"a": [0.0, 0.0, 0.0]}, "too_small_to_tell"),
        ({"a": [0.1 + 0.2, 0.3, 0.3]}, "too_small_to_tell"),
        ({}, "too_small_to_tell"),
    ],
)
def test_experiments_are_polled_over_seeds(margins, outcome):
    found = poll(margins)
    assert (found.verdict, found.outcome, found.status) == ("empirical", outcome, "judged")


def toy(trial, **more):
    return Claim(id="S1-toy", place="nowhere", printed="1 = 1", kind="theorem", trial=trial, **more)


def test_a_judge_that_raises_is_an_error_and_leaves_the_room_as_it_was():
    def trial(generator):
        yield printed("fine", 0.0)
        torch.set_default_dtype(torch.float16)
        torch.rand(3)
        raise RuntimeError("broken pipe")

    torch.set_default_dtype(torch.float32)
    before = torch.random.get_rng_state()
    found = toy(trial).judge(generator(0))
    assert (found.verdict, found.status) == (None, "error")
    assert "broken pipe" in found.sentence
    assert torch.get_default_dtype() is torch.float32
    assert torch.equal(torch.random.get_rng_state(), before)


def test_judges_run_in_double_precision_and_from_their_seed_alone():
    def trial(generator):
        yield printed("dtype", broken(torch.zeros(1).dtype is torch.float64))
        yield fact("global stream", torch.rand(()))
        yield fact("own stream", torch.rand((), generator=generator))

    torch.set_default_dtype(torch.float32)
    first, again, other = (toy(trial).judge(generator(seed)) for seed in (3, 3, 4))
    assert first.verdict == "holds"
    assert first == again
    assert {item.value for item in first.evidence[1:]}.isdisjoint(item.value for item in other.evidence[1:])


def test_a_duplicate_id_is_an_error(monkeypatch):
    monkeypatch.setattr(registry, "_CLAIMS", {})
    registry.theorem("S1-toy", place="p", printed="s")(lambda generator: [])
    with pytest.raises(InputError, match="registered once"):
        registry.theorem("S1-toy", place="p", printed="s")(lambda generator: [])


def test_a_margin_that_is_no_number_is_refused():
    with pytest.raises(InputError, match="did not finish"):
        poll({"a": [1.0, math.nan, 0.9]})


def test_empirical_claims_say_not_run_with_their_command_until_there_is_a_table(monkeypatch):
    monkeypatch.setattr(registry, "_CLAIMS", {})

    gain = Contrast("", {"reading": "batch"}, {"reading": "none"})
    words = {"race": {"criteria": {"S1-toy": {"place": "p", "printed": "BN wins", "control": "none"}}}}
    monkeypatch.setattr(registry, "study_words", lambda: words)
    registry.empirical("S1-toy", "race", contrasts=[gain])
    claim = registry._CLAIMS["S1-toy"]
    waiting = claim.judge(generator(0))
    assert (waiting.verdict, waiting.outcome, waiting.status) == ("empirical", "not_run", "not_run")
    assert "normgauge reproduce race" in waiting.sentence
    rows = tuple({"seed": seed, "batch": 1.0 + 0.01 * seed, "none": 0.5} for seed in range(4))
    assert claim.judge_table(StudyTable(rows)).outcome == "reproduced"
    swapped = tuple({"seed": row["seed"], "batch": row["none"], "none": row["batch"]} for row in rows)
    assert claim.judge_table(StudyTable(swapped)).outcome == "contradicted"
    assert claim.judge_table(StudyTable(({"seed": 0},))).status == "not_run"


def test_verdicts_use_the_vocabulary():
    with pytest.raises(InputError, match="verdict is one of"):
        Verdict("true", None, "judged", (), "")


def test_the_ledger_lists_finds_and_refuses():
    book = ledger(paper="S1")
    assert len(book) == len(list(book)) > 0
    assert {claim.paper for claim in book} == {"S1"}
    assert book["S1-T4.1"].cite[0] == "santurkar2018"
    with pytest.raises(UnknownNameError, match=r"S1-T4\.1"):
        ledger(ids=["S1-T4.11"])
    with pytest.raises(UnknownNameError, match="paper"):
        ledger(paper="S9")


def test_verdicts_do_not_depend_on_order_or_company():
    ids = ["S1-FC.2", "S1-T4.1"]
    together = {claim.id: claim.result for claim in ledger(ids=ids)}
    assert {id: ledger(ids=[id])[id].result for id in reversed(ids)} == together
    assert {claim.id: claim.result for claim in ledger(ids=ids, seed=1)} != together


@pytest.mark.heavy
def test_two_processes_find_what_one_finds():
    book = ledger(ids=["S1-FC.1", "S1-FC.2"])
    seen = []
    parallel = judge_many(book.claims, workers=2, progress=lambda *news: seen.append(news))
    assert [claim.result for claim in parallel] == [claim.result for claim in book]
    assert [news[1:] for news in seen] == [(1, 2), (2, 2)]


def test_the_printed_ledger_counts_by_paper_and_ends_with_what_it_is():
    text = str(ledger(ids=["S1-FC.2", "S1-T4.1"]))
    assert text.startswith("Santurkar et al. 2018 (S1): 2 claims (1 holds, 1 holds with correction)")
    assert "seed 0" in text.splitlines()[-1]


def test_the_frame_and_the_chart():
    book = ledger(ids=["S1-FC.2", "S1-T4.1"])
    frame = book.frame()
    assert list(frame["verdict"]) == ["holds", "holds_with_correction"]
    assert book.chart().to_dict()["mark"]["type"] == "bar"


def run(*arguments):
    app = typer.Typer()
    app.command()(command)
    return CliRunner().invoke(app, list(arguments))


def test_the_command_prints_json_and_nothing_else():
    done = run("--id", "S1-T4.1", "--json")
    assert done.exit_code == 0
    (record,) = json.loads(done.stdout)
    assert {"id", "verdict", "outcome", "status", "printed", "corrected", "evidence"} <= set(record)
    assert record["verdict"] == "holds_with_correction"
    assert {item["role"] for item in record["evidence"]} == {"printed", "corrected", "conclusion", "fact"}


def test_the_command_shows_one_claim_in_full():
    text = run("--id", "S1-T4.1").stdout
    for part in ("printed:", "finding:", "corrected:", "evidence:", "reproduce:", "cite:"):
        assert part in text


def test_a_failing_judge_is_exit_code_one(monkeypatch):
    def trial(generator):
        raise RuntimeError("no")
        yield Check("printed", "never", 0.0)

    monkeypatch.setitem(registry._CLAIMS, "S1-toy", toy(trial))
    assert run("--id", "S1-toy").exit_code == 1


def test_roles_of_the_spoken_checks():
    assert [check("a", 0.0).role for check in (printed, corrected, conclusion, fact)] == [
        "printed",
        "corrected",
        "conclusion",
        "fact",
    ]
