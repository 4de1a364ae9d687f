"""Batch, layer, group, instance and root mean square normalization on torch's own kernels, for 0 to 3 axes of space."""

import math
from typing import Any, Literal, Self

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.instancenorm import _InstanceNorm

from normgauge.errors import DataError, InputError, ModelError
from normgauge.nn import registry
from normgauge.nn._layout import (
    ChannelsLast,
    apply_per_channel,
    at_least_float32,
    check_channels,
    check_enough,
    check_not_empty,
    fitting_groups,
    per_channel,
)


class BatchNorm(_BatchNorm):
    r"""Normalize each channel by the mean and variance of batch and space; torch's layer for 0 to 3 spatial axes.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, with `mean` and the biased `var` over batch and space in
    training, and the stored population statistics in evaluation. These are the averages of the batches' means and of
    their unbiased variances `m / (m - 1) * var`: exponential with `momentum`, cumulative with `momentum=None`.

    Parameters, buffers and operators are those of `torch.nn.BatchNorm1d`, `2d` and `3d`; only the check of the input
    differs (in training, two values per channel). torch refuses an eps of 0; 1e-300 adds nothing.

    Examples:
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> BatchNorm(1, eps=1e-12)(x).flatten().round(decimals=5).tolist()  # a batch of two is sent to -1 and 1
        [-1.0, 1.0]

    References: ioffe2015, santurkar2018, sun2020.
    """

    def _check_input_dim(self, input: Tensor) -> None:
        check_channels("BatchNorm", input, self.num_features)
        if self.training or self.running_mean is None:
            check_enough("BatchNorm", input, 2)


class FrozenBatchNorm(torch.nn.Module):
    r"""Apply stored statistics, gain and bias that nothing changes any more.

    `y = weight * (x - running_mean) / sqrt(running_var + eps) + bias`; all four are buffers, so neither training nor an
    optimizer moves them. Nothing depends on the batch, and no invariance is left: scaling the weights before it
    scales the output.

    Examples:
        >>> layer = torch.nn.BatchNorm1d(2).eval()
        >>> x = torch.randn(3, 2)
        >>> torch.equal(FrozenBatchNorm.of(layer)(x).round(decimals=5), layer(x).round(decimals=5))
        True

    References: ioffe2015.
    """

    running_mean: Tensor
    running_var: Tensor
    weight: Tensor
    bias: Tensor

    def __init__(self, num_features: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_features, self.eps = num_features, eps
        for name, value in (("weight", 1.0), ("bias", 0.0), ("running_mean", 0.0), ("running_var", 1.0)):
            self.register_buffer(name, torch.full((num_features,), value))

    @classmethod
    def of(cls, layer: _BatchNorm) -> Self:
        """Return the frozen copy of a batch normalization layer, as it acts in evaluation."""
        if layer.running_mean is None or layer.running_var is None:
            step = "Train with track_running_stats=True, or compute population_statistics first"
            raise ModelError("FrozenBatchNorm.of", "the layer must store statistics", "track_running_stats=False", step)
        frozen = cls(layer.num_features, layer.eps)
        frozen.running_mean, frozen.running_var = layer.running_mean.clone(), layer.running_var.clone()
        if layer.affine:
            frozen.weight, frozen.bias = layer.weight.detach().clone(), layer.bias.detach().clone()
        return frozen.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input through the fixed affine map."""
        check_channels("FrozenBatchNorm", x, self.num_features)
        gain = self.weight / (self.running_var + self.eps).sqrt()
        return apply_per_channel(x, gain, self.bias - self.running_mean * gain)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{self.num_features}, eps={self.eps}"


class LayerNorm(torch.nn.LayerNorm):
    r"""Normalize the trailing axes of each sample by their mean and variance; torch's layer and operator.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, with `mean` and the biased `var` over `normalized_shape`.
    After a linear map with weights W this centres the rows: `(W - mean of rows) x` is what gets normalized.

    Examples:
        >>> LayerNorm(2, eps=0.0)(torch.tensor([[1.0, 5.0]])).tolist()
        [[-1.0, 1.0]]

    References: ba2016, sun2020.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        check_not_empty("LayerNorm", input)
        return super().forward(input)


class GroupNorm(torch.nn.GroupNorm):
    r"""Normalize each sample over the channels of a group and space; torch's layer and operator.

    `y = weight[c] * (x - mean[g]) / sqrt(var[g] + eps) + bias[c]`, statistics per sample and group.

    Examples:
        >>> layer = GroupNorm(2, 4, eps=0.0)
        >>> layer(torch.tensor([[1.0, 3.0, 10.0, 30.0]])).tolist()
        [[-1.0, 1.0, -1.0, 1.0]]

    References: wu2018.
    """

    def forward(self, input: Tensor) -> Tensor:
        """Return the normalized input."""
        check_channels(type(self).__name__, input, self.num_channels)
        return super().forward(input)


class ChannelLayerNorm(GroupNorm):
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


class InstanceNorm(_InstanceNorm):
    r"""Normalize each channel of each sample by its mean and variance over space; torch's layer, affine by default.

    `y = weight * (x - mean) / sqrt(var + eps) + bias`, statistics per sample and channel. The batch axis is always
    there: `(channels, length)` is refused, not guessed, and so is one value per channel.

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
        """Return the normalized input."""
        check_channels("InstanceNorm", input, self.num_features)
        uses_input = self.training or not self.track_running_stats
        if uses_input and input.numel() // (input.shape[0] * input.shape[1]) < 2:
            rule, step = "a channel needs at least two values in space", "Use LayerNorm for inputs without space"
            raise DataError(f"InstanceNorm({self.num_features})", rule, f"shape {tuple(input.shape)}", step)
        return self._apply_instance_norm(input)


class RMSNorm(torch.nn.RMSNorm):
    r"""Divide the trailing axes of each sample by their root mean square; torch's layer and operator.

    `y = gain * x / sqrt(mean(x**2) + eps)`, or `gain * x / (sqrt(mean(x**2)) + eps)` with eps outside the root, as in
    the code of the paper (`eps_place`). The gain is `weight`, or `1 + weight` with `gain="1+w"` (Gemma), which then
    starts at zero. Nothing is centred, so shifts are seen. Other arguments are those of torch's layer.

    Examples:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).tolist()
        [[1.0, 1.0]]
        >>> RMSNorm(2, eps=1.0, gain="1+w", eps_place="outside")(torch.tensor([[3.0, 3.0]])).tolist()
        [[0.75, 0.75]]

    References: zhang2019, gemma2024.
    """

    def __init__(
        self,
        normalized_shape: int | tuple[int, ...],
        eps: float = 1e-5,
        elementwise_affine: bool = True,
        *,
        gain: Literal["w", "1+w"] = "w",
        eps_place: Literal["inside", "outside"] = "inside",
    ) -> None:
        for word, known in ((gain, ("w", "1+w")), (eps_place, ("inside", "outside"))):
            if word not in known:
                raise InputError("RMSNorm", f"it is one of {', '.join(known)}", repr(word), "Use one of these words")
        self.gain, self.eps_place = gain, eps_place
        super().__init__(normalized_shape, eps, elementwise_affine)

    def reset_parameters(self) -> None:
        """Start at a gain of one."""
        super().reset_parameters()
        if self.gain == "1+w" and self.weight is not None:
            torch.nn.init.zeros_(self.weight)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        check_not_empty("RMSNorm", x)
        weight = 1 + self.weight if self.gain == "1+w" and self.weight is not None else self.weight
        if self.eps_place == "inside":
            return torch.nn.functional.rms_norm(x, self.normalized_shape, weight, self.eps)
        wide, axes = at_least_float32(x), tuple(range(-len(self.normalized_shape), 0))
        size = torch.linalg.vector_norm(wide, dim=axes, keepdim=True) / math.prod(self.normalized_shape) ** 0.5
        normalized = wide / (size + self.eps)
        return (normalized if weight is None else normalized * weight).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, gain={self.gain}, eps_place={self.eps_place}"


class ChannelRMSNorm(torch.nn.Module):
    r"""Divide each sample by its root mean square over channels and space, with one gain per channel.

    `y = weight[c] * x / sqrt(mean(x**2) + eps)`, the mean over all axes but the batch.

    Examples:
        >>> ChannelRMSNorm(1, eps=0.0)(torch.tensor([[[3.0, 3.0]]])).tolist()
        [[[1.0, 1.0]]]

    References: zhang2019.
    """

    def __init__(self, num_channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.num_channels, self.eps = num_channels, eps
        self.weight = torch.nn.Parameter(torch.ones(num_channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        check_channels("ChannelRMSNorm", x, self.num_channels)
        flat = x.flatten(1)
        normalized = torch.nn.functional.rms_norm(flat, flat.shape[1:], eps=self.eps).view_as(x)
        return (normalized * per_channel(self.weight, x)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{self.num_channels}, eps={self.eps}"


def _rms(channels: int, spatial: int, **form: Any) -> torch.nn.Module:
    """Return a form of the layer over the last axis, as transformers have it."""
    layer = RMSNorm(channels, **form)
    return ChannelsLast(layer) if spatial else layer


registry.declare("batch", make=lambda channels, spatial: BatchNorm(channels))
registry.declare("frozen_batch", make=lambda channels, spatial: FrozenBatchNorm(channels))
registry.declare("layer", make=lambda channels, spatial: ChannelLayerNorm(channels) if spatial else LayerNorm(channels))
registry.declare(
    "group", make=lambda channels, spatial: GroupNorm(fitting_groups(channels, 2 if spatial else 8), channels)
)
registry.declare("instance", make=lambda channels, spatial: InstanceNorm(channels) if spatial else LayerNorm(channels))
registry.declare("rms", make=lambda channels, spatial: ChannelRMSNorm(channels) if spatial else RMSNorm(channels))
registry.declare("rms_plus_one", make=lambda channels, spatial: _rms(channels, spatial, gain="1+w"))
registry.declare("rms_eps_outside", make=lambda channels, spatial: _rms(channels, spatial, eps_place="outside"))
