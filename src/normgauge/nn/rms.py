"""Root mean square normalization on torch's kernel: trailing axes, or all axes of a sample with channels first."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._layout import check_channels, check_not_empty, per_channel


class RMSNorm(torch.nn.RMSNorm):
    r"""Divide the trailing axes of each sample by their root mean square; torch's layer and operator.

    `y = weight * x / sqrt(mean(x**2) + eps)`. Nothing is centred, so shifts are seen.

    Arguments are those of torch's layer; axis 1 holds the channels, if there are any.

    Raises:
        DataError: for an empty input.

    Examples:
        >>> RMSNorm(2, eps=0.0)(torch.tensor([[3.0, 3.0]])).tolist()
        [[1.0, 1.0]]

    References: zhang2019.
    """

    def __init__(
        self, normalized_shape: int | tuple[int, ...], eps: float = 1e-5, elementwise_affine: bool = True
    ) -> None:
        super().__init__(normalized_shape, eps, elementwise_affine)

    def forward(self, x: Tensor) -> Tensor:
        """Return the normalized input."""
        check_not_empty("RMSNorm", x)
        return super().forward(x)


class ChannelRMSNorm(torch.nn.Module):
    r"""Divide each sample by its root mean square over channels and space, with one gain per channel.

    `y = weight[c] * x / sqrt(mean(x**2) + eps)`, the mean over all axes but the batch.

    Raises:
        DataError: for other shapes and empty inputs.

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


registry.register(
    registry.Declaration(
        name="rms",
        title="root mean square normalization",
        placement="activation",
        axes="channels and space per sample",
        statistics="sample",
        behaviour="The same map in training and evaluation; no statistics are stored, nothing is centred.",
        formula=r"y = \gamma \frac{x}{\sqrt{\frac{1}{n} \sum_j x_j^2 + \epsilon}}",
        cite=("zhang2019",),
        invariances=(
            registry.Invariance("input", "scale", "sample", exact=False),
            registry.Invariance("weights", "scale", "tensor", exact=False),
        ),
        make=lambda channels, spatial: ChannelRMSNorm(channels) if spatial else RMSNorm(channels),
    )
)
