"""Study normalizer-zoo: the mean over normalizers with a property against the others, on runs that finished."""

import pytest

from normgauge.papers.court import StudyTable, criteria
from normgauge.papers.studies import find

ACCURACIES = {"none": 0.5, "batch": 0.9, "rms": 0.6, "weight": 0.7, "noisy_batch": 0.9, "instance": 0.0}
find("normalizer-zoo")


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
    name = "test accuracy: statistics of the batch minus the others, mean over normalizers"
    assert margins[name] == pytest.approx([0.9 - 0.6 - 0.005] * 4), "instance is layer on vectors and left out"
    assert all(len(values) == 3 for values in finding.margins(table({("rms", 2)})).values())
