"""Lipschitz constants of the parts of a network, in the Euclidean norm; decimals are rounded up."""

import math

import torch  # noqa: F401 (the doctests)
from torch import Tensor

RELU = 1.0
SIGMOID = 0.25
HARD_SIGMOID = 0.166667
HARD_SWISH = 1.5
GELU = 1.128905
GELU_TANH = 1.128996
SILU = 1.099840
MISH = 1.088499
SELU = 1.758100
ERF = 1.128380
SOFTMAX = 0.5
"""Largest slope of each. Softmax: its Jacobian is the covariance of a one-hot vector, and along a unit direction u a
variance is at most a quarter of the squared range of u, which is at most two."""


def log_softmax_constant(count: int) -> float:
    """Return `sqrt(count)`: the Jacobian `I - 1 p^T` is an oblique projection, as long as its complement `1 p^T`.

    Examples:
        >>> log_softmax_constant(4)
        2.0
    """
    return math.sqrt(count)


def max_pool_constant(kernel: int, stride: int, dilation: int = 1) -> float:
    """Return `sqrt(n)` for one axis, n the number of windows an entry may stand in.

    `n = min(kernel, ceil(((kernel - 1) dilation + 1) / stride))`. A maximum changes by at most the largest change in
    its window, hence the squares of all changes sum to at most n times those of the input.

    Examples:
        >>> max_pool_constant(3, 3), max_pool_constant(3, 2) ** 2
        (1.0, 2.0000000000000004)
    """
    span = (kernel - 1) * dilation + 1
    return math.sqrt(min(kernel, -(-span // stride)))


def normalized_slope(deviation: Tensor, spread: Tensor, size: int, eps: float) -> Tensor:
    """Return `1 / sqrt(max(deviation - spread / sqrt(size), 0)^2 + eps)`: a normalizer's constant near a point.

    Standardizing a block of `size` entries has a Jacobian of norm at most 1 / sqrt(variance + eps); the deviation
    (the root mean square where nothing is centred) of a block changes by at most 1 / sqrt(size) per unit of distance.
    So this bounds the slope on the ball of radius `spread` about a point where the blocks have these deviations, and
    with an infinite spread it is the global constant 1 / sqrt(eps).

    Examples:
        >>> normalized_slope(torch.tensor([5.0]), torch.tensor([4.0]), size=4, eps=0.0)  # 5 - 4 / 2 = 3
        tensor([0.3333])

    References: than2025, ba2016
    """
    left = (deviation - spread / math.sqrt(size)).clamp_min(0.0)
    return 1 / (left.square() + eps).sqrt()


def attention_slopes(scale: float, keys: Tensor, values: Tensor, queries: Tensor, share: Tensor) -> tuple[Tensor, ...]:
    """Return the constants of dot-product attention with respect to queries, keys and values.

    With weights `P = softmax(scale Q K^T)` and outputs `o_i = sum_j P_ij v_j` the Jacobian is
    `d o_i = scale Cov_i(v, k) d q_i + scale sum_j P_ij (v_j - o_i) <q_i, d k_j> + sum_j P_ij d v_j`, covariances under
    row i of P. So its parts have norms at most `scale values keys`, `scale values queries sqrt(share)` and
    `sqrt(share)`, by Cauchy-Schwarz: `keys` and `values` the largest root of the top eigenvalue of a row's covariance
    of either, `queries` the largest length of a query, `share` the largest sum of a column of P.

    Examples:
        >>> one = torch.tensor(1.0)
        >>> attention_slopes(0.5, one, one, one, 4 * one)
        (tensor(0.5000), tensor(1.), tensor(2.))
    """
    return scale * values * keys, scale * values * queries * share.sqrt(), share.sqrt()
