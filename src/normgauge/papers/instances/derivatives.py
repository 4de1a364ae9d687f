"""Derivatives by reverse mode alone: the truth the judges compare closed forms with.

`torch.func.jvp` and `torch.func.hessian` load a compiler for their decompositions, which costs more than all judges.
"""

from collections.abc import Callable

import torch
from torch import Tensor

Loss = Callable[..., Tensor]


def gradient(loss: Loss, at: Tensor, *rest: object) -> Tensor:
    """Return the gradient of a scalar function with respect to its first argument.

    Examples:
        >>> gradient(lambda x: x @ x, torch.tensor([1.0, 2.0])).tolist()
        [2.0, 4.0]
    """
    return torch.func.grad(loss)(at, *rest)


def jacobian(function: Loss, at: Tensor, *rest: object) -> Tensor:
    """Return the Jacobian matrix of a function with respect to its first argument, a vector."""
    return torch.func.jacrev(function)(at, *rest)


def hessian(loss: Loss, at: Tensor, *rest: object) -> Tensor:
    """Return the Hessian of a scalar function with respect to its first argument, a vector.

    Examples:
        >>> hessian(lambda x: x @ x, torch.tensor([1.0, 2.0])).tolist()
        [[2.0, 0.0], [0.0, 2.0]]
    """
    return torch.func.jacrev(torch.func.grad(loss))(at, *rest)


def curvature(loss: Loss, at: Tensor, direction: Tensor) -> Tensor:
    """Return `direction^T Hessian direction` from one product."""
    product = torch.func.grad(lambda x: (torch.func.grad(loss)(x) * direction).sum())(at)
    return (product * direction).sum()
