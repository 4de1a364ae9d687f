"""Population statistics: what evaluation uses in place of a batch, gathered over the batches of training."""

from collections.abc import Iterable
from typing import TypedDict

import torch
from torch import Tensor

from normgauge.errors import DataError, InputError
from normgauge.nn._layout import apply_per_channel, check_channels, check_enough, reduced_axes


class Shared(TypedDict, total=False):
    """What all layers with statistics of the batch take: `eps`, `momentum`, and `affine` to learn `weight` and `bias`.

    `momentum` is the weight of a new batch in the stored statistics; `None` weights all batches equally.
    """

    eps: float
    momentum: float | None
    affine: bool


class BatchStatisticsNorm(torch.nn.Module):
    """Base of the layers that normalize by statistics of the batch and remember averages of them for evaluation.

    A subclass says what its two statistics per channel are, a centre and a moment, and how a moment becomes a scale.
    Parameters and buffers are named as in torch's batch normalization where they mean the same; axis 1 holds the
    `num_features` channels.
    """

    running_mean: Tensor
    running_moment: Tensor
    num_batches_tracked: Tensor
    weight: torch.nn.Parameter | None
    bias: torch.nn.Parameter | None
    smallest = 2
    moment = "running_moment"  # the buffer of the second statistic

    def __init__(self, num_features: int, eps: float = 1e-5, momentum: float | None = 0.1, affine: bool = True) -> None:
        super().__init__()
        if num_features < 1:
            raise InputError(type(self).__name__, "num_features is at least 1", str(num_features), "Count the channels")
        if momentum is not None and not 0 <= momentum <= 1:
            rule = "momentum is between 0 and 1, or None"
            raise InputError(type(self).__name__, rule, str(momentum), "Use 0.1 or None")
        self.num_features, self.eps, self.momentum, self.affine = num_features, eps, momentum, affine
        self.weight = torch.nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = torch.nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer(self.moment, torch.ones(num_features))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input, by the batch's statistics in training and the stored ones in evaluation."""
        check_channels(type(self).__name__, x, self.num_features)
        if not self.training:
            return self._evaluate(x)
        check_enough(type(self).__name__, x, self.smallest)
        return self._train(x)

    def _train(self, x: Tensor) -> Tensor:
        raise NotImplementedError

    def _scale(self, moment: Tensor) -> Tensor:
        return (moment + self.eps).sqrt()

    def _evaluate(self, x: Tensor) -> Tensor:
        gain = 1 / self._scale(self.running_moment)
        gain = gain if self.weight is None else gain * self.weight
        offset = -self.running_mean * gain if self.bias is None else self.bias - self.running_mean * gain
        return apply_per_channel(x, gain, offset)

    def _remember(self, mean: Tensor, moment: Tensor) -> None:
        """Average the batch's statistics into the population's."""
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            for stored, new in ((self.running_mean, mean), (getattr(self, self.moment), moment)):
                stored.lerp_(new.detach().to(stored.dtype), share)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{self.num_features}, eps={self.eps}, momentum={self.momentum}, affine={self.affine}"


def population_statistics(batches: Iterable[Tensor]) -> tuple[Tensor, Tensor]:
    r"""Return mean and variance of the population from batches, as inference with batch normalization uses them.

    `mean = E_B[mean_B]` and `var = E_B[m / (m - 1) * var_B]`, with m values per channel in batch B, over batch and
    space. Both are unbiased for independent samples; batches are weighted equally (cumulative average), as printed
    for batches of one size. Each is `(batch, channels, *space)` with at least two values per channel.

    Kind: unbiased. Cost: one pass.

    Examples:
        >>> mean, var = population_statistics([torch.tensor([[0.0], [2.0]]), torch.tensor([[4.0], [6.0]])])
        >>> mean.item(), var.item()  # var is within batches: 2 * 1, whatever the means are
        (3.0, 2.0)

    References: batchnorm_article, ioffe2015.
    """
    mean = var = torch.empty(0)
    count = 0
    for count, batch in enumerate(batches, start=1):
        check_channels("population_statistics", batch, batch.shape[1] if batch.dim() > 1 else 0)
        check_enough("population_statistics", batch, 2)
        batch_var, batch_mean = torch.var_mean(batch, reduced_axes(batch), correction=1)
        mean = batch_mean if count == 1 else mean.lerp(batch_mean, 1 / count)
        var = batch_var if count == 1 else var.lerp(batch_var, 1 / count)
    if not count:
        raise DataError("population_statistics", "at least one batch is needed", "none", "Pass the loader's inputs")
    return mean, var
