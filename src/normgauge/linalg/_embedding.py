"""A convolution on a box as part of a convolution on a torus: how long each circle must be, and what it may lose."""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

import torch

from normgauge.linalg.convolution import Convolution

_COARSE = 1e-3  # what a coarser grid may add to the bound, per axis


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution, embedded in a circle of `points` blocks of `stride` positions.

    Attributes:
        blocks: block every tap reads, relative to the output's.
        residues: position of every tap inside its block.
        points: length of the circle, which is also the number of frequencies.
        factor: what the embedding may lose: padding that repeats entries, a grid coarser than the circle.
        exact: whether the norm on the circle, times `factor`, is attained on the input itself.
        free: whether the circle's ends may be joined with any sign, because no kept entry crosses them.
        sign: shift of the frequencies in grid steps: 0, or 1/2 when the ends are joined with sign -1.
    """

    blocks: tuple[int, ...]
    residues: tuple[int, ...]
    points: int
    factor: float
    exact: bool
    free: bool
    sign: float = 0.0

    @property
    def span(self) -> int:
        """Degree of the symbol along this axis, as a polynomial in exp(i f)."""
        return max(self.blocks) - min(self.blocks)


def embed(convolution: Convolution) -> list[list[Axis]]:
    """Return the tori a convolution is part of; every one gives a bound."""
    if convolution.mode != "circular":
        return [_embed_padded(convolution)]
    if all(n % s == 0 for n, s in zip(convolution.size, convolution.stride, strict=True)):
        return [_embed_circular(convolution)]
    return [_embed_circular(convolution), _embed_padded(convolution)]


def _embed_padded(convolution: Convolution) -> list[Axis]:
    """Embed every axis of a zero-padded convolution; other paddings become a factor and a longer input."""
    axes = []
    for axis, length in enumerate(convolution.size):
        before, after = convolution.padding[axis]
        copies = 1
        if convolution.mode != "zeros":
            # the padding map is 0/1 with one 1 per row: its norm is the root of the largest column sum
            copies = int(torch.bincount(convolution.source_positions(axis)).max())
            length, before = length + before + after, 0
        outputs = convolution.outputs[axis]
        blocks, residues = _read_positions(convolution, axis, before, convolution.stride[axis])
        low, high = min(blocks), max(blocks)
        held = -(-length // convolution.stride[axis])
        # the shortest circle on which no tap of a kept output wraps into the input and no two outputs meet
        points = max(held - low, outputs + high, held, outputs)
        # one block per output: a direct sum of equal matrices, if one of them lies inside the input
        inside = any(0 <= out + low < length // convolution.stride[axis] for out in range(outputs))
        alone = low == high and copies == 1 and inside
        axes.append(_coarsen(Axis(blocks, residues, points, math.sqrt(copies), exact=alone, free=True)))
    return axes


def _embed_circular(convolution: Convolution) -> list[Axis]:
    """Embed every axis of a circular convolution in its own circle; exact when stride divides the size."""
    axes = []
    for axis, length in enumerate(convolution.size):
        stride, outputs = convolution.stride[axis], convolution.outputs[axis]
        step = stride if length % stride == 0 else 1  # otherwise: some rows of the stride-1 circulant
        points = length // step
        blocks, residues = _read_positions(convolution, axis, convolution.padding[axis][0], step)
        rows = torch.bincount((torch.arange(outputs) * (stride // step)) % points, minlength=points)
        uniform = bool((rows == rows[0]).all())
        axes.append(_coarsen(Axis(blocks, residues, points, math.sqrt(int(rows.max())), exact=uniform, free=False)))
    return axes


def _read_positions(convolution: Convolution, axis: int, before: int, step: int) -> tuple[tuple[int, ...], ...]:
    offsets = [convolution.dilation[axis] * tap - before for tap in range(convolution.weight.shape[axis + 2])]
    return tuple(offset // step for offset in offsets), tuple(offset % step for offset in offsets)


def _coarsen(axis: Axis) -> Axis:
    """Replace a circle much longer than the kernel by a coarser grid with its factor, a constant symbol by a point.

    By M. Riesz a real trigonometric polynomial of degree d falls off its maximum no faster than cos(d x), and u* K(f) v
    has degree span / 2 after a shift; so the maximum over a grid of n points, divided by cos(pi span / (2 n)), bounds
    the maximum over all frequencies, and with it every circle.
    """
    if axis.span == 0:
        return replace(axis, points=1, free=False)
    enough = math.ceil(math.pi * axis.span / 2 / math.sqrt(2 * _COARSE)) + 1
    if axis.points <= enough:
        return axis
    factor = axis.factor / math.cos(math.pi * axis.span / (2 * enough))
    return replace(axis, points=enough, factor=factor, exact=False, free=False)


def half_plane(axes: list[Axis]) -> torch.Tensor:
    """Return the angles of the frequency grid `[frequencies, axes]`, one of every pair f, -f of equal norms."""
    numbers = torch.cartesian_prod(*[torch.arange(axis.points) for axis in axes]).reshape(-1, len(axes))
    points = torch.tensor([axis.points for axis in axes])
    signs = torch.tensor([axis.sign for axis in axes], dtype=torch.float64)
    opposite = (-numbers - (2 * signs).long()) % points
    weights = torch.tensor([math.prod(axis.points for axis in axes[place + 1 :]) for place in range(len(axes))])
    first = (numbers * weights).sum(1) <= (opposite * weights).sum(1)
    return 2 * math.pi * (numbers[first] + signs) / points
