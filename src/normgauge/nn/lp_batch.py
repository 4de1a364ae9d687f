"""l_p batch normalization: the mean removed, the scale an l_p average of the uncentred values."""

import math
from typing import Any, Unpack

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._layout import apply_per_channel, at_least_float32, per_channel, plain_autograd, reduced_axes
from normgauge.nn._population import BatchStatisticsNorm, Shared
from normgauge.nn.functional import check_power, lp_moment, lp_norm, lp_norm_backward, lp_root


class LpBatchNorm(BatchStatisticsNorm):
    r"""Centre each channel and divide it by the l_p average of its uncentred values over batch and space.

    `y = weight * (x - mean) / (mean(|x|^p) + eps)^(1/p) + bias`, and `max|x| + eps` below the line for p = inf. The
    average is that of x before the mean is removed (santurkar2018 sec. 3.3), so scale is divided out and shift is not:
    `x + t` has a larger average and comes out smaller.

    In evaluation the stored averages of `mean` and of `mean(|x|^p)` (of `max|x|` for p = inf) take their place. Both
    moments are unbiased as they are, being uncentred; the average of maxima lies below the population's maximum.
    `p` is at least 1; `eps`, `momentum` and `affine` are those of batch normalization.

    Examples:
        >>> LpBatchNorm(1, p=1, eps=0.0)(torch.tensor([[1.0], [3.0]])).flatten().tolist()
        [-0.5, 0.5]

    References: santurkar2018.
    """

    def __init__(self, num_features: int, p: float = 1.0, **shared: Unpack[Shared]) -> None:
        check_power(p)
        super().__init__(num_features, **shared)
        self.p = float(p)

    def _train(self, x: Tensor) -> Tensor:
        y, mean, moment = lp_normalize(x, self.weight, self.bias, self.p, self.eps)
        self._remember(mean, moment)
        return y

    def _scale(self, moment: Tensor) -> Tensor:
        return lp_root(moment, self.p, self.eps)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, p={self.p}"


def lp_normalize(
    x: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the normalized input with the batch's mean and moment; low precision is computed in float32."""
    exact = at_least_float32(x)
    if plain_autograd():
        y, mean, moment = _Fused.apply(exact, weight, bias, p, eps)
    else:
        y, mean, moment = lp_norm(exact, p, weight, bias, eps), exact.mean(reduced_axes(x)), lp_moment(exact, p)
    return y.to(x.dtype), mean, moment


class _Fused(torch.autograd.Function):
    """The same map in few passes: one over x for each statistic, one for the output, two or three back."""

    @staticmethod
    def forward(
        ctx: Any, x: Tensor, weight: Tensor | None, bias: Tensor | None, p: float, eps: float
    ) -> tuple[Tensor, Tensor, Tensor]:
        axes = reduced_axes(x)
        mean = x.mean(axes)
        extremes: tuple[Tensor, ...] = ()
        if math.isinf(p):
            extremes = _extremes(x)
            moment = torch.maximum(extremes[0].amax(0), extremes[1].amax(0))
        else:
            moment = torch.linalg.vector_norm(x, p, axes).pow(p) / (x.numel() // x.shape[1])
        scale = lp_root(moment, p, eps)
        gain = 1 / scale if weight is None else weight / scale
        offset = -mean * gain if bias is None else bias - mean * gain
        y = apply_per_channel(x, gain, offset)
        ctx.save_for_backward(x, weight, bias, mean, scale, *extremes)
        ctx.p, ctx.eps = p, eps
        ctx.mark_non_differentiable(mean, moment)
        return y, mean, moment

    @staticmethod
    def backward(ctx: Any, grad: Tensor, *_: Any) -> tuple[Tensor | None, ...]:
        x, weight, bias, mean, scale, *extremes = ctx.saved_tensors
        if torch.is_grad_enabled():  # second derivatives wanted: the closed form in differentiable operators
            dx, dweight, dbias = lp_norm_backward(grad, x, ctx.p, weight, ctx.eps)
        else:
            dx, dweight, dbias = _fast_backward(grad, x, weight, (mean, scale), ctx.p, extremes)
        return dx, None if weight is None else dweight, None if bias is None else dbias, None, None


def _fast_backward(
    grad: Tensor, x: Tensor, weight: Tensor | None, statistics: tuple[Tensor, Tensor], p: float, extremes: list[Tensor]
) -> tuple[Tensor, Tensor, Tensor]:
    mean, scale = statistics
    along, total = gradient_sums(grad, x, mean, 1 / scale)
    count = x.numel() // x.shape[1]
    gain = 1 / scale if weight is None else weight / scale
    shift, first = per_channel(-gain * total / count, x), per_channel(gain, x)
    if math.isinf(p):
        dx = torch.addcmul(shift, grad, first)
        return _add_at_extremes(dx, x, -gain * along, *extremes), along, total
    slope = per_channel(-gain * along / count * scale.pow(1 - p), x)
    if p == 2:
        return torch.addcmul(shift, x, slope).addcmul_(grad, first), along, total
    # The power goes into the memory of the result: a fresh temporary would cost more than the passes over it.
    dx = x.sign() if p == 1 else x.abs().pow_(p - 1).copysign_(x)
    return torch.addcmul(shift, dx, slope, out=dx).addcmul_(grad, first), along, total


def gradient_sums(grad: Tensor, x: Tensor, mean: Tensor, inverse: Tensor) -> tuple[Tensor, Tensor]:
    """Return `sum(grad * (x - mean)) * inverse` and `sum(grad)` per channel, in one pass of batch norm's kernel."""
    mask = [False, True, True]
    kernel = torch.ops.aten.native_batch_norm_backward
    _, along, total = kernel(grad, x, torch.ones_like(mean), None, None, mean, inverse, True, 0.0, mask)
    return along, total


def _extremes(x: Tensor) -> tuple[Tensor, Tensor]:
    """Return the largest x and the largest -x of every sample and channel."""
    if x.dim() == 2:
        return x, -x
    low, high = x.flatten(2).aminmax(dim=2)
    return high, -low


def _add_at_extremes(dx: Tensor, x: Tensor, amount: Tensor, high: Tensor, low: Tensor) -> Tensor:
    """Add `sign(x) * amount` where |x| is largest in its channel, shared among ties; only their maps are searched."""
    top = torch.maximum(high.amax(0), low.amax(0))
    samples, channels = ((high == top) | (low == top)).nonzero(as_tuple=True)
    maps = x[samples, channels].reshape(len(samples), -1)
    hits = maps.abs() == top[channels, None]
    ties = torch.zeros_like(top).index_add_(0, channels, hits.sum(1).to(top.dtype))
    added = hits * maps.sign() * (amount / ties)[channels, None]
    dx[samples, channels] += added.view_as(x[samples, channels])
    return dx


registry.declare("lp1_batch", make=lambda channels, spatial: LpBatchNorm(channels, p=1.0))
registry.declare("lp2_batch", make=lambda channels, spatial: LpBatchNorm(channels, p=2.0))
registry.declare("lpinf_batch", make=lambda channels, spatial: LpBatchNorm(channels, p=math.inf))
