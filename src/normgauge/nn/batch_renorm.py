"""Batch renormalization: batch statistics in the gradient, population statistics in the value."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._eager import plain_autograd
from normgauge.nn._layout import reduced_axes
from normgauge.nn._population import BatchStatisticsNorm


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
        eps: added to the variance.
        momentum: weight of a new batch in the stored statistics (0.01 in the paper); `None` weights all equally.
        affine: learn `weight` and `bias`.

    Raises:
        DataError: in training, for fewer than two values per channel; for other shapes and empty inputs.

    Deviations:
        None. The stored scale is the average of the biased `sqrt(var + eps)`, as in the paper's Algorithm 1, not the
        unbiased variance that batch normalization stores.

    Examples:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> BatchRenorm(1, r_max=9.0, d_max=9.0, eps=1e-12)(x).flatten().round(decimals=4).tolist()  # stored: 0 and 1
        [1.0, 3.0]

    References: ioffe2017.
    """

    def __init__(
        self,
        num_features: int,
        r_max: float = 3.0,
        d_max: float = 5.0,
        eps: float = 1e-5,
        momentum: float | None = 0.01,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.r_max, self.d_max = r_max, d_max

    def _train(self, x: Tensor) -> Tensor:
        with torch.no_grad():
            var, mean = _moments(x)
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


def _moments(x: Tensor) -> tuple[Tensor, Tensor]:
    exact = x.detach() if x.dtype in (torch.float32, torch.float64) else x.detach().float()
    if plain_autograd():  # the kernel batch normalization itself uses, a third of var_mean's time
        mean, var = torch.ops.aten.batch_norm_update_stats(exact, None, None, 0.0)
        return var, mean
    var, mean = torch.var_mean(exact, reduced_axes(x), correction=0)
    return var, mean


registry.register(
    registry.Declaration(
        name="batch_renorm",
        title="batch renormalization",
        placement="activation",
        axes="batch and space per channel",
        statistics="batch",
        behaviour="Training normalizes by the batch and corrects by r and d towards the stored statistics, without "
        "gradient through r and d; evaluation uses the stored statistics. The gradient, not the value, has the "
        "invariances of batch normalization.",
        formula=r"y = \gamma \left( \frac{x - \mu_B}{\sigma_B} r + d \right) + \beta,\quad "
        r"r = \mathrm{clip}\left(\frac{\sigma_B}{\sigma}\right),\ "
        r"d = \mathrm{clip}\left(\frac{\mu_B - \mu}{\sigma}\right)",
        cite=("ioffe2017",),
        make=lambda channels, spatial: BatchRenorm(channels),
        smallest=2,
        detached=True,
    )
)
