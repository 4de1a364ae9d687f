"""Group normalization on torch's kernel, and the number of groups that fits any width."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._layout import check_channels


class GroupNorm(torch.nn.GroupNorm):
    r"""Normalize each sample over the channels of a group and space; torch's layer and operator.

    `y = weight[c] * (x - mean[g]) / sqrt(var[g] + eps) + bias[c]`, statistics per sample and group.

    Arguments are those of torch's layer; axis 1 holds the channels, if there are any.

    Raises:
        DataError: for other shapes and empty inputs.

    Examples:
        >>> layer = GroupNorm(2, 4, eps=0.0)
        >>> layer(torch.tensor([[1.0, 3.0, 10.0, 30.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]

    References: wu2018.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        check_channels("GroupNorm", input, self.num_channels)
        return super().forward(input)


def fitting_groups(channels: int, smallest: int, most: int = 32) -> int:
    """Return the largest number of groups up to `most` that divides the channels and leaves `smallest` in each.

    Examples:
        >>> [fitting_groups(channels, smallest=2) for channels in (1, 7, 10, 64, 512)]
        [1, 1, 5, 32, 32]
    """
    fits = (groups for groups in range(most, 0, -1) if channels % groups == 0 and channels // groups >= smallest)
    return next(fits, 1)


def _make(channels: int, spatial: int) -> GroupNorm:
    # Without space a group of two units knows only signs (it sends everything to -1 and 1), so groups are larger.
    return GroupNorm(fitting_groups(channels, smallest=2 if spatial else 8), channels)


registry.register(
    registry.Declaration(
        name="group",
        title="group normalization",
        placement="activation",
        axes="channels of a group and space per sample",
        statistics="group",
        behaviour="The same map in training and evaluation; no statistics are stored. By name: up to 32 groups of at "
        "least two channels (eight without space).",
        formula=r"y = \gamma \frac{x - \mu_{ig}}{\sqrt{\sigma_{ig}^2 + \epsilon}} + \beta",
        cite=("wu2018",),
        invariances=(
            registry.Invariance("input", "scale", "sample_group", exact=False),
            registry.Invariance("input", "shift", "sample_group"),
            registry.Invariance("weights", "scale", "group", exact=False),
            registry.Invariance("weights", "shift", "group", spatial=(0,)),
        ),
        make=_make,
    )
)
