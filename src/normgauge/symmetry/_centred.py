"""Shifts that a centring normalization hides behind its gain: W + t / gamma, with the bias that beta asks for."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import Slot, element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Centred, Offset, Scale, Term


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
