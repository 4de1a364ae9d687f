"""Losses of a Gaussian input, by a rule that is exact to rounding: the truth for the claims about halfspaces."""

from collections.abc import Callable
from dataclasses import dataclass
from functools import cached_property
from typing import TypeVar

import torch
from torch import Tensor

from normgauge.papers.instances.derivatives import gradient, hessian

Elementwise = Callable[[Tensor], Tensor]
Number = TypeVar("Number", float, Tensor)


def gaussian_grid(dimension: int, reach: float = 8.5, step: float = 0.2) -> tuple[Tensor, Tensor]:
    """Return nodes and weights of the trapezoid rule for a standard Gaussian.

    For analytic integrands the error falls like `exp(-2 pi d / step)`, d the distance of the nearest pole: below
    rounding for the losses used here. The second moments are exact to 1e-12.

    Examples:
        >>> nodes, weights = gaussian_grid(1)
        >>> round(float(weights @ nodes[:, 0] ** 2), 12)
        1.0
    """
    count = int(2 * reach / step) + 1
    axis = torch.linspace(-reach, reach, count, dtype=torch.float64)
    nodes = torch.cartesian_prod(*([axis] * dimension)).reshape(-1, dimension)
    return nodes, torch.softmax(-nodes.square().sum(1) / 2, 0)


@dataclass(frozen=True)
class GaussianLoss:
    """`f(wt) = E phi(z^T wt)` for `z` Gaussian with mean u and covariance C (which may be singular).

    For labels of 1 and -1 and `z = -y x`, u is `-E[y x]`. `step` is the grid's; the default suits two dimensions.
    """

    u: Tensor
    C: Tensor
    phi: Elementwise
    step: float = 0.2

    @cached_property
    def _grid(self) -> tuple[Tensor, Tensor]:
        nodes, weights = gaussian_grid(len(self.u), step=self.step)
        values, vectors = torch.linalg.eigh(self.C)
        root = vectors * values.clamp(min=0).sqrt()
        return self.u + nodes @ root.T, weights

    @property
    def z(self) -> Tensor:
        """The nodes of the grid."""
        return self._grid[0]

    @property
    def weights(self) -> Tensor:
        """The weights of its nodes."""
        return self._grid[1]

    @cached_property
    def S(self) -> Tensor:
        """The second moment `E[z z^T] = C + u u^T`."""
        return self.C + torch.outer(self.u, self.u)

    @cached_property
    def extremes(self) -> tuple[Tensor, Tensor]:
        """The smallest and the largest eigenvalue of S."""
        values = torch.linalg.eigvalsh(self.S)
        return values[0], values[-1]

    @property
    def best_direction(self) -> Tensor:
        """`S^-1 u`."""
        return torch.linalg.solve(self.S, self.u)

    @property
    def least_quotient(self) -> Tensor:
        """`rho* = -u^T S^-1 u`."""
        return -self.u @ self.best_direction

    def f(self, wt: Tensor) -> Tensor:
        """Return `E[phi(z . wt)]`."""
        return self.weights @ self.phi(self.z @ wt)

    def norm(self, w: Tensor) -> Tensor:
        """Return `|w|_S`."""
        return (w @ self.S @ w).sqrt()

    def decoupled_loss(self, w: Tensor, gamma: float | Tensor) -> Tensor:
        """Return f at `gamma w / |w|_S`."""
        return self.f(gamma * w / self.norm(w))

    def slope_in_length(self, gamma: float | Tensor, w: Tensor) -> Tensor:
        """Return `d f / d gamma`, by autograd."""
        return gradient(lambda c: self.decoupled_loss(w, c), torch.as_tensor(gamma, dtype=torch.float64))

    def mean_slopes(self, wt: Tensor) -> tuple[Tensor, Tensor]:
        """Return `E phi'(z^T wt)` and `E phi''(z^T wt)`."""
        s = (self.z @ wt).detach().requires_grad_()
        (first,) = torch.autograd.grad(self.phi(s).sum(), s, create_graph=True)
        (second,) = torch.autograd.grad(first.sum(), s)
        return self.weights @ first.detach(), self.weights @ second


def bisection(slope: Callable[[Number], Tensor], low: Number, high: Number, halvings: int) -> Number:
    """Return the left end after halving `[low, high]` around a zero of a function that rises through it."""
    for _ in range(halvings):
        middle = (low + high) / 2
        low, high = (middle, high) if slope(middle) < 0 else (low, middle)
    return low


def stationary_point(loss: Callable[[Tensor], Tensor], start: Tensor, iterations: int = 60) -> Tensor:
    """Return a point where the gradient of a smooth function vanishes, by Newton steps downhill.

    Negative curvature is turned positive, so that the steps go to a minimum where there is one nearby.
    """
    x = start
    for _ in range(iterations):
        slope, bend = gradient(loss, x), hessian(loss, x)
        if float(slope.norm()) < 1e-13:
            break
        values, vectors = torch.linalg.eigh(bend)
        step = vectors @ ((vectors.T @ slope) / values.abs().clamp(min=1e-8))
        rate = min(1.0, 2.0 / float(step.norm()))
        here = loss(x)
        while loss(x - rate * step) > here + 1e-15 and rate > 1e-6:
            rate /= 2
        x = x - rate * step
    return x


def misalignment(a: Tensor, b: Tensor) -> float:
    """Return the sine of the angle between two lines (0: the same line)."""
    cosine = (a @ b) / (a.norm() * b.norm())
    return float((a / a.norm() - cosine * b / b.norm()).norm())
