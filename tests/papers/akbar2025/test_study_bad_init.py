"""The study bad-init: a network that cannot be trained is a measurement, and spreads are over what is varied."""

import pytest

from normgauge.papers.court import StudyTable, criteria
from normgauge.papers.studies import execute, find

SPEC = {"study": "bad-init", "data": "digits", "steps": 6, "batch": 64, "seed": 0}


def test_divergence_is_measured_and_not_a_failure():
    broken = execute({**SPEC, "norm": "none", "init": "he x 10", "lr": 1.0})
    assert broken.status == "ok" and broken.last("diverged") == 1
    assert broken.last("train_accuracy") == pytest.approx(0.1, abs=0.05), "that of a constant"
    sound = execute({**SPEC, "norm": "batch", "init": "he x 10", "lr": 0.1})
    assert sound.status == "ok" and sound.last("diverged") == 0


def test_spreads_are_over_one_knob_while_the_other_is_held():
    accuracies = {("none", "a", 1): 0.1, ("none", "b", 1): 0.9, ("none", "a", 2): 0.3, ("none", "b", 2): 0.9}
    accuracies |= {("batch", init, lr): 0.9 for init in "ab" for lr in (1, 2)}
    rows = [
        {"norm": norm, "init": init, "lr": lr, "seed": seed, "train_accuracy": value}
        for (norm, init, lr), value in accuracies.items()
        for seed in range(3)
    ]
    rows.append({"norm": "none", "scale": "large", "lr": 1, "seed": 0, "train_accuracy": 0.5})  # has no scheme
    find("bad-init")
    (claim,) = (claim for claim in criteria("bad-init") if claim.id == "S3-init")
    schemes, rates = claim.margins(StudyTable(tuple(rows))).values()
    assert schemes == pytest.approx([0.35 - 0.02] * 3) and rates == pytest.approx([0.05 - 0.02] * 3)
