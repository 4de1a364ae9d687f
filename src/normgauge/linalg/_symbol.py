"""Norm of a convolution from above: the largest singular value of its symbol on a torus that holds the input."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

import numpy as np
import torch
from torch import Tensor

from normgauge.linalg.convolution import Convolution
from normgauge.rng import generator

SLACK = 1e-12  # relative, on float64 values: eigenvalues of a Gram matrix are good to a few n eps
_WINDOW = 4e-4  # relative, of the squared norm: what float32 leaves open is computed again in float64
_CHUNK = 8_000_000  # entries of the symbol held at once
_COARSE = 1e-3  # what a coarser grid may add to the bound, per axis


@dataclass(frozen=True)
class SymbolBound:
    """A certified upper bound on a convolution's norm."""

    value: float  # the bound, with the rounding slack added
    exact: bool  # whether the norm is this value up to twice the slack, so that it is also a lower bound
    frequencies: int  # how many were looked at
    factor: float  # the part of the bound that comes from repeating padding and from coarse grids


def symbol_bound(
    convolution: Convolution, *, avoid: Sequence[float] | None = None, at_least: float = 0.0
) -> SymbolBound:
    """Return a number the norm of a convolution on inputs of its size cannot exceed.

    With stride s, position s b + r is entry r of block b, and the map is a stride-1 convolution over blocks with
    symbol K(f) = sum over taps t of weight[:, :, t] exp(i <f, block(t)>), put at entry residue(t). Zero padding: the
    map is a circulant with rows and columns left out, so its norm is at most the largest norm of K(f) on the circle's
    frequencies. Circular padding: the same with equality when stride divides the size. Reflect and replicate padding:
    the padding map has norm sqrt(largest number of copies of one entry), times the bound of the unpadded convolution.
    A circle much longer than the kernel is sampled more coarsely, at a stated factor of at most 1.001 per axis.

    The ends of a zero-padded axis may be joined with sign -1 as well: that changes only entries that are left out, and
    moves the grid by half a step. With `avoid`, a frequency where the symbol is large, every such axis takes the sign
    whose grid stays away from it. On small inputs this is most of the gap (1.25 to 1.0002 on smooth 4x4 layers).

    Every K(f) is looked at in float32, what that leaves open again in float64, and 1e-12 is added. `at_least` is a
    lower bound on the norm, if one is known: frequencies that stay below it need no eigenvalues.

    Kind: upper, certified.
    Cost: per frequency of the half plane, a Gram matrix of side min(channels out, channels in * stride^axes) and its
    Cholesky factorization; an eigenvalue problem for the frequencies near the maximum.

    Deviations: sedghi2019 treats every convolution as circular with stride 1; for zero padding, the default in
    practice, that is another operator, and its norm is not a bound when padding exceeds half the kernel.

    Examples:
        >>> exact = 2 * math.cos(math.pi / 16)  # of the 7 x 8 difference matrix, with plus
        >>> bound = symbol_bound(Convolution(torch.tensor([[[1.0, 1.0]]]), (8,)), avoid=[0.0]).value
        >>> exact <= bound < 1.001 * exact
        True

    References: sedghi2019, cheney1966.
    """
    bounds = []
    for axes in embed(convolution):
        if avoid is not None:
            steps = [a * s * x.points / (2 * math.pi) for x, a, s in zip(axes, avoid, convolution.stride, strict=True)]
            signs = [0.5 if abs(step - round(step)) < 0.25 else 0.0 for step in steps]
            axes = [replace(axis, sign=s) if axis.free else axis for axis, s in zip(axes, signs, strict=True)]
        bounds.append(_bound(convolution.weight, convolution.groups, axes, at_least))
    return min(bounds, key=lambda bound: bound.value)


def symbol_is_exact(convolution: Convolution) -> bool:
    """Return whether `symbol_bound` is the norm itself: circular padding, or a kernel that does not overlap itself."""
    return all(axis.exact for axis in embed(convolution)[0])


def peak_frequency(convolution: Convolution, vector: Tensor) -> list[float]:
    """Return the angles at which a flat vector of the convolution's input space has most energy."""
    image = vector.reshape(-1, *convolution.size)
    sizes = [4 * n for n in convolution.size]
    dims = tuple(range(1, image.ndim))
    energy = torch.fft.fftn(image.float(), s=sizes, dim=dims).abs().square().sum(0)
    index = int(energy.argmax())
    return [2 * math.pi * int(i) / size for i, size in zip(np.unravel_index(index, sizes), sizes, strict=True)]


def _bound(weight: Tensor, groups: int, axes: list[Axis], at_least: float) -> SymbolBound:
    factor = math.prod(axis.factor for axis in axes)
    exact = all(axis.exact for axis in axes)
    scale = float(weight.abs().max())
    angles = half_plane(axes)
    if scale == 0.0:
        return SymbolBound(0.0, True, len(angles), factor)
    kernel = _Taps.sort_by_residue(weight.to(torch.float64) / scale, groups, axes)
    top = (at_least / (scale * factor)) ** 2 * (1.0 - 1e-9)
    for part in angles.split(max(1, _CHUNK // (2 * kernel.groups * kernel.rows * kernel.columns))):
        top = max(top, _largest(kernel, part, top))
    return SymbolBound(math.sqrt(top) * scale * factor * (1.0 + SLACK), exact, len(angles), factor)


def _largest(kernel: _Taps, angles: Tensor, lower: float) -> float:
    """Return the largest squared norm over `angles`, or `lower` if all are smaller.

    mu - G is positive definite exactly where all eigenvalues of G are below mu. Cholesky asks that far more cheaply
    than eigenvalues; what it cannot decide in float32 is decided in float64.
    """
    side = min(kernel.rows, kernel.columns)
    if side <= 8 or len(angles) <= 4:
        return max(lower, _largest_exactly(kernel, angles))
    grams = kernel.gram(angles, torch.float32)
    window = _WINDOW + 2e-7 * max(kernel.rows, kernel.columns)
    left = torch.arange(len(angles))
    if lower > 0.0:
        left = left[_reaches(grams, lower * (1.0 - window))]
    if len(left) > 4:  # a better candidate first, then ask again
        best = left[_power_estimates(grams[left]).topk(1 if side > 128 else 3).indices.cpu()]
        lower = max(lower, _largest_exactly(kernel, angles[best]))
        left = left[~torch.isin(left, best)]
        left = left[_reaches(grams[left], lower * (1.0 - window))]
    for part in left.split(16) if len(left) else ():
        lower = max(lower, _largest_exactly(kernel, angles[part]))
    return lower


def _reaches(grams: Tensor, level: float) -> Tensor:
    """Return for which frequencies an eigenvalue of some group is not certainly below `level`."""
    shifted = grams.neg()
    shifted.diagonal(dim1=-2, dim2=-1).add_(level)
    return torch.linalg.cholesky_ex(shifted).info.ne(0).any(1).cpu()


def _largest_exactly(kernel: _Taps, angles: Tensor) -> float:
    grams = kernel.gram(angles, torch.float64)
    return float(grams.real.max() if grams.shape[-1] == 1 else torch.linalg.eigvalsh(grams).max().clamp_min(0.0))


def _power_estimates(grams: Tensor, steps: int = 6) -> Tensor:
    """Return rough largest eigenvalues over groups: where to look first, nothing more."""
    start = torch.randn(grams.shape[-1], 1, generator=generator(0), dtype=torch.float32)
    vectors = start.to(device=grams.device, dtype=grams.dtype).expand(*grams.shape[:-1], 1)
    norms = torch.ones(())
    for _ in range(steps):
        vectors = grams @ vectors
        norms = torch.linalg.vector_norm(vectors, dim=-2, keepdim=True).clamp_min(1e-30)
        vectors = vectors / norms
    return norms[..., 0, 0].amax(1)


@dataclass(frozen=True)
class _Taps:
    """A kernel sorted by residue: for each, the blocks its taps read and the weights `[taps, groups rows columns]`."""

    parts: list[tuple[Tensor, Tensor]]
    groups: int
    rows: int
    columns: int

    @classmethod
    def sort_by_residue(cls, weight: Tensor, groups: int, axes: list[Axis]) -> _Taps:
        members: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        kernel = tuple(weight.shape[2:])
        flat = weight.reshape(weight.shape[0] * weight.shape[1], -1)
        for tap in itertools.product(*[range(k) for k in kernel]):
            place = tuple(axis.residues[t] for axis, t in zip(axes, tap, strict=True))
            members.setdefault(place, []).append(tap)
        parts = []
        for taps in members.values():
            blocks = [[axis.blocks[t] for axis, t in zip(axes, tap, strict=True)] for tap in taps]
            numbers = [int(np.ravel_multi_index(tap, kernel)) for tap in taps]
            parts.append((torch.tensor(blocks, dtype=torch.float64), flat[:, numbers].T.contiguous()))
        return cls(parts, groups, weight.shape[0] // groups, weight.shape[1] * len(parts))

    def gram(self, angles: Tensor, dtype: torch.dtype) -> Tensor:
        """Return K K^H (or K^T K^*, if smaller) as `[frequencies, groups, side, side]`."""
        total: Tensor | None = None
        wide = self.rows <= self.columns
        symbols = [self._symbol(blocks, weights.to(dtype), angles) for blocks, weights in self.parts]
        if not wide:  # K^T has the singular values of K
            symbols = [torch.cat(symbols, dim=-1).mT]
        for symbol in symbols:
            product = symbol @ symbol.mH
            total = product if total is None else total.add_(product)
        assert total is not None  # for the type checker
        return total

    def _symbol(self, blocks: Tensor, weights: Tensor, angles: Tensor) -> Tensor:
        phases = angles @ blocks.T
        real, imaginary = (part.to(weights) @ weights for part in (phases.cos(), phases.sin()))
        return torch.complex(real, imaginary).reshape(len(angles), self.groups, self.rows, -1)


# -- a convolution on a box as part of one on a torus: how long each circle must be, and what it may lose -------------


@dataclass(frozen=True)
class Axis:
    """One spatial axis of a convolution, embedded in a circle of `points` blocks of `stride` positions."""

    blocks: tuple[int, ...]  # block every tap reads, relative to the output's
    residues: tuple[int, ...]  # position of every tap inside its block
    points: int  # length of the circle, which is also the number of frequencies
    factor: float  # what the embedding may lose: padding that repeats entries, a grid coarser than the circle
    exact: bool  # whether the norm on the circle, times `factor`, is attained on the input itself
    free: bool  # whether the circle's ends may be joined with any sign, because no kept entry crosses them
    sign: float = 0.0  # shift of the frequencies in grid steps: 0, or 1/2 when the ends are joined with sign -1

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
