"""S3 (the encyclopedia article), linear convergence: learning halfspaces with Gaussian data, and GDNP."""

from collections.abc import Iterator
from functools import partial
from math import exp

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, normal, uniform
from normgauge.papers.instances.gaussian import (
    Elementwise,
    GaussianLoss,
    bisection,
    gaussian_grid,
    misalignment,
    stationary_point,
)
from normgauge.theory.gdnp import (
    bisection_bound,
    direction_gradient,
    direction_weight,
    largest_coefficient,
    stein_coefficients,
)
from normgauge.theory.rayleigh import direction_quotient, direction_step

REACH = 4.0  # of the bisection: gamma between -REACH and REACH
LOSSES: dict[str, tuple[Elementwise, float, float]] = {  # the loss, the bounds of |phi'| and of |phi''|
    "logistic": (functional.softplus, 1.0, 0.25),
    "hill": (lambda s: -_log_cosh(s - 2), 1.0, 1.0),
    "wavy": (lambda s: (1 + (s + 1).square()).sqrt() + 0.3 * torch.sin(s), 1.3, 1.3),
}


def _log_cosh(s: Tensor) -> Tensor:
    return functional.softplus(2 * s) - s


def _problems(generator: torch.Generator, *names: str) -> Iterator[tuple[str, GaussianLoss]]:
    """Draw Gaussians in the plane, with a mean of the size of the spread or well beyond it, for every loss named."""
    for name in names or LOSSES:
        for far in (0.5, 2.0):
            A = 0.5 * normal(generator, 2, 2)
            C = A @ A.T + 0.05 * torch.eye(2)
            u = far * normal(generator, 2)
            yield name, GaussianLoss(u, C, LOSSES[name][0])


@theorem("S3-Stein")
def _stein(generator: torch.Generator) -> Iterator[Check]:
    for _, problem in _problems(generator):
        line = normal(generator, 2)
        flat = GaussianLoss(problem.u, torch.outer(line, line), problem.phi)
        for task in (problem, flat):
            wt = uniform(generator, 0.2, 1.2) * _unit(generator, task)
            c1, c2 = stein_coefficients(*task.mean_slopes(wt), task.u, wt)
            truth = gradient(task.f, wt)
            yield printed("gradient by autograd", gap(truth, c1 * task.u + c2 * task.S @ wt, task.u.norm()))
    z = torch.stack([problem.u + line, problem.u - line])
    pair = gradient(lambda v: problem.phi(z @ v).mean(), wt)
    yield fact("two points of the same mean and covariance: the gradient moves by", gap(pair, gradient(flat.f, wt)))


@theorem("S3-crit")
def _critical(generator: torch.Generator) -> Iterator[Check]:
    twisted = _twisted_loss()
    for _ in range(3):
        logistic = _overlapping_classes(generator)
        odd = GaussianLoss(logistic.u, logistic.C, twisted)
        wt = torch.stack([-odd.u[1], odd.u[0]])
        wt = wt / odd.norm(wt)
        slope = gradient(odd.f, wt).norm()
        is_critical = gap(slope, 0.0, odd.u.norm()) < 1e-9
        off = misalignment(wt, odd.best_direction)
        yield printed("critical points of the loss exhibited", off if is_critical else 0.0)
        yield fact("its gradient there", slope)
        for name in ("logistic", "wavy"):
            task = GaussianLoss(logistic.u, logistic.C, LOSSES[name][0])
            point = stationary_point(task.f, 0.3 * normal(generator, 2))
            bend = task.mean_slopes(point)[1]
            aligned = misalignment(point, task.best_direction)
            yield corrected("a critical point was found", gap(gradient(task.f, point), 0.0, task.u.norm()))
            yield corrected("with E phi'' != 0 it is on the line", aligned if bend.abs() > 1e-6 else 0.0, 1e-6)
            if name == "logistic":
                yield corrected("a convex loss has E phi'' > 0", broken(bend > 0))
                yield conclusion("critical points of a convex loss", aligned, 1e-6)


@theorem("S3-GDNP")
def _steps(generator: torch.Generator) -> Iterator[Check]:
    for _, problem in _problems(generator):
        u, S, L = problem.u, problem.S, problem.extremes[1]
        w = 10.0 ** uniform(generator, -1, 1) * _unit(generator, problem)
        gamma = uniform(generator, 0.3, 1.5) * (1 if uniform(generator, -1, 1) > 0 else -1)
        norm = problem.norm(w)
        slope, bend = problem.mean_slopes(gamma * w / norm)
        move = gradient(problem.decoupled_loss, w, gamma)
        goal = direction_step(w, u, S, L)
        told = slope * (u @ w) - bend * (u @ w) ** 2
        right = direction_weight(slope, bend, u, w, gamma, S)
        stepped = w + norm**3 / (L * gamma * right) * move
        yield printed("the step with h as printed", gap(w + norm**3 / (L * gamma * told) * move, goal))
        yield corrected("the step with gamma/|w|_S", gap(stepped, goal))
        before, after = (direction_quotient(v, u, S) - problem.least_quotient for v in (w, stepped))
        rate = (1 - problem.extremes[0] / L) ** 2
        size = problem.least_quotient.abs()
        yield conclusion("the direction descends at the rate", excess(after, rate * before, size))


@theorem("S3-bis")
def _bisection(generator: torch.Generator) -> Iterator[Check]:
    for _ in range(3):
        problem = _overlapping_classes(generator)
        w = _unit(generator, problem)
        mu, L = problem.extremes
        for halvings in (0, 1, 4, 12, 24):
            left = bisection(partial(problem.slope_in_length, w=w), -REACH, REACH, halvings)
            slope = problem.slope_in_length(left, w)
            for c in (1e-4, 1.0, 1e4):
                smoothness = c * LOSSES["logistic"][2] * L
                square = (c * slope) ** 2
                bound = 2.0**-halvings * smoothness * 2 * REACH / mu**2
                yield printed("bound", excess(square, bound))
                right = bisection_bound(halvings, smoothness, 2 * REACH, mu)
                yield corrected("bound squared", excess(square, right))
                yield conclusion("linear convergence", excess(square, right))


@theorem("S3-dir")
def _direction_bound(generator: torch.Generator) -> Iterator[Check]:
    tight = GaussianLoss(torch.tensor([1.0, 0.2]), torch.diag(torch.tensor([0.02, 0.3])), LOSSES["hill"][0])
    for name, problem in [("hill", tight), *_problems(generator)]:
        steepest, least, (mu, L) = LOSSES[name][1], problem.least_quotient, problem.extremes
        w = _unit(generator, problem) + 3 * problem.best_direction
        w = w / problem.norm(w)
        start = direction_quotient(w, problem.u, problem.S) - least
        for t in range(5):
            gamma = 2.0 if name == "hill" else 1.0
            gamma = -gamma if problem.u @ w < 0 else gamma
            slopes = problem.mean_slopes(gamma * w / problem.norm(w))
            c1 = stein_coefficients(*slopes, problem.u, gamma * w / problem.norm(w))[0]
            move = gradient(problem.decoupled_loss, w, gamma)
            left = problem.norm(w) ** 2 * (move @ torch.linalg.solve(problem.S, move))
            decay = (1 - mu / L) ** (2 * t) * gamma**2 * start
            truth = direction_gradient(c1, w, gamma, problem.u, problem.S)
            size = steepest**2 * gamma**2 * least.abs()
            yield printed("bound with Phi = sup|phi'|", excess(left, steepest**2 * decay, size))
            yield corrected("equality with c1", gap(left, truth, size))
            bound = largest_coefficient(steepest, least) ** 2 * decay
            yield corrected("bound with Phi = sup|phi'|/sqrt(1+rho*)", excess(left, bound, size))
            yield conclusion("linear convergence, for some Phi", excess(left, bound, size))
            yield fact("largest |c1|/sup|phi'|", c1.abs() / steepest)
            w = direction_step(w, problem.u, problem.S, L)


@theorem("S3-final")
def _final_bound(generator: torch.Generator) -> Iterator[Check]:
    for c in (1e-2, 1.0, 1e2):
        for spread in (0.1, 1.0, 10.0):
            problem = _overlapping_classes(generator, spread)
            (mu, L), least = problem.extremes, problem.least_quotient
            w = _unit(generator, problem)
            start = direction_quotient(w, problem.u, problem.S) - least
            for steps, halvings in ((0, 2), (3, 6), (12, 20)):
                v = w
                for _ in range(steps):
                    v = direction_step(v, problem.u, problem.S, L)
                gamma = bisection(partial(problem.slope_in_length, w=v), -REACH, REACH, halvings)
                slope = c * gradient(problem.f, gamma * v / problem.norm(v))
                smoothness = c * 0.25 * L
                first = (1 - mu / L) ** (2 * steps) * c**2 * start
                size = 1e-20 * c**2 * L
                second = 2.0**-halvings * smoothness * 2 * REACH / mu**2
                yield printed("Euclidean norm", excess(slope @ slope, first + second, size))
                right = first + bisection_bound(halvings, smoothness, 2 * REACH, mu)
                in_metric = slope @ torch.linalg.solve(problem.S, slope)
                yield corrected("S^-1 norm", excess(in_metric, right, size / mu))
                yield corrected("Euclidean norm, L times", excess(slope @ slope, L * right, size))
                yield conclusion("linear convergence", excess(slope @ slope, L * right, size))


def _unit(generator: torch.Generator, problem: GaussianLoss) -> Tensor:
    """Return random weights with |w|_S = 1 that do not lose the mean: u^Tw is not small."""
    w = normal(generator, len(problem.u))
    w = w + 0.3 * torch.sign(w @ problem.u) * problem.u / problem.u.norm()
    return w / problem.norm(w)


def _overlapping_classes(generator: torch.Generator, spread: float = 1.0) -> GaussianLoss:
    """Return a problem whose classes overlap, so that the best length is finite, with data in other units."""
    A = normal(generator, 2, 2)
    C = A @ A.T + 0.2 * torch.eye(2)
    u = normal(generator, 2)
    u = 0.5 * u / (u @ torch.linalg.solve(C, u)).sqrt()
    return GaussianLoss(spread * u, spread**2 * C, LOSSES["logistic"][0])


def _twisted_loss() -> Elementwise:
    """Return the loss with slope cos s - e^1.5 cos 2s + tanh s - k sin s; k makes E phi'' = 0 for a normal."""
    nodes, weights = gaussian_grid(1)
    k = float(weights @ (1 - torch.tanh(nodes[:, 0]).square())) * exp(0.5)
    return lambda s: torch.sin(s) - exp(1.5) / 2 * torch.sin(2 * s) + _log_cosh(s) + k * torch.cos(s)
