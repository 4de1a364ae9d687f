"""Random instances the judges draw: batches of one unit with a smooth loss on top, matrices, sizes at the edge."""

from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from normgauge.papers.instances.derivatives import Loss, gradient, hessian
from normgauge.theory.batchnorm_calculus import standardize


def normal(generator: torch.Generator, *shape: int) -> Tensor:
    """Draw a float64 standard normal tensor."""
    return torch.randn(*shape, generator=generator, dtype=torch.float64)


def uniform(generator: torch.Generator, low: float, high: float) -> float:
    """Draw one number between `low` and `high`."""
    return low + (high - low) * float(torch.rand((), generator=generator, dtype=torch.float64))


def sign(generator: torch.Generator) -> float:
    """Draw -1 or 1."""
    return float(2 * torch.randint(2, (), generator=generator) - 1)


@dataclass(frozen=True)
class Unit:
    """One normalized unit on one batch: `z = gamma * standardize(y) + beta`, and a smooth loss of `z`.

    y are the pre-activations of m samples; gamma has either sign and is not their deviation.
    """

    y: Tensor
    gamma: float
    beta: float
    loss: Loss

    @property
    def m(self) -> int:
        """The batch size."""
        return self.y.shape[0]

    @property
    def yh(self) -> Tensor:
        """The standardized pre-activations."""
        return standardize(self.y)[0]

    @property
    def s(self) -> Tensor:
        """Their standard deviation."""
        return standardize(self.y)[1]

    @property
    def z(self) -> Tensor:
        """What the layer hands on."""
        return self.gamma * self.yh + self.beta

    @property
    def g(self) -> Tensor:
        """The loss's gradient with respect to `z`, at `z`."""
        return gradient(self.loss, self.z)

    @property
    def H(self) -> Tensor:
        """The loss's Hessian with respect to `z`, at `z`."""
        return hessian(self.loss, self.z)

    def normalized_loss(self, y: Tensor, eps: float = 0.0) -> Tensor:
        """Return the loss as a function of the pre-activations: the thing autograd differentiates."""
        return self.loss(self.output(y, eps))

    def output(self, y: Tensor, eps: float = 0.0) -> Tensor:
        """Return the layer's output as a function of the pre-activations."""
        return self.gamma * standardize(y, eps)[0] + self.beta

    def loss_of_gamma(self, gamma: Tensor) -> Tensor:
        """Return the loss as a function of the scale."""
        return self.loss(gamma * self.yh + self.beta)


def units(generator: torch.Generator, sizes: tuple[int, ...] = (2, 3, 8, 33), per_size: int = 4) -> Iterator[Unit]:
    """Draw units: batch sizes from the edge on, scales of both signs, deviations over decades, losses times c."""
    for m in sizes:
        for k in range(per_size):
            spread = 10.0 ** uniform(generator, -1.5, 1.5)
            size = 10.0 ** uniform(generator, -2, 2)
            gamma = uniform(generator, 0.3, 3.0) * (sign(generator) if k else 1.0)
            y = spread * normal(generator, m) + normal(generator, 1)
            yield Unit(y, gamma, uniform(generator, -2, 2), wavy(generator, m, size))


def wavy(generator: torch.Generator, m: int, size: float = 1.0) -> Loss:
    """Return `size (w^T sin(A z) + z^T B z / m + w^T z)`: smooth, not convex, and it couples the samples."""
    A, B, w = normal(generator, m, m), normal(generator, m, m), normal(generator, m)

    def loss(z: Tensor) -> Tensor:
        return size * ((torch.sin(A @ z) * w).sum() + z @ B @ z / m + w @ z)

    return loss
