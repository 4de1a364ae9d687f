"""l_p batch normalization: forward map and closed-form backward map."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normgauge.errors import InputError


def lp_norm(x: Tensor, p: float, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Centre each channel (axis 1) and divide it by the l_p average of its uncentred values.

    `y = gamma[c] * (x - mean[c]) / s[c] + beta[c]` with `s = (mean(|x|^p) + eps)^(1/p)` over batch and space, and
    `s = max|x| + eps` for p = inf. The average is taken before the mean is removed, so the output is invariant to
    the scale of x but not to its shift.

    Raises:
        InputError: for p below 1.

    Examples:
        >>> lp_norm(torch.tensor([[1.0], [3.0]]), 1, eps=0.0).flatten().tolist()  # (1 - 2) / 2 and (3 - 2) / 2
        [-0.5, 0.5]

    References: santurkar2018.
    """
    axes = (0, *range(2, x.dim()))
    scale = lp_root(lp_moment(x, p), p, eps)
    shape = (1, -1, *(1,) * (x.dim() - 2))
    y = (x - x.mean(axes, keepdim=True)) / scale.view(shape)
    y = y if gamma is None else y * gamma.view(shape)
    return y if beta is None else y + beta.view(shape)


def lp_norm_backward(
    grad: Tensor, x: Tensor, p: float, gamma: Tensor | None = None, eps: float = 1e-5
) -> tuple[Tensor, Tensor, Tensor]:
    r"""Return the gradients of `lp_norm` with respect to x, gamma and beta in closed form.

    With `h = gamma * grad`, `xhat = (x - mean) / s` and means over batch and space:
    `dx = (h - mean(h) - mean(h * xhat) * s^(1-p) |x|^(p-1) sign(x)) / s`. For p = inf the last product is
    `sum(h * xhat) * sign(x) / t` at the t values where `|x|` is largest, and zero elsewhere.

    Raises:
        InputError: for p below 1.

    Examples:
        >>> x = torch.tensor([[1.0], [2.0], [6.0]])
        >>> dx, _, _ = lp_norm_backward(torch.tensor([[1.0], [0.0], [0.0]]), x, 2, eps=0.0)
        >>> bool((dx * x).sum().abs() < 1e-6)  # scale invariance: the gradient is orthogonal to x
        True

    References: santurkar2018.
    """
    axes = (0, *range(2, x.dim()))
    shape = (1, -1, *(1,) * (x.dim() - 2))
    scale = lp_root(lp_moment(x, p), p, eps).view(shape)
    xhat = (x - x.mean(axes, keepdim=True)) / scale
    h = grad if gamma is None else grad * gamma.view(shape)
    along = (h * xhat).mean(axes, keepdim=True)
    if math.isinf(p):
        top = x.abs() == x.abs().amax(axes, keepdim=True)
        count = x.numel() // x.shape[1]
        slope = torch.where(top, x.sign(), torch.zeros_like(x)) * (count / top.sum(axes, keepdim=True))
    else:
        slope = scale.pow(1 - p) * x.abs().pow(p - 1) * x.sign()
    dx = (h - h.mean(axes, keepdim=True) - along * slope) / scale
    return dx, (grad * xhat).sum(axes), grad.sum(axes)


def lp_moment(x: Tensor, p: float) -> Tensor:
    """Return `mean(|x|^p)` per channel over batch and space, or `max|x|` for p = inf."""
    check_power(p)
    axes = (0, *range(2, x.dim()))
    if math.isinf(p):
        return x.abs().amax(axes)
    if p == 1:
        return x.abs().mean(axes)
    return (x.square() if p == 2 else x.abs().pow(p)).mean(axes)


def lp_root(moment: Tensor, p: float, eps: float) -> Tensor:
    """Return the scale of a moment: `(moment + eps)^(1/p)`, or `moment + eps` for p = 1 and p = inf."""
    if math.isinf(p) or p == 1:
        return moment + eps
    return (moment + eps).sqrt() if p == 2 else (moment + eps).pow(1 / p)


def check_power(p: float) -> None:
    """Refuse p below 1 and nan: the average of powers is then no norm.

    Raises:
        InputError: naming the p that came.
    """
    if not p >= 1:
        raise InputError("lp_norm", "p is at least 1 (math.inf for the maximum)", repr(p), "Use p=1, 2 or inf")
