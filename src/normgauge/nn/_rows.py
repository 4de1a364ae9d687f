"""Parametrizations that act on each output channel's weights as one vector."""

from __future__ import annotations

from typing import Literal

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.nn.functional import _weights as maps

Gain = Literal["none", "row"]
_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


class RowParametrization(nn.Module):
    """Base of parametrizations that act on each output channel's weights as one vector."""

    centered = False

    def __init__(self, layer: nn.Module) -> None:
        super().__init__()
        self.transposed = isinstance(layer, _TRANSPOSED)
        self.groups = int(getattr(layer, "groups", 1))

    def rows(self, weight: Tensor) -> Tensor:
        """Return the weight as `[output channels, entries]`."""
        if not self.transposed:
            return weight.flatten(1)
        grouped = weight.unflatten(0, (self.groups, -1)).transpose(1, 2)
        return grouped.reshape(self.groups * weight.shape[1], -1)

    def unrows(self, rows: Tensor, like: Tensor) -> Tensor:
        """Return rows in the layout of the weight `like`."""
        if not self.transposed:
            return rows.reshape(like.shape)
        per_group = like.shape[0] // self.groups
        grouped = rows.reshape(self.groups, like.shape[1], per_group, *like.shape[2:])
        return grouped.transpose(1, 2).reshape(like.shape)


class WeightNorm(RowParametrization):
    """w = g v / ||v|| per row; `original0` is g, `original1` is v."""

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return self.unrows(maps.weight_norm(self.rows(v), g), v)

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return the lengths and the weight itself."""
        return _lengths(self.rows(weight)), weight


class CenteredWeightNorm(RowParametrization):
    """w = (v - mean) / ||v - mean|| per row, times g (`original0`) with gain "row"."""

    centered = True

    def __init__(self, layer: nn.Module, gain: Gain) -> None:
        super().__init__(layer)
        self.gain = gain

    def forward(self, *originals: Tensor) -> Tensor:
        """Return the normalized weight."""
        rows = maps.centered_weight_norm(self.rows(originals[-1]))
        return self.unrows(_apply_gain(rows, originals), originals[-1])

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weight, and with gain "row" first its centred lengths."""
        rows = self.rows(weight)
        lengths = _lengths(rows - rows.mean(1, keepdim=True), "a row must not be constant")
        return weight if self.gain == "none" else (lengths, weight)


class WeightStandardization(RowParametrization):
    """w = scale (v - mean) / sqrt(var + eps) per row, times g (`original0`) with gain "row"."""

    centered = True

    def __init__(self, layer: nn.Module, gain: Gain, eps: float, scale: float) -> None:
        super().__init__(layer)
        self.gain, self.eps, self.scale = gain, eps, scale

    def forward(self, *originals: Tensor) -> Tensor:
        """Return the normalized weight."""
        rows = maps.weight_standardization(self.rows(originals[-1]), self.eps)
        return self.unrows(_apply_gain(rows if self.scale == 1.0 else rows * self.scale, originals), originals[-1])

    def right_inverse(self, weight: Tensor) -> Tensor | tuple[Tensor, Tensor]:
        """Return the weight, and with gain "row" first the gain that gives it back."""
        rows = self.rows(weight)
        if self.gain == "none":
            return weight
        return (rows.var(1, correction=0) + self.eps).sqrt() / self.scale, weight


class UnitSphere(RowParametrization):
    """w = radius v / ||v|| per row."""

    def __init__(self, layer: nn.Module, radius: float) -> None:
        super().__init__(layer)
        self.length = radius

    def forward(self, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return self.unrows(maps.unit_sphere(self.rows(v), self.length), v)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        _lengths(self.rows(weight))
        return weight


class UnitColumns(RowParametrization):
    """w = v / ||v|| per input unit: columns of a matrix, all entries that one input channel reaches."""

    def forward(self, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return v / self._lengths(v)

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself."""
        _lengths(self._lengths(weight).flatten()[:, None], "a column must not be zero")
        return weight

    def _lengths(self, v: Tensor) -> Tensor:
        axis = 0 if self.transposed else 1
        return torch.linalg.vector_norm(v, dim=[other for other in range(v.ndim) if other != axis], keepdim=True)


class Hyperball(RowParametrization):
    """w = R v / ||v|| for the whole tensor, R its norm when wrapped or assigned."""

    def __init__(self, layer: nn.Module, weight: Tensor) -> None:
        super().__init__(layer)
        self.length: Tensor
        self.register_buffer("length", torch.linalg.vector_norm(weight.detach()))

    def forward(self, v: Tensor) -> Tensor:
        """Return the normalized weight."""
        return v * (self.length / torch.linalg.vector_norm(v))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return the weight itself, whose norm is the radius from now on."""
        self.length.copy_(_lengths(weight.detach().reshape(1, -1), "the weight must not be zero")[0])
        return weight


def _apply_gain(rows: Tensor, originals: tuple[Tensor, ...]) -> Tensor:
    return rows if len(originals) == 1 else rows * originals[0].unsqueeze(1)


def _lengths(rows: Tensor, rule: str = "a row must not be zero") -> Tensor:
    lengths = torch.linalg.vector_norm(rows, dim=1)
    if bool((lengths == 0).any()):
        number = int((lengths == 0).nonzero()[0])
        raise InputError("weight normalizer", f"{rule}: it has no direction", f"row {number}", "Initialize it first")
    return lengths
