"""S0 (Akbar 2025), gradient flow, learning rates, margins and a citation: sections 2.3, 5.1, 7.2, Experiment 4."""

from collections.abc import Iterator
from itertools import product

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed, unsaid
from normgauge.papers.court.registry import bibliographic, find, theorem
from normgauge.papers.instances import Loss, gradient, normal, sign, uniform, wavy
from normgauge.papers.instances.layers import Layer, layers
from normgauge.theory.batchnorm_calculus import standardize
from normgauge.theory.margins import margin_term
from normgauge.theory.norm_growth import after_sgd_step, equivalent_rate, under_decay_flow
from normgauge.theory.weight_normalization import normalized_weight


@theorem("S0-L5.1")
def _conservation(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        slope, _ = layer.unpack(gradient(layer.loss, layer.theta))
        yield printed("BN: d|w_i|^2/dt = 0", gap(-2 * (slope * layer.W).sum(1), 0.0, layer.size))
        spread = (layer.X @ layer.W.T).var(0, correction=0).mean()
        leaky, _ = layer.unpack(gradient(layer.loss, layer.theta, float(0.3 * spread)))
        yield fact("with eps = 0.3 var: d|w_i|^2/dt, relative", (leaky * layer.W).sum(1).abs().max() / layer.size)
    for n in (2, 3, 9):
        v, g, loss = normal(generator, n), uniform(generator, 0.3, 3) * sign(generator), wavy(generator, n)
        slope = gradient(_loss_by_direction, v, g, loss)
        size = abs(g) * gradient(loss, normalized_weight(v, g)).norm()
        yield printed("WN: d|v|^2/dt = 0", gap(-2 * v @ slope, 0.0, size))


@theorem("S0-L5.1b")
def _frobenius(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator, "layer", sizes=((2, 2, 3), (6, 3, 4), (9, 2, 6))):
        W, b = layer.unpack(gradient(layer.loss, layer.theta))
        yield printed("d|W|_F^2/dt = 0", gap(-2 * (W * layer.W).sum(), 0.0, layer.size))
        both = (W * layer.W).sum() + (b * layer.b).sum()
        yield corrected("d(|W|_F^2 + |b|^2)/dt = 0", gap(-2 * both, 0.0, layer.size))
        size = layer.size / layer.W.norm()
        yield corrected("sums over the units stay", gap(torch.cat([W.sum(0), b.sum()[None]]), 0.0, size))
        zeros = torch.zeros_like(layer.b)
        bare = gradient(lambda W, layer, b: layer.head(layer.activations(W, b)), layer.W, layer, zeros)
        yield conclusion("without bias d|W|_F^2/dt = 0", gap(-2 * (bare * layer.W).sum(), 0.0, layer.size))


@theorem("S0-5.1iii")
def _mini_batches(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator, sizes=((24, 2, 1), (24, 3, 4))):
        for count in (2, 3, 8):
            part = layer.select_rows(torch.randperm(24, generator=generator)[:count])
            slope, _ = part.unpack(gradient(part.loss, part.theta))
            along = (slope * part.W).sum(1)
            component = gap(along, 0.0, part.size)
            yield printed("a component along w appears", broken(component > 1e-8))
            yield corrected("there is none", component)
            rate = 0.1 * float(part.W.square().sum()) / part.size
            grown = (part.W - rate * slope).square().sum()
            expected = after_sgd_step(part.W.square().sum(), slope.square().sum(), rate)
            yield corrected("|w|^2 grows by eta^2 |gradient|^2", gap(grown, expected))


@theorem("S0-WD")
def _weight_decay(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        squared = layer.W.square().sum()
        decay = uniform(generator, 0.1, 1) * layer.size / float(squared)
        slope, _ = layer.unpack(gradient(layer.loss, layer.theta))
        speed = 2 * (layer.W * (-slope - decay * layer.W)).sum()
        size = decay * squared
        yield printed("-lambda |w|^2", gap(speed, -decay * squared, size))
        zero = torch.tensor(0.0)
        law = gradient(lambda t, n, decay: torch.as_tensor(under_decay_flow(n, decay, t)), zero, squared, decay)
        yield corrected("-2 lambda |w|^2", gap(speed, law, size))
        yield conclusion("the norm decays, whatever the loss", excess(speed, 0.0, size))


@theorem("S0-efflr")
def _initial_scale(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator, sizes=((8, 2, 2), (12, 3, 4))):
        slope = gradient(layer.loss, layer.theta)
        rate = 0.1 * float(layer.theta.norm() / slope.norm())
        plain = _outputs_after_descent(layer, 1.0, rate)
        for c in (0.2, 5.0, 100.0):
            yield printed("equal rates", gap(_outputs_after_descent(layer, c, rate), plain))
            yield corrected("rate c^2 eta", gap(_outputs_after_descent(layer, c, equivalent_rate(rate, c)), plain))
            first = gradient(layer.loss, c * layer.theta)
            yield corrected("the first turn is c^2 times smaller", gap(c**2 * (first / c), slope))
        start, far = layer.outputs(layer.W, layer.b), _outputs_after_descent(layer, 100.0, rate)
        yield fact("change of the outputs from 100 W over that from W", (far - start).norm() / (plain - start).norm())


@theorem("S0-margin")
def _margin(generator: torch.Generator) -> Iterator[Check]:
    for count in (3, 6, 9):
        y = torch.tensor([sign(generator) for _ in range(count)])
        reach = uniform(generator, 0.5, 2)
        X = torch.stack([reach * y, torch.zeros(count), normal(generator, count)], 1)
        w, tilted = torch.tensor([1.0, 0.0, 0.0]), torch.tensor([0.5, 0.75**0.5, 0.0])  # the same norm, half the margin
        wide, narrow, doubled = (_capacity(v, X, y) for v in (w, tilted, 2 * w))
        yield printed("twice the margin at the same norm: half the term", gap(wide, narrow / 2))
        yield corrected("twice the margin by twice the weights: no change", gap(doubled, wide))
        bound = margin_term((y * (X @ w)).min(), w.norm(), X)
        yield corrected("the closed form bounds it", excess(wide, bound))
        yield corrected("and is not loose by more than sqrt(2)", excess(bound, 2**0.5 * wide))


@bibliographic("S0-cite")
def _citations(generator: torch.Generator) -> Iterator[Check]:
    kohler, yang, than, article = find("S0-cite").quotes
    yield printed("Kohler: residual network, infinite width", unsaid(kohler, ["residual network", "infinite width"]))
    yield printed("Yang: deep linear networks", unsaid(yang, ["linear networks"]))
    yield corrected("Kohler: halfspaces, Gaussian inputs", unsaid(kohler, ["learning halfspace", "gaussian inputs"]))
    yield corrected("Yang: fully-connected, nonlinear", unsaid(yang, ["fully-connected", "nonlinear activation"]))
    yield corrected("Kohler in Than's words", unsaid(than, ["perceptron", "gaussian inputs"]))
    yield corrected("Yang in the article's words", unsaid(article, ["gradient explosion", "nonlinearity"]))


@theorem("S0-balance")
def _balance(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((12, 3), (20, 4)):
        X, goal = normal(generator, m, n), normal(generator, m, n)
        first, second = 10 * normal(generator, n, n), 0.1 * normal(generator, n, n)
        theta = torch.stack([first, second]).flatten()
        slopes = gradient(_two_layers, theta, X, goal).reshape(2, -1)
        norms, growth = theta.reshape(2, -1).norm(dim=1), slopes.norm(dim=1)
        speed = -(slopes * theta.reshape(2, -1)).sum(1)
        yield corrected("the flow keeps both norms", gap(speed, 0.0, (norms * growth).max()))
        apart = speed[0] / norms[0] ** 2 - speed[1] / norms[1] ** 2
        yield printed("the flow brings them together", broken(apart < -1e-6 * growth[1] / norms[1]))
        rate = float(norms[1] / growth[1])
        after = (theta.reshape(2, -1) - rate * slopes).norm(dim=1)
        yield corrected("|W|^2 grows by eta^2 |grad|^2", gap(after**2, after_sgd_step(norms**2, growth**2, rate)))
        yield corrected("the small layer grows more", broken(after[1] / norms[1] > after[0] / norms[0]))
        yield conclusion("a large step brings them together", broken(after[0] / after[1] < norms[0] / norms[1]))


def _two_layers(theta: Tensor, X: Tensor, goal: Tensor) -> Tensor:
    """Return the squared loss of two square layers, BN behind both and tanh between."""
    W, V = theta.reshape(2, X.shape[1], -1)
    return (standardize(V @ torch.tanh(standardize(W @ X.T)[0]))[0].T - goal).square().mean()


def _loss_by_direction(v: Tensor, g: float, loss: Loss) -> Tensor:
    return loss(g * v / v.norm())


def _outputs_after_descent(layer: Layer, c: float, rate: float) -> Tensor:
    """Return the outputs after three steps of gradient descent on (W, b) from c times the weights."""
    theta = c * layer.theta
    for _ in range(3):
        theta = theta - rate * gradient(layer.loss, theta)
    return layer.outputs(*layer.unpack(theta))


def _capacity(w: Tensor, X: Tensor, y: Tensor) -> Tensor:
    """Return 2/margin times the empirical Rademacher complexity of {|w'| <= |w|}, over all signs of the samples."""
    signs = torch.tensor(list(product((-1.0, 1.0), repeat=len(y))))
    complexity = w.norm() * (signs @ X).norm(dim=1).mean() / len(y)
    return 2 * complexity / (y * (X @ w)).min()
