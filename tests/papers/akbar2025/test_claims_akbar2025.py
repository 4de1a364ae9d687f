"""S0's claims: their verdicts over seeds; judges with an ingredient broken notice it; the experiments' criteria."""

from dataclasses import replace

import pytest
import torch

from mutation import judged, promoted, settled, swapped
from normgauge.papers.akbar2025.claims import activations, curvature, dynamics, gradients, landscape, symmetry
from normgauge.papers.court import ledger
from normgauge.papers.court.registry import find
from normgauge.papers.instances import layers as _layers
from normgauge.papers.instances.draws import Unit, units
from normgauge.theory import batchnorm_calculus as calculus
from normgauge.theory import margins, norm_growth, scale_invariance, weight_normalization

VERDICTS = {
    "S0-P4.1a": "false_as_stated",
    "S0-P4.1b": "holds",
    "S0-P4.1c": "holds_with_correction",
    "S0-sign": "holds",
    "S0-unitvar": "holds_with_correction",
    "S0-C4.1.1": "holds",
    "S0-ginv": "holds",
    "S0-metric": "holds",
    "S0-scalar": "holds_with_correction",
    "S0-P4.2": "holds_with_correction",
    "S0-T1LN": "holds_with_correction",
    "S0-eq1": "holds_with_correction",
    "S0-eqLN": "holds_with_correction",
    "S0-A1.1": "holds_with_correction",
    "S0-A1.1f": "holds",
    "S0-A1.2a": "false_as_stated",
    "S0-Ex5.1": "false_as_stated",
    "S0-6.1b": "holds_with_correction",
    "S0-P4.3": "false_as_stated",
    "S0-WN1": "false_as_stated",
    "S0-WN2": "false_as_stated",
    "S0-WN3": "false_as_stated",
    "S0-H1": "holds_with_correction",
    "S0-H2": "holds",
    "S0-polar": "holds_with_correction",
    "S0-lam": "holds_with_correction",
    "S0-6.1a": "false_as_stated",
    "S0-A1.2b": "false_as_stated",
    "S0-A1.2c": "holds_with_correction",
    "S0-7.1": "false_as_stated",
    "S0-7.1m": "false_as_stated",
    "S0-6dl": "false_as_stated",
    "S0-FIM": "holds",
    "S0-L5.1": "holds",
    "S0-L5.1b": "holds_with_correction",
    "S0-5.1iii": "false_as_stated",
    "S0-WD": "holds_with_correction",
    "S0-efflr": "false_as_stated",
    "S0-margin": "holds",
    "S0-cite": "false_as_stated",
    "S0-sphere": "holds_with_correction",
    "S0-balance": "holds_with_correction",
    "S0-cue": "false_as_stated",
    "S0-dying": "holds_with_correction",
    "S0-explode": "holds_with_correction",
}
WAITING = ["S0-conf"]
LISTED = ["S0-E1", "S0-E2", "S0-E3", "S0-E4", "S0-noise"]
ADDED = ["S0-noisem", "S0-init", "S0-decay", "S0-sgd", "S0-rate", "S0-bjorck", "S0-bias", "S0-shift", "S0-dropout"]
ADDED += ["S0-rnn", "S0-gan"]
EXPERIMENTS = LISTED + ADDED


@pytest.mark.parametrize("id", VERDICTS)
@pytest.mark.parametrize("seed", [0, 1])
def test_verdict_over_seeds(id, seed):
    found = settled(id, seed)
    assert (found.verdict, found.status) == (VERDICTS[id], "judged"), found.sentence


def test_every_claim_of_the_paper_is_here():
    assert {claim.id for claim in ledger(paper="S0")} == {*VERDICTS, *EXPERIMENTS, *WAITING}


@pytest.mark.parametrize("id", [id for id, word in VERDICTS.items() if word != "holds"])
def test_exchanging_printed_and_corrected_changes_the_verdict(id):
    assert swapped(id) == "error"  # the printed statement, offered as the correction, fails
    assert promoted(id) == "holds"  # the corrected statement, had it been printed


def offset(y, eps=0.0):
    """Let a little of the scale through, as a large eps does."""
    return calculus.standardize(y, 0.5)


def by_length(y, eps=0.0):
    """Divide by the norm instead of the deviation: the 1/n of the variance dropped."""
    yh, s = calculus.standardize(y, eps)
    root = y.shape[-1] ** 0.5
    return yh / root, s * root


def uncentred(y, eps=0.0):
    s = (y.square().mean(-1, keepdim=True) + eps).sqrt()
    return y / s, s.squeeze(-1)


def absolute(y, eps=0.0):
    yh, s = calculus.standardize(y, eps)
    return yh.abs(), s


def forget_the_mean(y, g, gamma=1.0, eps=0.0):
    yh, s = calculus.standardize(y, eps)
    return (gamma / s) * (g - yh * (g * yh).mean())


def drop_one_over_m(yh):
    return calculus.project(yh) - yh.outer(yh)


def without_square(v, g, slope):
    return g / v.norm() * (slope - v * (v @ slope) / v.norm())


def double(function):
    """Return the closed form times two."""
    return lambda *args, **kwargs: 2 * function(*args, **kwargs)


def one_more(function):
    return lambda *args, **kwargs: 1 + function(*args, **kwargs)


def quoting(place, text):
    """Return a `find` of claims whose quotation at this place says something else."""
    return lambda id: replace(find(id), quotes=(*find(id).quotes[:place], text, *find(id).quotes[place + 1 :]))


def whitened(w, X, gamma=1.0):
    return gamma**2 / X.shape[1] * torch.eye(X.shape[1])


@pytest.mark.parametrize(
    ("id", "module", "name", "mutant"),
    [
        ("S0-P4.1a", symmetry, "_batch_norm", lambda layer, W, b, gamma: gamma * (layer.X @ W.T + b) + layer.beta),
        ("S0-P4.1b", _layers, "standardize", offset),
        ("S0-P4.1c", symmetry, "batch_norm_redundancy", lambda units, bias=True: 1),
        ("S0-sign", symmetry, "standardize", absolute),
        ("S0-sign", symmetry, "standardize", uncentred),
        ("S0-unitvar", symmetry, "standardize", by_length),
        ("S0-unitvar", symmetry, "standardize", lambda y, eps=0.0: calculus.standardize(y)),
        ("S0-C4.1.1", _layers, "standardize", offset),
        ("S0-C4.1.1", symmetry, "radial_derivative", double(scale_invariance.radial_derivative)),
        ("S0-ginv", _layers, "standardize", offset),
        ("S0-metric", symmetry, "_scale_free_metric", lambda y, first, second: first @ second / y.norm()),
        ("S0-scalar", symmetry, "standardize", absolute),
        ("S0-scalar", symmetry, "_standardize_scalar", lambda w, x, b: calculus.standardize(w * x + b, 0.5)[0]),
        ("S0-P4.2", _layers, "standardize", offset),
        ("S0-T1LN", symmetry, "layer_norm_redundancy", lambda inputs: 2),
        ("S0-T1LN", _layers, "standardize", uncentred),
        ("S0-eq1", gradients, "pullback_gradient", forget_the_mean),
        ("S0-eqLN", gradients, "pullback_gradient", forget_the_mean),
        ("S0-A1.1", gradients, "project", drop_one_over_m),
        ("S0-A1.1f", gradients, "pullback_gradient", forget_the_mean),
        ("S0-A1.2a", gradients, "project", lambda yh: torch.eye(len(yh)) - 1 / len(yh)),
        ("S0-Ex5.1", gradients, "pullback_gradient", forget_the_mean),
        ("S0-6.1b", gradients, "standardize", by_length),
        ("S0-P4.3", gradients, "normalized_weight", lambda v, g: g * v),
        ("S0-P4.3", gradients, "normalized_weight", lambda v, g: g * v / v.norm() ** 2),
        ("S0-WN1", gradients, "direction_gradient", without_square),
        ("S0-WN2", gradients, "_loss_by_direction", lambda v, g, loss: loss(g * v)),
        ("S0-WN3", gradients, "length_gradient", double(weight_normalization.length_gradient)),
        ("S0-H1", _layers, "standardize", offset),
        ("S0-H2", _layers, "standardize", offset),
        ("S0-polar", curvature, "polar_eigenvalues", lambda slope, bend, r: torch.stack([0 * bend, bend / r**2])),
        (
            "S0-polar",
            curvature,
            "polar_hessian",
            lambda slope, bend, r: scale_invariance.polar_hessian(-slope, bend, r),
        ),
        ("S0-polar", _layers, "standardize", offset),
        ("S0-lam", _layers, "standardize", offset),
        ("S0-6.1a", curvature, "fit_hessian", whitened),
        ("S0-A1.2b", curvature, "project", drop_one_over_m),
        ("S0-A1.2c", curvature, "fit_hessian", whitened),
        ("S0-A1.2c", curvature, "standardize", offset),
        ("S0-7.1", landscape, "excess_loss", double(scale_invariance.excess_loss)),
        ("S0-7.1", landscape, "standardize", offset),
        ("S0-7.1m", landscape, "standardize", lambda y, eps=0.0: (y.sin(), y.norm())),
        ("S0-7.1m", landscape, "_factor_fit", lambda p, X, T, units: (X @ p[: X.shape[1]]).square().mean()),
        ("S0-6dl", landscape, "linear_network_redundancy", one_more(scale_invariance.linear_network_redundancy)),
        ("S0-FIM", _layers, "standardize", offset),
        ("S0-L5.1", _layers, "standardize", offset),
        ("S0-L5.1", dynamics, "_loss_by_direction", lambda v, g, loss: loss(g * v)),
        ("S0-L5.1b", _layers, "standardize", offset),
        ("S0-5.1iii", _layers, "standardize", offset),
        ("S0-5.1iii", dynamics, "after_sgd_step", lambda norm, slope, rate: norm + rate * slope),
        ("S0-WD", dynamics, "under_decay_flow", lambda n, decay, t: norm_growth.under_decay_flow(n, decay / 2, t)),
        ("S0-efflr", dynamics, "equivalent_rate", lambda rate, factor: rate * factor),
        ("S0-margin", dynamics, "margin_term", lambda margin, norm, X: margins.margin_term(margin**2, norm, X) / 9),
        ("S0-cite", dynamics, "find", quoting(0, "a residual network with BN at infinite width")),
        ("S0-cite", dynamics, "find", quoting(2, "their result holds for every network")),
        ("S0-lam", curvature, "mismatch", lambda w, X, goal, gamma=1.0: (3 * X @ w - goal).square().sum()),
        ("S0-7.1", landscape, "_several_fits", lambda p, X, t: (X @ p[: X.shape[1]] - t[:, 0]).square().mean()),
        ("S0-sphere", curvature, "_great_circle_hessian", lambda w, X, goal: 2 * torch.eye(len(w) - 1)),
        ("S0-sphere", _layers, "standardize", offset),
        ("S0-balance", dynamics, "after_sgd_step", lambda norm, slope, rate: norm + rate * slope),
        ("S0-balance", dynamics, "standardize", offset),
        ("S0-cue", activations, "standardize", lambda y, eps=0.0: (y.abs().sin(), y.norm())),
        ("S0-dying", activations, "standardize", uncentred),
        ("S0-explode", activations, "_growth_with_depth", lambda seed, c, normalized: c**2),
    ],
)
def test_a_broken_ingredient_changes_the_verdict(monkeypatch, id, module, name, mutant):
    monkeypatch.setattr(module, name, mutant)
    found = replace(find(id)).result  # judged anew
    assert "raised" not in found.sentence  # the mutant lies, it does not crash
    assert found.verdict != VERDICTS[id]


def test_with_gamma_one_the_first_equation_is_right(monkeypatch):
    def plain(generator):
        for unit in units(generator):
            yield Unit(unit.y, 1.0, unit.beta, unit.loss)

    monkeypatch.setattr(gradients, "units", plain)
    assert judged("S0-eq1") == "holds"


def test_with_two_samples_stationary_gamma_and_beta_do_make_the_gradient_vanish(monkeypatch):
    monkeypatch.setattr(gradients, "units", lambda generator, sizes: units(generator, sizes=(2,)))
    assert judged("S0-A1.2a") == "holds"


def test_at_critical_points_the_weights_are_a_null_vector(monkeypatch):
    draw = curvature.layers

    def fitted(generator, sizes):
        for layer in draw(generator, sizes=sizes):
            yield curvature.replace(layer, goal=layer.outputs(layer.W, layer.b))

    monkeypatch.setattr(curvature, "layers", fitted)
    assert judged("S0-H1") == "holds"


def test_without_biases_layer_norm_does_conserve_the_frobenius_norm(monkeypatch):
    draw = dynamics.layers

    def bare(generator, norm="batch", sizes=_layers.SIZES):
        for layer in draw(generator, norm, sizes):
            yield curvature.replace(layer, b=torch.zeros_like(layer.b))

    monkeypatch.setattr(dynamics, "layers", bare)
    assert judged("S0-L5.1b") == "holds"


@pytest.mark.parametrize("unit_width", [1, 4])
def test_counts_of_redundant_directions_match_the_jacobian(unit_width):
    generator = torch.Generator().manual_seed(3)
    layer = next(_layers.layers(generator, sizes=((30, 3, unit_width),)))
    J = torch.func.jacrev(lambda theta: layer.activations(*layer.unpack(theta)))(layer.theta / layer.theta.norm())
    count = scale_invariance.batch_norm_redundancy(unit_width)
    assert _layers.nullity(J.reshape(-1, layer.theta.numel())) == count
