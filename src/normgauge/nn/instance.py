"""Instance normalization on torch's kernel, for one to three spatial axes."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.modules.instancenorm import _InstanceNorm

from normgauge.errors import DataError
from normgauge.nn import registry
from normgauge.nn._layout import check_channels
from normgauge.nn.layer import LayerNorm


class InstanceNorm(_InstanceNorm):
    r"""Normalize each channel of each sample by its mean and variance over space; torch's layer and operator.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, statistics per sample and channel.

    Arguments are those of torch's layer; axis 1 holds the channels, if there are any.

    Raises:
        DataError: for inputs with one value per channel, without space, empty, or with other channels.

    Examples:
        >>> InstanceNorm(1, eps=0.0)(torch.tensor([[[1.0, 5.0]]])).tolist()
        [[[-1.0, 1.0]]]

    References: ulyanov2016.
    """

    def __init__(
        self,
        num_features: int,
        eps: float = 1e-5,
        momentum: float = 0.1,
        affine: bool = True,
        track_running_stats: bool = False,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine, track_running_stats)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input; the batch axis is always there: (channels, length) is refused, not guessed."""
        self._check_input_dim(input)
        return self._apply_instance_norm(input)

    def _check_input_dim(self, input: Tensor) -> None:
        check_channels("InstanceNorm", input, self.num_features)
        uses_input = self.training or not self.track_running_stats
        if uses_input and input.numel() // (input.shape[0] * input.shape[1]) < 2:
            raise DataError(
                f"InstanceNorm({self.num_features})",
                "a channel needs at least two values in space",
                f"shape {tuple(input.shape)}",
                "Use LayerNorm for inputs without space",
            )


def _make(channels: int, spatial: int) -> torch.nn.Module:
    return InstanceNorm(channels) if spatial else LayerNorm(channels)


registry.register(
    registry.Declaration(
        name="instance",
        title="instance normalization",
        placement="activation",
        axes="space per sample and channel",
        statistics="sample",
        behaviour="The same map in training and evaluation; no statistics are stored. Without space a channel has one "
        "value and nothing to average: the layer by this name is then layer normalization.",
        formula=r"y = \gamma \frac{x - \mu_{ic}}{\sqrt{\sigma_{ic}^2 + \epsilon}} + \beta",
        cite=("ulyanov2016",),
        invariances=(
            registry.Invariance("input", "scale", "sample_row", exact=False),
            registry.Invariance("input", "shift", "sample_row"),
            registry.Invariance("weights", "scale", "row", exact=False),
        ),
        make=_make,
        spatial=(1, 2, 3),
        smallest=2,
    )
)
