"""l_p batch normalization: the mean removed, the scale an l_p average of the uncentred values."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._eager import plain_autograd
from normgauge.nn._layout import per_channel, reduced_axes
from normgauge.nn._population import BatchStatisticsNorm
from normgauge.nn.functional._lp import check_power, lp_moment, lp_norm, lp_norm_backward, lp_root


class LpBatchNorm(BatchStatisticsNorm):
    r"""Centre each channel and divide it by the l_p average of its uncentred values over batch and space.

    `y = weight * (x - mean) / (mean(|x|^p) + eps)^(1/p) + bias`, and `max|x| + eps` below the line for p = inf. The
    average is that of x before the mean is removed (santurkar2018 sec. 3.3), so scale is divided out and shift is not:
    `x + t` has a larger average and comes out smaller.

    In evaluation the stored averages of `mean` and of `mean(|x|^p)` (of `max|x|` for p = inf) take their place. Both
    moments are unbiased as they are, being uncentred; the average of maxima lies below the population's maximum.

    Args:
        num_features: channels, on axis 1.
        p: at least 1; `math.inf` takes the maximum.
        eps: added to the mean of the powers (to the maximum for p = inf).
        momentum: weight of a new batch in the stored statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias`.

    Raises:
        InputError: for p below 1.
        DataError: in training, for fewer than two values per channel; for other shapes and empty inputs.

    Examples:
        >>> LpBatchNorm(1, p=1, eps=0.0)(torch.tensor([[1.0], [3.0]])).flatten().tolist()
        [-0.5, 0.5]

    References: santurkar2018.
    """

    def __init__(
        self, num_features: int, p: float = 1.0, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True
    ) -> None:
        check_power(p)
        super().__init__(num_features, eps, momentum, affine)
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
    exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
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
        extremes = _extremes(x) if math.isinf(p) else (None, None)
        if extremes[0] is not None:
            moment = torch.maximum(extremes[0].amax(0), extremes[1].amax(0))
        else:
            moment = torch.linalg.vector_norm(x, p, axes).pow(p) / (x.numel() // x.shape[1])
        scale = lp_root(moment, p, eps)
        gain = 1 / scale if weight is None else weight / scale
        offset = -mean * gain if bias is None else bias - mean * gain
        y = torch.addcmul(per_channel(offset, x), x, per_channel(gain, x))
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
    # The kernel's two sums: sum(grad * (x - mean)) / scale and sum(grad), in one pass.
    _, along, total = torch.ops.aten.native_batch_norm_backward(
        grad,
        x,
        torch.ones_like(mean),
        running_mean=None,
        running_var=None,
        save_mean=mean,
        save_invstd=1 / scale,
        train=True,
        eps=0.0,
        output_mask=[False, True, True],
    )
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


def _declare(name: str, p: float, formula: str) -> None:
    registry.register(
        registry.Declaration(
            name=name,
            title=f"l_{'inf' if math.isinf(p) else int(p)} batch normalization",
            placement="activation",
            axes="batch and space per channel",
            statistics="batch",
            behaviour="Training uses the batch's mean and the l_p average of its uncentred values; evaluation the "
            "stored averages of both. Not invariant to shifts, since the average is uncentred.",
            formula=formula,
            cite=("santurkar2018",),
            invariances=(
                registry.Invariance("input", "scale", "row", exact=False, modes=("train",)),
                registry.Invariance("weights", "scale", "row", exact=False, modes=("train",)),
            ),
            make=lambda channels, spatial: LpBatchNorm(channels, p=p),
            smallest=2,
        )
    )


_declare("lp1_batch", 1.0, r"y = \gamma \frac{x - \mu_B}{\frac{1}{m} \sum_B |x| + \epsilon} + \beta")
_declare("lp2_batch", 2.0, r"y = \gamma \frac{x - \mu_B}{\sqrt{\frac{1}{m} \sum_B x^2 + \epsilon}} + \beta")
_declare("lpinf_batch", math.inf, r"y = \gamma \frac{x - \mu_B}{\max_B |x| + \epsilon} + \beta")
