"""Frozen batch normalization: a fixed affine map per channel, in training as in evaluation."""

from __future__ import annotations

from typing import Self

import torch
from torch import Tensor
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.errors import ModelError
from normgauge.nn import registry
from normgauge.nn._layout import check_channels, per_channel


class FrozenBatchNorm(torch.nn.Module):
    r"""Apply stored statistics, gain and bias that nothing changes any more.

    `y = weight * (x - running_mean) / sqrt(running_var + eps) + bias`; all four are buffers, so neither training nor an
    optimizer moves them. Nothing depends on the batch, and no invariance is left: scaling the weights before it
    scales the output.

    Args:
        num_features: channels, on axis 1.
        eps: added to the variance.

    Raises:
        DataError: for other shapes and empty inputs.

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
        """Return the frozen copy of a batch normalization layer, as it acts in evaluation.

        Raises:
            ModelError: if the layer stores no statistics.
        """
        if layer.running_mean is None or layer.running_var is None:
            raise ModelError(
                "FrozenBatchNorm.of",
                "the layer must store statistics",
                "track_running_stats=False",
                "Train with track_running_stats=True, or compute population_statistics first",
            )
        frozen = cls(layer.num_features, layer.eps)
        frozen.running_mean, frozen.running_var = layer.running_mean.clone(), layer.running_var.clone()
        if layer.affine:
            frozen.weight, frozen.bias = layer.weight.detach().clone(), layer.bias.detach().clone()
        return frozen.train(layer.training)

    def forward(self, x: Tensor) -> Tensor:
        """Return the input through the fixed affine map."""
        check_channels("FrozenBatchNorm", x, self.num_features)
        gain = self.weight / (self.running_var + self.eps).sqrt()
        offset = self.bias - self.running_mean * gain
        return torch.addcmul(per_channel(offset, x), x.to(gain.dtype), per_channel(gain, x)).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{self.num_features}, eps={self.eps}"


registry.register(
    registry.Declaration(
        name="frozen_batch",
        title="frozen batch normalization",
        placement="activation",
        axes="nothing: statistics are constants",
        statistics="running",
        behaviour="The same fixed affine map in training and evaluation; built by name it is the identity up to eps, "
        "and `FrozenBatchNorm.of(layer)` takes a trained layer's statistics.",
        formula=r"y = \gamma \frac{x - \mu}{\sqrt{\sigma^2 + \epsilon}} + \beta,\quad \mu, \sigma, \gamma, \beta"
        r"\ \text{constant}",
        cite=("ioffe2015",),
        make=lambda channels, spatial: FrozenBatchNorm(channels),
    )
)
