"""How the norm of scale-invariant weights moves under gradient descent."""

import math

from torch import Tensor


def after_sgd_step(squared_norm: float | Tensor, squared_gradient: float | Tensor, rate: float) -> float | Tensor:
    """Return `|w|^2 + rate^2 |gradient|^2`: the squared norm after one step of SGD on a scale-invariant loss.

    Exact, because such a gradient is orthogonal to `w`; without momentum and without weight decay.

    Examples:
        >>> after_sgd_step(25.0, 4.0, rate=0.5)
        26.0

    References: sun2020
    """
    return squared_norm + rate**2 * squared_gradient


def under_decay_flow(squared_norm: float | Tensor, decay: float, time: float | Tensor) -> float | Tensor:
    """Return `|w|^2 exp(-2 decay time)`: the squared norm under gradient flow of loss plus `decay |w|^2 / 2`.

    Exact for a scale-invariant loss, whatever it is.

    Deviations: S0 sec 5.1 prints the rate `decay`, which is that of the norm, not of its square.

    Examples:
        >>> round(under_decay_flow(1.0, decay=0.5, time=1.0), 6)  # exp(-1)
        0.367879

    References: akbar2025
    """
    return squared_norm * math.e ** (-2 * decay * time)


def equivalent_rate(rate: float, factor: float) -> float:
    """Return `factor^2 rate`: from `factor w` it turns scale-invariant weights exactly as `rate` does from `w`.

    For SGD without momentum or decay; the norm then stays `factor` times the other one.

    Examples:
        >>> equivalent_rate(0.1, factor=10.0)
        10.0

    References: akbar2025
    """
    return factor**2 * rate
