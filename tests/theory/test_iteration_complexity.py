"""Slope bounds and iteration counts of S2 section 5.1: against autograd, against a resisting function, the ledger."""

import math
from itertools import pairwise

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

import normgauge as ng
from normgauge.errors import InputError
from normgauge.theory import iteration_complexity as theory
from normgauge.theory.lipschitz_norms import batch_norm_constant
from normgauge.theory.stationarity import goldstein_evaluations


def net_and_data(seed, normed):
    source = torch.Generator().manual_seed(seed)
    widths = (4, 6, 5, 3)
    weights = [torch.randn(b, a, generator=source) for a, b in pairwise(widths)]
    data, targets = torch.randn(16, 4, generator=source), torch.randn(16, 3, generator=source)
    norms, h, inputs = [], data, []
    for W in weights:
        inputs.append(h)
        y = h @ W.T
        mean, variance = y.mean(0), y.var(0, correction=0)
        norms.append((mean, variance) if normed else (torch.zeros(len(W)), torch.ones(len(W)) - 1e-5))
        h = torch.relu((y - norms[-1][0]) * (norms[-1][1] + 1e-5).rsqrt())
    return weights, norms, data, targets, inputs


@settings(max_examples=20, deadline=None)
@given(st.integers(0, 1000), st.booleans(), st.integers(1, 3))
def test_no_gradient_is_steeper_than_the_bound(seed, normed, layer):
    weights, norms, data, targets, inputs = net_and_data(seed, normed)
    weights[layer - 1].requires_grad_()
    h = data
    for W, (mean, variance) in zip(weights, norms, strict=True):
        h = torch.relu((h @ W.T - mean) * (variance + 1e-5).rsqrt())
    loss = (h - targets).norm(dim=1).mean()  # 1-Lipschitz in h
    (gradient,) = torch.autograd.grad(loss, weights[layer - 1])
    sizes = [float(torch.linalg.matrix_norm(W.detach(), 2)) for W in weights]
    constants = [float(batch_norm_constant(v, 1e-5)) for _, v in norms]
    reach = float(inputs[layer - 1].norm(dim=1).max())
    bound = theory.weight_slope_bound(sizes, layer, reach, normalizers=constants)
    assert float(gradient.norm()) <= bound * (1 + 1e-9)
    loop = reach
    for k in range(3):
        loop *= (sizes[k] if k > layer - 1 else 1.0) * (constants[k] if k >= layer - 1 else 1.0)
    assert bound == pytest.approx(loop, rel=1e-12)


def test_the_bound_is_attained_by_the_cascade():
    """Theorem 13's network: the slope in W_1 of one sample is a_2 ... a_K |x|."""
    net = ng.nn.cascade([3, 3, 3], [1.0, 7.0])
    x = torch.tensor([0.5, 1.0, 2.0])
    out = net(x)
    (gradient,) = torch.autograd.grad(out[0], net[0].weight)
    assert float(gradient.norm()) == pytest.approx(theory.weight_slope_bound([1.0, 7.0], 1, float(x.norm())))


@pytest.mark.parametrize("steps", [5, 20, 60])
def test_no_subgradient_method_beats_the_resisting_function(steps):
    """f(x) = L max_i x_i on the ball: after t steps from 0 some coordinate is still untouched."""
    lipschitz, radius = 2.0, 3.0
    accuracy = lipschitz * radius / (2 * (1 + math.sqrt(steps)))  # what the bound says of `steps` iterations
    assert theory.convex_iterations(lipschitz, radius, accuracy) == steps
    x, best = torch.zeros(steps), math.inf
    for _ in range(steps - 1):
        best = min(best, float(lipschitz * x.max()))
        g = torch.zeros(steps)
        g[int(x.argmax())] = lipschitz
        x = x - radius / (lipschitz * math.sqrt(steps)) * g
        x = x * min(1.0, radius / float(x.norm()))
    best = min(best, float(lipschitz * x.max()))
    minimum = -lipschitz * radius / math.sqrt(steps)
    assert best - minimum >= accuracy


@pytest.mark.parametrize("steps", [5, 40])
def test_no_subgradient_method_beats_the_strongly_convex_one(steps):
    """f(x) = L/2 max_i x_i + a/2 |x|^2."""
    lipschitz, convexity = 2.0, 0.5
    accuracy = lipschitz**2 / (8 * convexity * steps)
    assert theory.strongly_convex_iterations(lipschitz, convexity, accuracy) == steps
    half = lipschitz / 2

    def value(x):
        return float(half * x.max() + convexity / 2 * x.square().sum())

    x, best = torch.zeros(steps), math.inf
    for t in range(1, steps):
        best = min(best, value(x))
        g = convexity * x
        g[int(x.argmax())] += half
        x = x - g / (convexity * t)
    best = min(best, value(x))
    minimum = value(torch.full((steps,), -half / (convexity * steps)))
    assert best - minimum >= accuracy * (1 - 1e-12)


@settings(max_examples=30, deadline=None)
@given(st.floats(0.01, 100), st.floats(0.1, 10), st.floats(0.1, 10))
def test_other_units_do_not_change_the_count(unit, drop, radius):
    """What the printed L / alpha^2 fails: weights measured in other units."""
    one = theory.stationary_evaluations([1.0, 3.0], 1, 2.0, drop, radius, 0.7)
    other = theory.stationary_evaluations([1.0, 3.0], 1, 2.0 * unit, drop, radius / unit, 0.7 * unit)
    assert other == pytest.approx(one, rel=1e-6, abs=200)
    assert theory.printed_iterations([1.0, 3.0], 1, 0.7 * unit) == pytest.approx(3.0 / 0.7 / unit)


def test_normalizers_enter_squared():
    saving = theory.normalizer_saving([0.1, 0.1], layer=1)
    plain = theory.weight_slope_bound([1.0, 50.0], 1, 40.0)
    assert theory.weight_slope_bound([1.0, 50.0], 1, 40.0, normalizers=[0.1, 0.1]) == pytest.approx(saving * plain)
    counts = [
        theory.stationary_evaluations([1.0, 50.0], 1, 40.0, 1.0, 1.0, 1.0, normalizers=n) for n in (None, [0.1, 0.1])
    ]
    assert counts[1] / counts[0] == pytest.approx(saving**2, rel=1e-3)
    assert counts[0] == goldstein_evaluations(1.0, 2000.0, 1.0, 1.0)


def test_the_ledger_says_the_same():
    verdicts = {claim.id: claim.verdict for claim in ng.claims.ledger(ids=["S2-C18", "S2-C19", "S2-R16"]).claims}
    assert verdicts["S2-C18"] == verdicts["S2-C19"] == "false_as_stated"  # printed_iterations, and the units
    assert verdicts["S2-R16"] == "holds_with_correction"  # reach and outer in weight_slope_bound


def test_one_gradient_step_is_enough_where_the_printed_bound_says_a_billion():
    """S2-C18: the printed count grows, the work does not."""
    data = torch.rand(8, 3, generator=torch.Generator().manual_seed(0)) + 0.1
    for size in (1e3, 1e9):
        W = torch.ones(4, 3, requires_grad=True)
        loss = torch.nn.functional.softplus(size * torch.relu(data @ W.T).sum(1)).mean()
        (g,) = torch.autograd.grad(loss, W)
        V = (W - g).detach().requires_grad_()
        loss = torch.nn.functional.softplus(size * torch.relu(data @ V.T).sum(1)).mean()
        assert float(torch.autograd.grad(loss, V)[0].norm()) == 0.0
        assert theory.printed_iterations([1.0, size], 1, 1e-3) == pytest.approx(size / 1e-3)


def test_layers_that_do_not_exist_are_refused():
    with pytest.raises(InputError, match="one entry per layer"):
        theory.weight_slope_bound([1.0], 2, 1.0)
    with pytest.raises(InputError, match="one entry per layer"):
        theory.stationary_evaluations([1.0], 1, 1.0, 1.0, 1.0, 1.0, normalizers=[1.0, 1.0])
