"""S1's claims: their verdicts, over seeds; and judges with an ingredient broken notice it."""

import pytest

from mutation import judged, promoted, swapped
from normgauge.claims import ledger
from normgauge.claims import santurkar2018_activations as activations
from normgauge.theory import batchnorm_calculus as calculus

VERDICTS = {
    "S1-FC.1": "holds",
    "S1-FC.2": "holds",
    "S1-T4.1": "holds_with_correction",
}


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    assert judged(id, seed) == VERDICTS[id], ledger(ids=[id], seed=seed).explain(id)


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


def drop_mean(y, g, gamma=1.0, eps=0.0):
    yh, s = calculus.standardize(y, eps)
    return (gamma / s) * (g - yh * (g * yh).mean())


def drop_one_over_m(yh):
    return calculus.project(yh) - yh.outer(yh)


def flip_gamma(y, g, gamma=1.0):
    return calculus.gradient_norm_squared(y, g, gamma + 1)


@pytest.mark.parametrize(
    ("id", "module", "name", "mutant"),
    [
        ("S1-FC.1", activations, "pullback_gradient", drop_mean),
        ("S1-FC.2", activations, "project", drop_one_over_m),
        ("S1-T4.1", activations, "gradient_norm_squared", flip_gamma),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    assert judged(id) != VERDICTS[id]
