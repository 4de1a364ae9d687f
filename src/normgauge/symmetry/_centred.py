"""Shifts that are hidden: by a centring normalization behind its gain (W + t / gamma), by a reader's kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import Slot, element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Centred, Offset, Scale, Shift, Term, Undone, Unread
from normgauge.symmetry._trace import Hints

WIDEST = 4096  # of a reader whose kernel is written out


def centred_candidates(families: Sequence[Family], point: Mapping[str, Tensor]) -> Iterator[tuple[Term, ...]]:
    """Yield terms that may cancel because the input of a gain sums to zero over its index.

    A layer W reading gamma * z + beta with sum(z) = 0 (LayerNorm) does not see W + t 1/gamma^T, up to
    t <beta, 1/gamma> in its bias; a writer behind a layer scale before a LayerNorm does not show u/gamma.
    """
    triples: set[tuple[str, str, int]] = set()
    for family in families:
        scales = [term for term in family.terms if isinstance(term, Scale) and term.slot.narrow is None]
        vectors = [term for term in scales if _is_vector(point, term)]
        yield from _undone_terms(family, vectors, point)
        for gamma in vectors:
            size = point[gamma.parameter].numel()
            for term in scales:
                shape = tuple(point[term.parameter].shape)
                for axis in [a for a, s in enumerate(shape) if s == size and term.parameter != gamma.parameter]:
                    if (gamma.parameter, term.parameter, axis) not in triples:
                        triples.add((gamma.parameter, term.parameter, axis))
                        yield from _centred_terms(term.parameter, axis, gamma, vectors, point)


def _undone_terms(
    family: Family, vectors: Sequence[Term], point: Mapping[str, Tensor]
) -> Iterator[tuple[Term, ...]]:
    """Yield a shift beside a gain, undone by all who read it, where they have no biases for that."""
    readers = [term for term in family.terms if term.coefficient < 0 and term not in vectors]
    plain = all(t.slot.narrow is None and t.slot.view == tuple(point[t.parameter].shape) for t in readers)
    plain &= not any(_biases(t.parameter, point) for t in readers)
    if family.kind == "rescale" and family.size > 1 and readers and plain and len(vectors) + len(readers) == len(family.terms):
        for gamma, beta in permutations([t for t in vectors if t.coefficient > 0], 2):
            names = gamma.parameter, beta.parameter
            yield (Shift(beta.slot), *(Undone(t.slot, -1.0, *names) for t in readers))


def unread_candidates(point: Mapping[str, Tensor], hints: Hints) -> Iterator[tuple[Term, ...]]:
    """Yield shifts of writers along what a narrower reader maps to zero: the last layers before a small head."""
    for reader, matrix in point.items():
        for along, width in enumerate(matrix.shape):
            outputs = matrix.numel() // max(1, width)
            if matrix.ndim != 2 or not 0 < outputs < width or width > WIDEST:
                continue
            for name, value in point.items():
                for axis, size in enumerate(value.shape):
                    if size == width and name != reader and axis not in hints.kernel_axes(tuple(value.shape)):
                        rest = tuple(a for a in range(value.ndim) if a != axis)
                        slot = Slot(name, tuple(value.shape), rest)
                        yield (Unread(slot, 1.0, reader, along, axis, width - outputs),)


def _is_vector(point: Mapping[str, Tensor], term: Term) -> bool:
    shape = point[term.parameter].shape
    return sum(s > 1 for s in shape) == 1


def _centred_terms(
    name: str, axis: int, gamma: Term, vectors: Sequence[Term], point: Mapping[str, Tensor]
) -> Iterator[tuple[Term, ...]]:
    shape = tuple(point[name].shape)
    rest = tuple(a for a in range(len(shape)) if a != axis)
    centred = Centred(Slot(name, shape, rest), 1.0, gamma.parameter)
    yield (centred,)
    for bias in [other for other in _biases(name, point) if point[other].numel() == centred.size]:
        for beta in vectors:
            same = point[beta.parameter].numel() == point[gamma.parameter].numel()
            if same and beta.parameter not in (gamma.parameter, name):
                offset = Offset(element_slot(bias, tuple(point[bias].shape)), -1.0, gamma.parameter, beta.parameter)
                yield (centred, offset)


def _biases(name: str, point: Mapping[str, Tensor]) -> list[str]:
    """Return the vectors of a tensor's module."""
    return [other for other, value in point.items() if owner_of(other) == owner_of(name) and value.ndim == 1]
