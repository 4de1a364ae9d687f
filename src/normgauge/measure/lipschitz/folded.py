"""Linear layers that follow each other, kept as one linear map so that its own norm can be taken."""

from __future__ import annotations

import math
from dataclasses import dataclass, field
from functools import cached_property

import torch
from torch import Tensor, nn

from normgauge.linalg import Convolution
from normgauge.measure.lipschitz.linear_layer import LinearMap
from normgauge.measure.lipschitz.operator_norm import BracketKind, bracket_of
from normgauge.measure.lipschitz.reach import Reach, constant_gain
from normgauge.network import fold_channels

_SLACK = 1e-11
Norms = dict[tuple[str, ...], tuple[float, float]]


@dataclass(frozen=True)
class Folded:
    """One linear map from `base` to here: a diagonal per channel, a matrix on the last axis, or a convolution.

    Attributes:
        base: the tensor before it.
        key: the layers it is made of, under which its norm is remembered.
        norms: lower and upper bounds of norms found so far, shared by all maps of one network.
        weight: factors per channel, matrix, or kernel, in float64.
        offset: what a matrix adds; `None` for the others.
        layer: the convolution whose geometry the kernel has; `None` for a diagonal and a matrix.
        size: spatial size of the convolution's input.
        axis: of the channels, for a diagonal.
    """

    base: Reach
    key: tuple[str, ...]
    norms: Norms = field(repr=False)
    weight: Tensor
    offset: Tensor | None = None
    layer: nn.Module | None = None
    size: tuple[int, ...] = ()
    axis: int = 1

    def norm(self) -> float:
        """Return a certified upper bound of the norm."""
        return self._bracket("certified")[1]

    def likely_norm(self) -> float:
        """Return an estimate of the norm, widened as the bound was where this map went on to be folded; for display."""
        if ("certified", *self.key) in self.norms:
            return self.norm()
        later = [key for key in self.norms if key[0] == "certified" and key[1 : len(self.key) + 1] == self.key]
        low, high = self.norms[later[0]] if later else (1.0, 1.0)
        return self._bracket("estimate")[0] * (high / low if low > 0 else 1.0)

    def _bracket(self, kind: BracketKind) -> tuple[float, float]:
        key = (kind, *self.key)
        if key not in self.norms:
            self.norms[key] = self._measure(kind)
        return self.norms[key]

    def _measure(self, kind: BracketKind) -> tuple[float, float]:
        if self.weight.ndim == 1:
            largest = float(self.weight.abs().max())
            return largest, largest * (1 + _SLACK)
        if self.layer is None:
            operator = Convolution(self.weight.unsqueeze(-1), (1,))
        else:
            operator = Convolution.of(self.layer, self.size, self.weight)
        map_ = LinearMap("layer", operator.input_shape, self.weight, operator, torch.float32)
        bracket = bracket_of(map_, kind, steps=None, delta=1e-10)
        return bracket.lower, bracket.upper * (1 + _SLACK)

    def then_factors(self, name: str, factors: Tensor, offset: Tensor | None, axis: int) -> Folded | None:
        """Return the map followed by factors per channel; `None` where they act on another axis."""
        key = (*self.key, name)
        if not _is_in_range(self.weight, factors):
            return None
        if self.weight.ndim == 1:
            same = axis == self.axis
            return Folded(self.base, key, self.norms, self.weight * factors, axis=axis) if same else None
        if self.layer is None:
            if axis != -1:
                return None
            return Folded(
                self.base, key, self.norms, self.weight * factors[:, None], _scale_offset(self.offset, factors, offset)
            )
        if axis != 1:
            return None
        weight = fold_channels(self.layer, self.weight, factors, after=True)
        return Folded(base=self.base, key=key, norms=self.norms, weight=weight, layer=self.layer, size=self.size)

    def then_matrix(self, name: str, matrix: Tensor, offset: Tensor | None) -> Folded | None:
        """Return the map followed by a matrix on the last axis."""
        apart = self.layer is not None or (self.weight.ndim == 1 and self.axis != -1)
        if apart or not _is_in_range(self.weight, matrix):
            return None
        key = (*self.key, name)
        if self.weight.ndim == 1:  # its own offset is not known
            return Folded(self.base, key, self.norms, matrix * self.weight, None)
        total = None if self.offset is None or offset is None else matrix @ self.offset + offset
        return Folded(self.base, key, self.norms, matrix @ self.weight, total)

    def then_convolution(self, name: str, layer: nn.Module, weight: Tensor, size: tuple[int, ...]) -> Folded | None:
        """Return the map followed by a convolution: factors per input channel enter its kernel."""
        if self.weight.ndim != 1 or self.axis != 1 or not _is_in_range(self.weight, weight):
            return None
        weight = fold_channels(layer, weight, self.weight, after=False)
        return Folded(base=self.base, key=(*self.key, name), norms=self.norms, weight=weight, layer=layer, size=size)


@dataclass(frozen=True)
class Pending:
    """The output of a linear map whose norm is taken only when something not linear follows.

    Attributes:
        value: at the data.
        folded: the map.
    """

    value: Tensor
    folded: Folded

    @cached_property
    def certified(self) -> Reach:
        """The reach of the output, by a certified norm."""
        return self._reach(self.folded.norm())

    def estimated_reach(self) -> Reach:
        """Return the reach by the certified norm if it was taken, else by an estimate; for display only."""
        return self._reach(self.folded.likely_norm())

    def _reach(self, norm: float) -> Reach:
        folded, base = self.folded, self.folded.base
        rows = peak = math.inf
        if folded.offset is not None and math.isfinite(base.rows):
            rows = norm * base.rows + float(folded.offset.norm())
            peak = float(folded.weight.norm(dim=1).max()) * base.rows + float(folded.offset.abs().max())
        return base.pass_through(constant_gain(norm, peak, rows), self.value)

    def drop_value(self) -> Pending:
        """Return the numbers without the tensor."""
        return Pending(self.value.new_empty(0), self.folded)


def _is_in_range(first: Tensor, second: Tensor) -> bool:
    """Tell whether a product stays where float64 keeps its digits; else norms are taken apart and their logs add up."""
    sizes = float(first.abs().max()), float(second.abs().max())
    return 0.0 in sizes or 1e-140 < sizes[0] * sizes[1] < 1e140


def _scale_offset(offset: Tensor | None, factors: Tensor, shift: Tensor | None) -> Tensor | None:
    return None if offset is None or shift is None else offset * factors + shift
