"""The study rate-or-norm: what is compared at equal training loss, what is said of the runs that did not get there."""

import math
from dataclasses import replace

import pytest

from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.papers.akbar2025.studies import rate_or_norm as study
from normgauge.papers.court import StudyTable, criteria
from normgauge.papers.studies import execute

SPEC = {"study": "rate-or-norm", "data": "digits", "samples": 128, "model": "mlp", "batch": 32, "measured": 32}
SPEC |= {"norm": "batch", "rate": "own", "lr": 0.1, "seed": 0, "tuned_on": 1, "steps": 40, "target_loss": 0.5}


def row(norm, rate, lr, seed, accuracy, sharpness, **more):
    """Return a run that reached the target, unless `more` says otherwise."""
    found = {"norm": norm, "rate": rate, "lr": lr, "seed": seed, "tuned_on": 2, "status": "ok", "sentence": ""}
    found |= {"seconds": 1.0, "reached": 1.0, "train_loss": 1.1, "steps_to_target": 100, "sharpness_residual": 0.01}
    found |= {"test_accuracy": accuracy, "quotient_sharpness": sharpness, **more}
    if seed < 2:
        found.setdefault("score", accuracy)
    return {name: value for name, value in found.items() if value is not None}


def missing(**more):
    """Return the holes of a run without the readings at the target."""
    names = ("test_accuracy", "quotient_sharpness", "sharpness_residual", "steps_to_target")
    return {**dict.fromkeys(names), "reached": 0.0, **more}


@pytest.fixture
def table():
    """BN gains from its own rate only; one plain run stops short, one run of BN is an error."""
    short = missing(train_loss=1.6, accuracy_when_stopped=0.2)
    error = missing(status="error", reached=None, train_loss=None, score=None)
    rows = [
        row("none", "plain", 0.01, seed, 0.38 + 0.001 * seed, 500.0, **(short if seed == 3 else {}))
        for seed in range(5)
    ]
    rows += [row("batch", "plain", 0.01, seed, 0.35 + 0.002 * seed, 200.0 + seed) for seed in range(5)]
    rows += [
        row("batch", "own", 0.1, seed, 0.42 + 0.001 * seed, 20.0, **(error if seed == 4 else {})) for seed in range(5)
    ]
    rows[-2]["sharpness_residual"] = 0.08
    trials = [row("none", "plain", 0.1, seed, 0.0, 0.0, **{**short, "score": 0.2}) for seed in range(2)]
    trials += [row("none", "plain", 0.3, seed, 0.0, 0.0, **{**error, "status": "diverged"}) for seed in range(2)]
    trials += [row("batch", "own", 0.3, seed, 0.3, 30.0, **(error if seed else {})) for seed in range(2)]
    return finished([*rows, *trials], rows)


def finished(trials, rows):
    """Return the table of these runs; what failed is a trial, and no measurement."""
    return StudyTable(tuple(row for row in rows if row["status"] == "ok"), tuple(trials))


def judge(table):
    return {claim.id: claim.judge_table(table) for claim in criteria("rate-or-norm")}


def test_criteria_leave_out_seeds_that_missed_the_target(table):
    margins = {claim.id: list(claim.margins(table).values()) for claim in criteria("rate-or-norm")}
    same, gain = margins["S0-bjorck"]
    assert same == pytest.approx([0.01 - (0.35 + 0.002 * s - 0.38 - 0.001 * s) for s in (0, 1, 2, 4)])
    assert gain == pytest.approx([0.07 - 0.005 - 0.001 * s for s in range(4)])
    assert margins["rate-or-norm"] == [pytest.approx([math.log10((200 + s) / 20) - 0.1 for s in range(4)])]
    assert {name: verdict.outcome for name, verdict in judge(table).items()} == dict.fromkeys(margins, "reproduced")


def test_a_rate_of_its_own_that_is_not_larger_is_no_premise(table):
    rows = tuple({**r, "lr": 0.01} for r in table.rows)
    assert judge(replace(table, rows=rows))["rate-or-norm"].outcome == "premise_absent"


def test_an_arm_without_any_finished_run_does_not_end_the_study(table):
    lost = missing(status="error", reached=None, train_loss=None, score=None)
    rows = tuple(
        row("none", "plain", 0.01, r["seed"], 0.0, 0.0, **lost) if r["norm"] == "none" else r for r in table.rows
    )
    bare = finished(rows, rows)
    assert judge(bare)["S0-bjorck"].outcome == "too_small_to_tell"


def last(run):
    return {reading.name: reading.value for reading in run.readings}


def test_training_stops_at_the_target():
    outcome = execute(SPEC)
    found = last(outcome)
    assert outcome.status == "ok" and found["reached"] == 1
    assert found["train_loss"] <= SPEC["target_loss"] and 0 < found["steps_to_target"] < SPEC["steps"]
    assert found["steps_to_target"] % study.EVERY == 0
    assert found["score"] == found["validation_accuracy"]
    assert {"test_accuracy", "quotient_sharpness", "sharpness_residual"} <= found.keys()
    assert "accuracy_when_stopped" not in found


def test_a_run_that_stops_short_is_scored_and_not_compared():
    found = last(outcome := execute({**SPEC, "steps": 2}))
    assert outcome.status == "ok" and found["reached"] == 0 and found["train_loss"] > SPEC["target_loss"]
    assert {"score", "accuracy_when_stopped", "validation_accuracy"} <= found.keys()
    assert not {"test_accuracy", "quotient_sharpness", "steps_to_target"} & found.keys()


def test_divergence_is_the_status_and_its_readings_stay():
    outcome = execute({**SPEC, "norm": "none", "rate": "plain", "lr": 1e4})
    found = last(outcome)
    assert outcome.status == "diverged" and "diverged at step" in outcome.sentence
    assert found["diverged"] == 1 and found["reached"] == 0 and math.isfinite(found["accuracy_when_stopped"])
    assert not {"test_accuracy", "quotient_sharpness", "score"} & found.keys()
    beside = execute({**SPEC, "rate": "plain", "lr": 1e4})
    assert "score" not in last(beside), "BN may survive the rate, but the plain net did not"


def test_accuracies_are_of_recomputed_statistics(monkeypatch):
    """A moving average lags where training stops; whole pools of training images take its place."""
    monkeypatch.setattr(study, "POOL", 40)
    seen = []

    def watched(network, batches):
        seen.append([len(batch) for batch in batches])
        return recalibrated_copy(network, [])

    monkeypatch.setattr(study, "recalibrated_copy", watched)
    study._train_and_score.cache_clear()
    knobs = {name: value for name, value in SPEC.items() if name not in ("norm", "rate", "study")}
    found, accuracies = study._train_and_score("batch", tuple(sorted({**knobs, "steps": 1}.items())))
    study._train_and_score.cache_clear()
    task = study._task("digits", 128)
    assert seen == [[40, 40, 40]]
    assert accuracies["test"] == evaluate(recalibrated_copy(found.network, []), task).accuracy
