"""What all layers share: where the channels are in inputs `(batch, channels, *space)`, checks, when fast paths run."""

import torch
from torch import Tensor

from normgauge.errors import DataError


def plain_autograd() -> bool:
    """Return whether neither torch.func, forward-mode differentiation nor torch.compile is at work.

    The fast paths are `torch.autograd.Function`s that call fused kernels; those know nothing of tangents and batching
    rules, so that under a transform the same map is written in ordinary operators.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def reduced_axes(inputs: Tensor) -> tuple[int, ...]:
    """Return the axes of batch and space: all but axis 1."""
    return (0, *range(2, inputs.dim()))


def per_channel(statistic: Tensor, inputs: Tensor) -> Tensor:
    """View one number per channel so that it broadcasts against `(batch, channels, *space)`."""
    return statistic.view(1, -1, *(1,) * (inputs.dim() - 2))


def apply_per_channel(x: Tensor, gain: Tensor, offset: Tensor) -> Tensor:
    """Return `gain * x + offset` with one gain and offset per channel, in the type of x."""
    return torch.addcmul(per_channel(offset, x), x.to(gain.dtype), per_channel(gain, x)).to(x.dtype)


def at_least_float32(inputs: Tensor) -> Tensor:
    """Return the inputs in a type in which sums of squares are precise."""
    return inputs.to(torch.promote_types(inputs.dtype, torch.float32))


def fitting_groups(channels: int, smallest: int, most: int = 32) -> int:
    """Return the largest number of groups up to `most` that divides the channels and leaves `smallest` in each.

    Without space a group of two units knows only signs (it sends everything to -1 and 1): callers then ask for eight.

    Examples:
        >>> [fitting_groups(channels, smallest=2) for channels in (1, 7, 10, 64, 512)]
        [1, 1, 5, 32, 32]
    """
    return next((n for n in range(most, 0, -1) if channels % n == 0 and channels // n >= smallest), 1)


class ChannelsLast(torch.nn.Module):
    """A layer over the last axis, used on `(batch, channels, *space)`: the channels of each place on their own."""

    def __init__(self, layer: torch.nn.Module) -> None:
        super().__init__()
        self.layer = layer

    def forward(self, inputs: Tensor) -> Tensor:
        """Return what the layer makes of the channels of each place."""
        return self.layer(inputs.movedim(1, -1)).movedim(-1, 1)


def check_channels(layer: str, inputs: Tensor, channels: int) -> None:
    """Refuse inputs that are empty or not `(batch, channels, *space)` with at most three axes of space."""
    if not 2 <= inputs.dim() <= 5 or inputs.shape[1] != channels:
        fitting = inputs.shape[1] if inputs.dim() > 1 else "as many"
        rule = f"input must be (batch, {channels}, *space) with at most three axes of space"
        step = f"Build the layer with {fitting} channels, or move the channels to axis 1"
        raise DataError(f"{layer}({channels})", rule, f"shape {tuple(inputs.shape)}", step)
    check_not_empty(layer, inputs)


def check_not_empty(layer: str, inputs: Tensor) -> None:
    """Refuse inputs without a single value."""
    if inputs.numel() == 0:
        rule, step = "input must hold at least one value", "Drop the empty batch before the layer"
        raise DataError(layer, rule, f"shape {tuple(inputs.shape)}", step)


def check_enough(layer: str, inputs: Tensor, smallest: int) -> None:
    """Refuse inputs with too few values per channel for statistics of the batch."""
    values = inputs.numel() // inputs.shape[1]
    if values < smallest:
        rule = f"training needs at least {smallest} values per channel (batch times space)"
        step = "Use a larger batch, or layer.eval() to use the stored statistics"
        raise DataError(layer, rule, f"{values} in shape {tuple(inputs.shape)}", step)
