"""Shifts that are hidden: by a centring normalization behind its gain (W + t / gamma), by a reader's kernel."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import Slot, element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Centred, Offset, Scale, Term, Unread
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
        for gamma in vectors:
            size = point[gamma.parameter].numel()
            for term in scales:
                shape = tuple(point[term.parameter].shape)
                for axis in [a for a, s in enumerate(shape) if s == size and term.parameter != gamma.parameter]:
                    if (gamma.parameter, term.parameter, axis) not in triples:
                        triples.add((gamma.parameter, term.parameter, axis))
                        yield from _centred_terms(term.parameter, axis, gamma, vectors, point)


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
    biases = [
        other
        for other, value in point.items()
        if owner_of(other) == owner_of(name) and value.ndim == 1 and value.numel() == centred.size
    ]
    for bias in biases:
        for beta in vectors:
            same = point[beta.parameter].numel() == point[gamma.parameter].numel()
            if same and beta.parameter not in (gamma.parameter, name):
                offset = Offset(element_slot(bias, tuple(point[bias].shape)), -1.0, gamma.parameter, beta.parameter)
                yield (centred, offset)
