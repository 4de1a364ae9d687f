"""S2 (Than 2025), Lipschitz constants of networks: section 4, Lemma 5 to Remark 17."""

from collections.abc import Iterator
from dataclasses import replace
from math import prod

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, normal, uniform
from normgauge.papers.instances.feedforward import (
    Feedforward,
    Map,
    layer_norm,
    nothing,
    padded_identity,
    random_network,
    with_population_statistics,
)
from normgauge.theory.batchnorm_calculus import standardize
from normgauge.theory.lipschitz_norms import batch_norm_constant, layer_norm_constant

WIDTHS = ((3, 4), (2, 5, 3), (6, 4, 4, 5))
CASCADES = ((5, 4, 2, 3), (3, 6, 6, 6), (4, 3, 5, 2, 4))  # input, layer i = 1, the layers above
ACTIVATIONS: dict[str, Map] = {
    "relu": torch.relu,
    "tanh": torch.tanh,
    "sigmoid": torch.sigmoid,
    "leaky relu": functional.leaky_relu,
    "softmax": lambda y: torch.softmax(y, -1),
}


@theorem("S2-L5")
def _product(generator: torch.Generator) -> Iterator[Check]:
    for activation in ACTIVATIONS.values():
        for widths in WIDTHS:
            net = random_network(generator, widths, activation=activation)
            x = 10.0 ** uniform(generator, -1, 1) * normal(generator, widths[0])
            step = normal(generator, widths[0])
            yield printed("Jacobians", excess(net.input_slope(x), net.weight_product()))
            yield printed("differences", excess((net(x + step) - net(x)).norm(), net.weight_product() * step.norm()))


@theorem("S2-T6")
def _attainment(generator: torch.Generator) -> Iterator[Check]:
    for widths in (*WIDTHS, (4, 1, 3), (3, 3, 3, 3, 3, 3, 3)):
        for low, high in ((0.0, 0.0), (0.1, 0.9), (1.0, 9.0)):
            sizes = [uniform(generator, low, high) for _ in widths[1:]]
            net = _cascade(widths, sizes)
            slopes = [net.input_slope(normal(generator, widths[0])) for _ in range(3)]
            slopes.append(net.input_slope(normal(generator, widths[0]).abs() + 0.1))
            yield printed("largest Jacobian", gap(max(map(float, slopes)), prod(sizes)))
            yield printed("norms of the weights are a_k", gap(net.weight_product(), prod(sizes)))


@theorem("S2-T9")
def _normalized_product(generator: torch.Generator) -> Iterator[Check]:
    for widths in WIDTHS:
        for size in (0.3, 3.0):
            net = random_network(generator, widths)
            net = replace(net, weights=tuple(size * W for W in net.weights))
            normed, variances = with_population_statistics(net, normal(generator, 40, widths[0]), 1e-5)
            sharp = net.weight_product() * prod(float(batch_norm_constant(v, 1e-5)) for v in variances)
            norms = [float((v + 1e-5).rsqrt().norm()) for v in variances]
            for x in (normal(generator, widths[0]), 10 * normal(generator, widths[0])):
                slope = normed.input_slope(x)
                yield printed("product of the layers' constants", excess(slope, sharp))
                yield printed("Corollary 10 (1)", excess(slope, net.weight_product() * prod(norms)))
                yield printed("Corollary 10 (2)", excess(slope, net.weight_product() * max(norms) ** len(norms)))
            yield fact("largest prod |W_k| prod |1/sigma_k|", net.weight_product() * prod(norms))


@theorem("S2-C11")
def _layer_norm_product(generator: torch.Generator) -> Iterator[Check]:
    for widths in WIDTHS:
        eps = 10.0 ** uniform(generator, -5, 0)
        net = random_network(generator, widths, layer_norm(eps))
        zero = torch.zeros(widths[0])
        sigmas = [float(_deviation(net, zero, k, eps)) for k in range(len(net.weights))]
        bound = net.weight_product() / prod(sigmas)
        for size in (1e-4, 1.0, 100.0):
            x = size * normal(generator, widths[0])
            yield printed("Jacobians", excess(net.input_slope(x), bound))
        yield corrected("sigma_k = sqrt(eps)", gap(prod(sigmas), layer_norm_constant(eps) ** -len(sigmas)))


@theorem("S2-LNred")
def _no_global_reduction(generator: torch.Generator) -> Iterator[Check]:
    eps = 1e-5
    for widths in ((4, 5, 6), (5, 8, 8, 6)):
        net = random_network(generator, widths, layer_norm(eps))
        net = replace(net, weights=tuple(10 * W for W in net.weights))
        data = 10 * normal(generator, 20, widths[0])
        depth = len(net.weights)
        deviations = [min(float(_deviation(net, x, k, eps)) for x in data) for k in range(depth)]
        near = [1e-6 * normal(generator, widths[0]) for _ in range(4)]
        steepest = max(float(net.input_slope(x)) for x in near)
        seen = net.weight_product() / prod(deviations)
        yield printed("slope near 0 against the observed variances", excess(steepest, seen))
        yield conclusion("slope near 0 against the network without LN", excess(steepest, net.weight_product()))
        yield fact("smallest observed sigma", min(deviations))
        for x in (*data[:4], *near):
            here = prod(float(_deviation(net, x, k, eps)) for k in range(depth))
            yield corrected("at each point", excess(net.input_slope(x), net.weight_product() / here))


@theorem("S2-T12")
def _weights_and_inputs(generator: torch.Generator) -> Iterator[Check]:
    for widths in ((2, 5, 3), (6, 4, 4, 5)):
        eps = 0.1
        plain = random_network(generator, widths)
        data = normal(generator, 30, widths[0])
        normed, variances = with_population_statistics(plain, data, eps)
        constants = [float(batch_norm_constant(v, eps)) for v in variances]
        layered = replace(plain, norms=(layer_norm(eps),) * len(plain.weights))
        for net, lips in ((normed, constants), (layered, [layer_norm_constant(eps)] * len(constants))):
            for i in range(1, len(widths)):
                inputs = [net.hidden(x, i - 1) for x in data[:6]]
                largest = max(h.norm() for h in inputs)
                above = net.weight_product(i) * prod(lips[i - 1 :])
                for h in inputs:
                    to_input = net.total_input_slope(i, net.weights[i - 1] @ h)
                    yield printed("(7)", excess(to_input, above))
                    yield printed("(6)", excess(net.weight_slope(i, h), largest * to_input))
        far, width = 1e6 * data[:6], widths[1] ** 0.5
        reach = max(normed.hidden(x, 1).norm() for x in far) / max(normed.hidden(x, 1).norm() for x in data[:6])
        yield corrected("BN with fixed statistics: A grows without bound", broken(reach > 1e3))
        yield corrected("LN: A is bounded", excess(max(layered.hidden(x, 1).norm() for x in far), width))
    yield fact("one layer, statistics moving with W: slope over A/s", _moving_statistics(generator))


@theorem("S2-T13a")
def _bad_weights(generator: torch.Generator) -> Iterator[Check]:
    for widths in CASCADES:
        net, sizes, h = _bad_network(generator, widths)
        truth = net.weight_slope(1, h)
        kept = h[: min(widths[2:])]
        yield printed("with h_{i-1} truncated", gap(truth, prod(sizes) * kept.norm()))
        yield corrected("with all of h_{i-1}", gap(truth, prod(sizes) * h.norm()))
        yield conclusion("of size a_{i+1}..a_K at least", excess(prod(sizes) * kept.norm(), truth))


@theorem("S2-T13b")
def _bad_inputs(generator: torch.Generator) -> Iterator[Check]:
    for widths in CASCADES:
        net, sizes, _ = _bad_network(generator, widths)
        slopes = [net.total_input_slope(1, normal(generator, widths[1]).abs() + 0.1)]
        slopes += [net.total_input_slope(1, normal(generator, widths[1])) for _ in range(3)]
        yield printed("largest Jacobian", gap(max(map(float, slopes)), prod(sizes)))


@theorem("S2-C14")
def _l1_loss(generator: torch.Generator) -> Iterator[Check]:
    for widths in (*CASCADES, (4, 3, 1)):
        net, sizes, h = _bad_network(generator, widths)
        slope = net.weight_slope(1, h)
        loss = _l1_slope(net, h, -torch.ones(widths[-1]))
        rank = min(widths[1:])
        yield printed("|f, W_i| = |h, W_i|", gap(loss, slope))
        yield corrected("sqrt(r) times (11) corrected", gap(loss, rank**0.5 * prod(sizes) * h.norm()))
        free = random_network(generator, widths)
        bound = widths[-1] ** 0.5 * free.weight_slope(1, h)
        yield corrected("<= sqrt(n_K) |h, W_i|", excess(_l1_slope(free, h, normal(generator, widths[-1])), bound))
        yield conclusion("of the order of b_{i+1} A_{i-1}", excess(loss, widths[-1] ** 0.5 * prod(sizes) * h.norm()))


@theorem("S2-T15")
def _extreme_gradients(generator: torch.Generator) -> Iterator[Check]:
    for widths in CASCADES:
        net, sizes, _ = _bad_network(generator, widths)
        W, c = normal(generator, widths[1], widths[0]), 10.0 ** uniform(generator, -2, 2)
        data = normal(generator, 7, widths[0])
        c = c / prod(sizes)  # keep u where the loss has a slope
        truth = gradient(_training_loss, W, net, c, data)
        u = c * replace(net, weights=(W, *net.weights[1:]))(data).sum(1)
        slope = gradient(lambda v: _outer_loss(v).sum(), u)
        active = (data @ W.T >= 0).double()
        formula = c * prod(sizes) / len(data) * (active * slope[:, None]).T @ data
        formula[min(widths[2:]) :] = 0
        yield printed("against autograd", gap(truth, formula))


@theorem("S2-R16")
def _orders(generator: torch.Generator) -> Iterator[Check]:
    for widths in ((3, 4, 5, 3), (2, 5, 5, 4)):
        net = random_network(generator, widths)
        data, direction = normal(generator, 6, widths[0]), normal(generator, widths[1], widths[0])
        slopes = []
        for a in (1.0, 10.0, 1e3):
            bad = _cascade(widths, [1.0, *([a] * (len(widths) - 2))])
            grown = a ** (len(widths) - 2)
            slopes.append(gradient(_training_loss, direction / grown, bad, 1.0, data).norm() / grown)
        yield corrected("gradients of size a_K..a_{i+1}", gap(torch.stack(slopes), slopes[0]))
        yield corrected("and not 0", broken(slopes[0] > 1e-6))
        yield conclusion("gradients of size a_K..a_{i+1}", gap(torch.stack(slopes), slopes[0]))
        base = gradient(_training_loss, net.weights[1], net, 0.01, data, 1).norm()
        for name, c, lower in (("last layer times 10", 0.1, 1.0), ("first layer times 10", 0.01, 10.0)):
            scaled = replace(net, weights=(lower * net.weights[0], *net.weights[1:]))
            slope = gradient(_training_loss, scaled.weights[1], scaled, c, data, 1).norm()
            yield printed(f"constant free of the other layers: {name}", excess(slope, 2 * base))
            reach = max(scaled.hidden(x, 1).norm() for x in data)
            bound = c * widths[-1] ** 0.5 * scaled.weight_product(2) * reach
            yield corrected("the bound", excess(slope, bound))


def _cascade(widths: tuple[int, ...], sizes: list[float]) -> Feedforward:
    """Return the ReLU net whose layers truncate or pad, times a_k."""
    weights = tuple(a * padded_identity(n, m) for a, m, n in zip(sizes, widths, widths[1:], strict=False))
    return Feedforward(weights, (nothing,) * len(weights))


def _bad_network(generator: torch.Generator, widths: tuple[int, ...]) -> tuple[Feedforward, list[float], Tensor]:
    """Return Theorem 13's network for i = 1, its a_k, and an input; W_1's units are all active on it."""
    sizes = [uniform(generator, 0.2, 4) for _ in widths[2:]]
    h = normal(generator, widths[0])
    net = _cascade(widths, [1.0, *sizes])
    first = torch.outer(torch.linspace(1, 2, widths[1]), h)
    return replace(net, weights=(first, *net.weights[1:])), sizes, h


def _deviation(net: Feedforward, x: Tensor, layer: int, eps: float) -> Tensor:
    """Return `sqrt(sigma^2 + eps)` of the input of a layer's normalization."""
    return standardize(net.weights[layer] @ net.hidden(x, layer), eps)[1]


def _l1_slope(net: Feedforward, h: Tensor, label: Tensor) -> Tensor:
    """Return the norm of the gradient of `|label - h_K|_1` in `W_1`."""
    flat = net.weights[0].flatten()
    return gradient(lambda w: (net.output_by_weight(w, 1, h) - label).abs().sum(), flat).norm()


def _outer_loss(u: Tensor) -> Tensor:
    """Return `f(g(u))` for each sample: 1-Lipschitz and smooth."""
    return functional.softplus(-u)


def _training_loss(W: Tensor, net: Feedforward, c: float, data: Tensor, layer: int = 0) -> Tensor:
    """Return `L` as a function of one layer, the last being `c (1, ..., 1)`."""
    changed = replace(net, weights=(*net.weights[:layer], W, *net.weights[layer + 1 :]))
    return _outer_loss(c * changed(data).sum(1)).mean()


def _moving_statistics(generator: torch.Generator) -> float:
    """Return the largest slope of one sample's normalized output in W over `A / s`, batch statistics moving with W."""
    X = 0.1 * normal(generator, 12, 3)
    X[:, 0] = -1.0
    X[0, 0] = 1.0  # one sample far from the others in a direction W ignores
    W = torch.tensor([0.0, 1.0, 0.3])
    s = standardize(X @ W)[1]
    slope = gradient(lambda w: standardize(X @ w)[0][0], W).norm()
    return float(slope * s / X.norm(dim=1).max())
