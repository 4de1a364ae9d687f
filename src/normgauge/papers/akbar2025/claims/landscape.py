"""S0 (Akbar 2025), critical points, zero modes and the Fisher matrix: sections 4.3, 6.1, 7.1."""

from collections.abc import Iterator
from itertools import combinations, pairwise

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, broken, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, hessian, jacobian, normal
from normgauge.papers.instances.layers import factor, layers, mismatch, normalize, nullity
from normgauge.theory.batchnorm_calculus import standardize
from normgauge.theory.scale_invariance import excess_loss, linear_network_redundancy


@theorem("S0-7.1")
def _critical_points(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((6, 2), (12, 3), (30, 5)):
        X, t = normal(generator, m, n) + 1, normal(generator, m)
        centred = X - X.mean(0)
        c = centred.T @ (t - t.mean()) / m
        best = torch.linalg.lstsq(centred, (t - t.mean())[:, None]).solution[:, 0]
        least = (t - t.mean() - centred @ best).square().mean() / 2
        v = normal(generator, n)
        saddle = torch.cat([v - c * (v @ c) / (c @ c), torch.zeros(1), t.mean().reshape(1)])
        spread = t.var(correction=0)
        slope, H = gradient(_affine_fit, saddle, X, t), hessian(_affine_fit, saddle, X, t)
        yield printed("a critical point is a global minimum", excess(_affine_fit(saddle, X, t), least, spread))
        yield corrected("gamma = 0, cov(w.x, t) = 0 is critical", gap(slope, 0.0, spread))
        yield corrected("and a strict saddle", broken(torch.linalg.eigvalsh(H)[0] < -1e-6 * H.abs().max()))
        away = normal(generator, n)
        zh = standardize(X @ away)[0]
        gamma = (zh * t).mean()
        here = torch.cat([away, gamma.reshape(1), t.mean().reshape(1)])
        slope = gradient(_affine_fit, here, X, t)
        above = _affine_fit(here, X, t) - least
        yield corrected("loss - min from the gradient", gap(above, excess_loss(away, X, gamma, slope[:n]), spread))
        goal = standardize(t)[0]
        for w in (best, -best):
            still = gradient(mismatch, w, X, goal)
            yield corrected("on the sphere w* and -w* are critical", gap(still * w.norm(), 0.0, float(m)))
            yield printed("on the sphere", excess(mismatch(w, X, goal), mismatch(best, X, goal)))
        targets = normal(generator, m, 2)
        cross = centred.T @ (targets - targets.mean(0)) / m
        inverse = torch.linalg.inv(torch.linalg.cholesky(centred.T @ centred / m))
        vectors = inverse.T @ torch.linalg.eigh(inverse @ cross @ cross.T @ inverse.T).eigenvectors[:, -2:]
        values = []
        for w in vectors.T:
            gains = (standardize(X @ w)[0][:, None] * targets).mean(0)
            here = torch.cat([w, gains, targets.mean(0)])
            slope, H = gradient(_several_fits, here, X, targets), hessian(_several_fits, here, X, targets)
            values.append(torch.linalg.eigvalsh(H)[0] / H.abs().max())
            yield corrected("two outputs: the eigenvectors are critical", gap(slope, 0.0, targets.square().mean()))
            yield corrected("with gain", broken(gains.norm() > 1e-4))
        yield corrected("the first is no saddle", excess(-values[1], 0.0, 1.0))
        yield corrected("the second is one, strictly", broken(values[0] < -1e-6))
        gains = (standardize(X @ vectors[:, 0])[0][:, None] * targets).mean(0)
        yield fact("two outputs: gain at the saddle", gains.norm())


@theorem("S0-7.1m")
def _critical_points_of_layers(generator: torch.Generator) -> Iterator[Check]:
    for samples, inputs, outputs, units in ((12, 3, 2, 1), (20, 4, 3, 2), (30, 3, 4, 2)):
        X, T = normal(generator, samples, inputs), normal(generator, samples, outputs)
        X, T = X - X.mean(0), T - T.mean(0)
        whitening = torch.linalg.inv(torch.linalg.cholesky(X.T @ X / samples)).T
        left, s, right = torch.linalg.svd(whitening.T @ X.T @ T / samples, full_matrices=False)
        spread = T.square().sum(1).mean()
        lowest = {}
        for chosen in combinations(range(len(s)), units):
            pairs = list(chosen)
            here = torch.cat([(whitening @ left[:, pairs]).T.flatten(), (s[pairs, None] * right[pairs]).flatten()])
            loss, H = _layer_fit(here, X, T, units), hessian(_layer_fit, here, X, T, units)
            lowest[chosen] = torch.linalg.eigvalsh(H)[0] / H.abs().max()
            yield corrected("singular pairs: critical", gap(gradient(_layer_fit, here, X, T, units), 0.0, spread))
            yield corrected("the loss there", gap(loss, (spread - s[pairs].square().sum()) / 2, spread))
            least = (spread - s[:units] @ s[:units]) / 2
            yield printed("critical points are global minima", excess(loss, least, spread))
        first, *others = lowest.values()
        yield corrected("the first pairs: no saddle", excess(-first, 0.0, 1.0))
        yield corrected("all others: strict saddles", broken(max(others) < -1e-6))
        point = normal(generator, units * (inputs + outputs))
        w, a = point[: units * inputs].reshape(units, inputs), point[units * inputs :].reshape(units, outputs)
        unit = torch.cat([(w / (X @ w.T).square().mean(0).sqrt()[:, None]).flatten(), a.flatten()])
        slope = gradient(_layer_fit, point, X, T, units)[units * inputs :].reshape(units, outputs)
        plain = gradient(_factor_fit, unit, X, T, units)[: units * inputs].reshape(units, inputs)
        radial = (plain * unit[: units * inputs].reshape(units, inputs)).sum(1)
        yield corrected("the slope BN leaves out follows from the others", gap(radial, (slope * a).sum(1), spread))


def _layer_fit(point: Tensor, X: Tensor, T: Tensor, units: int) -> Tensor:
    """Return half the mean squared loss of A BN(W x), (W, A) in one vector; the targets are centred."""
    w, a = point[: units * X.shape[1]].reshape(units, -1), point[units * X.shape[1] :].reshape(units, -1)
    return (standardize((X @ w.T).T)[0].T @ a - T).square().sum(1).mean() / 2


def _factor_fit(point: Tensor, X: Tensor, T: Tensor, units: int) -> Tensor:
    """Return the same without BN."""
    w, a = point[: units * X.shape[1]].reshape(units, -1), point[units * X.shape[1] :].reshape(units, -1)
    return (X @ w.T @ a - T).square().sum(1).mean() / 2


@theorem("S0-6dl")
def _zero_modes(generator: torch.Generator) -> Iterator[Check]:
    for widths in ((4, 2, 3), (3, 2, 2, 3), (5, 3, 4)):
        X = normal(generator, 24, widths[0])
        X = X - X.mean(0)
        count = sum(a * b for a, b in pairwise(widths)) + sum(widths[1:-1])
        theta = normal(generator, count)
        zero_modes = {}
        for kind in ("none", "fixed", "trained"):
            J = jacobian(_linear_outputs, theta, X, widths, kind).reshape(-1, count)
            unused = 0 if kind == "trained" else sum(widths[1:-1])
            zero_modes[kind] = nullity(J) - unused
            yield fact(f"{kind}: zero modes", zero_modes[kind])
        hidden = sum(widths[1:-1])
        yield printed("fewer zero modes with BN", excess(zero_modes["trained"], zero_modes["none"] - hidden))
        yield printed("with gamma fixed", excess(zero_modes["fixed"], zero_modes["none"] - hidden))
        redundant, more = linear_network_redundancy(widths), linear_network_redundancy(widths, True)
        yield corrected("without BN", gap(zero_modes["none"], redundant))
        yield corrected("BN, gamma fixed: as many", gap(zero_modes["fixed"], redundant))
        yield corrected("BN, gamma trained: k more", gap(zero_modes["trained"], more))
        alpha, n, k = factor(generator), widths[0], widths[1]
        before, first = _linear_outputs(theta, X, widths, "trained"), slice(0, n * k)
        scales, second = slice(n * k, n * k + k), slice(n * k + k, n * k + k + k * widths[2])
        scaled = _linear_outputs(_multiply_parts(theta, (first, alpha)), X, widths, "trained")
        yield corrected("W1 times alpha", gap(scaled, before))
        shared = _linear_outputs(_multiply_parts(theta, (scales, alpha), (second, 1 / alpha)), X, widths, "trained")
        yield corrected("gamma times, W2 over alpha", gap(shared, before))
        if len(widths) == 3:  # a further BN would hide the factor
            parts = _multiply_parts(theta, (first, alpha), (second, 1 / alpha))
            broken_up = _linear_outputs(parts, X, widths, "trained")
            yield corrected("W1 times, W2 over alpha: the output over alpha", gap(broken_up, before / alpha))


@theorem("S0-FIM")
def _fisher(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator):
        theta = layer.theta
        J = jacobian(lambda theta, layer: layer.outputs(*layer.unpack(theta)), theta, layer)
        p = torch.softmax(layer.outputs(layer.W, layer.b), 1)
        curvature = torch.diag_embed(p) - p[:, :, None] * p[:, None, :]
        fisher = torch.einsum("moi,mop,mpj->ij", J, curvature, J)
        each = torch.einsum("moi,mo->mi", J, layer.outputs(layer.W, layer.b) - layer.goal)
        size = layer.gamma.abs().max() * layer.V.norm() * p.shape[0]
        shift = torch.cat([torch.zeros(layer.W.numel()), layer.W.abs().mean() * normal(generator, layer.b.numel())])
        for name, v in (("scale", theta), ("shift", shift)):
            relative = size**2 * v.norm() / layer.W.norm() ** 2
            yield printed(f"Fisher matrix times the {name}", gap(fisher @ v, 0.0, relative))
            yield printed(f"per-sample gradients along the {name}", gap(each @ v, 0.0, size * layer.goal.norm()))


def _affine_fit(packed: Tensor, X: Tensor, t: Tensor) -> Tensor:
    """Return the mean squared loss of gamma zh + beta as a function of (w, gamma, beta)."""
    w, gamma, beta = packed[:-2], packed[-2], packed[-1]
    return (gamma * standardize(X @ w)[0] + beta - t).square().mean() / 2


def _several_fits(packed: Tensor, X: Tensor, targets: Tensor) -> Tensor:
    """Return the mean squared loss of one BN unit with a gain and a shift for each output: (w, gains, shifts)."""
    w, gains, shifts = packed.split([X.shape[1], targets.shape[1], targets.shape[1]])
    return (standardize(X @ w)[0][:, None] * gains + shifts - targets).square().sum(1).mean() / 2


def _multiply_parts(theta: Tensor, *factors: tuple[slice, float]) -> Tensor:
    """Return a copy of `theta` with some of its parts multiplied."""
    theta = theta.clone()
    for part, c in factors:
        theta[part] *= c
    return theta


def _linear_outputs(theta: Tensor, X: Tensor, widths: tuple[int, ...], kind: str) -> Tensor:
    """Return the outputs of a linear network; BN after the hidden layers with scales 1 (fixed) or trained."""
    take, h = theta, X
    for index, (inputs, width) in enumerate(pairwise(widths)):
        W, take = take[: inputs * width].reshape(width, inputs), take[inputs * width :]
        h = h @ W.T
        if index < len(widths) - 2:
            gamma, take = take[:width], take[width:]
            h = h if kind == "none" else normalize(h, "batch")
            h = gamma * h if kind == "trained" else h
    return h
