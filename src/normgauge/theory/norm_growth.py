"""How the norm of scale-invariant weights moves under gradient descent."""

from __future__ import annotations

from torch import Tensor


def after_sgd_step(squared_norm: float | Tensor, squared_gradient: float | Tensor, rate: float) -> float | Tensor:
    """Return `|w|^2 + rate^2 |gradient|^2`: the squared norm after one step of SGD on a scale-invariant loss.

    Exact, because such a gradient is orthogonal to `w`; without momentum and without weight decay.

    Example:
        >>> after_sgd_step(25.0, 4.0, rate=0.5)
        26.0

    References: sun2020
    """
    return squared_norm + rate**2 * squared_gradient
