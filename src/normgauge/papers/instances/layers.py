"""One normalized layer of several units on one batch, with a smooth head on top: the instances of S0's judges."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, replace
from math import exp
from typing import Literal

import torch
from torch import Tensor

from normgauge.papers.instances.derivatives import gradient
from normgauge.papers.instances.draws import normal, sign, uniform
from normgauge.theory.batchnorm_calculus import standardize

Norm = Literal["batch", "layer"]


def normalize(Z: Tensor, norm: Norm, eps: float = 0.0) -> Tensor:
    """Standardize `[samples, units]` over the batch (unit by unit) or over the layer (sample by sample)."""
    return standardize(Z.T, eps)[0].T if norm == "batch" else standardize(Z, eps)[0]


def mismatch(w: Tensor, X: Tensor, goal: Tensor, gamma: float = 1.0) -> Tensor:
    """Return half the squared distance of `gamma standardize(X w)` from a goal."""
    return (gamma * standardize(X @ w)[0] - goal).square().sum() / 2


@dataclass(frozen=True)
class Layer:
    """`tanh(gamma * normalize(X W^T + b) + beta) V^T` against a goal, squared: everything but (W, b) is fixed.

    Shapes: X `[m, n]`, W `[d, n]`, b, gamma (of both signs) and beta `[d]`, the head V `[o, d]`, goal `[m, o]`.
    """

    X: Tensor
    W: Tensor
    b: Tensor
    gamma: Tensor
    beta: Tensor
    V: Tensor
    goal: Tensor
    norm: Norm

    @property
    def theta(self) -> Tensor:
        """The weights, then the biases, as one vector."""
        return torch.cat([self.W.reshape(-1), self.b])

    @property
    def size(self) -> float:
        """The size of the loss's radial derivative before its terms cancel: `|gamma dL/da| sqrt(m d)`."""
        slope = gradient(self.head, self.activations(self.W, self.b))
        return float((self.gamma * slope).norm() * slope.numel() ** 0.5)

    def activations(self, W: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
        """Return what the normalized layer hands on, before the nonlinearity."""
        return self.gamma * normalize(self.X @ W.T + b, self.norm, eps) + self.beta

    def outputs(self, W: Tensor, b: Tensor, eps: float = 0.0) -> Tensor:
        """Return the network's outputs on the batch."""
        return torch.tanh(self.activations(W, b, eps)) @ self.V.T

    def head(self, activations: Tensor) -> Tensor:
        """Return the loss as a function of what the normalized layer hands on."""
        return (torch.tanh(activations) @ self.V.T - self.goal).square().sum() / 2

    def loss(self, theta: Tensor, eps: float = 0.0) -> Tensor:
        """Return the loss as a function of the packed (W, b)."""
        return self.head(self.activations(*self.unpack(theta), eps))

    def unpack(self, theta: Tensor) -> tuple[Tensor, Tensor]:
        """Return W and b of a packed vector."""
        return theta[: self.W.numel()].reshape(self.W.shape), theta[self.W.numel() :]

    def select_rows(self, rows: Tensor) -> Layer:
        """Return the same layer on some of the samples."""
        return replace(self, X=self.X[rows], goal=self.goal[rows])


SIZES = ((2, 2, 1), (3, 2, 2), (8, 3, 4), (16, 5, 3))


def layers(
    generator: torch.Generator, norm: Norm = "batch", sizes: tuple[tuple[int, int, int], ...] = SIZES
) -> Iterator[Layer]:
    """Draw layers of `(samples, inputs, units)`: edges first, weights over decades, scales of both signs."""
    for m, n, d in sizes:
        spread = 10.0 ** uniform(generator, -1.5, 1.5)
        gamma = torch.tensor([uniform(generator, 0.3, 2.0) * sign(generator) for _ in range(d)])
        X, W = normal(generator, m, n) + normal(generator, n), spread * normal(generator, d, n)
        b, beta = spread * normal(generator, d), normal(generator, d)
        V, goal = normal(generator, 2, d), normal(generator, m, 2)
        yield Layer(X=X, W=W, b=b, gamma=gamma, beta=beta, V=V, goal=goal, norm=norm)


def factor(generator: torch.Generator) -> float:
    """Draw a positive factor that is clearly not 1."""
    return exp(sign(generator) * uniform(generator, 0.5, 2.0))


def nullity(J: Tensor) -> int:
    """Return the number of columns minus the rank, with singular values below 1e-9 of the largest as zero.

    Examples:
        >>> nullity(torch.tensor([[1.0, 1.0], [2.0, 2.0]], dtype=torch.float64))
        1
    """
    values = torch.linalg.svdvals(J)
    return J.shape[1] - int((values > 1e-9 * values.max()).sum())
