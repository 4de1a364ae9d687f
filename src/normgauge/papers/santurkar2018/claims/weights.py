"""S1 (Santurkar et al. 2018), the landscape in weight space: Observation 4.3, Theorems 4.4 and C.1, Lemma 4.5."""

from collections.abc import Iterator
from dataclasses import dataclass
from math import pi

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import Loss, Unit, curvature, gradient, hessian, normal, uniform, units
from normgauge.papers.instances.gaussian import bisection
from normgauge.theory.batchnorm_calculus import pullback_hessian, standardize
from normgauge.theory.smoothness import curvature_along_gradient, nearest_rescaling, worst_weight_gradient


@theorem("S1-O4.3")
def _minima_preserved(generator: torch.Generator) -> Iterator[Check]:
    for n, m in ((1, 4), (2, 6), (3, 12), (5, 9)):
        X, target = normal(generator, m, n) + normal(generator, n), 2 * normal(generator, m) + 1
        for ones in (False, True):
            fit = _Fit(torch.cat([X, torch.ones(m, 1)], 1) if ones else X, target)
            w, size = fit.minimum(), fit.slope_size
            y = fit.X @ w
            yh, s = standardize(y)
            z = s * yh + y.mean()
            here = torch.cat([w, s[None], y.mean()[None]])
            slope = gradient(fit.normalized_loss, here)
            yield printed("the same activations", gap(z, y))
            yield conclusion("every minimum's loss is attained with gamma = s", gap(fit.loss(z), fit.loss(y)))
            if not ones:
                yield printed("the matched point is stationary (no bias)", gap(slope, 0.0, size))
                continue
            yield corrected("the matched point is stationary (bias)", gap(slope, 0.0, size), 1e-7)
            values = torch.linalg.eigvalsh(hessian(fit.normalized_loss, here))
            yield corrected("its Hessian has no negative eigenvalue", excess(-values[0], 0.0, values[-1]), 1e-7)


@theorem("S1-T4.4")
def _worst_case(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator):
        radius, g = 10.0 ** uniform(generator, -1, 1), unit.g
        v = gradient(unit.normalized_loss, unit.y)
        ratio, plain = (unit.gamma / unit.s) ** 2, radius**2 * g.square().sum()
        best = max(float((X.T @ v).square().sum()) for X in _ball(generator, v, radius))
        inner = (g @ unit.yh) ** 2
        bound = ratio * (plain**2 - unit.m * g.mean() ** 2 - radius**2 * inner)
        yield printed("bound", excess(best, bound, ratio * plain))
        yield corrected("equality", gap(best, worst_weight_gradient(unit.y, g, unit.gamma, radius), ratio * plain))
        yield conclusion("ghat <= (gamma^2/s^2) g_j", excess(best, ratio * plain))
    yield fact("|grad_W|^2 growth when s shrinks 1000-fold at |X| <= 1", _blow_up(generator))


@theorem("S1-TC.1")
def _minimax_smoothness(generator: torch.Generator) -> Iterator[Check]:
    for unit in units(generator, sizes=(3, 6, 9)):
        radius, m = 10.0 ** uniform(generator, -1, 1), unit.m
        g = normal(generator, m)
        g = g if g @ unit.yh > 0 else -g
        gamma = float(unit.s)
        linear = Unit(unit.y, gamma, 0.0, g.dot)
        v = gradient(linear.normalized_loss, unit.y)
        Hhat = hessian(linear.normalized_loss, unit.y)
        best = max(float((X @ X.T @ v) @ Hhat @ (X @ X.T @ v)) for X in _ball(generator, v, radius, Hhat))
        size = radius**4 * (v @ v) * torch.linalg.matrix_norm(Hhat, 2)
        kappa = (g @ unit.yh) * (v @ v) / (m * gamma)
        yield printed("maximum over X", excess(best, -(radius**4) * kappa, size))
        yield printed("(58): no X beats X X^T = lambda^2 I", excess(best, radius**4 * (v @ Hhat @ v), size))
        yield conclusion("BN's worst case is not above the plain one (here 0)", excess(best, 0.0, size))
        yield from _orthogonal_inputs(generator, unit, radius)


def _orthogonal_inputs(generator: torch.Generator, unit: Unit, radius: float) -> Iterator[Check]:
    """Differentiate twice through y = X w itself, statistics moving with w, where X X^T = radius^2 I."""
    m = unit.m
    X = radius * torch.linalg.qr(normal(generator, m + 2, m))[0].T
    w = torch.linalg.lstsq(X, unit.y[:, None]).solution[:, 0]

    def loss(w: Tensor) -> Tensor:
        return unit.normalized_loss(X @ w)

    v = gradient(loss, w)
    truth = curvature(loss, w, v)
    form = radius**4 * curvature_along_gradient(unit.y, unit.g, unit.H, unit.gamma)
    bend = torch.linalg.matrix_norm(pullback_hessian(unit.y, unit.g, unit.H, unit.gamma), 2)
    yield corrected("equality where X X^T = lambda^2 I", gap(truth, form, radius**2 * (v @ v) * bend))


@theorem("S1-L4.5")
def _initialization(generator: torch.Generator) -> Iterator[Check]:
    for m in (6, 9, 16):
        X, target = normal(generator, m, 2) * torch.tensor([1.0, 2.0]) + 1, 3 * normal(generator, m) ** 2
        fit = _Fit(torch.cat([X, torch.ones(m, 1)], 1), target)
        whole = fit.minimum()
        best, y = whole[:2], fit.X @ whole
        free = _circle_minima(fit.direction_loss(1.0, 0.0))
        matched = fit.direction_loss(standardize(y)[1], y.mean())
        optima = _circle_minima(matched)
        nearest = min(float((w - best / best.norm()).norm()) for w in optima)
        yield corrected("W* is among the optima of the BN network", nearest, 1e-6)
        for k in (0.5, 2.0):
            start = k * best + 0.1 * (k - 0.5) * best.norm() * normal(generator, 2)
            right = (start - best).square().sum() - (best @ best - start @ best) ** 2 / (best @ best)
            size = start @ start + best @ best
            distance = min(_ray_distance(start, w) for w in free)
            yield printed("constants gamma = 1, beta = 0", excess(distance, right, size))
            slope = gradient(matched, k * best) * k * best.norm()
            yield corrected("k W* is stationary", gap(slope, 0.0, fit.slope_size * best.norm()), 1e-7)
            yield corrected("distance to its ray", gap(nearest_rescaling(start, best)[1], right, size))
            distance = min(_ray_distance(start, w) for w in optima)
            yield conclusion("matched, the nearest optimum is as near as printed", excess(distance, right, size), 1e-7)


@dataclass(frozen=True)
class _Fit:
    """One linear unit with a convex loss: its minimum, and the same loss behind batch normalization."""

    X: Tensor
    target: Tensor

    def loss(self, z: Tensor) -> Tensor:
        # strictly convex, and not least squares: there every gamma > 0 agrees
        return (1 + (z - self.target).square()).sqrt().mean()

    def normalized_loss(self, theta: Tensor) -> Tensor:
        """Return the loss as a function of (w, gamma, beta) in one vector."""
        w, gamma, beta = theta[:-2], theta[-2], theta[-1]
        return self.loss(gamma * standardize(self.X @ w)[0] + beta)

    def direction_loss(self, gamma: float | Tensor, beta: float | Tensor) -> Loss:
        """Return the loss of the BN layer as a function of the weights alone (all columns but the constant one)."""
        return lambda w: self.loss(gamma * standardize(self.X[:, :-1] @ w)[0] + beta)

    def minimum(self) -> Tensor:
        """Return the weights of least loss, by damped Newton steps (the loss is convex)."""
        w = torch.linalg.lstsq(self.X, self.target[:, None]).solution[:, 0]

        def loss(w: Tensor) -> Tensor:
            return self.loss(self.X @ w)

        for _ in range(60):
            slope, bend = gradient(loss, w), hessian(loss, w)
            step = torch.linalg.solve(bend, slope)
            rate = 1.0
            while loss(w - rate * step) > loss(w) and rate > 1e-3:
                rate /= 2
            w = w - rate * step
            if float(slope.norm()) < 1e-13:
                break
        return w

    @property
    def slope_size(self) -> Tensor:
        """How large the gradient with respect to the weights can be: the loss is 1-Lipschitz per sample."""
        return torch.linalg.matrix_norm(self.X, 2) / self.X.shape[0] ** 0.5


def _ball(generator: torch.Generator, v: Tensor, radius: float, form: Tensor | None = None) -> Iterator[Tensor]:
    """Give inputs of spectral norm `radius`: random ones, the rank-one one along v, projections that favour `form`."""
    m = v.shape[0]
    for _ in range(4):
        X = normal(generator, m, m + 1)
        yield radius * X / torch.linalg.matrix_norm(X, 2)
    if v.norm() > 0:
        yield radius * torch.outer(v / v.norm(), torch.eye(m)[0])
    if form is None:
        return
    for e in torch.linalg.eigh(form).eigenvectors.T:
        for mix in torch.linspace(-2, 2, 9):
            q = v / v.norm() + mix * e
            yield radius * torch.outer(q, q) / (q @ q)


def _blow_up(generator: torch.Generator) -> float:
    """Return how |grad_W Lhat|^2 grows when X in the unit ball turns and y = X w spreads 1000 times less."""
    m = 6
    A = torch.linalg.qr(normal(generator, m, 3))[0]
    w, g = torch.tensor([1.0, 0.0]), normal(generator, m)

    def squared(tilt: float) -> Tensor:
        X = torch.stack([tilt * A[:, 0], A[:, 1]], 1)
        return gradient(lambda w: g @ standardize(X @ w)[0], w).square().sum()

    return float(squared(1e-3) / squared(1.0))


def _circle_minima(loss: Loss, points: int = 240) -> list[Tensor]:
    """Return the directions in the plane where a scale-invariant loss is locally least: a scan, then bisection."""

    def along(angle: Tensor) -> Tensor:
        return loss(torch.stack([angle.cos(), angle.sin()]))

    slope = torch.func.grad(along)
    grid = torch.arange(points + 1) * (2 * pi / points) + 0.1234
    slopes = torch.func.vmap(slope)(grid)
    starts = [k for k in range(points) if slopes[k] < 0 <= slopes[k + 1]]
    angles = (bisection(slope, grid[k], grid[k + 1], 40) for k in starts)
    return [torch.stack([angle.cos(), angle.sin()]) for angle in angles]


def _ray_distance(start: Tensor, direction: Tensor) -> float:
    """Return the squared distance to the positive multiples of a direction."""
    if start @ direction <= 0:
        return float(start @ start)
    return float(nearest_rescaling(start, direction)[1])
