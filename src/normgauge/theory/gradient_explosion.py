"""How fast gradients grow with depth in a wide batch-normalized network at initialization.

The network repeats `x = W h`, `y = (x - mean) / deviation` over a batch of B, `h = phi(y)`, with Gaussian weights of
variance 1/width; infinite width, no eps. At its fixed point the batch is a random direction: `y = sqrt(B) u` with `u`
uniform on the unit sphere orthogonal to `(1, ..., 1)`. All rates are factors per layer of the expected SQUARED norm of
the gradient; the norm grows by their square root.
"""

from math import acos, asin, inf, pi, sqrt

import torch  # noqa: F401 (the doctests)
from torch import Tensor

RELU_LIMIT = pi / (pi - 1)  # of the squared norm, as the batch grows


def relu_rate(batch: int) -> float:
    """Return the factor per layer for ReLU and a batch of `batch` samples; infinite for three or fewer.

    `B t / ((q - p) (B - 1) (B - 3))` where `q = 1/2` and `p` are the mean square and mean product of two activations
    and `t = E |(I - 1 1^T / B) D (I - 1 1^T / B - u u^T)|^2` with D the pattern of active samples; all three follow
    from two Gaussians of correlation `-1 / (B - 1)`. The factor 1/(B - 3) is the mean of one over a chi-square.

    Examples:
        >>> round(relu_rate(16), 4), relu_rate(10**6) - RELU_LIMIT < 1e-5
        (1.59, True)

    References: yang2019
    """
    if batch <= 3:
        return inf
    r = -1.0 / (batch - 1)
    p = (sqrt(1 - r * r) + r * (pi - acos(r))) / (2 * pi)
    both = 0.25 + asin(r) / (2 * pi)
    active_squared = batch / 2 + batch * (batch - 1) * both
    t = batch / 2 - 1 + active_squared / batch**2 - 0.5 + (0.5 + (batch - 1) * p) / batch
    return batch * t / ((0.5 - p) * (batch - 1) * (batch - 3))


def linear_rate(batch: int) -> float:
    """Return `(B - 2) / (B - 3)`, the factor per layer without nonlinearity: above 1 for every batch, 1 in the limit.

    Examples:
        >>> linear_rate(8), linear_rate(3)
        (1.2, inf)

    References: yang2019
    """
    return (batch - 2) / (batch - 3) if batch > 3 else inf


def large_batch_rate(values: Tensor, slopes: Tensor, weights: Tensor) -> float:
    """Return `E phi'(x)^2 / var phi(x)` for a standard normal x: the factor per layer as the batch grows.

    By the Gaussian Poincare inequality it is at least 1, and 1 only where phi is affine. `values` and `slopes` are phi
    and phi' at the nodes of a quadrature for x, whose `weights` sum to 1.

    Examples:
        >>> x = torch.linspace(-9, 9, 4000, dtype=torch.float64)
        >>> weights = torch.softmax(-x.square() / 2, 0)
        >>> round(large_batch_rate(x.relu(), (x > 0).double(), weights) / RELU_LIMIT, 3)
        1.0

    References: yang2019
    """
    mean = weights @ values
    return float((weights @ slopes.square()) / (weights @ (values - mean).square()))


def squared_gradient_growth(squares: Tensor) -> float:
    """Return the factor per layer of squared gradient norms, first layer first: its geometric mean, ends left out.

    Examples:
        >>> round(squared_gradient_growth(2.0 ** torch.arange(20.0).flip(0)), 4)
        2.0
    """
    logs = squares.log()
    first, last = 2, len(squares) - 4
    return float(((logs[first] - logs[last]) / (last - first)).exp())
