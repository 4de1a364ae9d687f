"""S0 (Akbar 2025), gradients through the three normalizations: sections 3.2, 4.3, 6.1, Example 5.1, App A.1."""

from collections.abc import Iterator

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, conclusion, corrected, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import Loss, Unit, gradient, jacobian, normal, sign, uniform, units, wavy
from normgauge.papers.instances.layers import factor, mismatch
from normgauge.theory.batchnorm_calculus import project, pullback_gradient, standardize
from normgauge.theory.weight_normalization import direction_gradient, length_gradient, normalized_weight


@theorem("S0-eq1")
def _without_gamma(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            truth = gradient(unit.normalized_loss, unit.y, eps)
            zh, s = standardize(unit.y, eps)
            delta = gradient(unit.loss, unit.gamma * zh + unit.beta)
            size = (1 + abs(unit.gamma)) / s * delta.norm()
            bracket = unit.m * delta - delta.sum() - zh * (delta @ zh)
            yield printed("without gamma", gap(truth, bracket / (unit.m * s), size))
            yield corrected("with gamma", gap(truth, pullback_gradient(unit.y, delta, unit.gamma, eps), size))
            yield conclusion("the gradient sums to zero over the batch", gap(truth.sum(), 0.0, size))
        c = factor(generator)
        shrunk = gradient(unit.normalized_loss, c * unit.y)
        truth = gradient(unit.normalized_loss, unit.y)
        yield conclusion("and scales as 1/c", gap(c * shrunk, truth, size))


@theorem("S0-eqLN")
def _layer_backward(generator: torch.Generator) -> Iterator[Check]:
    for d in (2, 3, 5, 12):
        for eps in (0.0, 0.1):
            z, gamma, beta, loss = normal(generator, d), normal(generator, d), normal(generator, d), wavy(generator, d)
            truth = gradient(_loss_after_layer_norm, z, gamma, beta, loss, eps)
            zh, s = standardize(z, eps)
            delta = gradient(loss, gamma * zh + beta)
            size = (1 + gamma.abs().max()) * delta.norm() / s
            readings = [d * delta - delta.sum() - zh[j] * (delta @ zh) for j in range(d)]
            readings.append(d * delta - delta.sum() - delta @ zh.square())
            yield printed("the kindest index", min(gap(truth, r / (d * s), size) for r in readings))
            own = (d * delta - delta.sum() - zh * (delta @ zh)) / (d * s)
            yield fact("with zh_i and no gamma", gap(truth, own, size))
            yield corrected("with zh_i and gamma", gap(truth, pullback_gradient(z, gamma * delta, 1.0, eps), size))
            yield conclusion("the gradient sums to zero over the units", gap(truth.sum(), 0.0, size))


@theorem("S0-A1.1")
def _jacobian(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        truth = jacobian(lambda y: standardize(y)[0], unit.y)
        zh, s, m = unit.yh, unit.s, unit.m
        centred = unit.y - unit.y.mean()
        formula = torch.eye(m) / s - 1 / (m * s) - torch.outer(centred, centred) / s**3
        yield printed("without 1/m", gap(truth, formula, 1 / s))
        yield corrected("with 1/m", gap(truth, project(zh) / s, 1 / s))
        pulled = unit.gamma * truth.T @ unit.g
        size = abs(unit.gamma) / s * unit.g.norm()
        final = pullback_gradient(unit.y, unit.g, unit.gamma)
        yield conclusion("the final formula it leads to", gap(pulled, final, size))


@theorem("S0-A1.1f")
def _final_formulas(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            X, w, b = normal(generator, unit.m, 3) + 1, normal(generator, 3), uniform(generator, -1, 1)
            zh, s = standardize(X @ w + b, eps)
            delta = gradient(unit.loss, unit.gamma * zh + unit.beta)
            slope = pullback_gradient(X @ w + b, delta, unit.gamma, eps)
            size = abs(unit.gamma) / s * delta.norm()
            yield printed("dL/dz", gap(gradient(unit.normalized_loss, X @ w + b, eps), slope, size))
            own = gradient(lambda w, unit, X, b, eps: unit.normalized_loss(X @ w + b, eps), w, unit, X, b, eps)
            yield printed("dL/dW", gap(own, X.T @ slope, size * X.norm()))
            centred = X - X.mean(0)
            second = delta.mean() * centred.sum(0)
            yield printed("the second term with centred x", gap(second, 0.0, delta.norm() * X.norm()))


@theorem("S0-A1.2a")
def _equilibrium(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator, sizes=(2, 3, 8)):
        delta = project(unit.yh) @ normal(generator, unit.m)
        truth = gradient(Unit(unit.y, unit.gamma, unit.beta, delta.dot).normalized_loss, unit.y)
        size = abs(unit.gamma) / unit.s
        yield fact("sum delta", delta.sum())
        yield fact("sum delta (z - mu)/s", delta @ unit.yh)
        yield printed("dL/dz = 0", gap(truth, 0.0, size))
        yield corrected("dL/dz = (gamma/s) delta", gap(truth, unit.gamma / unit.s * delta, size))
        flat = normal(generator, 1) + normal(generator, 1) * unit.yh
        still = gradient(Unit(unit.y, unit.gamma, unit.beta, flat.dot).normalized_loss, unit.y)
        yield corrected("zero for delta in the span of 1 and zh", gap(still, 0.0, size * flat.norm()))


@theorem("S0-Ex5.1")
def _example(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((3, 2), (6, 2), (12, 4)):
        X, w, t = normal(generator, m, n) + 0.5, normal(generator, n), normal(generator, m)
        truth = gradient(mismatch, w, X, t)
        zh, s = standardize(X @ w)
        raw = (X @ w - t)[:, None] * X
        features = raw - raw.mean(1, keepdim=True) - zh[:, None] * (raw * zh[:, None]).mean(1, keepdim=True)
        samples = raw - raw.mean(0) - zh[:, None] * (raw * zh[:, None]).mean(0)
        size = (zh - t).norm() * X.norm() / s
        readings = [reading.sum(0) / s for reading in (features, samples)]
        yield printed("sums over features, or over samples", min(gap(truth, r, size) for r in readings))
        yield corrected("the right sums", gap(truth, X.T @ pullback_gradient(X @ w, zh - t), size))
        c = factor(generator)
        yield corrected("its size is proportional to 1/|w|", gap(c * gradient(mismatch, c * w, X, t), truth))
        yield conclusion("its size does not change with |w|", gap(gradient(mismatch, c * w, X, t).norm(), truth.norm()))


@theorem("S0-6.1b")
def _fixed_statistics(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((2, 2), (5, 3), (12, 2)):
        X, w = normal(generator, m, n) + 1, normal(generator, n)
        zh, s = standardize(X @ w)
        centred = X - X.mean(0)
        yield printed("(x - xbar)/sigma is orthogonal to w", gap(centred @ w / s, 0.0, 1.0))
        frozen = jacobian(_normalize_partly_frozen, w, X, w, True, True)
        moving = jacobian(_normalize_partly_frozen, w, X, w, False, True)
        whole = jacobian(_normalize_partly_frozen, w, X, w, False, False)
        size = X.norm() / s
        yield printed("grad_w a with mu, sigma fixed", gap(frozen, centred / s, size))
        yield corrected("both fixed: x/sigma", gap(frozen, X / s, size))
        yield corrected("mu moving: product with w is zh", gap(moving @ w, zh))
        direction = torch.outer(zh, zh @ centred) / m
        yield corrected("both moving: the gradient", gap(whole, (centred - direction) / s, size))
        yield corrected("both moving: orthogonal to w", gap(whole @ w, 0.0, size * w.norm()))
        yield conclusion("a does not change along w", gap(whole @ w, 0.0, size * w.norm()))


@theorem("S0-P4.3")
def _weight_scale(generator: torch.Generator) -> Iterator[Check]:
    for v, g, _ in _weights(generator):
        alpha, w = factor(generator), normalized_weight(v, g)
        torch_w = torch._weight_norm(v[None], torch.tensor([[g]]), 0)[0]
        yield printed("(alpha v, g/alpha)", gap(normalized_weight(alpha * v, g / alpha), w))
        yield corrected("gives w/alpha", gap(normalized_weight(alpha * v, g / alpha), w / alpha))
        yield corrected("(alpha v, g)", gap(normalized_weight(alpha * v, g), w))
        yield corrected("(-v, -g)", gap(normalized_weight(-v, -g), w))
        yield corrected("this is torch's weight norm", gap(torch_w, w))


@theorem("S0-WN1")
def _diagonal(generator: torch.Generator) -> Iterator[Check]:
    for v, g, loss in _weights(generator):
        slope = gradient(loss, normalized_weight(v, g))
        truth = gradient(_loss_by_direction, v, g, loss)
        size = abs(g) / v.norm() * slope.norm()
        own = g / v.norm() - g * v.square() / v.norm() ** 3
        partial = jacobian(normalized_weight, v, g)
        yield fact("the diagonal partials, against autograd", gap(partial.diagonal(), own, abs(g) / v.norm()))
        yield printed("diagonal chain rule", gap(truth, slope * own, size))
        yield corrected("with all j", gap(truth, direction_gradient(v, g, slope), size))
        along = v @ truth - g * gradient(_loss_by_length, torch.tensor(g), v, loss)
        yield conclusion("(v, -g) is a null direction of the gradient", gap(along, 0.0, abs(g) * slope.norm()))


@theorem("S0-WN2")
def _flat_direction(generator: torch.Generator) -> Iterator[Check]:
    for v, g, loss in _weights(generator):
        slope = gradient(loss, normalized_weight(v, g))
        by_direction = gradient(_loss_by_direction, v, g, loss)
        by_length = gradient(_loss_by_length, torch.tensor(g), v, loss)
        size = abs(g) * slope.norm()
        yield printed("grad_v . v = g dL/dg", gap(by_direction @ v, g * by_length, size))
        yield corrected("grad_v . v = 0", gap(by_direction @ v, 0.0, size))
        t = uniform(generator, 0.2, 0.6)
        here = loss(normalized_weight(v, g))
        yield printed("the loss is flat along (v, -g)", gap(loss(normalized_weight((1 + t) * v, (1 - t) * g)), here))
        yield corrected("the loss is flat along (v, 0)", gap(loss(normalized_weight((1 + t) * v, g)), here))


@theorem("S0-WN3")
def _length(generator: torch.Generator) -> Iterator[Check]:
    for v, g, loss in _weights(generator):
        slope = gradient(loss, normalized_weight(v, g))
        truth = gradient(_loss_by_length, torch.tensor(g), v, loss)
        yield printed("with 1/|v| twice", gap(truth, slope @ v / v.square().sum(), slope.norm()))
        yield corrected("dL/dg", gap(truth, length_gradient(v, slope), slope.norm()))
        by_direction = gradient(_loss_by_direction, v, g, loss)
        size = abs(g) / v.norm() * slope.norm()
        yield corrected("v is orthogonal to grad_v", gap(by_direction @ v, 0.0, size * v.norm()))
        along = v * (by_direction @ v) / (v @ v)
        yield conclusion("grad_v is proportional to v", gap(by_direction, along, size))


def _weights(generator: torch.Generator) -> Iterator[tuple[Tensor, float, Loss]]:
    """Draw v, g and a loss of w; |v| over two decades."""
    for n in (2, 3, 9):
        for _ in range(3):
            v = 10.0 ** uniform(generator, -1, 1) * normal(generator, n)
            yield v, uniform(generator, 0.3, 3) * sign(generator), wavy(generator, n)


def _loss_by_direction(v: Tensor, g: float, loss: Loss) -> Tensor:
    return loss(g * v / v.norm())


def _loss_by_length(g: Tensor, v: Tensor, loss: Loss) -> Tensor:
    return loss(g * v / v.norm())


def _loss_after_layer_norm(z: Tensor, gamma: Tensor, beta: Tensor, loss: Loss, eps: float) -> Tensor:
    return loss(gamma * standardize(z, eps)[0] + beta)


def _normalize_partly_frozen(w: Tensor, X: Tensor, at: Tensor, mean: bool, deviation: bool) -> Tensor:
    """Return (w.x - mu)/sigma with the statistics those of `at` where frozen."""
    z, old = X @ w, X @ at
    mu = old.mean() if mean else z.mean()
    return (z - mu) / (old if deviation else z).std(correction=0)
