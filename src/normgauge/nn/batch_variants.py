"""Batch normalization with other statistics: of virtual batches, corrected by the population's, of all processes."""

from typing import Any, Unpack

import torch
from torch import Tensor
from torch import distributed as dist

from normgauge.errors import DataError, InputError
from normgauge.nn import registry
from normgauge.nn._layout import at_least_float32, check_enough, per_channel, plain_autograd, reduced_axes
from normgauge.nn._population import BatchStatisticsNorm, Shared


class GhostBatchNorm(BatchStatisticsNorm):
    r"""Normalize each of several virtual batches by its own mean and variance over batch and space.

    The batch of n samples is dealt out, like cards, to `k = max(1, n // ghost_size)` virtual batches: sample i goes
    to batch `i mod k`, so that sizes differ by at most one and none is smaller than `ghost_size` unless n is. Within
    each, `y = weight * (x - mean) / sqrt(var + eps) + bias`. Evaluation uses the stored averages over the virtual
    batches of their means and unbiased variances. `eps`, `momentum` and `affine` are those of batch normalization.

    Deviations: hoffer2017 cuts the batch into consecutive pieces and folds them into the stored statistics one after
        another. Dealing is the same for shuffled data, and makes the virtual batches a view that torch's fused kernel
        takes without a copy; the pieces' statistics enter the stored ones as their average.

    Examples:
        >>> x = torch.tensor([[0.0], [10.0], [2.0], [30.0]])  # dealt to (0, 2) and (10, 30)
        >>> GhostBatchNorm(1, ghost_size=2, eps=1e-12)(x).flatten().round(decimals=4).tolist()
        [-1.0, -1.0, 1.0, 1.0]

    References: hoffer2017.
    """

    def __init__(self, num_features: int, ghost_size: int = 32, **shared: Unpack[Shared]) -> None:
        if ghost_size < 2:
            step = "Use LayerNorm for single samples"
            raise InputError("GhostBatchNorm", "ghost_size is at least 2", str(ghost_size), step)
        super().__init__(num_features, **shared)
        self.ghost_size = ghost_size

    def _train(self, x: Tensor) -> Tensor:
        ghosts = max(1, x.shape[0] // self.ghost_size)
        mean, moment = self.running_mean.repeat(ghosts), self.running_moment.repeat(ghosts)
        # A share of 1 stores the batch's own statistics; the average over ghosts then enters the running ones.
        if x.shape[0] % ghosts == 0:
            weight, bias = (None if own is None else own.repeat(ghosts) for own in (self.weight, self.bias))
            dealt = x.reshape(x.shape[0] // ghosts, ghosts * x.shape[1], *x.shape[2:])
            y = self._normalize(dealt, weight, bias, mean, moment).reshape(x.shape)
        else:
            y = torch.empty_like(x)
            for ghost, (m, v) in enumerate(zip(mean.chunk(ghosts), moment.chunk(ghosts), strict=True)):
                part, index = x[ghost::ghosts], torch.arange(ghost, len(x), ghosts, device=x.device)
                check_enough("GhostBatchNorm", part, 2)
                y = y.index_copy(0, index, self._normalize(part, self.weight, self.bias, m, v))
        with torch.no_grad():
            self._remember(mean.view(ghosts, -1).mean(0), moment.view(ghosts, -1).mean(0))
        return y

    def _normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, moment: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, moment, weight, bias, training=True, momentum=1.0, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"


class BatchRenorm(BatchStatisticsNorm):
    r"""Normalize by the batch, then correct towards the population statistics within bounds.

    `y = weight * ((x - mean) / std * r + d) + bias` with `std = sqrt(var + eps)`,
    `r = clip(std / running_std, 1 / r_max, r_max)` and `d = clip((mean - running_mean) / running_std, -d_max, d_max)`;
    r and d count as constants in the gradient. While no bound is active the value is that of evaluation,
    `(x - running_mean) / running_std`, and the gradient that of batch normalization times r. With `r_max=1, d_max=0` it
    is batch normalization.

    The value depends on the scale of x, so no invariance is declared; the gradient is still orthogonal to x per
    channel, as in batch normalization (for eps = 0).

    Args:
        num_features: channels, on axis 1.
        r_max: bound of the scale's correction, at least 1. May be set during training; the paper raises it from 1.
        d_max: bound of the shift's correction, at least 0. May be set during training; the paper raises it from 0.
        momentum: weight of a new batch in the stored statistics (0.01 in the paper); `None` weights all equally.
        **shared: `eps` and `affine`, as batch normalization has them.

    The stored scale is the average of the biased `sqrt(var + eps)`, as in the paper's Algorithm 1, not the unbiased
    variance that batch normalization stores.

    Examples:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> BatchRenorm(1, r_max=9.0, d_max=9.0, eps=1e-12)(x).flatten().round(decimals=4).tolist()  # stored: 0 and 1
        [1.0, 3.0]

    References: ioffe2017.
    """

    def __init__(self, num_features: int, r_max: float = 3.0, d_max: float = 5.0, **shared: Unpack[Shared]) -> None:
        shared.setdefault("momentum", 0.01)
        super().__init__(num_features, **shared)
        self.r_max, self.d_max = r_max, d_max

    def _train(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            exact = at_least_float32(x.detach())
            if plain_autograd():  # the kernel batch normalization itself uses, a third of var_mean's time
                mean, var = torch.ops.aten.batch_norm_update_stats(exact, None, None, 0.0)
            else:
                var, mean = torch.var_mean(exact, reduced_axes(x), correction=0)
            std = (var + self.eps).sqrt()
            stored = self.running_moment.to(std.dtype)
            r = (std / stored).clamp(1 / self.r_max, self.r_max)
            d = ((mean - self.running_mean) / stored).clamp(-self.d_max, self.d_max)
            r, d = r.to(self.running_mean.dtype), d.to(self.running_mean.dtype)
        gain = r if self.weight is None else self.weight * r
        offset = d if self.weight is None else self.weight * d
        offset = offset if self.bias is None else offset + self.bias
        y = torch.nn.functional.batch_norm(x, None, None, gain, offset, training=True, eps=self.eps)
        self._remember(mean, std)
        return y

    def _scale(self, moment: Tensor) -> Tensor:
        return moment  # the stored number is the standard deviation itself, eps included

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, r_max={self.r_max}, d_max={self.d_max}"


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
    refuses tensors on the CPU. `group` is the process group, `None` the default one; without one it is batch
    normalization, whose `eps`, `momentum` and `affine` it has. All together need two values per channel.

    Examples:
        >>> SyncedBatchNorm(1, eps=0.0)(torch.tensor([[1.0], [5.0]])).flatten().tolist()
        [-1.0, 1.0]

    References: ioffe2015.
    """

    smallest = 0  # a process may hold one sample, as long as all together hold two

    def __init__(self, num_features: int, group: Any = None, **shared: Unpack[Shared]) -> None:
        super().__init__(num_features, **shared)
        self.group = group

    def _train(self, x: Tensor) -> Tensor:
        exact, axes = at_least_float32(x), reduced_axes(x)
        held = torch.full((1,), exact.numel() // exact.shape[1], dtype=exact.dtype, device=x.device)
        sums = all_reduce(torch.cat([exact.sum(axes), held]), self.group)
        count = sums[-1].detach()
        if float(count) < 2:
            rule = "training needs at least 2 values per channel in all processes together"
            step = "Use a larger batch, or layer.eval() to use the stored statistics"
            raise DataError("SyncedBatchNorm", rule, f"{int(count)}", step)
        mean = sums[:-1] / count
        centred = exact - per_channel(mean, x)
        var = all_reduce(centred.square().sum(axes), self.group) / count
        gain = (var + self.eps).rsqrt()
        gain = gain if self.weight is None else gain * self.weight
        y = centred * per_channel(gain, x)
        self._remember(mean, var * count / (count - 1))
        return (y if self.bias is None else y + per_channel(self.bias, x)).to(x.dtype)


registry.declare("ghost_batch", make=lambda channels, spatial: GhostBatchNorm(channels))
registry.declare("batch_renorm", make=lambda channels, spatial: BatchRenorm(channels))
