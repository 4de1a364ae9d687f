"""Study normalizer-zoo: the mean over normalizers with a property against the others, on runs that finished."""

import pytest

from normgauge.papers.court import StudyTable, criteria
from normgauge.papers.santurkar2018.studies.normalizer_zoo import remarks

ACCURACIES = {"none": 0.5, "batch": 0.9, "rms": 0.6, "weight": 0.7}


def table(left_out=()):
    rows = [
        {"norm": norm, "lr": 0.1, "seed": seed, "test_accuracy": accuracy + 0.001 * seed, "status": "ok"}
        for norm, accuracy in ACCURACIES.items()
        for seed in range(4)
        if (norm, seed) not in left_out
    ]
    failed = {"norm": "weight_standardization", "lr": 0.1, "seed": 0, "status": "diverged"}
    return StudyTable(tuple(rows), (*rows, failed))


def test_properties_are_compared_on_seeds_that_every_normalizer_finished():
    (finding,) = criteria("normalizer-zoo")
    margins = finding.margins(table())
    assert margins["test accuracy, weights scale-invariant minus the others"] == pytest.approx(
        [0.7 + 0.1 / 3 - 0.5] * 4
    )
    assert margins["test accuracy, statistics of the batch minus the others"] == pytest.approx([0.3] * 4)
    assert all(len(values) == 3 for values in finding.margins(table({("rms", 2)})).values())


def test_a_normalizer_that_never_finished_is_named_and_left_out():
    assert remarks(table())[-1] == "Left out, because no run finished: weight_standardization."
