"""S1 (Santurkar et al. 2018), the landscape in activation space: Facts C.1-C.2, Theorems 4.1 and 4.2."""

from collections.abc import Callable, Iterator

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import Loss, Unit, curvature, gradient, hessian, jacobian, normal, units
from normgauge.theory.batchnorm_calculus import (
    gradient_norm_squared,
    project,
    pullback_gradient,
    pullback_hessian,
    scale_gradient,
    standardize,
)
from normgauge.theory.smoothness import curvature_along_gradient


@theorem("S1-FC.1")
def _gradient_through(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            truth = gradient(unit.normalized_loss, unit.y, eps)
            yh, s = standardize(unit.y, eps)
            g = gradient(unit.loss, unit.gamma * yh + unit.beta)
            formula = pullback_gradient(unit.y, g, unit.gamma, eps)
            size = abs(unit.gamma) / s * g.norm()
            yield printed("gradient against autograd", gap(truth, formula, size))


@theorem("S1-FC.2")
def _normalization_jacobian(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            yh, s = standardize(unit.y, eps)
            truth = jacobian(lambda y, eps: standardize(y, eps)[0], unit.y, eps)
            yield printed("Jacobian of yh against autograd", gap(truth, project(yh) / s, 1 / s))
            scaled = jacobian(unit.output, unit.y, eps)
            yield printed("Jacobian of z", gap(scaled, unit.gamma * project(yh) / s, abs(unit.gamma) / s))


@theorem("S1-T4.1")
def _lipschitz(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        truth = gradient(unit.normalized_loss, unit.y).square().sum()
        g, ratio = unit.g, (unit.gamma / unit.s) ** 2
        size = ratio * g.square().sum()
        inner = (g @ unit.yh) ** 2
        bound = ratio * (g @ g - g.sum() ** 2 / unit.m - inner / unit.m**0.5)
        yield printed("bound with 1/sqrt(m)", excess(truth, bound, size))
        yield corrected("equality with 1/m", gap(truth, gradient_norm_squared(unit.y, g, unit.gamma), size))
        yield conclusion("the gradient shrinks beyond the factor gamma^2/s^2", excess(truth, size))
        yield fact("most negative right side as printed, over its first term", min(float(bound / size), 0.0))


@theorem("S1-T4.1id")
def _same_gradient(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        plain = gradient(unit.loss, unit.y)
        yield printed("dLhat/dz against dL/dy", gap(unit.g, plain))
        matched = Unit(unit.y, float(unit.s), float(unit.y.mean()), unit.loss)
        yield corrected("the same with gamma = s, beta = mean", gap(matched.g, plain))
        truth = gradient(unit.normalized_loss, unit.y).square().sum()
        bound = (unit.gamma / unit.s) ** 2 * plain.square().sum()
        yield conclusion("gradient with BN <= (gamma/s) times that of the network without", excess(truth, bound))


@theorem("S1-eq30")
def _scale_derivative(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for eps in (0.0, 0.1):
            yh, s = standardize(unit.y, eps)
            truth = gradient(lambda y, gamma, eps: gamma / standardize(y, eps)[1], unit.y, unit.gamma, eps)
            yield printed("derivative against autograd", gap(truth, scale_gradient(yh, s, unit.gamma)))


@theorem("S1-eq40")
def _activation_hessian(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator, sizes=(2, 3, 8)):
        for eps in (0.0, 0.1):
            yh, s = standardize(unit.y, eps)
            z = unit.gamma * yh + unit.beta
            g, H = gradient(unit.loss, z), hessian(unit.loss, z)
            truth = hessian(unit.normalized_loss, unit.y, eps)
            size = (unit.gamma / s) ** 2 * H.abs().max() + abs(unit.gamma) / s**2 * g.norm()
            formula = pullback_hessian(unit.y, g, H, unit.gamma, eps)
            yield printed("Hessian against autograd", gap(truth, formula, size))


@theorem("S1-eq43")
def _projections(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        yh, m = unit.yh, unit.m
        P, identity, M = project(yh), torch.eye(m), torch.ones(m, m)
        centred = unit.g - unit.g.mean()
        along = identity - torch.outer(yh, yh) / m
        size = centred.norm()
        yield printed("M gb = 0", gap(M @ centred, 0.0, m * unit.g.norm()))
        yield printed("P^2 = P", gap(P @ P, P, 1.0))
        yield printed("yh^T (I - yh yh^T/m) = 0", gap(yh @ along, 0.0, yh.norm()))
        yield printed("(I - M/m) drops out", gap((identity - M / m) @ along @ centred, along @ centred, size))
        truth = gradient(unit.normalized_loss, unit.y)
        scale = unit.gamma / unit.s
        yield printed("gradient (47)", gap(truth, scale * along @ centred, abs(scale) * unit.g.norm()))
        blurred = project(standardize(unit.y, 0.1 * float(unit.s) ** 2)[0])
        yield fact("P^2 - P with eps = 0.1 s^2", gap(blurred @ blurred, blurred, 1.0))


@theorem("S1-T4.2a")
def _curvature_along(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        v, truth, size = _directional_curvature(unit)
        g, H, m = unit.g, unit.H, unit.m
        bound = (unit.gamma / unit.s) ** 2 * (v @ H @ v) - unit.gamma / (m * unit.s**2) * (g @ unit.yh) * (v @ v)
        yield printed("bound", excess(truth, bound, size))
        yield corrected("equality", gap(truth, curvature_along_gradient(unit.y, g, H, unit.gamma), size))


@theorem("S1-T4.2b")
def _relative_norms(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        for gamma in (unit.gamma, float(unit.s)):
            g = normal(generator, unit.m)
            H = _norm_preserving_hessian(generator, g, pullback_gradient(unit.y, g, gamma))
            v, truth, size = _directional_curvature(_quadratic(unit.y, gamma, g, H))
            ratio, form, a = (gamma / unit.s) ** 2, g @ H @ g, g @ unit.yh
            bound = ratio * (form - a * (v @ v) / (unit.m * gamma))
            if gamma == unit.gamma:
                yield printed("bound", excess(truth, bound, size))
            else:
                yield conclusion("with gamma = s the curvature is reduced as printed", excess(truth, bound, size))
            right = ratio * (ratio * form - a * (v @ v) / (unit.m * gamma))
            yield corrected("bound with gamma^4/s^4", excess(truth, right, size))


@theorem("S1-T4.2c")
def _towards_minimum(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        target = 2 * unit.gamma * unit.yh + 0.3 * normal(generator, unit.m)
        for goal in (target, normal(generator, unit.m)):
            here = Unit(unit.y, unit.gamma, unit.beta, _squared_distance_to(goal))
            inner = float(here.g @ here.yh)
            way = goal - here.z
            yield fact("cosine of -g and the way to the minimum", -here.g @ way / (here.g.norm() * way.norm()))
            yield printed("<yh,g> > 0", broken(inner > 0))
            yield fact("smallest <yh,g>/m seen", min(inner / unit.m, 0.0))
            slope = gradient(here.loss_of_gamma, torch.tensor(here.gamma))
            yield corrected("<yh,g> = dL/dgamma", gap(inner, slope, unit.m))
            best = float((goal - here.beta) @ here.yh / unit.m)
            yield corrected("positive exactly above the best gamma", broken((inner > 0) == (here.gamma > best)))


@theorem("S1-PSD")
def _positive_hessian(generator: torch.Generator) -> Iterator[Check]:
    for m, width in ((2, 3), (3, 4), (6, 5)):
        for loss in (_cross_entropy, _squares):
            layers = [normal(generator, 6, width), normal(generator, 6, 6), normal(generator, 3, 6)]
            labels, z = torch.randint(3, (m,), generator=generator), normal(generator, m * width)
            values = torch.linalg.eigvalsh(hessian(_relu_loss(layers, labels, loss, m, False), z))
            yield printed("smallest eigenvalue >= 0", excess(-values[0], 0.0, values[-1].clamp(min=1e-6)))
            bent = torch.linalg.eigvalsh(hessian(_relu_loss(layers, labels, loss, m, True), z))
            yield fact("smallest eigenvalue with a further BN layer", bent[0])


def _directional_curvature(unit: Unit) -> tuple[Tensor, Tensor, Tensor]:
    """Return v = grad_y Lhat and v^T Hhat v by autograd, and the size the terms of the latter have."""
    v = gradient(unit.normalized_loss, unit.y)
    slope = abs(unit.gamma) / unit.s * unit.g.norm()
    bend = (unit.gamma / unit.s) ** 2 * torch.linalg.matrix_norm(unit.H) + abs(unit.gamma) / unit.s**2 * unit.g.norm()
    return v, curvature(unit.normalized_loss, unit.y, v), slope**2 * bend


def _quadratic(y: Tensor, gamma: float, g: Tensor, H: Tensor) -> Unit:
    """Return a unit whose loss has gradient g and Hessian H at its own z."""
    z = gamma * standardize(y)[0]
    return Unit(y, gamma, 0.0, lambda x: g @ (x - z) + (x - z) @ H @ (x - z) / 2)


def _norm_preserving_hessian(generator: torch.Generator, g: Tensor, v: Tensor) -> Tensor:
    """Return a positive semi-definite H with v^T H v/|v|^2 = g^T H g/|g|^2 (any H where v = 0)."""
    A = normal(generator, g.shape[0], g.shape[0])
    H = A @ A.T
    if v.norm() < 1e-9 * g.norm():
        return H
    low, high = g / g.norm(), v / v.norm()
    if low @ H @ low > high @ H @ high:
        low, high = high, low
    w = low - (low @ high) * high  # orthogonal to the direction that already has the larger form
    return H + (high @ H @ high - low @ H @ low) / (w @ low) ** 2 * torch.outer(w, w)


def _squared_distance_to(goal: Tensor) -> Loss:
    return lambda z: (z - goal).square().sum() / 2


def _cross_entropy(out: Tensor, labels: Tensor) -> Tensor:
    return torch.nn.functional.cross_entropy(out, labels)


def _squares(out: Tensor, labels: Tensor) -> Tensor:
    return (out - torch.nn.functional.one_hot(labels, out.shape[1])).square().mean()


def _relu_loss(
    layers: list[Tensor], labels: Tensor, loss: Callable[[Tensor, Tensor], Tensor], m: int, normalized: bool
) -> Loss:
    """Return the loss of a ReLU network on the flattened activations of a batch of m."""

    def value(z: Tensor) -> Tensor:
        h = z.reshape(m, -1)
        for weight in layers[:-1]:
            h = torch.relu(h) @ weight.T
            if normalized:
                h = standardize(h.T, 0.01)[0].T
        return loss(torch.relu(h) @ layers[-1].T, labels)

    return value
