"""S3 (the encyclopedia article), the layer: backpropagation, inference, smoothness, gradients through many layers."""

from collections.abc import Callable, Iterator
from itertools import product
from math import prod, sqrt

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import find, theorem
from normgauge.papers.instances import Loss, Unit, gradient, normal, uniform, units
from normgauge.papers.instances.feedforward import nothing
from normgauge.theory.batchnorm_calculus import gradient_norm_squared, project, standardize
from normgauge.theory.gradient_explosion import (
    RELU_LIMIT,
    large_batch_rate,
    linear_rate,
    relu_rate,
    squared_gradient_growth,
)
from normgauge.theory.smoothness import nearest_rescaling

WIDTH, DEPTH, NETWORKS = 160, 16, 3
NEAR = 0.08  # networks of this width and depth scatter by 2 per cent about the limit of infinite width
Activation = Callable[[Tensor], Tensor]


@theorem("S3-bp")
def _backpropagation(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator, sizes=(2, 3, 9), per_size=2):
        for eps in (0.0, 0.1):
            x, m, gamma, beta = unit.y, unit.m, torch.tensor(unit.gamma), torch.tensor(unit.beta)
            mu, variance = x.mean(), x.var(correction=0)
            s = (variance + eps).sqrt()
            xhat, deviation, given = (x - mu) / s, x - mu, (unit, eps, standardize(x, eps)[0])
            g = gradient(unit.loss, gamma * xhat + beta)
            to_xhat = g * gamma
            to_variance = (g * deviation).sum() * (-gamma / 2) * (variance + eps) ** -1.5
            to_mu = (g * -gamma / s).sum() + to_variance * (-2 * deviation).mean()
            to_x = to_xhat / s + to_variance * 2 * deviation / m + to_mu / m
            size = gamma.abs() * g.norm()
            for name, at, formula, scale in (
                ("xhat", xhat, to_xhat, size),
                ("gamma", gamma, (g * xhat).sum(), g.norm()),
                ("beta", beta, g.sum(), g.norm()),
                ("sigma^2", variance, to_variance, size / s**2),
                ("mu", mu, to_mu, size / s),
            ):
                yield printed(f"dl/d{name}", gap(gradient(_LOSS_BY[name], at, *given), formula, scale))
            yield printed("dl/dx", gap(gradient(unit.normalized_loss, x, eps), to_x, size / s))


def _loss_of_normalized(xhat: Tensor, unit: Unit) -> Tensor:
    return unit.loss(unit.gamma * xhat + unit.beta)


def _loss_by_mean(mu: Tensor, unit: Unit, eps: float, _: Tensor) -> Tensor:
    deviation = unit.y - mu
    return _loss_of_normalized(deviation / (deviation.square().mean() + eps).sqrt(), unit)


# The loss of a unit as a function of one ingredient, the others held fixed.
_LOSS_BY: dict[str, Loss] = {
    "xhat": lambda xhat, unit, eps, _: _loss_of_normalized(xhat, unit),
    "gamma": lambda gamma, unit, eps, xhat: unit.loss(gamma * xhat + unit.beta),
    "beta": lambda beta, unit, eps, xhat: unit.loss(unit.gamma * xhat + beta),
    "sigma^2": lambda v, unit, eps, _: _loss_of_normalized((unit.y - unit.y.mean()) / (v + eps).sqrt(), unit),
    "mu": _loss_by_mean,
}


@theorem("S3-inf")
def _population(generator: torch.Generator) -> Iterator[Check]:
    for count, m in ((2, 2), (3, 2), (4, 3), (3, 4)):
        x = 10.0 ** uniform(generator, -1, 1) * normal(generator, count) + normal(generator, 1)
        batches = torch.stack([x[list(pick)] for pick in product(range(count), repeat=m)])
        variance = x.var(correction=0)
        told = m / (m - 1) * batches.var(1, correction=0).mean()
        yield printed("E[x]", gap(batches.mean(1).mean(), x.mean(), x.abs().max()))
        yield printed("Var[x]", gap(told, variance))
        behind = standardize(batches, 0.01 * float(variance))[0].relu()
        coupled = m / (m - 1) * behind.var(1, correction=0).mean()
        yield fact("behind another BN layer and ReLU: told over true", coupled / behind.var(correction=0))
        if m < count:
            picks = [pick for pick in product(range(count), repeat=m) if len(set(pick)) == m] or [(*range(count),)]
            epoch = m / (m - 1) * torch.stack([x[list(pick)] for pick in picks]).var(1, correction=0).mean()
            yield fact("without repetition: told over true", epoch / variance)


@theorem("S3-T41")
def _lipschitz(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        truth = gradient(unit.normalized_loss, unit.y).square().sum()
        g, ratio = unit.g, (unit.gamma / unit.s) ** 2
        size = ratio * g.square().sum()
        bound = ratio * (g @ g - g.sum() ** 2 / unit.m - (g @ unit.yh) ** 2 / unit.m)
        yield printed("bound", excess(truth, bound, size))
        yield corrected("equality", gap(truth, gradient_norm_squared(unit.y, g, unit.gamma), size))


@theorem("S3-T42")
def _quadratic_form(generator: torch.Generator) -> Iterator[Check]:
    return _checks_of_claim("S1-T4.2a", generator)


@theorem("S3-T44")
def _weights(generator: torch.Generator) -> Iterator[Check]:
    return _checks_of_claim("S1-T4.4", generator)


@theorem("S3-L45")
def _initialization(generator: torch.Generator) -> Iterator[Check]:
    yield from _checks_of_claim("S1-L4.5", generator)
    for n in (2, 5):
        best, start = normal(generator, n), normal(generator, n)
        start = start if start @ best < 0 else -start
        right = (start - best).square().sum() - (best @ best - start @ best) ** 2 / (best @ best)
        yield printed("W0 on the other side of W*", excess(start @ start, right))
        yield corrected("on W*'s side the multiple is positive", broken(nearest_rescaling(-start, best)[0] > 0))


@theorem("S3-fBN")
def _decoupling(generator: torch.Generator) -> Iterator[Check]:
    for n, count in ((1, 2), (2, 3), (3, 9), (6, 5)):
        x = normal(generator, count, n) @ normal(generator, n, n)
        x = x - x.mean(0)
        w, S = normal(generator, n), x.T @ x / count
        gamma = uniform(generator, -2, 2)
        norm = (w @ S @ w).sqrt()
        unit = gamma * standardize(x @ w)[0]
        yield printed("var(x^Tw) = w^TSw", gap((x @ w).var(correction=0), norm**2))
        for phi in (torch.tanh, torch.relu, torch.sin):
            truth = phi(unit).mean()
            yield printed("phi(gamma x^Tw/|w|_S)", gap(truth, phi(gamma * (x @ w) / norm).mean(), 1.0))
            yield printed("phi(x^T wt)", gap(truth, phi(x @ (gamma * w / norm)).mean(), 1.0))
        moved = x + normal(generator, n)
        second = w @ (moved.T @ moved / count) @ w
        yield fact("w^TSw over var where E[x] != 0", second / norm**2)


@theorem("S3-lam")
def _explosion(generator: torch.Generator) -> Iterator[Check]:
    for batch in (12, 64):
        growth = _measured_growth(generator, batch, torch.relu)
        yield printed("the norm grows by lambda per layer", broken(sqrt(growth) > (1 - NEAR) * RELU_LIMIT))
        yield corrected("the squared norm does", broken(abs(growth / relu_rate(batch) - 1) < NEAR))
        yield conclusion("gradients explode with depth", broken(growth > 1 + NEAR))
        yield fact("growth of the norm per layer", sqrt(growth))
    rates = [relu_rate(batch) for batch in (4, 5, 8, 16, 64, 1024, 10**6)]
    yield corrected("lambda(B) decreases", broken(rates == sorted(rates, reverse=True)))
    yield corrected("to pi/(pi-1)", gap(rates[-1], RELU_LIMIT), 1e-5)
    x = torch.linspace(-9, 9, 40002)  # an even number: no node at the kink
    weights = torch.softmax(-x.square() / 2, 0)
    limit = large_batch_rate(x.relu(), (x > 0).double(), weights)
    yield corrected("E phi'^2/var phi", gap(limit, RELU_LIMIT), 1e-6)


@theorem("S3-lamlin")
def _any_nonlinearity(generator: torch.Generator) -> Iterator[Check]:
    identity = _measured_growth(generator, 8, nothing)
    yield corrected("identity, B = 8: (B-2)/(B-3)", broken(abs(identity / linear_rate(8) - 1) < NEAR))
    yield conclusion("at a finite batch even the identity explodes", broken(identity > 1 + NEAR))
    for batch in (5, 8, 32):
        growth = _one_layer(batch, generator)
        yield corrected("one layer of the identity, by integration", gap(growth, linear_rate(batch)), 1e-6)
    x = torch.linspace(-10, 10, 20001)
    weights = torch.softmax(-x.square() / 2, 0)
    for name, phi in _NONLINEARITIES.items():
        slopes = gradient(lambda v, phi=phi: phi(v).sum(), x)
        rate = large_batch_rate(phi(x), slopes, weights)
        seen = _measured_growth(generator, 64, phi)
        even = _evenness(generator, phi)
        if name == "cube":
            yield corrected("the cube: few samples take over the batch", broken(even < 0.3))
            yield corrected("the cube: lambda is larger", broken(seen > (1 + NEAR) * rate))
        else:
            yield corrected("lambda measured at B = 64 is near its limit", broken(abs(seen / rate - 1) < NEAR))
            yield corrected("the batch stays even", broken(even > 0.5))
            affine = name in ("identity", "affine")
            yield corrected("above 1 unless phi is affine", broken((rate > 1.001) != affine))
        yield printed("lambda > 1 whatever the batch", broken(rate > 1 + 1e-6))
        yield fact(f"lambda at B = 64, {name}", seen)


@theorem("S3-shift")
def _amplified_shift(generator: torch.Generator) -> Iterator[Check]:
    for name, phi, deviation, normalized, grows in (
        ("He's ReLU", torch.relu, 2**0.5, False, False),
        ("tanh, deviation 1", torch.tanh, 1.0, False, False),
        ("tanh, deviation 3", torch.tanh, 3.0, False, True),
        ("BN and ReLU", torch.relu, 1.0, True, True),
    ):
        rate = _shift_growth(generator, phi, deviation, normalized)
        yield printed("a small shift is amplified", broken(rate > 1.05))
        yield corrected(f"{name}: amplified" if grows else f"{name}: not amplified", broken((rate > 1.05) == grows))
        yield fact(f"growth per layer, {name}", rate)


def _shift_growth(generator: torch.Generator, phi: Activation, deviation: float, normalized: bool) -> float:
    """Return by how much per layer the relative change of the pre-activations grows (geometric mean)."""
    growths = []
    for _ in range(NETWORKS):
        layers = [deviation * normal(generator, WIDTH, WIDTH) / WIDTH**0.5 for _ in range(DEPTH)]
        nudge, start = 1e-6 * normal(generator, WIDTH, WIDTH), normal(generator, WIDTH, 16)
        changes, h, moved = [], start, start
        for k, W in enumerate(layers):
            z, other = W @ h, (W + nudge if k == 0 else W) @ moved
            z, other = (standardize(z)[0], standardize(other)[0]) if normalized else (z, other)
            changes.append(float((other - z).norm() / z.norm()))
            h, moved = phi(z), phi(other)
        growths.append((changes[-1] / changes[1]) ** (1 / (DEPTH - 2)))
    return prod(growths) ** (1 / NETWORKS)


def _one_layer(batch: int, generator: torch.Generator) -> Tensor:
    """Return the mean of |P g|^2 / (s^2 |g|^2) at the fixed point: y Gaussian and g anywhere in the space without mean.

    The length and the direction of y are independent: P takes one of the B - 1 directions, s^2 has their chi-square.
    """
    length = torch.linspace(0, 25, 20001)[1:]
    weights = torch.softmax((batch - 2) * length.log() - length.square() / 2, 0)
    left = torch.trace(project(standardize(normal(generator, batch))[0])) / (batch - 1)
    return left * (weights * (batch - 1) / length.square()).sum()


_NONLINEARITIES: dict[str, Activation] = {
    "identity": nothing,
    "affine": lambda x: 1 - 2 * x,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "relu": torch.relu,
    "leaky relu": lambda x: torch.where(x > 0, x, 0.5 * x),
    "sine": torch.sin,
    "cube": lambda x: x**3,
}


def _evenness(generator: torch.Generator, phi: Activation, batch: int = 16) -> float:
    """Return the share of the batch's directions that the last layer's Gram matrix uses: 1 at the even fixed point."""
    h = normal(generator, WIDTH, batch)
    for _ in range(DEPTH):
        y = standardize(normal(generator, WIDTH, WIDTH) @ h / WIDTH**0.5)[0]
        h = phi(y)
    gram = y.T @ y
    return float(gram.trace() ** 2 / gram.square().sum() / (batch - 1))


def _measured_growth(generator: torch.Generator, batch: int, phi: Activation) -> float:
    """Return the growth per layer of squared weight gradients in random networks (geometric mean), by autograd."""
    growths = []
    for _ in range(NETWORKS):
        layers = [(normal(generator, WIDTH, WIDTH) / WIDTH**0.5).requires_grad_() for _ in range(DEPTH)]
        h = normal(generator, WIDTH, batch)
        for W in layers:
            h = phi(standardize(W @ h)[0])
        gradients = torch.autograd.grad((h * normal(generator, WIDTH, batch)).sum(), layers)
        growths.append(squared_gradient_growth(torch.stack([g.square().sum() for g in gradients])))
    return prod(growths) ** (1 / NETWORKS)


def _checks_of_claim(id: str, generator: torch.Generator) -> Iterator[Check]:
    """Give the checks of another paper's claim that says the same."""
    trial = find(id).trial
    yield from trial(generator) if trial is not None else ()
