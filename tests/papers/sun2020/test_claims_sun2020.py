"""S4's claims: their verdicts over seeds; judges with an ingredient broken notice it; the experiments' criteria."""

import pytest
import torch

from mutation import judged, promoted, settled, swapped
from normgauge.papers.court import ledger
from normgauge.papers.instances.draws import Unit
from normgauge.papers.sun2020.claims import batchnorm, methods
from normgauge.theory import batchnorm_calculus as calculus
from normgauge.theory import effective_weights as effective

VERDICTS = {
    "S4-L1a": "holds",
    "S4-L1b": "holds_with_correction",
    "S4-L1c": "holds_with_correction",
    "S4-10": "holds",
    "S4-sim": "false_as_stated",
    "S4-perm": "holds_with_correction",
    "S4-rank": "holds",
    "S4-ker": "false_as_stated",
    "S4-B2": "holds",
    "S4-ell": "holds_with_correction",
    "S4-inv": "holds",
    "S4-LN": "holds",
    "S4-WN": "holds_with_correction",
    "S4-WS": "holds",
    "S4-SN": "holds",
    "S4-SNnoise": "false_as_stated",
    "S4-L2": "holds_with_correction",
    "S4-L3a": "holds_with_correction",
    "S4-L3b": "holds",
    "S4-adv": "false_as_stated",
    "S4-5.4": "holds",
    "S4-5.4b": "false_as_stated",
    "S4-conv": "false_as_stated",
    "S4-gauge": "false_as_stated",
    "S4-tab": "holds_with_correction",
}
EXPERIMENTS = ["S4-gs", "S4-wd", "S4-E1", "S4-E2", "S4-sphere", "S4-SNrob"]
FINDINGS = ["pruning"]


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    found = settled(id, seed)
    assert (found.verdict, found.status) == (VERDICTS[id], "judged"), found.sentence


def test_every_claim_of_the_paper_is_here():
    assert {claim.id for claim in ledger(paper="S4")} == {*VERDICTS, *EXPERIMENTS}


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


def uncentred(y, eps=0.0):
    s = (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y / s, s.squeeze(-1)


def by_length(y, eps=0.0):
    """Divide by the norm instead of the deviation: the 1/n of the variance dropped."""
    yh, s = calculus.standardize(y, eps)
    root = y.shape[-1] ** 0.5
    return yh / root, s * root


def offset(y, eps=0.0):
    """Let a little of the scale through, as a large eps does."""
    return calculus.standardize(y, 0.5)


def second_moment(X):
    return X @ X.T / X.shape[1]


def unscaled(W, X, gamma=1.0, beta=0.0):
    weights, bias = effective.effective_weights(W, X, gamma, beta)
    return weights / X.shape[1] ** 0.5, bias


def flipped(first, second, gamma=1.0):
    return effective.unit_distance_squared(first, -second, gamma)


@pytest.mark.parametrize(
    ("id", "module", "name", "mutant"),
    [
        ("S4-L1a", batchnorm, "standardize", by_length),
        ("S4-L1c", batchnorm, "standardize", offset),
        ("S4-10", batchnorm, "effective_weights", unscaled),
        ("S4-10", batchnorm, "covariance", second_moment),
        ("S4-sim", batchnorm, "unit_distance_squared", flipped),
        ("S4-perm", batchnorm, "standardize", lambda y, eps=0.0: (y.cumsum(-1), y.norm())),
        ("S4-rank", batchnorm, "covariance", second_moment),
        ("S4-ker", batchnorm, "normalized_rows", lambda Y, gamma, beta: gamma * Y + beta),
        ("S4-B2", batchnorm, "standardize", uncentred),
        ("S4-ell", batchnorm, "effective_weights", unscaled),
        ("S4-inv", batchnorm, "normalized_rows", lambda Y, gamma, beta: gamma * uncentred(Y)[0] + beta),
        ("S4-L1b", torch, "std", lambda v, correction=1: (v - v.mean()).norm() / len(v)),
        ("S4-LN", methods.functional, "layer_norm", lambda y, shape, eps: uncentred(y)[0]),
        ("S4-SN", torch.linalg, "matrix_norm", lambda W, order: W.norm()),
        ("S4-WN", methods, "effective_weights", unscaled),
        ("S4-SNnoise", methods, "_relu_net", lambda weights, x: torch.tanh(x @ weights[0].T + 1)),
        ("S4-tab", methods, "IMAGES", 10_000),
        (
            "S4-tab",
            methods,
            "CLEAN",
            (tuple(v + 0.01 for v in methods.CLEAN[0]), methods.CLEAN[1]),
        ),
        ("S4-WS", methods, "_centred_unit_rows", lambda W: W / W.norm(dim=1, keepdim=True)),
        ("S4-L2", methods, "_loss_by_weights", lambda unit, X: lambda w: unit.normalized_loss(X @ w, 0.5)),
        ("S4-L3b", methods, "after_sgd_step", lambda norm, slope, rate: norm + rate * slope),
        ("S4-L3b", batchnorm, "standardize", offset),
        ("S4-adv", methods, "standardize", offset),
        ("S4-5.4", methods, "project", lambda yh: torch.eye(len(yh)) - yh.outer(yh) / len(yh)),
        ("S4-conv", methods, "standardize", uncentred),
        ("S4-gauge", methods, "standardize", lambda y, eps=0.0: (y - y.mean(-1, keepdim=True), torch.ones(()))),
        ("S4-tab", methods, "ATTACK", methods.CLEAN),
        ("S4-tab", methods, "MISPRINTS", {}),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    assert judged(id) != VERDICTS[id]


@pytest.mark.parametrize("norm", ["BN", "IN", "WN", "CWN", "WS", "LN", "GN"])
def test_a_normalizer_that_does_not_normalize_is_noticed(monkeypatch, norm):
    monkeypatch.setitem(methods._NORMALIZERS, norm, methods._convolve)
    assert judged("S4-L3a") == "error"


def test_the_lemma_of_rows_is_false_only_because_of_layer_and_group_norm(monkeypatch):
    for norm in ("LN", "GN"):
        monkeypatch.delitem(methods._NORMALIZERS, norm)
    assert judged("S4-L3a") == "holds"


def test_at_a_stationary_gamma_the_term_of_theorem_4_1_does_vanish(monkeypatch):
    draw = methods.units

    def at_best_gamma(generator):
        for unit in draw(generator, sizes=(3, 8)):
            goal = unit.gamma * unit.yh + calculus.project(unit.yh) @ unit.y.square()
            yield Unit(unit.y, unit.gamma, 0.0, lambda z, t=goal: (z - t).square().sum())

    monkeypatch.setattr(methods, "units", at_best_gamma)
    assert judged("S4-5.4b") == "holds"


def rows(good):
    """Return rows per study in which everything goes as the claims hope (or, reversed, fear)."""
    runs = {"gamma-sigma": [], "robustness": [], "norm-growth": [], "batch-size-width": [], "pruning": []}
    for seed in range(4):
        wobble = 1 + 0.001 * seed
        far = (0.02 if good else 3.0) * wobble
        runs["gamma-sigma"].append({"seed": seed, "relative_gamma_distance": far, "relative_beta_distance": far})
        for norm in ("batch", "group", "layer", "weight"):
            for decayed in (False, True):
                accuracy = 0.5 + (0.1 if decayed == good else 0.0) * wobble
                growth = (0.1 if decayed else 1.0) * wobble * (1 if good else -1)
                run = {"seed": seed, "norm": norm, "decayed": decayed}
                runs["robustness"].append({**run, "bim_accuracy": accuracy, "noise_accuracy": accuracy})
                runs["norm-growth"].append({**run, "norm_growth": growth, "late_norm_growth": growth})
        for width in (8, 16):
            for batch in (8, 16, 32):
                best = (batch == width) == good
                runs["batch-size-width"].append(
                    {"seed": seed, "width": width, "batch_size": batch, "test_accuracy": 0.5 + 0.1 * best * wobble}
                )
        kept = 0.5 + (0.1 if good else -0.1) * wobble
        ways = {"similar_mean_accuracy": kept, "gamma_mean_accuracy": kept, "random_mean_accuracy": 0.5}
        runs["pruning"] += [{"seed": seed, "l1": strength, **ways} for strength in (0.0, 1e-3)]
    return runs
