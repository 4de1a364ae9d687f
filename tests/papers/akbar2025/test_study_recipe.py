"""What the recipe study says of hand-made tables: means over cells, and a premise."""

from itertools import product

import pytest

from normgauge.papers.akbar2025.studies.recipe import USUAL
from normgauge.papers.court import StudyTable, criteria

NORMS, OPTIMIZERS = ("none", "batch", "layer"), tuple(USUAL)
DECAYS = (0.0, 1e-2)
SCHEDULES = ("constant", "step", "cosine")
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


def test_the_cells_are_averaged_and_none_is_picked():
    """SGD is ahead of Adam by 0.2 in every cell: Adam was not needed, so that the sentence has no premise."""
    rows = [row for row in cells() if row["seed"] != 1]
    decay, sgd = criteria("recipe")
    gains = decay.contrasts[0].effects(table(rows))
    assert gains == pytest.approx([0.0] * 3, abs=0.01)
    lucky = changed(rows, "none", "sgd", "cosine", 1e-2, **{TEST: 0.96})
    moved = decay.contrasts[0].effects(table(lucky))
    assert moved == pytest.approx([gain + (0.96 - 0.6) / 6 for gain in gains], abs=0.01), "one of six cells"
    assert sgd.judge_table(table(rows)).outcome == "premise_absent"
    gain = {seed: 0.3 + 0.01 * seed for seed in SEEDS}  # of Adam without BN; with it SGD stays ahead, by seed too
    arms = {("none", "adam"): 1.0, ("batch", "sgd"): 0.1}
    needed = [{**r, TEST: r[TEST] + gain[r["seed"]] * arms.get((r["norm"], r["optimizer"]), 0.0)} for r in rows]
    assert sgd.judge_table(table(needed)).outcome == "reproduced"


def test_a_seed_without_one_cell_is_left_out():
    (decay, _) = criteria("recipe")
    assert len(decay.contrasts[0].effects(table(cells()))) == 3
