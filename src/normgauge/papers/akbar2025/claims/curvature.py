"""S0 (Akbar 2025), the Hessian of normalized networks: sections 3.2, 4.3, 5, 6.1, App A.1.2."""

from collections.abc import Iterator
from dataclasses import replace

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, hessian, normal, sign, uniform, units
from normgauge.papers.instances.layers import factor, layers, mismatch
from normgauge.theory.batchnorm_calculus import project, standardize
from normgauge.theory.scale_invariance import fit_hessian, polar_eigenvalues, polar_hessian

ZERO = 1e-9  # of the largest possible eigenvalue: smaller ones count as zero
SMALL = ((3, 2, 2), (8, 3, 4), (12, 2, 3))


@theorem("S0-H1")
def _null_vector(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator, sizes=SMALL):
        theta = layer.theta
        H, slope = hessian(layer.loss, theta), gradient(layer.loss, theta)
        size = torch.linalg.matrix_norm(H) * theta.norm()
        shift = torch.cat([torch.zeros(layer.W.numel()), normal(generator, layer.b.numel())])
        yield printed("H w = 0", gap(H @ theta, 0.0, size))
        yield corrected("H w = -grad", gap(H @ theta, -slope, size))
        yield corrected("H v = 0 for a shift", gap(H @ shift, 0.0, torch.linalg.matrix_norm(H) * shift.norm()))
        yield conclusion("the curvature along w is zero", gap(theta @ H @ theta, 0.0, size * theta.norm()))
        there = replace(layer, goal=layer.outputs(layer.W, layer.b))
        H = hessian(there.loss, theta)
        flat = gap(H @ theta, 0.0, torch.linalg.matrix_norm(H) * theta.norm())
        yield conclusion("at a critical point H w = 0", flat)


@theorem("S0-H2")
def _cross_terms(generator: torch.Generator) -> Iterator[Check]:
    for layer in layers(generator, sizes=SMALL):
        theta = layer.theta
        H, slope = hessian(layer.loss, theta), gradient(layer.loss, theta)
        steepest, other = slope / slope.norm(), normal(generator, theta.numel())
        for v in (steepest, other, other - (other @ steepest) * steepest):
            size = torch.linalg.matrix_norm(H) * theta.norm() * v.norm()
            yield corrected("v^T H w = -<v, grad>", gap(v @ H @ theta, -v @ slope, size))
        yield printed("v^T H w = 0 where the slope along v is 0", gap(v @ H @ theta, 0.0, size))
        coupling = (steepest @ H @ theta).abs() / (torch.linalg.matrix_norm(H) * theta.norm())
        yield fact("coupling with the gradient's direction, relative", coupling)


@theorem("S0-polar")
def _polar(generator: torch.Generator) -> Iterator[Check]:
    for m in (3, 8, 20):
        X, t = normal(generator, m, 2) + 1, normal(generator, m)
        r, angle = factor(generator), uniform(generator, -3, 3)
        for goal in (t, standardize(X @ _unit_vector(angle))[0]):
            w = r * _unit_vector(angle)
            at = torch.tensor(angle)
            slope, bend = (derivative(_mismatch_by_angle, at, X, goal) for derivative in (gradient, hessian))
            H = hessian(mismatch, w, X, goal)
            eigenvalues, right = torch.linalg.eigvalsh(H), polar_eigenvalues(slope, bend, r)
            size = bend.abs() / r**2 + slope.abs() / r**2
            claimed = torch.stack([torch.zeros_like(bend), bend / r**2]).sort().values
            own = torch.linalg.eigvalsh(hessian(_mismatch_in_polar, torch.tensor([r, angle]), X, goal))
            yield printed("the kinder coordinates", min(gap(eigenvalues, claimed, size), gap(own, claimed, bend.abs())))
            yield corrected("Cartesian", gap(eigenvalues, right, size))
            flat = torch.stack([torch.zeros_like(bend), bend]).sort().values
            yield corrected("(r, theta)", gap(own, flat, bend.abs() + slope.abs()))
            frame = torch.stack([_unit_vector(angle), _unit_vector(angle + torch.pi / 2)])
            yield corrected("the whole matrix", gap(frame @ H @ frame.T, polar_hessian(slope, bend, r), size))
            if goal is not t:
                yield corrected("0 and f''/r^2 where f' = 0", gap(eigenvalues, claimed, size))
            yield conclusion("curvature along the angle is f''/r^2", gap(frame[1] @ H @ frame[1], bend / r**2, size))


@theorem("S0-lam")
def _largest_eigenvalue(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((3, 2), (8, 2), (20, 5)):
        X, t, w = normal(generator, m, n), normal(generator, m), normal(generator, n)
        plain = torch.linalg.eigvalsh(X.T @ X)[-1]
        unit = torch.linalg.eigvalsh(hessian(mismatch, w, X, t))
        for c in (0.01, 1.0, 100.0):
            here = torch.linalg.eigvalsh(hessian(mismatch, c * w, X, t))
            yield printed("lambda_max with BN <= without", excess(here[-1], plain))
            yield corrected("H(cw) = H(w)/c^2", gap(c**2 * here, unit))
            yield fact("lambda_max with BN over without", here[-1] / plain)
        zh, s = standardize(X @ w)
        fit = torch.linalg.eigvalsh(hessian(mismatch, w, X, s * zh, s))
        yield corrected("at a fit with gamma = s", excess(fit[-1], plain))
        yield conclusion("at equal scale BN's is not larger", excess(fit[-1], plain))


@theorem("S0-6.1a")
def _whitening(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((6, 2), (12, 3), (30, 5)):
        mixing = normal(generator, n, n) + torch.diag(torch.linspace(1.0, 8.0, n))
        X = normal(generator, m, n) @ mixing
        centred = X - X.mean(0)
        Sigma = centred.T @ centred / m
        w = normal(generator, n)
        H = hessian(mismatch, w, X, standardize(X @ w)[0]) / m
        size = Sigma.diagonal().max() / (w @ Sigma @ w)
        yield printed("H = Cov(x_hat)", gap(H, torch.corrcoef(X.T), size))
        values, all_values = torch.linalg.eigvalsh(H)[1:], torch.linalg.eigvalsh(Sigma)
        if n > 2:  # with two weights one eigenvalue is left, and kappa says nothing
            yield printed("kappa = 1", gap(values[-1], values[0]))
            yield fact("kappa on the complement of w", values[-1] / values[0])
        yield corrected("the closed form", gap(H, fit_hessian(w, X), size))
        s2 = w @ Sigma @ w
        yield corrected("eigenvalues interlace, from below", excess(all_values[:-1] / s2, values, size))
        yield corrected("and from above", excess(values, all_values[1:] / s2, size))
        white = torch.linalg.qr(centred).Q * m**0.5
        even = hessian(mismatch, w, white, standardize(white @ w)[0]) / m
        expected = (torch.eye(n) - torch.outer(w, w) / (w @ w)) / (w @ w)
        yield corrected("white inputs: kappa = 1", gap(even, expected, 1 / (w @ w)))


@theorem("S0-sphere")
def _sphere_hessian(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((6, 3), (12, 4), (20, 5)):
        X, t, w = normal(generator, m, n), normal(generator, m), normal(generator, n)
        for goal in (t, standardize(X @ w)[0]):
            values, vectors = torch.linalg.eigh(hessian(mismatch, w, X, goal))
            on_sphere = torch.linalg.eigvalsh(_great_circle_hessian(w, X, goal))
            size, radial = values.abs().max(), int((vectors.T @ w).abs().argmax())
            others = torch.cat([values[:radial], values[radial + 1 :]])
            yield printed("the same but the radial one", gap(on_sphere, others, size))
            yield corrected("between neighbours, from below", excess(values[:-1] + size, on_sphere + size))
            yield corrected("and from above", excess(on_sphere + size, values[1:] + size))
        yield conclusion("the same at a fit", gap(on_sphere, others, size))


@theorem("S0-A1.2b")
def _negative_curvature(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator, sizes=(2, 3, 8)):
        zh, s, m = unit.yh, unit.s, unit.m
        fit = replace(unit, loss=lambda z, goal=unit.z: (z - goal).square().sum() / 2)
        H = hessian(fit.normalized_loss, unit.y)
        size = (unit.gamma / s) ** 2
        along = zh @ H @ zh / m
        yield printed("the eigenvalue along zh", gap(along, size * (1 - m), size))
        yield corrected("H zh = 0 at a fit", gap(H @ zh, 0.0, size * m))
        yield corrected("H = (gamma^2/s^2) P", gap(H, size * project(zh), size))
        slope, bent = gradient(unit.normalized_loss, unit.y), hessian(unit.normalized_loss, unit.y)
        scale = size * torch.linalg.matrix_norm(unit.H) * m + unit.g.norm() * abs(unit.gamma) / s**2
        yield corrected("H zh = -grad/s anywhere", gap(bent @ zh, -slope / s, scale))


@theorem("S0-A1.2c")
def _weight_space(generator: torch.Generator) -> Iterator[Check]:
    for m, n in ((2, 2), (3, 3), (4, 6), (6, 2), (9, 4), (20, 5)):
        X, gamma = normal(generator, m, n) + 1, uniform(generator, 0.5, 2) * sign(generator)
        centred = X - X.mean(0)
        w = centred.T @ normal(generator, m) + 0.3 * normal(generator, n)  # else sigma may be small, and rounding not
        zh, s = standardize(X @ w)
        rank = int(torch.linalg.matrix_rank(centred, rtol=ZERO))
        basis = torch.linalg.qr(torch.cat([torch.ones(m, 1), centred], 1)).Q
        noise = normal(generator, m)
        residual = noise - basis @ (basis.T @ noise) if m > n + 1 else torch.zeros(m)
        for extra in (torch.zeros(m), residual):
            H = hessian(mismatch, w, X, gamma * zh + extra, gamma)
            size = (gamma / s) ** 2 * centred.square().sum()
            values = torch.linalg.eigvalsh(H)
            positive = int((values > ZERO * size).sum())
            yield printed("n - 1 positive eigenvalues", gap(positive, n - 1))
            yield corrected("rank(Sigma) - 1 positive eigenvalues", gap(positive, rank - 1))
            yield corrected("none negative", excess(-values[0], 0.0, size))
            yield corrected("the closed form", gap(H, m * fit_hessian(w, X, gamma), size))
            if rank == n:
                yield conclusion("regular Sigma: n - 1 of them", gap(positive, n - 1))
                yield conclusion("and one 0 along w", gap(H @ w, 0.0, size * w.norm()))


def _great_circle_hessian(w: Tensor, X: Tensor, goal: Tensor) -> Tensor:
    """Return the Hessian on the sphere through w: second derivatives along great circles; mixed ones polarized."""
    r = w.norm()
    basis = torch.linalg.qr(torch.cat([w[:, None], torch.eye(len(w))[:, : len(w) - 1]], 1)).Q[:, 1:].T

    def bend(e: Tensor) -> Tensor:
        turn = e.norm() / r

        def along(t: Tensor) -> Tensor:
            return mismatch((turn * t).cos() * w + (turn * t).sin() * r * e / e.norm(), X, goal)

        return hessian(along, w.new_zeros(()))

    pure = torch.stack([bend(e) for e in basis])
    mixed = torch.stack([bend(a + b) for a in basis for b in basis]).reshape(len(basis), -1)
    return (mixed - pure[:, None] - pure) / 2


def _unit_vector(angle: float | Tensor) -> Tensor:
    angle = torch.as_tensor(angle)
    return torch.stack([angle.cos(), angle.sin()])


def _mismatch_by_angle(angle: Tensor, X: Tensor, goal: Tensor) -> Tensor:
    return mismatch(_unit_vector(angle), X, goal)


def _mismatch_in_polar(point: Tensor, X: Tensor, goal: Tensor) -> Tensor:
    return mismatch(point[0] * _unit_vector(point[1]), X, goal)
