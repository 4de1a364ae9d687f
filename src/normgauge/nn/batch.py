"""Batch normalization on torch's kernels, for any number of spatial axes."""

from __future__ import annotations

from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.nn import registry
from normgauge.nn._layout import check_channels, check_enough


class BatchNorm(_BatchNorm):
    r"""Normalize each channel by the mean and variance of batch and space; torch's layer for 0 to 3 spatial axes.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, with `mean` and the biased `var` over batch and space in
    training, and the stored population statistics in evaluation. These are the averages of the batches' means and of
    their unbiased variances `m / (m - 1) * var`: exponential with `momentum`, cumulative with `momentum=None`.

    It is a `torch.nn.modules.batchnorm._BatchNorm` with the same parameters, buffers and operators as
    `torch.nn.BatchNorm1d`, `2d` and `3d`; only the check of the input differs.

    Args:
        num_features: channels, on axis 1.
        eps: added to the variance; scale invariance is approximate by it. torch refuses 0; 1e-300 adds nothing.
        momentum: weight of a new batch in the population statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias`.
        track_running_stats: keep population statistics for evaluation.

    Raises:
        DataError: in training, for fewer than two values per channel; for other shapes and empty inputs.

    Examples:
        >>> import torch
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> BatchNorm(1, eps=1e-12)(x).flatten().round(decimals=5).tolist()  # a batch of two is sent to -1 and 1
        [-1.0, 1.0]

    References: ioffe2015, santurkar2018, sun2020.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        check_channels("BatchNorm", input, self.num_features)
        if self.training or self.running_mean is None:
            check_enough("BatchNorm", input, 2)


registry.register(
    registry.Declaration(
        name="batch",
        title="batch normalization",
        placement="activation",
        axes="batch and space per channel",
        statistics="batch",
        behaviour="Training uses the batch's mean and variance; evaluation the stored population statistics, "
        "where it is an affine map per channel.",
        formula=r"y = \gamma \frac{x - \mu_B}{\sqrt{\sigma_B^2 + \epsilon}} + \beta",
        cite=("ioffe2015", "santurkar2018", "sun2020"),
        invariances=(
            registry.Invariance("input", "scale", "row", exact=False, modes=("train",)),
            registry.Invariance("input", "shift", "row", modes=("train",)),
            registry.Invariance("weights", "scale", "row", exact=False, modes=("train",)),
        ),
        make=lambda channels, spatial: BatchNorm(channels),
        smallest=2,
    )
)
