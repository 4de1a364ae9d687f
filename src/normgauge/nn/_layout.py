"""Where the channels are: the shape rules all layers share, for inputs `(batch, channels, *space)`."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.errors import DataError


def reduced_axes(inputs: Tensor) -> tuple[int, ...]:
    """Return the axes of batch and space: all but axis 1."""
    return (0, *range(2, inputs.dim()))


def per_channel(statistic: Tensor, inputs: Tensor) -> Tensor:
    """View one number per channel so that it broadcasts against `(batch, channels, *space)`."""
    return statistic.view(1, -1, *(1,) * (inputs.dim() - 2))


def at_least_float32(inputs: Tensor) -> Tensor:
    """Return the inputs in a type in which sums of squares are precise."""
    return inputs.to(torch.promote_types(inputs.dtype, torch.float32))


class ChannelsLast(torch.nn.Module):
    """A layer over the last axis, used on `(batch, channels, *space)`: the channels of each place on their own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layer makes of the channels of each place."""
        return self.layer(inputs.movedim(1, -1)).movedim(-1, 1)


def check_channels(layer: str, inputs: Tensor, channels: int) -> None:
    """Refuse inputs that are not `(batch, channels, *space)` with at most three axes of space.

    Raises:
        DataError: naming the shape that came.
    """
    if not 2 <= inputs.dim() <= 5 or inputs.shape[1] != channels:
        raise DataError(
            f"{layer}({channels})",
            f"input must be (batch, {channels}, *space) with at most three axes of space",
            f"shape {tuple(inputs.shape)}",
            f"Build the layer with {inputs.shape[1] if inputs.dim() > 1 else 'as many'} channels, "
            "or move the channels to axis 1",
        )
    check_not_empty(layer, inputs)


def check_not_empty(layer: str, inputs: Tensor) -> None:
    """Refuse inputs without a single value.

    Raises:
        DataError: naming the shape that came.
    """
    if inputs.numel() == 0:
        raise DataError(
            layer,
            "input must hold at least one value",
            f"shape {tuple(inputs.shape)}",
            "Drop the empty batch before the layer",
        )


def check_enough(layer: str, inputs: Tensor, smallest: int) -> None:
    """Refuse inputs with too few values per channel for statistics of the batch.

    Raises:
        DataError: naming the number of values that came.
    """
    values = inputs.numel() // inputs.shape[1]
    if values < smallest:
        raise DataError(
            layer,
            f"training needs at least {smallest} values per channel (batch times space)",
            f"{values} in shape {tuple(inputs.shape)}",
            "Use a larger batch, or layer.eval() to use the stored statistics",
        )
