"""Batch normalization over all processes of a group, on any device: statistics by a differentiable all-reduce."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch import distributed as dist

from normgauge.errors import DataError
from normgauge.nn._layout import per_channel, reduced_axes
from normgauge.nn._population import BatchStatisticsNorm


class _AllReduce(torch.autograd.Function):
    """Sum over processes; since the sum of every process depends on every summand, the gradient is a sum too."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, group: Any) -> Tensor:
        ctx.group = group
        total = x.clone()
        dist.all_reduce(total, group=group)
        return total

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        return _AllReduce.apply(grad.contiguous(), ctx.group), None


def all_reduce(x: Tensor, group: Any = None) -> Tensor:
    """Return the sum of x over the processes of a group, differentiable as often as wanted; alone, x itself.

    Every process must call it, forward and backward, in the same order.

    Examples:
        >>> all_reduce(torch.ones(2)).tolist()
        [1.0, 1.0]
    """
    if not (dist.is_available() and dist.is_initialized()) or dist.get_world_size(group) == 1:
        return x
    return _AllReduce.apply(x, group)


class SyncedBatchNorm(BatchStatisticsNorm):
    r"""Normalize by mean and variance over batch and space of all processes, as one process would on the joint batch.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, with count and sum reduced first and the squared distances from
    the joint mean second, so that nothing cancels. Processes may hold different numbers of samples. Forward, backward
    and stored statistics equal those of one process on the concatenated batch; gradients of `weight` and `bias` are
    each process's share, to be summed over processes (data-parallel wrappers average them). torch's SyncBatchNorm
    refuses tensors on the CPU.

    Args:
        num_features: channels, on axis 1.
        eps: added to the variance.
        momentum: weight of a new batch in the stored statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias`.
        group: process group; `None` is the default group. Without one it is batch normalization.

    Raises:
        DataError: in training, for fewer than two values per channel in all processes together.

    Examples:
        >>> SyncedBatchNorm(1, eps=0.0)(torch.tensor([[1.0], [5.0]])).flatten().tolist()
        [-1.0, 1.0]

    References: ioffe2015.
    """

    smallest = 0  # a process may hold one sample, as long as all together hold two

    def __init__(
        self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True, group: Any = None
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.group = group

    def _train(self, x: Tensor) -> Tensor:
        exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
        axes = reduced_axes(x)
        held = torch.full((1,), exact.numel() // exact.shape[1], dtype=exact.dtype, device=x.device)
        sums = all_reduce(torch.cat([exact.sum(axes), held]), self.group)
        count = sums[-1].detach()
        if float(count) < 2:
            raise DataError(
                "SyncedBatchNorm",
                "training needs at least 2 values per channel in all processes together",
                f"{int(count)}",
                "Use a larger batch, or layer.eval() to use the stored statistics",
            )
        mean = sums[:-1] / count
        centred = exact - per_channel(mean, x)
        var = all_reduce(centred.square().sum(axes), self.group) / count
        gain = (var + self.eps).rsqrt()
        gain = gain if self.weight is None else gain * self.weight
        y = centred * per_channel(gain, x)
        self._remember(mean, var * count / (count - 1))
        return (y if self.bias is None else y + per_channel(self.bias, x)).to(x.dtype)
