"""Root mean square normalization on torch's kernel: trailing axes, or all axes of a sample with channels first."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.nn import registry
from normgauge.nn._layout import ChannelsLast, at_least_float32, check_channels, check_not_empty, per_channel


class RMSNorm(torch.nn.RMSNorm):
    r"""Divide the trailing axes of each sample by their root mean square; torch's layer and operator.

    `y = gain * x / sqrt(mean(x**2) + eps)`, or `gain * x / (sqrt(mean(x**2)) + eps)` with eps outside the root, as in
    the code of the paper. The gain is `weight`, or `1 + weight` (Gemma), which then starts at zero. Nothing is centred,
    so shifts are seen.

    Args:
        normalized_shape: the trailing axes, as for torch's layer.
        eps: of the root.
        elementwise_affine: whether there is a gain.
        gain: how it is stored, "w" or "1+w".
        eps_place: "inside" or "outside" the root.

    Raises:
        InputError: for other words.
        DataError: for an empty input.

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


_INSIDE = r"\frac{x}{\sqrt{\frac{1}{n} \sum_j x_j^2 + \epsilon}}"
_OUTSIDE = r"\frac{x}{\sqrt{\frac{1}{n} \sum_j x_j^2} + \epsilon}"
_STORED = "The same map in training and evaluation; no statistics are stored, nothing is centred."
_LAWS = (
    registry.Invariance("input", "scale", "sample", exact=False),
    registry.Invariance("weights", "scale", "tensor", exact=False),
)

registry.register(
    registry.Declaration(
        name="rms",
        title="root mean square normalization",
        placement="activation",
        axes="channels and space per sample",
        statistics="sample",
        behaviour=_STORED,
        formula=rf"y = \gamma {_INSIDE}",
        cite=("zhang2019",),
        invariances=_LAWS,
        gain="w",
        eps_place="inside",
        make=lambda channels, spatial: ChannelRMSNorm(channels) if spatial else RMSNorm(channels),
    )
)


def _declare_form(name: str, words: str, formula: str, cite: tuple[str, ...], options: dict[str, Any]) -> None:
    """Declare a form of the layer over the last axis, as transformers have it."""

    def make(channels: int, spatial: int) -> torch.nn.Module:
        layer = RMSNorm(channels, **options)
        return ChannelsLast(layer) if spatial else layer

    registry.register(
        registry.Declaration(
            name=name,
            title=f"root mean square normalization, {words}",
            placement="activation",
            axes="channels per sample",
            statistics="sample",
            behaviour=f"{_STORED} On maps the channels of each place are a sample.",
            formula=formula,
            cite=cite,
            invariances=_LAWS,
            spatial=(0,),
            make=make,
            **{"gain": "w", "eps_place": "inside", **options},
        )
    )


_declare_form(
    "rms_plus_one", "gain stored as 1 + w", rf"y = (1 + w) {_INSIDE}", ("zhang2019", "gemma2024"), {"gain": "1+w"}
)
_declare_form(
    "rms_eps_outside", "eps outside the root", rf"y = \gamma {_OUTSIDE}", ("zhang2019",), {"eps_place": "outside"}
)
