"""What the shift study says of a hand-made table, and what it keeps of a trained network."""

import pytest
import torch
from torch import nn

from normgauge.lab import data
from normgauge.papers.akbar2025.studies import shift
from normgauge.papers.court import StudyTable, criteria

ARMS = (("none", "none"), *(("batch", name) for name in ("stored", "recalibrated", "batch")))
CUE_DROP = {"none": 0.2, "stored": 0.3, "recalibrated": 0.1, "batch": 0.5}
UNDER = {"none": 0.5, "stored": 0.3, "recalibrated": 0.7, "batch": 0.7}


def table(cost, under=UNDER, seeds=4):
    """One row per task, arm and seed; the last seed of the recalibrated arm failed before it was read."""
    rows = []
    for norm, arm in ARMS:
        for seed in range(seeds):
            noise = 0.004 * ((3 * seed + len(arm)) % 5 - 2)
            knobs = {"norm": norm, "statistics": arm, "seed": seed, "status": "ok"}
            kept, shifted, drop = 0.8, under[arm] + noise, cost[arm] + noise
            images = {"clean_accuracy": kept, "shift_accuracy": shifted, "shift_drop": kept - shifted}
            images |= {"brightness_accuracy": shifted, "contrast_accuracy": shifted}
            cue = {"clean_accuracy": kept, "broken_cue_accuracy": kept - drop, "cue_drop": drop}
            if arm == "recalibrated" and seed and seed == seeds - 1:
                knobs, images, cue = {**knobs, "status": "error"}, {}, {}
            rows += [{**knobs, "task": "images", **images}, {**knobs, "task": "cue", **cue}]
    return StudyTable(tuple(row for row in rows if row["status"] == "ok"), tuple(rows))


def test_the_criteria_are_of_stored_statistics():
    verdicts = {claim.id: claim.judge_table(table(CUE_DROP)) for claim in criteria("shift")}
    assert all(item.instances == 4 for verdict in verdicts.values() for item in verdict.evidence)
    assert [item.value for item in verdicts["S0-shift"].evidence] == pytest.approx([-0.21], abs=0.01)
    assert [item.value for item in verdicts["shift"].evidence] == pytest.approx([-0.21, -0.11], abs=0.01)
    behind, ahead = table(CUE_DROP), table(CUE_DROP, {**UNDER, "stored": 0.6})
    claim = next(claim for claim in criteria("shift") if claim.id == "S0-shift")
    assert [claim.judge_table(given).outcome for given in (behind, ahead)] == ["contradicted", "reproduced"]


def test_a_trained_network_is_shared_and_kept_without_its_data():
    shift._train_network.cache_clear()
    knobs = {"data": "digits", "task": "cue", "network": "mlp", "norm": "batch"}
    knobs |= {"lr": 0.1, "steps": 2, "batch": 32, "seed": 0}
    assert set(knobs) == set(shift.TRAINED)
    network, diverged = shift._train_network(**knobs)
    assert isinstance(network, nn.Module) and diverged is False
    assert shift._train_network(**knobs)[0] is network
    assert shift._dataset("digits", "cue") is not shift._dataset("digits", "cue")
    shift._train_network.cache_clear()


def test_the_cue_scales_a_class_and_leaves_the_data_as_they_were():
    plain = data.load("digits")
    before = plain.test[0].clone()
    cued = shift._dataset("digits", "cue")
    for label, factor in ((0, 0.4), (9, 1.6)):
        rows = plain.test[1] == label
        assert torch.allclose(cued.test[0][rows].float(), factor * plain.test[0][rows])
    assert torch.equal(plain.test[0], before)
    assert torch.equal(shift._dataset("digits", "images").test[0], before)
