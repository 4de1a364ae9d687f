"""What the recipe study says of hand-made tables: choices by validation data alone, and sentences as told apart."""

import re
from itertools import product

import pytest

from normgauge.papers.akbar2025.studies.recipe import NORMS, OPTIMIZERS, SCHEDULES, figures, remarks
from normgauge.papers.court import StudyTable, criteria

DECAYS = (0.0, 1e-2)
SEEDS = range(4)
VALIDATION, TEST = "validation_accuracy", "test_accuracy"


def cells():
    """SGD is clearly ahead of Adam, cosine of constant, step as good as cosine, no decay matters; one run failed."""
    rows = []
    for place, (norm, optimizer, schedule, decay) in enumerate(product(NORMS, OPTIMIZERS, SCHEDULES, DECAYS)):
        level = 0.6 - 0.2 * (optimizer == "adam") - 0.1 * (schedule == "constant")
        for seed in SEEDS:
            noise = 0.004 * ((place + seed) % 2 - 0.5)
            liked = level + 0.01 * (schedule == "cosine") + 0.005 * (decay > 0)
            knobs = {"norm": norm, "optimizer": optimizer, "schedule": schedule, "decay": decay, "factor": 1.0}
            rows.append({**knobs, "seed": seed, "status": "ok", VALIDATION: liked, TEST: level + noise})
    failed = next(row for row in rows if is_cell(row, "none", "adam", "constant", 0.0) and row["seed"] == 1)
    failed |= {"status": "diverged", VALIDATION: 0.99, TEST: 0.99}
    return rows


def is_cell(row, *values):
    return tuple(row[name] for name in ("norm", "optimizer", "schedule", "decay")) == values


def changed(rows, *values, **readings):
    return [{**row, **readings} if is_cell(row, *values) else row for row in rows]


def table(rows):
    return StudyTable(tuple(row for row in rows if row.get("status", "ok") == "ok"), tuple(rows))


def margins(rows):
    return {name: values for claim in criteria("recipe") for name, values in claim.margins(table(rows)).items()}


def line(rows, start):
    return next(text for text in remarks(table(rows)) if text.startswith(start))


def test_the_sentences_tell_ahead_from_behind_from_neither():
    for norm in NORMS:
        found = line(cells(), f"{norm}: ")
        assert found.startswith(f"{norm}: best sgd, cosine schedule, decay 0.01, rate 0.01: test accuracy 0.")
        assert re.search(r"Optimizer: sgd is better than adam \(ahead by \+0\.(19|20)", found)
        assert re.search(r"Schedule: cosine is better than constant \(ahead by \+0\.(09|10)", found)
        assert "no preference can be told between cosine and step (ahead by " in found
        assert "Decay: no preference can be told between 0.01 and 0 (" in found
        assert "of the 11 other cells can be told to be behind it: " in found
        assert re.search(r"adam, cosine, 0\.01 by 0\.(19|20)", found) and "sgd, step, 0.01 by" not in found


def test_cells_that_are_all_alike_are_not_called_behind():
    alike = [{**row, TEST: 0.5 + 0.01 * ((row["seed"] + n) % 3), "status": "ok"} for n, row in enumerate(cells())]
    found = line(alike, "batch: ")
    assert "None of the 11 other cells can be told to be behind it." in found and "better than" not in found


def test_a_choice_that_was_wrong_on_test_data_is_said_to_be():
    lucky = changed(cells(), "layer", "adam", "step", 0.0, **{VALIDATION: 0.1, TEST: 0.9})
    assert line(lucky, "layer: ").startswith("layer: best sgd, cosine schedule, decay 0.01, rate 0.01")
    assert line(lucky, "layer with adam: ").startswith("layer with adam: best adam, cosine schedule, decay 0.01")
    wrong = changed(cells(), "layer", "sgd", "cosine", 1e-2, **{VALIDATION: 0.95, TEST: 0.2})
    assert "cosine, chosen on validation data, is worse on test data than constant (ahead by -0." in line(
        wrong, "layer: "
    )


@pytest.mark.parametrize("norm", ["none", "batch"])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_high_test_accuracy_chooses_nothing(norm, optimizer):
    rows = cells()
    for schedule in SCHEDULES:  # so that no choice of the schedule hides the decay's
        rows = changed(rows, norm, optimizer, schedule, 0.0, **{VALIDATION: 0.3})
    lucky = rows
    for schedule in SCHEDULES:
        lucky = changed(lucky, norm, optimizer, schedule, 0.0, **{TEST: 0.99})
    assert margins(lucky) == margins(rows) == margins(rows[::-1])


def test_validation_accuracy_chooses_the_decay_of_each_optimizer_and_seed():
    rows = changed(cells(), "none", "adam", "cosine", 0.0, **{VALIDATION: 0.7, TEST: 0.55})
    rows = [{**row, TEST: round(row[TEST], 2)} if row["optimizer"] == "sgd" else row for row in rows]
    batch = {s: row[TEST] for row in rows if is_cell(row, "batch", "adam", "cosine", 1e-2) for s in [row["seed"]]}
    sgd = {
        n: {row["seed"]: row[TEST] for row in rows if is_cell(row, n, "sgd", "cosine", 1e-2)} for n in ("none", "batch")
    }
    found = margins(rows)
    gains = [(0.55 - sgd["none"][s]) - (batch[s] - sgd["batch"][s]) for s in SEEDS]
    assert found["Adam's gain, none minus batch"] == pytest.approx(gains)
    assert found["log10 of the best decay, none minus batch"] == [-4.0] * 4  # none at 0 (drawn at 1e-6), batch at 0.01


def test_the_best_value_per_seed_leaves_out_failures_and_takes_the_smallest_of_equals():
    rows = [{"seed": 0, "decay": d, "fit": 0.5} for d in (3, 1, 2)]
    rows += [{"seed": 1, "decay": 1, "fit": 0.5}, {"seed": 1, "decay": 2, "fit": 0.9, "status": "diverged"}]
    rows += [{"seed": 2, "decay": 1, "fit": None}]
    for order in (rows, rows[::-1]):
        assert StudyTable(tuple(order)).best_by_seed("decay", by="fit") == {0: 1, 1: 1}


def test_a_cell_without_any_finished_run_is_in_no_comparison():
    lost = changed(cells(), "batch", "adam", "step", 0.0, status="error")
    assert "of the 10 other cells can be told to be behind it: " in line(lost, "batch: ")


def test_figures_are_drawn_with_failed_runs():
    pytest.importorskip("altair")
    lost = changed(cells(), "batch", "adam", "step", 0.0, status="error")
    assert [figure.name for figure in figures(table(lost))] == [*NORMS, "behind"]
