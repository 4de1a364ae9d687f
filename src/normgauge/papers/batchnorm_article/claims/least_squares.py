"""S3 (the encyclopedia article), linear convergence: the least-squares problem and the Rayleigh quotient."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, excess, fact, gap, printed
from normgauge.papers.court.registry import theorem
from normgauge.papers.instances import gradient, normal, uniform
from normgauge.theory.rayleigh import (
    ascent_factor,
    best_length,
    decoupled_least_squares,
    direction_quotient,
    direction_step,
    quotient,
)

STEPS = 12


@dataclass(frozen=True)
class _Regression:
    """A finite population of (x, y) with E[x] = 0: least squares as the article has it."""

    x: Tensor
    y: Tensor

    @property
    def S(self) -> Tensor:
        return self.x.T @ self.x / len(self.x)

    @property
    def u(self) -> Tensor:
        return -(self.y[:, None] * self.x).mean(0)

    @property
    def spectrum(self) -> Tensor:
        """The eigenvalues of S, in rising order."""
        return torch.linalg.eigvalsh(self.S)

    def risk(self, wt: Tensor) -> Tensor:
        return (self.y - self.x @ wt).square().mean()

    def decoupled_risk(self, w: Tensor, gamma: float | Tensor) -> Tensor:
        """Return the risk of `gamma w / |w|_S`, by definition."""
        return self.risk(gamma * w / (self.x @ w).square().mean().sqrt())

    def quotient(self, w: Tensor) -> Tensor:
        return direction_quotient(w, self.u, self.S)

    @property
    def least(self) -> Tensor:
        """Return the smallest value of `quotient`, from the best least-squares fit."""
        fit = torch.linalg.lstsq(self.x, self.y[:, None]).solution[:, 0]
        return self.risk(fit) - self.y.square().mean()


def _regressions(generator: torch.Generator) -> Iterator[_Regression]:
    """Draw populations: dimension 1 to 6, condition numbers over decades, targets times c, S with mu = L once."""
    for n, count in ((1, 3), (2, 3), (2, 8), (3, 12), (6, 9)):
        x = normal(generator, count, n) @ torch.diag(10.0 ** torch.linspace(0, uniform(generator, -1.5, 0), n))
        x = 10.0 ** uniform(generator, -1, 1) * (x - x.mean(0))
        yield _Regression(x, 10.0 ** uniform(generator, -1, 1) * (normal(generator, count) + x[:, 0]))
    x = torch.tensor([[1.0, 0.0], [-1.0, 0.0], [0.0, 1.0], [0.0, -1.0]])
    yield _Regression(x, normal(generator, 4))


@theorem("S3-OLS1")
def _objective(generator: torch.Generator) -> Iterator[Check]:
    for task in _regressions(generator):
        w, gamma = normal(generator, task.x.shape[1]), uniform(generator, -2, 2)
        u, S, constant = task.u, task.S, task.y.square().mean()
        norm = (w @ S @ w).sqrt()
        truth = task.decoupled_risk(w, gamma)
        wt = gamma * w / norm
        size = constant + gamma**2
        yield printed("E(y - x^Twt)^2", gap(truth, 2 * u @ wt + wt @ S @ wt, size))
        yield printed("f_OLS(w, gamma)", gap(truth - constant, 2 * gamma * (u @ w) / (norm + gamma**2), size))
        yield corrected("without E y^2", gap(truth - constant, 2 * u @ wt + wt @ S @ wt, size))
        yield corrected("in length and direction", gap(truth - constant, decoupled_least_squares(w, gamma, u, S), size))
        fit = torch.linalg.lstsq(task.x, task.y[:, None]).solution[:, 0]
        slope = gradient(lambda v, u, S: 2 * u @ v + v @ S @ v, fit, u, S)
        yield conclusion("the same minimizer", gap(slope, 0.0, u.norm()))


@theorem("S3-OLS2")
def _minimum_over_length(generator: torch.Generator) -> Iterator[Check]:
    for task in _regressions(generator):
        w = normal(generator, task.x.shape[1])
        u, S, constant = task.u, task.S, task.y.square().mean()
        best = best_length(w, u, S)
        slope = gradient(lambda gamma, w=w, task=task: task.decoupled_risk(w, gamma), best)
        size = constant + best**2
        yield printed("the slope in gamma vanishes", gap(slope, 0.0, size.sqrt()))
        yield printed("the value is rho(w)", gap(task.decoupled_risk(w, best) - constant, task.quotient(w), size))
        for gamma in (-2.0, 0.0, 0.5, 3.0):
            risk = task.decoupled_risk(w, gamma) - constant
            yield printed("no gamma is better", excess(task.quotient(w), risk, size))
        norm = (w @ S @ w).sqrt()
        yield fact("minimum of the printed f_OLS over rho(w)", (u @ w).abs() / norm.sqrt() / task.quotient(w).abs())


@theorem("S3-OLS3")
def _direction_rate(generator: torch.Generator) -> Iterator[Check]:
    for task in _regressions(generator):
        low, high = task.spectrum[0], task.spectrum[-1]
        w, least = normal(generator, task.x.shape[1]), task.least
        start = task.quotient(w) - least
        for t in range(1, STEPS + 1):
            rho = task.quotient(w)
            slope = gradient(task.quotient, w)
            eta = (w @ task.S @ w) / (2 * high * rho.abs())
            step = direction_step(w, task.u, task.S, high)
            w = w - eta * slope
            yield printed("the step in closed form", gap(w, step))
            left = task.quotient(w) - least
            yield printed("the rate", excess(left, (1 - low / high) ** (2 * t) * start, least.abs()))


@theorem("S3-sublin")
def _plain_descent(generator: torch.Generator) -> Iterator[Check]:
    for task in _regressions(generator):
        for singular in (False, True):
            # one feature repeated: S is singular
            here = _Regression(torch.cat([task.x, task.x[:, :1]], 1), task.y) if singular else task
            values = here.spectrum
            low, high = values[values > 1e-9 * values[-1]][0], values[-1]
            best = here.least + here.y.square().mean()
            size = here.y.square().mean()
            runs = {"same bound": (1 / (2 * high), (1 - low / high) ** 2)}
            runs["better step"] = 1 / (low + high), ((high - low) / (high + low)) ** 2
            for name, (rate, factor) in runs.items():
                errors = _descent_errors(here, rate, best, generator)
                bounds = factor ** torch.arange(len(errors)) * errors[0]
                yield corrected(f"gradient descent is linear ({name})", excess(errors, bounds, size))
                linear = bool((errors <= bounds + 1e-9 * size).all()) and float(factor) < 1
                yield printed("gradient descent is only sub-linear", broken(not linear))
            slower = runs["better step"][1] > (1 - low / high) ** 2 + 1e-12
            yield conclusion("its guarantee is slower than BN's", broken(slower))


@theorem("S3-Ray")
def _rayleigh(generator: torch.Generator) -> Iterator[Check]:
    for n in (2, 3, 6):
        for own_metric in (False, True):
            X, B = normal(generator, n, 2 * n), normal(generator, n, n)
            A, B = X @ X.T / n + 0.05 * torch.eye(n), B + B.T
            M = torch.linalg.inv(A) if own_metric else torch.eye(n) / torch.linalg.eigvalsh(A)[-1]
            values, top = _pencil(B, A)
            extreme = torch.linalg.eigvalsh(A)[[0, -1]]
            q = ascent_factor(values, 1.0 if own_metric else extreme[0] / extreme[1])
            told, w = torch.linalg.eigvalsh(B), _start_above_second(generator, B, A, values, top)
            start = ratio = _error_ratio(quotient(w, B, A), values)
            for t in range(1, STEPS + 1):
                before, misread = ratio, _error_ratio(quotient(w, B, A), told)
                rho = quotient(w, B, A)
                w = w + (w @ A @ w) / (2 * (rho - values[0])) * M @ gradient(quotient, w, B, A)
                ratio = _error_ratio(quotient(w, B, A), values)
                yield corrected("one step: q^2", excess(ratio, q**2 * before, start))
                yield conclusion("t steps: q^{2t}", excess(ratio, q ** (2 * t) * start, start))
                printed_factor = ascent_factor(told) ** (2 * t)
                after = _error_ratio(quotient(w, B, A), told)
                bound = printed_factor * misread
                yield printed("step t with exponent 2t, eigenvalues of B", excess(after, bound, 1e-3))
                right = ascent_factor(values) ** (2 * t) * before
                yield printed("step t with exponent 2t, eigenvalues of the pencil", excess(ratio, right, start))


def _descent_errors(task: _Regression, rate: Tensor, best: Tensor, generator: torch.Generator) -> Tensor:
    """Return risk less least risk along plain gradient descent."""
    w = normal(generator, task.x.shape[1])
    errors = []
    for _ in range(STEPS):
        errors.append(task.risk(w) - best)
        w = w - rate * gradient(task.risk, w)
    return torch.stack(errors)


def _pencil(B: Tensor, A: Tensor) -> tuple[Tensor, Tensor]:
    """Return the eigenvalues of B w = lambda A w, rising, and the eigenvector of the largest."""
    inverse = torch.linalg.inv(torch.linalg.cholesky(A))
    values, vectors = torch.linalg.eigh(inverse @ B @ inverse.T)
    return values, inverse.T @ vectors[:, -1]


def _start_above_second(generator: torch.Generator, B: Tensor, A: Tensor, values: Tensor, top: Tensor) -> Tensor:
    """Return a random start whose quotient lies above the second eigenvalue, as the bound asks."""
    w = top + top.norm() * normal(generator, len(top))
    while quotient(w, B, A) <= values[-2] + 0.05 * (values[-1] - values[-2]):
        w = (w + top) / 2
    return w


def _error_ratio(rho: Tensor, values: Tensor) -> Tensor:
    return (values[-1] - rho) / (rho - values[-2])
