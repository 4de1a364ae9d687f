"""Shifts that are hidden: by a centring normalization behind its gain (W + t / gamma), by a reader's kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import Slot, element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Centred, Offset, Scale, Shift, Term, Undone, Unread, kernel_basis
from normgauge.symmetry._trace import Hints

WIDEST = 4096  # of a reader whose kernel is written out
LOUDEST = 8  # slices on which a shift is tried first
CANDIDATE = 1e-5


def centred_candidates(
    families: Sequence[Family], point: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
) -> Iterator[tuple[Term, ...]]:
    """Yield terms that may cancel because the input of a gain sums to zero over its index.

    A layer W reading gamma * z + beta with sum(z) = 0 (LayerNorm) does not see W + t 1/gamma^T, up to
    t <beta, 1/gamma> in its bias; a writer behind a layer scale before a LayerNorm does not show u/gamma.
    Every gain is tried with every weight of its width, on the slices with the largest gradients first.
    """
    gains = [name for name, value in point.items() if sum(s > 1 for s in value.shape) == 1]
    for name, value in point.items():
        for axis in range(value.ndim if name not in gains else 0):
            matching = [gain for gain in gains if point[gain].numel() == value.shape[axis]]
            loudest = _loudest(gradient[name], axis) if matching else None
            for gamma in matching:
                yield from _centred_terms(name, axis, gamma, loudest, point, gradient)  # type: ignore[arg-type]
    for family in families:
        scales = [term for term in family.terms if isinstance(term, Scale) and term.slot.narrow is None]
        yield from _undone_terms(family, [term for term in scales if term.parameter in gains], point)


def _undone_terms(family: Family, vectors: Sequence[Term], point: Mapping[str, Tensor]) -> Iterator[tuple[Term, ...]]:
    """Yield a shift beside a gain, undone by all who read it, where they have no biases for that."""
    readers = [term for term in family.terms if term.coefficient < 0 and term not in vectors]
    plain = all(t.slot.narrow is None and t.slot.view == tuple(point[t.parameter].shape) for t in readers)
    plain &= not any(_biases(t.parameter, point) for t in readers)
    if (
        family.kind == "rescale"
        and family.size > 1
        and readers
        and plain
        and len(vectors) + len(readers) == len(family.terms)
    ):
        for gamma, beta in permutations([t for t in vectors if t.coefficient > 0], 2):
            names = gamma.parameter, beta.parameter
            yield (Shift(beta.slot), *(Undone(t.slot, -1.0, *names) for t in readers))


def unread_candidates(
    point: Mapping[str, Tensor], gradient: Mapping[str, Tensor], hints: Hints
) -> Iterator[tuple[Term, ...]]:
    """Yield shifts of writers along what a narrower reader maps to zero: the last layers before a small head.

    Every writer of the reader's width is tried, on the slices with the largest gradients first.
    """
    for reader, matrix in point.items():
        for along, width in enumerate(matrix.shape):
            outputs = matrix.numel() // max(1, width)
            if matrix.ndim != 2 or not 0 < outputs < width or width > WIDEST:
                continue
            blind = kernel_basis(matrix, along)
            for name, value in point.items():
                for axis, size in enumerate(value.shape):
                    if size == width and name != reader and axis not in hints.kernel_axes(tuple(value.shape)):
                        slopes = _loudest(gradient[name], axis)[0].double()
                        if float((slopes @ blind).norm()) < CANDIDATE * float(slopes.norm()):
                            rest = tuple(a for a in range(value.ndim) if a != axis)
                            slot = Slot(name, tuple(value.shape), rest)
                            yield (Unread(slot, 1.0, reader, along, axis, width - outputs),)


def _loudest(slope: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the slices along an axis with the largest gradients, and their numbers."""
    slices = slope.movedim(axis, -1).reshape(-1, slope.shape[axis])
    rows = slices.square().sum(1).topk(min(LOUDEST, len(slices))).indices
    return slices[rows], rows


def _centred_terms(
    name: str,
    axis: int,
    gamma: str,
    loudest: tuple[Tensor, Tensor],
    point: Mapping[str, Tensor],
    gradient: Mapping[str, Tensor],
) -> Iterator[tuple[Term, ...]]:
    """Yield a weight's shift by 1/gamma, alone or with its bias, if some rows of the gradient allow it."""
    shape = tuple(point[name].shape)
    centred = Centred(Slot(name, shape, tuple(a for a in range(len(shape)) if a != axis)), 1.0, gamma)
    inverse, (slopes, rows) = 1 / point[gamma].reshape(-1), loudest
    sums, sizes = slopes @ inverse, (slopes * inverse).norm(dim=1).clamp_min(1e-300)
    if float((sums.abs() / sizes).max()) < CANDIDATE:
        yield (centred,)
        return
    for bias in [other for other in _biases(name, point) if point[other].numel() == centred.size]:
        for beta in [other for other in _biases(gamma, point) if other != gamma and len(point[other]) == len(inverse)]:
            offset = Offset(element_slot(bias, tuple(point[bias].shape)), -1.0, gamma, beta)
            rest = sums + offset.gather(point, gradient)[rows]
            if float((rest.abs() / sizes).max()) < CANDIDATE:
                yield (centred, offset)


def _biases(name: str, point: Mapping[str, Tensor]) -> list[str]:
    """Return the vectors of a tensor's module."""
    return [other for other, value in point.items() if owner_of(other) == owner_of(name) and value.ndim == 1]
