"""S0 (Akbar 2025), the symmetries of batch and layer normalization: sections 3.1, 4.1, 4.2, Table 1."""

from collections.abc import Iterator
from itertools import pairwise, zip_longest

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, jacobian, normal, uniform, units
from normgauge.papers.instances.layers import Layer, factor, layers, normalize, nullity
from normgauge.theory.batchnorm_calculus import standardize
from normgauge.theory.scale_invariance import batch_norm_redundancy, layer_norm_redundancy, radial_derivative

TINY = 1e-300  # torch's batch normalization refuses eps = 0


@theorem("S0-P4.1a")
def _with_gamma(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        c = factor(generator)
        a = _batch_norm(layer, layer.W, layer.b, layer.gamma)
        scaled = _batch_norm(layer, c * layer.W, c * layer.b, layer.gamma / c)
        yield printed("W, b times c and gamma over c", gap(scaled, a))
        yield corrected("activations are beta + (a - beta)/c", gap(scaled, layer.beta + (a - layer.beta) / c))
        yield corrected("W, b times c alone", gap(_batch_norm(layer, c * layer.W, c * layer.b, layer.gamma), a))


@theorem("S0-P4.1b")
def _scale(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        c = factor(generator)
        a = _batch_norm(layer, layer.W, layer.b, layer.gamma)
        yield printed("activations", gap(_batch_norm(layer, c * layer.W, c * layer.b, layer.gamma), a))
        yield printed("outputs", gap(layer.outputs(c * layer.W, c * layer.b), layer.outputs(layer.W, layer.b)))
        yield printed("loss", gap(layer.loss(c * layer.theta), layer.loss(layer.theta)))
        Z = layer.X @ layer.W.T + layer.b
        s = Z.std(0, correction=0)
        yield fact("stored statistics: change of (z - mean)/s", gap((c * Z - Z.mean(0)) / s, (Z - Z.mean(0)) / s))
        eps = float(0.1 * s.square().mean())
        here, there = (layer.activations(k * layer.W, k * layer.b, eps) for k in (1.0, c))
        yield fact("eps = 0.1 var: change of the activations", gap(there, here))


@theorem("S0-P4.1c")
def _group(generator: torch.Generator) -> Iterator[Check]:
    for widths in ((2, 2), (3, 2)):
        X = normal(generator, 40, 3)
        for bias in (False, True):
            weights = sum(w * n for n, w in pairwise((X.shape[1], *widths)))
            used = weights + (3 if bias else 2) * sum(widths) + 2 * widths[-1]
            theta = normal(generator, used)
            theta = theta + 0.5 * theta.sign()  # a scale or head near 0 would hide a direction that is seen
            J = jacobian(_deep_outputs, theta, X, widths, bias).reshape(-1, used)
            count = sum(batch_norm_redundancy(width, bias) for width in widths)
            yield corrected(f"directions not seen, {'with' if bias else 'without'} biases", gap(nullity(J), count))
            if not bias:
                yield printed("one direction per layer", gap(nullity(J), len(widths)))
            factors = tuple(factor(generator) for _ in widths)
            scaled = _deep_outputs(theta, X, widths, bias, factors)
            same = gap(scaled, _deep_outputs(theta, X, widths, bias))
            yield conclusion("one scale per layer leaves the outputs unchanged", same)


@theorem("S0-sign")
def _negative(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        zh, s = standardize(unit.y)
        for c in (-1.0, -factor(generator), factor(generator)):
            yield printed("BN(cz) = sign(c) BN(z)", gap(standardize(c * unit.y)[0], (1.0 if c > 0 else -1.0) * zh))
        shift = uniform(generator, -3, 3) * float(s)
        for eps in (0.0, 0.1):
            yield printed("a shift is removed", gap(standardize(unit.y + shift, eps)[0], standardize(unit.y, eps)[0]))
        yield fact("a with beta under c = -1, against -a", gap(unit.output(-unit.y), -unit.output(unit.y)))


@theorem("S0-unitvar")
def _unit_variance(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        variance = unit.y.var(correction=0)
        for eps in (0.0, 0.1):
            zh = standardize(unit.y, eps)[0]
            own = zh.var(correction=0)
            yield printed("variance is 1", gap(own, 1.0))
            yield corrected("variance is sigma^2/(sigma^2 + eps)", gap(own, variance / (variance + eps)))
            yield corrected("mean is 0", gap(zh.mean(), 0.0, 1.0))
            off = (1 - own).abs()
            yield conclusion("the variance is 1 up to eps/sigma^2", excess(off, eps / variance, 1.0))
        flat = standardize(torch.full_like(unit.y, 2.0), 0.1)[0]
        yield corrected("a constant batch gives 0", gap(flat, 0.0, 1.0))


@theorem("S0-C4.1.1")
def _orthogonal(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        slope = gradient(layer.loss, layer.theta)
        yield printed("inner product over the layer", gap(slope @ layer.theta, 0.0, layer.size))
        W, b = layer.unpack(slope * layer.theta)
        yield printed("and unit by unit", gap(W.sum(1), 0.0, layer.size))
        yield printed("the bias has no gradient", gap(b, 0.0, layer.size))
        Z = layer.X @ layer.W.T + layer.b
        eps = float(0.3 * Z.var(0, correction=0).mean())
        radial = layer.unpack(gradient(layer.loss, layer.theta, eps) * layer.theta)[0].sum(1)
        slopes = gradient(layer.head, layer.activations(layer.W, layer.b, eps))
        formula = [radial_derivative(Z[:, i], slopes[:, i], layer.gamma[i], eps) for i in range(Z.shape[1])]
        yield corrected("with eps > 0, the closed form", gap(radial, torch.stack(formula), layer.size))
        yield fact("with eps = 0.3 var: inner product, relative", radial.abs().max() / layer.size)


@theorem("S0-ginv")
def _inverse(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        c = factor(generator)
        slope = gradient(layer.loss, layer.theta)
        size = layer.size / layer.W.norm()
        yield printed("grad L(cW) = grad L(W)/c", gap(c * gradient(layer.loss, c * layer.theta), slope, size))
        bare = torch.cat([c * layer.W.reshape(-1), layer.b])
        yield printed("the bias left alone", gap(c * gradient(layer.loss, bare), slope, size))


@theorem("S0-metric")
def _metric(generator: torch.Generator) -> Iterator[Check]:
    for n in (1, 2, 7):
        y, first, second = normal(generator, n), normal(generator, n), normal(generator, n)
        for k in (factor(generator), -factor(generator)):
            scaled = _scale_free_metric(k * y, k * first, k * second)
            yield printed("the metric does not see k", gap(scaled, _scale_free_metric(y, first, second)))


@theorem("S0-scalar")
def _scalar(generator: torch.Generator) -> Iterator[Check]:
    for m in (2, 3, 9):
        x, b, w = normal(generator, m), uniform(generator, -1, 1), uniform(generator, 0.2, 2)
        a = standardize(w * x + b)[0]
        for other in (factor(generator) * w, -factor(generator) * w):
            again = standardize(other * x + b)[0]
            yield printed("a(w) = a(w') for any w'", gap(again, a))
            yield corrected("a = sign(w) standardize(x)", gap(again, (1.0 if other > 0 else -1.0) * standardize(x)[0]))
            slope = jacobian(_standardize_scalar, torch.tensor([other]), x, b)
            yield conclusion("da/dw = 0", gap(other * slope, 0.0, 1.0))
        constant = standardize(w * torch.full((m,), 0.7) + b, 0.1)[0]
        yield corrected("constant x, eps > 0: a = 0", gap(constant, 0.0, 1.0))


@theorem("S0-P4.2")
def _layer_scale(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator, "layer", sizes=((1, 2, 2), (3, 2, 3), (8, 3, 5))):
        c, d = factor(generator), layer.W.shape[0]
        Z = layer.X @ layer.W.T + layer.b
        for eps in (0.0, float(0.2 * Z.var(1, correction=0).mean())):
            plain = functional.layer_norm(Z, (d,), layer.gamma, layer.beta, eps)
            yield printed("(cW, cb)", gap(functional.layer_norm(c * Z, (d,), layer.gamma, layer.beta, eps), plain))
            scaled = functional.layer_norm(c * Z, (d,), layer.gamma, layer.beta, c**2 * eps)
            yield corrected("with c^2 eps", gap(scaled, plain))
        again = layer.outputs(c * layer.W, c * layer.b)
        yield conclusion("with eps = 0 the outputs stay", gap(again, layer.outputs(layer.W, layer.b)))


@theorem("S0-T1LN")
def _layer_count(generator: torch.Generator) -> Iterator[Check]:
    for n, d in ((1, 3), (2, 4), (4, 5)):
        layer = next(layers(generator, "layer", sizes=((30, n, d),)))
        J = jacobian(_packed_norm, layer.theta / layer.theta.norm(), layer).reshape(-1, layer.theta.numel())
        hidden = nullity(J)
        yield printed("two directions", gap(hidden, 2))
        yield corrected("n + 2 directions", gap(hidden, layer_norm_redundancy(n)))
        a = layer.activations(layer.W, layer.b)
        row = layer.W.abs().mean() * normal(generator, n)
        yield corrected("one vector added to all rows", gap(layer.activations(layer.W + row, layer.b), a))
        c, shift = factor(generator), float(layer.b.std())
        yield conclusion("the scale", gap(layer.activations(c * layer.W, c * layer.b), a))
        yield conclusion("the common bias shift", gap(layer.activations(layer.W, layer.b + shift), a))
    pair = next(layers(generator, "layer", sizes=((9, 2, 2),)))
    J = jacobian(_packed_norm, pair.theta, pair).reshape(-1, pair.theta.numel())
    yield fact("two units: largest derivative of the output times |theta|", J.abs().max() * pair.theta.norm())


def _batch_norm(layer: Layer, W: Tensor, b: Tensor, gamma: Tensor) -> Tensor:
    """Return torch's own batch normalization of the layer."""
    return functional.batch_norm(layer.X @ W.T + b, None, None, gamma, layer.beta, training=True, eps=TINY)


def _deep_outputs(
    theta: Tensor, X: Tensor, widths: tuple[int, ...], bias: bool, factors: tuple[float, ...] = ()
) -> Tensor:
    """Return the outputs of a tanh network with BN in every layer; `factors` scale (W, b) layer by layer."""
    take, h = theta, X
    for width, c in zip_longest(widths, factors, fillvalue=1.0):
        count = int(width) * h.shape[1]
        W, take = c * take[:count].reshape(int(width), -1), take[count:]
        b, gamma, beta = c * take[: int(width)], take[: int(width)], take[int(width) : 2 * int(width)]
        take = take[2 * int(width) :]
        if bias:
            gamma, beta, take = beta, take[: int(width)], take[int(width) :]
        h = torch.tanh(gamma * normalize(h @ W.T + (b if bias else 0.0), "batch") + beta)
    return h @ take.reshape(2, -1).T


def _scale_free_metric(y: Tensor, first: Tensor, second: Tensor) -> Tensor:
    return first @ second / (y @ y)


def _standardize_scalar(w: Tensor, x: Tensor, b: float) -> Tensor:
    return standardize(w * x + b)[0]


def _packed_norm(theta: Tensor, layer: Layer) -> Tensor:
    W, b = layer.unpack(theta)
    return normalize(layer.X @ W.T + b, "layer")
