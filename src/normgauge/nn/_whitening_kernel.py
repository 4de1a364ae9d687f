"""Whitening as a map of tensors: composite form, and the same in five matrix products, forward and back."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgauge.nn._eager import plain_autograd
from normgauge.nn._layout import per_channel, reduced_axes


class Settings(NamedTuple):
    """Numbers of groups and of steps, and what is added to the diagonal."""

    groups: int
    iterations: int
    eps: float


def whiten(x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings) -> tuple[Tensor, Tensor, Tensor]:
    """Return the whitened input with the batch's mean and biased covariance."""
    if plain_autograd():
        return _Fused.apply(x, weight, bias, settings)
    return _composite(x, weight, bias, settings)


def apply_root(
    centred: Tensor, covariance: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
) -> Tensor:
    """Return `weight * covariance^(-1/2) centred + bias` by groups."""
    root = _root(covariance, settings).to(centred.dtype)
    blocks = _pack(centred, settings.groups)
    y = _unpack(torch.matmul(root, blocks), centred)
    y = y if weight is None else y * per_channel(weight, y)
    return y if bias is None else y + per_channel(bias, y)


def inverse_root(matrices: Tensor, iterations: int) -> Tensor:
    """Return `S^(-1/2)` of symmetric positive matrices `(..., d, d)` after so many Newton-Schulz steps.

    The coupled form, which carries `S P` along: in exact arithmetic it gives the same matrices, but the plain form
    amplifies rounding errors that do not commute with S and diverges once it has converged.
    """
    trace = matrices.diagonal(dim1=-2, dim2=-1).sum(-1)[..., None, None]
    identity = torch.eye(matrices.shape[-1], dtype=matrices.dtype, device=matrices.device)
    inverse, root = identity.expand_as(matrices), matrices / trace
    for _ in range(iterations):
        step = 1.5 * identity - 0.5 * (inverse @ root)
        inverse, root = step @ inverse, root @ step
    return inverse / trace.sqrt()


def _root(covariance: Tensor, settings: Settings) -> Tensor:
    identity = torch.eye(covariance.shape[-1], dtype=covariance.dtype, device=covariance.device)
    return inverse_root(covariance + settings.eps * identity, settings.iterations)


def _composite(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
) -> tuple[Tensor, Tensor, Tensor]:
    mean = x.mean(reduced_axes(x))
    centred = x - per_channel(mean, x)
    covariance = _gram(_pack(centred, settings.groups)) / (x.numel() // x.shape[1])
    return apply_root(centred, covariance, weight, bias, settings), mean, covariance


class _Fused(torch.autograd.Function):
    """Two products forward and three back; derivatives of the small root by autograd on the small matrices."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, settings: Settings
    ) -> tuple[Tensor, Tensor, Tensor]:
        mean = x.mean(reduced_axes(x))
        centred = x - per_channel(mean, x)
        blocks = _pack(centred, settings.groups)
        covariance = _gram(blocks) / (x.numel() // x.shape[1])
        root = _root(covariance, settings)
        gained = root if weight is None else root * weight.view(settings.groups, -1, 1)
        y = _unpack(torch.matmul(gained, blocks), x)
        if bias is not None:
            y.add_(per_channel(bias, x))
        ctx.save_for_backward(x, weight, bias, blocks, covariance)
        ctx.settings = settings
        ctx.mark_non_differentiable(mean, covariance)
        return y, mean, covariance

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, blocks, covariance = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives wanted: differentiate the composite form
            inputs = [value for value in (x, weight, bias) if value is not None]
            y = _composite(x, weight, bias, ctx.settings)[0]
            gradients = iter(torch.autograd.grad(y, inputs, grad, create_graph=True))
            return (*(None if value is None else next(gradients) for value in (x, weight, bias)), None)
        groups = ctx.settings.groups
        grads = _pack(grad, groups)
        outer = torch.matmul(grads, blocks.transpose(-1, -2)).sum(0)
        total = grad.sum(reduced_axes(x))
        with torch.enable_grad():
            leaf = covariance.detach().requires_grad_()
            gains = torch.ones_like(total) if weight is None else weight.detach().requires_grad_()
            gained = _root(leaf, ctx.settings) * gains.view(groups, -1, 1)
            wanted = [leaf] if weight is None else [leaf, gains]
            small = torch.autograd.grad(gained, wanted, outer)
        back = gained.detach().transpose(-1, -2)
        count = x.numel() // x.shape[1]
        dx = torch.matmul((small[0] + small[0].transpose(-1, -2)) / count, blocks)
        shift = torch.matmul(back, total.view(groups, -1, 1)) / count
        dx = _accumulate(dx, back, grads).sub_(shift)
        return _unpack(dx, x), None if weight is None else small[1], None if bias is None else total, None


def _accumulate(total: Tensor, matrices: Tensor, blocks: Tensor) -> Tensor:
    """Add the products of matrices `(groups, d, d)` with blocks `(n, groups, d, m)` to a fresh tensor in place."""
    rows, groups, size, _ = blocks.shape
    left = matrices.expand(rows, groups, size, size).reshape(-1, size, size)
    total.view(rows * groups, size, -1).baddbmm_(left, blocks.reshape(rows * groups, size, -1))
    return total


def _gram(blocks: Tensor) -> Tensor:
    return torch.matmul(blocks, blocks.transpose(-1, -2)).sum(0)


def _pack(x: Tensor, groups: int) -> Tensor:
    """View `(batch, channels, *space)` as `(n, groups, d, m)`; with little space the samples join it, by a copy."""
    batch, channels = x.shape[:2]
    if x[0, 0].numel() >= 16:
        return x.reshape(batch, groups, channels // groups, -1)
    return x.transpose(0, 1).reshape(1, groups, channels // groups, -1)


def _unpack(blocks: Tensor, like: Tensor) -> Tensor:
    if like[0, 0].numel() >= 16:
        return blocks.reshape(like.shape)
    return blocks.reshape(like.shape[1], like.shape[0], *like.shape[2:]).transpose(0, 1).contiguous()
