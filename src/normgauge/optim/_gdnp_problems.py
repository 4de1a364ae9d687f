"""Problems for gradient descent in normalized parametrization: `f(w) = E[phi(z^T w)]`, `u = E[z]`, `S = E[z z^T]`.

Each gives `u`, `S`, the loss, its gradient, and the means of phi' and phi'' at a point. For least squares z = x and the
means are those of the quadratic; for halfspaces `z = -y x`.
"""

import math
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from typing import NamedTuple

import numpy
import torch
from torch import Tensor

from normgauge.errors import DataError, InputError, unknown_name
from normgauge.results import spend

_PANEL_NODES = 20
_TAIL = 12


class Means(NamedTuple):
    """Loss, gradient, and the means of phi' and phi'' at a point."""

    loss: float
    gradient: Tensor
    first: float
    second: float


def _sigmoid(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(t)
    return s, s * (1 - s), s * (1 - s) * (1 - 2 * s)


def _softplus(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    s = torch.sigmoid(t)
    return torch.nn.functional.softplus(t), s, s * (1 - s)


def _tanh(t: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    h = torch.tanh(t)
    return h, 1 - h * h, -2 * h * (1 - h * h)


#: name -> (phi, phi', phi''); sup |phi'| and sup |phi''|
LOSSES: dict[str, tuple[Callable[[Tensor], tuple[Tensor, Tensor, Tensor]], float, float]] = {
    "sigmoid": (_sigmoid, 0.25, 1 / (6 * math.sqrt(3))),
    "softplus": (_softplus, 1.0, 0.25),
    "tanh": (_tanh, 1.0, 4 / (3 * math.sqrt(3))),
}


def _loss(name: str) -> Callable[[Tensor], tuple[Tensor, Tensor, Tensor]]:
    if name not in LOSSES:
        raise unknown_name("halfspace loss", name, LOSSES)
    return LOSSES[name][0]


def _second_moment(z: Tensor) -> Tensor:
    return z.T @ z / len(z)


def _check_regular(S: Tensor, subject: str) -> Tensor:
    low = float(torch.linalg.eigvalsh(S)[0])
    if not low > 0:
        rule = "the second moment S = E[x x^T] must be positive definite"
        step = "Pass more samples than features, or drop features that repeat others"
        raise DataError(subject, rule, f"a smallest eigenvalue of {low:.3g}", step)
    return S


@dataclass(frozen=True)
class LeastSquares:
    """`f(w) = E[(y - x^T w)^2] = constant + 2 u^T w + w^T S w` with `u = -E[y x]`."""

    u: Tensor
    S: Tensor
    constant: float
    gaussian = True  # its gradient 2 u + 2 S w has the form the analysis needs, whatever the data

    def means(self, w: Tensor) -> Means:
        """Return loss and gradient; the means are those of `c1 = 2`, `c2 = 2`."""
        spend("gradients")
        loss = self.constant + 2 * float(self.u @ w) + float(w @ self.S @ w)
        return Means(loss, 2 * self.u + 2 * self.S @ w, 2.0 + 2.0 * float(self.u @ w), 2.0)


@cache  # bisection asks for the same rule at every slope
def _panel_rule() -> tuple[Tensor, Tensor]:
    points, weights = numpy.polynomial.legendre.leggauss(_PANEL_NODES)
    return torch.from_numpy((points + 1) / 2), torch.from_numpy(weights / 2)


def _normal_nodes(mean: float, spread: float) -> tuple[Tensor, Tensor]:
    """Return points `t = mean + spread x` and shares that average a function of t over standard normal x.

    phi bends within about 1 of t = 0, a stretch of 1 / spread in x, and the density within about 1 of x = 0: the panels
    are no longer than 2 and double in length away from t = 0, so that each is short next to what it holds. Beyond 12
    lies a share of 1e-33.
    """
    edges = torch.arange(-_TAIL, _TAIL + 1, 2, dtype=torch.float64)
    if spread > 0:
        doublings = 2.0 ** torch.arange(max(1, math.ceil(math.log2(2 * _TAIL * max(spread, 1.0)))) + 1)
        around = -mean / spread + torch.cat([-doublings, torch.zeros(1), doublings]).double() / spread
        edges = torch.cat([edges, around]).clamp(-_TAIL, _TAIL).unique()
    points, weights = _panel_rule()
    lengths = edges.diff()[:, None]
    x = (edges[:-1, None] + lengths * points).flatten()
    share = (lengths * weights).flatten() * torch.exp(-x * x / 2)
    return mean + spread * x, share / share.sum()


@dataclass(frozen=True)
class GaussianHalfspace:
    """`f(w) = E[phi(z^T w)]` for Gaussian z of mean `u` and second moment `S`, by quadrature of one dimension."""

    u: Tensor
    S: Tensor
    loss: str
    gaussian = True

    def means(self, w: Tensor) -> Means:
        """Return loss, gradient `c1 u + c2 S w` (Stein's identity), and the means of phi' and phi''."""
        spend("gradients")
        mean = float(self.u @ w)
        spread = math.sqrt(max(float(w @ self.S @ w) - mean**2, 0.0))
        t, share = (part.to(w.dtype) for part in _normal_nodes(mean, spread))
        value, first, second = (float(share @ part) for part in _loss(self.loss)(t))
        return Means(value, (first - second * mean) * self.u + second * (self.S @ w), first, second)


@dataclass(frozen=True)
class SampleHalfspace:
    """`f(w) = mean(phi(z_i^T w))` over samples; the analysis of GDNP then holds only as far as they look Gaussian."""

    z: Tensor
    loss: str
    gaussian = False

    @property
    def u(self) -> Tensor:
        """The mean of z."""
        return self.z.mean(0)

    @property
    def S(self) -> Tensor:
        """The second moment of z."""
        return _second_moment(self.z)

    def means(self, w: Tensor) -> Means:
        """Return loss, gradient and the means over the samples."""
        spend("gradients")
        value, first, second = _loss(self.loss)(self.z @ w)
        return Means(float(value.mean()), self.z.T @ first / len(self.z), float(first.mean()), float(second.mean()))


Problem = LeastSquares | GaussianHalfspace | SampleHalfspace


def _samples(x: Tensor, y: Tensor, subject: str) -> tuple[Tensor, Tensor]:
    if x.ndim != 2 or y.shape != x.shape[:1]:
        got = f"{tuple(x.shape)} and {tuple(y.shape)}"
        raise InputError(subject, "x is [samples, features] and y is [samples]", got, "Reshape them")
    return x.double(), y.double()


def least_squares(x: Tensor, y: Tensor) -> LeastSquares:
    """Make the least-squares problem of data: `E[(y - x^T w)^2]`.

    Examples:
        >>> problem = least_squares(torch.tensor([[1.0], [-1.0]]), torch.tensor([2.0, -2.0]))
        >>> problem.u.item(), problem.S.item(), problem.constant
        (-2.0, 1.0, 4.0)
    """
    x, y = _samples(x, y, "least_squares")
    return LeastSquares(-(y @ x) / len(x), _check_regular(_second_moment(x), "least_squares"), float(y @ y) / len(y))


def halfspace(x: Tensor, y: Tensor, *, loss: str = "softplus") -> SampleHalfspace:
    """Make the problem of learning a halfspace from samples: `mean(phi(-y x^T w))`, labels y of -1 and 1.

    The samples x are assumed centred; phi is softplus (logistic regression), sigmoid or tanh (which may have no finite
    optimal length).
    """
    x, y = _samples(x, y, "halfspace")
    if not bool((y.abs() == 1).all()):
        raise DataError("halfspace", "labels are -1 or 1", f"{y.unique()[:4].tolist()}", "Map the classes")
    problem = SampleHalfspace(-y[:, None] * x, loss)
    _loss(loss)
    _check_regular(problem.S, "halfspace")
    return problem


def gaussian_halfspace(u: Tensor, S: Tensor, *, loss: str = "softplus") -> GaussianHalfspace:
    """Make the population problem `E[phi(z^T w)]` of Gaussian `z = -y x` with mean `u` and second moment `S`."""
    _loss(loss)
    u, S = u.double(), _check_regular(S.double(), "gaussian_halfspace")
    if (size := float(u @ torch.linalg.solve(S, u))) >= 1:
        rule = "S - u u^T must be a covariance, so u^T S^-1 u < 1"
        step = "S is the second moment E[z z^T], no covariance"
        raise DataError("gaussian_halfspace", rule, f"{size:.3g}", step)
    return GaussianHalfspace(u, S, loss)
