"""S1's claims: their verdicts over seeds; judges with an ingredient broken notice it; the experiments' criteria."""

import math

import pytest
import torch

from mutation import judged, promoted, settled, swapped
from normgauge.papers.court import StudyTable, ledger
from normgauge.papers.instances.draws import Unit, units
from normgauge.papers.santurkar2018.claims import activations, weights
from normgauge.theory import batchnorm_calculus as calculus
from normgauge.theory import smoothness

VERDICTS = {
    "S1-FC.1": "holds",
    "S1-FC.2": "holds",
    "S1-T4.1": "holds_with_correction",
    "S1-T4.1id": "false_as_stated",
    "S1-eq30": "holds",
    "S1-eq40": "holds",
    "S1-eq43": "holds",
    "S1-T4.2a": "holds",
    "S1-T4.2b": "holds_with_correction",
    "S1-T4.2c": "false_as_stated",
    "S1-PSD": "holds",
    "S1-O4.3": "holds_with_correction",
    "S1-T4.4": "holds_with_correction",
    "S1-TC.1": "false_as_stated",
    "S1-L4.5": "holds_with_correction",
}
EXPERIMENTS = ["S1-ICS", "S1-land", "S1-E1", "S1-E2", "S1-E3", "S1-E4", "S1-noise", "S1-random", "S1-l1"]
WAITING = ["S1-inner", "S1-mean", "S1-sigma"]
FINDINGS = ["covariate-shift", "lp-norms", "noisy-batchnorm", "performance", "smoothness"]


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    found = settled(id, seed)
    assert (found.verdict, found.status) == (VERDICTS[id], "judged"), found.sentence


def test_every_claim_of_the_paper_is_here():
    assert {claim.id for claim in ledger(paper="S1")} == {*VERDICTS, *EXPERIMENTS, *WAITING}


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


def forget_the_mean(y, g, gamma=1.0, eps=0.0):
    yh, s = calculus.standardize(y, eps)
    return (gamma / s) * (g - yh * (g * yh).mean())


def drop_one_over_m(yh):
    return calculus.project(yh) - yh.outer(yh)


def square_root_of_m(y, g, gamma=1.0):
    yh, s = calculus.standardize(y)
    m = len(y)
    return (gamma / s) ** 2 * (g @ g - g.sum() ** 2 / m - (g @ yh) ** 2 / math.sqrt(m))


def flip_the_bend(y, g, H, gamma=1.0, eps=0.0):
    return 2 * (gamma / calculus.standardize(y, eps)[1]) ** 2 * (
        calculus.project(calculus.standardize(y, eps)[0]) @ H @ calculus.project(calculus.standardize(y, eps)[0])
    ) - calculus.pullback_hessian(y, g, H, gamma, eps)


def forget_the_curvature(y, g, H, gamma=1.0):
    return smoothness.curvature_along_gradient(y, g, 0 * H, gamma)


def uncentred(y, eps=0.0):
    s = (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y / s, s.squeeze(-1)


@pytest.mark.parametrize(
    ("id", "module", "name", "mutant"),
    [
        ("S1-FC.1", activations, "pullback_gradient", forget_the_mean),
        ("S1-FC.2", activations, "project", drop_one_over_m),
        ("S1-T4.1", activations, "gradient_norm_squared", square_root_of_m),
        ("S1-eq30", activations, "scale_gradient", lambda yh, s, gamma: -calculus.scale_gradient(yh, s, gamma)),
        ("S1-eq40", activations, "pullback_hessian", flip_the_bend),
        ("S1-eq43", activations, "project", drop_one_over_m),
        ("S1-T4.2a", activations, "curvature_along_gradient", forget_the_curvature),
        ("S1-T4.2b", activations, "_norm_preserving_hessian", lambda generator, g, v: torch.zeros(len(g), len(g))),
        ("S1-T4.2c", Unit, "loss_of_gamma", lambda self, gamma: 2 * self.loss(gamma * self.yh + self.beta)),
        ("S1-PSD", activations, "_cross_entropy", lambda out, labels: out.sin().sum()),
        ("S1-O4.3", weights, "standardize", uncentred),
        (
            "S1-T4.4",
            weights,
            "worst_weight_gradient",
            lambda y, g, gamma, radius: radius * smoothness.worst_weight_gradient(y, g, gamma, 1.0),
        ),
        ("S1-TC.1", weights, "curvature_along_gradient", forget_the_curvature),
        (
            "S1-L4.5",
            weights,
            "nearest_rescaling",
            lambda start, w: (start @ w, (start - (start @ w) * w).square().sum()),
        ),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    assert judged(id) != VERDICTS[id]


def test_with_a_linear_loss_on_top_the_two_networks_do_share_their_gradient(monkeypatch):
    def linear(generator):
        for unit in units(generator):
            yield Unit(unit.y, unit.gamma, unit.beta, unit.y.sin().dot)

    monkeypatch.setattr(activations, "units", linear)
    assert judged("S1-T4.1id") == "holds"


def test_where_the_minimum_lies_below_gamma_the_sign_is_as_printed(monkeypatch):
    def shrinking(generator):
        for unit in units(generator):
            yield Unit(unit.y, abs(unit.gamma), 0.0, unit.loss)

    monkeypatch.setattr(activations, "units", shrinking)
    monkeypatch.setattr(activations, "_squared_distance_to", lambda goal: lambda z: z.square().sum() / 2)
    assert judged("S1-T4.2c") == "error"  # the printed sign holds, and the best gamma is no longer the one computed


NORMS = ("none", "batch", "noisy", "noise", "l1", "l2", "linf")


HOPED = {
    "cosine": {"batch": 0.05, "none": 0.99},
    "l2": {"batch": 10.0, "none": 1.0},
    "loss_range": {"none": 100.0, "batch": 1.0},
    "random_loss_range": {"none": 100.0, "batch": 1.0},
    "gradient_distance": {"none": 100.0, "batch": 1.0},
    "early_gradient_distance": {"none": 100.0, "batch": 1.0},
    "effective_beta": {"none": 100.0, "batch": 1.0},
    "mean_change": {"noisy": 10.0, "none": 1.0},
    "variance_change": {"noisy": 10.0, "none": 1.0},
    "test_accuracy": {"batch": 0.83, "none": 0.80},
    "train_accuracy": {"batch": 0.95, "noisy": 0.95, "none": 0.8, "noise": 0.1, "l1": 0.95, "l2": 0.95, "linf": 0.95},
    "train_loss": {"none": 2.0, "batch": 1.0, "l1": 0.1, "l2": 0.1, "linf": 0.1},
}
FEARED = {
    "cosine": {"batch": 0.9, "none": 0.1},
    "l2": {"batch": 1.0, "none": 10.0},
    "loss_range": {"none": 1.0, "batch": 100.0},
    "random_loss_range": {"none": 1.0, "batch": 100.0},
    "gradient_distance": {"none": 1.0, "batch": 100.0},
    "early_gradient_distance": {"none": 2.0, "batch": 1.0},
    "effective_beta": {"none": 1.0, "batch": 100.0},
    "mean_change": {"noisy": 1.0, "none": 10.0},
    "variance_change": {"noisy": 1.0, "none": 10.0},
    "test_accuracy": {"batch": 0.80, "none": 0.83},
    "train_accuracy": {"batch": 0.95, "noisy": 0.7, "none": 0.8, "noise": 0.9, "l1": 0.7, "l2": 0.7, "linf": 0.7},
    "train_loss": {"none": 0.05, "batch": 0.1, "l1": 1.0, "l2": 1.0, "linf": 1.0},
}


def table(study, readings, seeds=4):
    """Return a table of these readings per norm; with the knob of augmentation where the study has it."""
    augmented = [{"model": "vgg", "augmentation": on} for on in (False, True)]
    rows = []
    for part in augmented if study == "performance" else ({"model": "vgg"}, {"model": "dln"}):
        for place, norm in enumerate(NORMS, start=2):
            for seed in range(seeds):
                spread = 1 + 0.001 * seed * place  # an own one per arm, so that no margin is equal on every seed
                values = {name: arms[norm] * spread for name, arms in readings.items() if norm in arms}
                rows.append({**part, "norm": norm, "seed": seed, **values})
    return StudyTable(tuple(rows))
