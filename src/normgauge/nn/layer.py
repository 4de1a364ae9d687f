"""Layer normalization on torch's kernels: trailing axes, or all axes of a sample with channels first."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._layout import check_channels, check_not_empty


class LayerNorm(torch.nn.LayerNorm):
    r"""Normalize the trailing axes of each sample by their mean and variance; torch's layer and operator.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, with `mean` and the biased `var` over `normalized_shape`.
    After a linear map with weights W this centres the rows: `(W - mean of rows) x` is what gets normalized.

    Arguments are those of torch's layer; axis 1 holds the channels, if there are any.

    Raises:
        DataError: for an empty input.

    Examples:
        >>> LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 5.0]])).tolist()
        [[-1.0, 1.0]]

    References: ba2016, sun2020.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        check_not_empty("LayerNorm", input)
        return super().forward(input)


class ChannelLayerNorm(torch.nn.GroupNorm):
    r"""Normalize each sample over channels and space, with one gain and bias per channel.

    `y = weight[c] * (x - mean) / sqrt(var + eps) + bias[c]`, statistics over all axes but the batch. This is layer
    normalization for maps `(batch, channels, *space)` of any size: torch's group normalization with one group.

    Examples:
        >>> layer = ChannelLayerNorm(1, eps=0.0)
        >>> layer(torch.tensor([[[1.0, 5.0]]])).tolist()
        [[[-1.0, 1.0]]]

    References: ba2016, wu2018.
    """

    def __init__(self, num_channels: int, eps: float = 1e-5, affine: bool = True) -> None:
        super().__init__(1, num_channels, eps=eps, affine=affine)

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        check_channels("ChannelLayerNorm", input, self.num_channels)
        return super().forward(input)


registry.register(
    registry.Declaration(
        name="layer",
        title="layer normalization",
        placement="activation",
        axes="channels and space per sample",
        statistics="sample",
        behaviour="The same map in training and evaluation; no statistics are stored.",
        formula=r"y = \gamma \frac{x - \mu_i}{\sqrt{\sigma_i^2 + \epsilon}} + \beta",
        cite=("ba2016", "sun2020"),
        invariances=(
            registry.Invariance("input", "scale", "sample", exact=False),
            registry.Invariance("input", "shift", "sample"),
            registry.Invariance("weights", "scale", "tensor", exact=False),
            registry.Invariance("weights", "shift", "tensor", spatial=(0,)),
        ),
        make=lambda channels, spatial: ChannelLayerNorm(channels) if spatial else LayerNorm(channels),
    )
)
