"""Batch, layer, group and root-mean-square normalization: forward maps and closed-form backward maps.

All four are `y = gamma * (x - beta(x)) / scale(x) + beta` on blocks of `n` entries, by the decomposition of
`decompose`. With `h = gamma * grad`, means over the block and `xhat = (x - mean) / scale`, the backward map is

    dx = (h - mean(h) - xhat * mean(h * xhat)) / scale,      scale = sqrt(var + eps),

for every eps, since `d scale / d x_k = xhat_k / n`. Without centring the term `mean(h)` is absent.
"""

from __future__ import annotations

import torch  # noqa: F401 (the doctests)
from torch import Tensor

from normgauge.errors import InputError

Gradients = tuple[Tensor, Tensor, Tensor]


def batch_norm(x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5) -> Tensor:
    r"""Normalize each channel (axis 1) by mean and variance over batch and space.

    `y = gamma[c] * (x - mean[c]) / sqrt(var[c] + eps) + beta[c]`, with the biased variance.

    Examples:
        >>> batch_norm(torch.tensor([[1.0], [5.0]]), eps=0.0).flatten().tolist()
        [-1.0, 1.0]

    References: ioffe2015, santurkar2018.
    """
    xhat, _ = _standardize(x, _batch_axes(x), eps)
    return _affine(xhat, _channel(gamma, x), _channel(beta, x))


def batch_norm_backward(grad: Tensor, x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5) -> Gradients:
    r"""Return the gradients of `batch_norm` with respect to x, gamma and beta in closed form.

    `dx = gamma / sqrt(var + eps) * (grad - mean(grad) - xhat * mean(grad * xhat))`, means over batch and space;
    `dgamma = sum(grad * xhat)`, `dbeta = sum(grad)`.

    Deviations:
        akbar2025 eq. (1) takes `grad` to be the gradient of the output and omits gamma: its dx is wrong by the factor
        1 / gamma (relative error 0.5 at gamma = 2, below). Its App. A.1.1 prints the Jacobian with
        `(z_n - mean)(z_k - mean) / s^3`, without 1 / m: on 8 samples the error is 7 times that term.

    Examples:
        >>> g, x, gamma = torch.tensor([[1.0], [0.0], [0.0]]), torch.tensor([[0.0], [1.0], [5.0]]), torch.tensor([2.0])
        >>> right = batch_norm_backward(g, x, gamma, eps=0.0)[0]
        >>> printed = batch_norm_backward(g, x, None, eps=0.0)[0]
        >>> round(float((printed - right).norm() / right.norm()), 6)
        0.5

    References: akbar2025, batchnorm_article, santurkar2018.
    """
    axes = _batch_axes(x)
    xhat, scale = _standardize(x, axes, eps)
    dx = _standardize_backward(_multiply(grad, _channel(gamma, x)), xhat, scale, axes)
    return dx, (grad * xhat).sum(axes), grad.sum(axes)


def layer_norm(
    x: Tensor, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1
) -> Tensor:
    r"""Normalize each sample by mean and variance over its trailing axes.

    `y = gamma * (x - mean) / sqrt(var + eps) + beta`, gamma and beta of the shape of the trailing axes.

    Examples:
        >>> layer_norm(torch.tensor([[1.0, 5.0]]), eps=0.0).tolist()
        [[-1.0, 1.0]]

    References: ba2016, sun2020.
    """
    xhat, _ = _standardize(x, _last_axes(x, trailing), eps)
    return _affine(xhat, gamma, beta)


def layer_norm_backward(
    grad: Tensor, x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1
) -> Gradients:
    r"""Return the gradients of `layer_norm` with respect to x, gamma and beta in closed form.

    With `h = gamma * grad`: `dx = (h - mean(h) - xhat * mean(h * xhat)) / sqrt(var + eps)`, means over the trailing
    axes; `dgamma = sum(grad * xhat)`, `dbeta = sum(grad)` over the samples.

    Deviations:
        akbar2025 sec. 3.2 prints `xhat_j` with the summed index j where the free index i belongs (relative error 1.53
        on six Gaussian entries, and a gradient that no longer sums to zero), and omits gamma, which here differs from
        entry to entry and cannot be put right by a factor.

    Examples:
        >>> dx, _, dbeta = layer_norm_backward(torch.tensor([[1.0, 0.0]]), torch.tensor([[1.0, 5.0]]), eps=0.0)
        >>> dx.tolist(), dbeta.tolist()  # two entries: the output is (-1, 1) whatever x is
        ([[0.0, 0.0]], [1.0, 0.0])

    References: akbar2025, ba2016.
    """
    axes = _last_axes(x, trailing)
    xhat, scale = _standardize(x, axes, eps)
    dx = _standardize_backward(_multiply(grad, gamma), xhat, scale, axes)
    samples = tuple(range(x.dim() - trailing))
    return dx, _sum(grad * xhat, samples), _sum(grad, samples)


def group_norm(
    x: Tensor, groups: int, gamma: Tensor | None = None, beta: Tensor | None = None, eps: float = 1e-5
) -> Tensor:
    r"""Normalize each sample by mean and variance over the channels of a group and space.

    `y = gamma[c] * (x - mean[i, g]) / sqrt(var[i, g] + eps) + beta[c]`; one group is layer normalization with channels
    first, as many groups as channels is instance normalization.

    Raises:
        InputError: if the groups do not divide the channels.

    Examples:
        >>> group_norm(torch.tensor([[1.0, 3.0, 10.0, 30.0]]), 2, eps=0.0).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]

    References: wu2018.
    """
    xhat, _ = _standardize(_split_groups(x, groups), (2,), eps)
    return _affine(xhat.reshape(x.shape), _channel(gamma, x), _channel(beta, x))


def group_norm_backward(
    grad: Tensor, x: Tensor, groups: int, gamma: Tensor | None = None, eps: float = 1e-5
) -> Gradients:
    r"""Return the gradients of `group_norm` with respect to x, gamma and beta in closed form.

    With `h = gamma * grad`: `dx = (h - mean(h) - xhat * mean(h * xhat)) / sqrt(var + eps)`, means per sample and group;
    `dgamma = sum(grad * xhat)`, `dbeta = sum(grad)` over batch and space.

    Raises:
        InputError: if the groups do not divide the channels.

    Examples:
        >>> x = torch.tensor([[1.0, 5.0, 2.0, 4.0]])
        >>> group_norm_backward(torch.ones(1, 4), x, 2, eps=0.0)[0].tolist()  # a common shift changes nothing
        [[0.0, 0.0, 0.0, 0.0]]

    References: wu2018.
    """
    xhat, scale = _standardize(_split_groups(x, groups), (2,), eps)
    h = _split_groups(_multiply(grad, _channel(gamma, x)), groups)
    dx = _standardize_backward(h, xhat, scale, (2,)).reshape(x.shape)
    axes = _batch_axes(x)
    return dx, (grad * xhat.reshape(x.shape)).sum(axes), grad.sum(axes)


def rms_norm(x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1) -> Tensor:
    r"""Divide each sample by its root mean square over the trailing axes.

    `y = gamma * x / sqrt(mean(x^2) + eps)`.

    Examples:
        >>> rms_norm(torch.tensor([[3.0, 3.0]]), eps=0.0).tolist()
        [[1.0, 1.0]]

    References: zhang2019.
    """
    scale = (x.square().mean(_last_axes(x, trailing), keepdim=True) + eps).sqrt()
    return _multiply(x / scale, gamma)


def rms_norm_backward(
    grad: Tensor, x: Tensor, gamma: Tensor | None = None, eps: float = 1e-5, *, trailing: int = 1
) -> tuple[Tensor, Tensor]:
    r"""Return the gradients of `rms_norm` with respect to x and gamma in closed form.

    With `h = gamma * grad` and `xhat = x / scale`: `dx = (h - xhat * mean(h * xhat)) / scale`.

    Examples:
        >>> dx, _ = rms_norm_backward(torch.tensor([[1.0, 1.0]]), torch.tensor([[3.0, 3.0]]), eps=0.0)
        >>> dx.tolist()  # along x nothing changes
        [[0.0, 0.0]]

    References: zhang2019.
    """
    axes = _last_axes(x, trailing)
    scale = (x.square().mean(axes, keepdim=True) + eps).sqrt()
    xhat = x / scale
    h = _multiply(grad, gamma)
    dx = (h - xhat * (h * xhat).mean(axes, keepdim=True)) / scale
    return dx, _sum(grad * xhat, tuple(range(x.dim() - trailing)))


def _standardize(x: Tensor, axes: tuple[int, ...], eps: float) -> tuple[Tensor, Tensor]:
    centred = x - x.mean(axes, keepdim=True)
    scale = (centred.square().mean(axes, keepdim=True) + eps).sqrt()
    return centred / scale, scale


def _standardize_backward(h: Tensor, xhat: Tensor, scale: Tensor, axes: tuple[int, ...]) -> Tensor:
    return (h - h.mean(axes, keepdim=True) - xhat * (h * xhat).mean(axes, keepdim=True)) / scale


def _affine(xhat: Tensor, gamma: Tensor | None, beta: Tensor | None) -> Tensor:
    scaled = _multiply(xhat, gamma)
    return scaled if beta is None else scaled + beta


def _multiply(x: Tensor, gamma: Tensor | None) -> Tensor:
    return x if gamma is None else x * gamma


def _sum(x: Tensor, axes: tuple[int, ...]) -> Tensor:
    return x.sum(axes) if axes else x  # torch sums everything when it is given no axis


def _batch_axes(x: Tensor) -> tuple[int, ...]:
    return (0, *range(2, x.dim()))


def _last_axes(x: Tensor, trailing: int) -> tuple[int, ...]:
    if not 1 <= trailing <= x.dim():
        raise InputError(
            "functional", "trailing is between 1 and the number of axes", str(trailing), "Count the averaged axes"
        )
    return tuple(range(x.dim() - trailing, x.dim()))


def _channel(parameter: Tensor | None, x: Tensor) -> Tensor | None:
    return None if parameter is None else parameter.view(1, -1, *(1,) * (x.dim() - 2))


def _split_groups(x: Tensor, groups: int) -> Tensor:
    if groups < 1 or x.shape[1] % groups:
        raise InputError(
            "group_norm",
            "groups divides the channels",
            f"{groups} groups for {x.shape[1]} channels",
            "Choose a divisor",
        )
    return x.reshape(x.shape[0], groups, -1)
