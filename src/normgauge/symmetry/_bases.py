"""Where matrix symmetries may be: proposed from rescalings and from free scales of streams, decided by moment maps."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normgauge.rng import generator
from normgauge.symmetry._axes import Slot, refinements
from normgauge.symmetry._family import Family
from normgauge.symmetry._matrix import MatrixFamily, MatrixTerm, matrix_family, residual_of
from normgauge.symmetry._terms import Scale, Term
from normgauge.symmetry._trace import Hints

Gradients = Sequence[Mapping[str, Tensor]]
Unit = tuple[MatrixTerm, ...]  # what reads a stream behind one gain, and the shift beside that gain
EQUATIONS_PER_READER = 20


def change_of_basis(
    families: Sequence[Family], point: Mapping[str, Tensor], gradients: Gradients, hints: Hints, precision: float
) -> list[MatrixFamily]:
    """Return the matrix symmetries behind the given rescalings and free scales."""
    matrix_families: list[MatrixFamily] = []
    for family in families:
        if family.kind == "rescale" and family.size > 1 and all(isinstance(t, Scale) for t in family.terms):
            matrix_families.extend(_linear_blocks(family, point, gradients, hints, precision))
            matrix_families.extend(_planes(family, point, gradients, precision))
    matrix_families.extend(_between_gains(families, point, gradients, precision))
    for family in families:
        if family.size == 1 and family.scaling and all(term.slot.whole for term in family.terms):
            matrix_families.extend(_streams(family, families, point, gradients, precision))
    return matrix_families


def _linear_blocks(
    family: Family, point: Mapping[str, Tensor], gradients: Gradients, hints: Hints, precision: float
) -> Iterator[MatrixFamily]:
    """Try GL on the largest blocks of a rescaling's index: linear neighbours, attention heads."""
    if any(abs(term.coefficient) != 1 for term in family.terms):
        return
    sizes = {family.size, *(family.size // g for shape, g in hints.convolutions.items() if shape[0] == family.size)}
    for factors in refinements(family.size, hints):
        sizes.update(math.prod(factors[k:]) for k in range(1, len(factors)))
    for term in family.terms:
        kept = [term.slot.view[a] for a in term.slot.keep]
        sizes.update(math.prod(kept[k:]) for k in range(1, len(kept)))
    for block in sorted(sizes, reverse=True):
        terms = [_view_as_blocks(term, family.size // block, block) for term in family.terms]
        if block == 1 or any(term is None for term in terms):
            continue
        chosen = tuple(term for term in terms if term is not None)
        residual = residual_of(chosen, "GL", point, gradients)
        if residual < 10 * precision:
            yield matrix_family("GL", chosen, family.size // block, block, residual)
            return


def _between_gains(
    families: Sequence[Family], point: Mapping[str, Tensor], gradients: Gradients, precision: float
) -> Iterator[MatrixFamily]:
    """Try GL where a constant gain stands between linear neighbours: normalizers with stored statistics."""
    units = {unit[0].by: unit for family in _rescalings(families) for unit in _units([family], point, family.size)}
    for family in _rescalings(families):
        gains = [t.parameter for t in family.terms if t.coefficient < 0]
        writers = [MatrixTerm(t.slot, 1.0, (), t.slot.keep) for t in family.terms if t.coefficient > 0]
        plain = all(len(t.slot.keep) == 1 and not t.slot.narrow for t in family.terms)
        unit = units.pop(gains[0], None) if plain and len(gains) == 1 and writers else None
        if unit is not None:
            residual = residual_of((*writers, *unit), "GL", point, gradients)
            if residual < 10 * precision:
                yield matrix_family("GL", (*writers, *unit), 1, family.size, residual)


def _rescalings(families: Sequence[Family]) -> Iterator[Family]:
    """Yield rescalings of several indices, their inverses, and the products of two that share a vector."""
    plain = [f for f in families if f.kind == "rescale" and f.size > 1 and f.indices is None]
    inverses = [replace(f, terms=tuple(t.with_coefficient(-t.coefficient) for t in f.terms)) for f in plain]
    yield from (*plain, *inverses)
    for k, first in enumerate(plain):
        for second in (*plain[:k], *inverses[:k]):
            if first.size == second.size and {t.slot for t in first.terms} & {t.slot for t in second.terms}:
                sums: dict[Slot, float] = {}
                for term in (*first.terms, *second.terms):
                    sums[term.slot] = sums.get(term.slot, 0.0) + term.coefficient
                terms = tuple(Scale(slot, value) for slot, value in sums.items() if value)
                if all(abs(term.coefficient) == 1 for term in terms):
                    yield replace(first, terms=terms)
                    yield replace(first, terms=tuple(t.with_coefficient(-t.coefficient) for t in terms))


def _view_as_blocks(term: Term, blocks: int, block: int) -> MatrixTerm | None:
    """View a term's index as [blocks, block]."""
    slot = term.slot
    sizes = [slot.view[a] for a in slot.keep]
    for cut in range(len(sizes) + 1):
        if math.prod(sizes[:cut]) == blocks:
            return MatrixTerm(slot, term.coefficient, slot.keep[:cut], slot.keep[cut:])
    if len(slot.keep) == 1:
        axis = slot.keep[0]
        view = (*slot.view[:axis], blocks, block, *slot.view[axis + 1 :])
        return MatrixTerm(
            Slot(slot.name, view, (axis, axis + 1), slot.narrow, slot.first), term.coefficient, (axis,), (axis + 1,)
        )
    return None


def _planes(
    family: Family, point: Mapping[str, Tensor], gradients: Gradients, precision: float
) -> Iterator[MatrixFamily]:
    """Try rotations of the planes a rescaling scales (rotary embeddings)."""
    options = []
    for term in family.terms:
        slot = term.slot
        low, high = (min(slot.keep), max(slot.keep)) if slot.keep else (0, -1)
        near = [a for a in range(max(0, low - 1), min(len(slot.view), high + 2)) if a not in slot.keep]
        planes = [a for a in near if slot.view[a] == 2]
        if len(planes) != 1:
            return
        wide = Slot(slot.name, slot.view, tuple(sorted((*slot.keep, planes[0]))), slot.narrow, slot.first)
        options.append(MatrixTerm(wide, 1.0, slot.keep, (planes[0],)))
    terms = tuple(options)
    residual = residual_of(terms, "O", point, gradients)
    if terms and residual < 10 * precision:
        yield matrix_family("O", terms, family.size, 2, residual)


def _streams(
    family: Family, families: Sequence[Family], point: Mapping[str, Tensor], gradients: Gradients, precision: float
) -> Iterator[MatrixFamily]:
    """Try rotations of a residual stream: all its writers against those of its readers that turn with them."""
    writers = [term.parameter for term in family.terms if term.coefficient > 0]
    sizes = set.intersection(*({s for s in point[name].shape if s > 1} for name in writers))
    for size in sorted(sizes, reverse=True):
        readers = _readers(families, point, size, set(writers))
        options = [_along(name, point, size, 1.0) for name in writers]
        for first in (0, -1):  # square writers turn along one of their axes: rows if all are, as in nn.Linear
            terms = tuple(o[0] for o in options if len(o) == 1) or (options[0][first],)
            others = [*readers, *((term,) for o in options for term in o if o[0] not in terms and o[-1] not in terms)]
            for group in ("O", "O1"):
                if size <= (1 if group == "O" else 2):
                    continue
                turning = _turning_readers(terms, others, group, point, gradients)
                chosen = (*terms, *(term for unit in turning for term in unit))
                residual = residual_of(chosen, group, point, gradients)
                if turning and residual < 10 * precision:
                    yield matrix_family(group, chosen, 1, size, residual)
                    return


def _turning_readers(
    writers: Sequence[MatrixTerm],
    readers: Sequence[Unit],
    group: str,
    point: Mapping[str, Tensor],
    gradients: Gradients,
) -> list[Unit]:
    """Return the readers whose moments cancel those of the writers: each takes part whole or not at all."""
    target = _turning_moment(writers, group, point, gradients)
    keep = torch.randperm(target.numel(), generator=generator(7))[: EQUATIONS_PER_READER * (len(readers) + 4)]
    columns = [_turning_moment(unit, group, point, gradients)[keep] for unit in readers]
    if not columns:
        return []
    matrix = torch.stack(columns, 1)
    norms = matrix.norm(dim=0).clamp_min(1e-300)
    shares = torch.linalg.lstsq(matrix / norms, -target[keep, None], driver="gelsd").solution[:, 0] / norms
    return [unit for unit, share in zip(readers, shares.tolist(), strict=True) if share > 0.5]


def _turning_moment(
    terms: Sequence[MatrixTerm], group: str, point: Mapping[str, Tensor], gradients: Gradients
) -> Tensor:
    """Return the derivatives along all rotations, over the gradients."""
    parts = []
    for gradient in gradients:
        total = torch.stack([term.moment(point, gradient)[0] for term in terms]).sum(0)
        total = total - total.mT
        if group == "O1":
            centre = torch.eye(total.shape[-1], dtype=total.dtype) - 1.0 / total.shape[-1]
            total = centre @ total @ centre
        parts.append(total.reshape(-1).double())
    return torch.cat(parts)


def _along(name: str, point: Mapping[str, Tensor], size: int, sign: float) -> list[MatrixTerm]:
    """Return the ways a tensor can turn: along each of its axes of this size."""
    shape = tuple(point[name].shape)
    return [MatrixTerm(Slot(name, shape, (a,)), sign, (), (a,)) for a, s in enumerate(shape) if s == size]


def _readers(families: Sequence[Family], point: Mapping[str, Tensor], size: int, writers: set[str]) -> list[Unit]:
    """Return what may read a stream of this size, behind a gain or plainly."""
    units = list(_units(families, point, size))
    behind = {term.slot.name for unit in units for term in unit}
    for name, value in point.items():
        if name not in writers and name not in behind and value.ndim > 1:
            units.extend((term,) for term in _along(name, point, size, -1.0)[-1:])
    return units


def _units(families: Sequence[Family], point: Mapping[str, Tensor], size: int) -> Iterator[Unit]:
    """Yield what reads gain * z + shift: z -> A z is undone behind the gain, and the shift follows."""
    for family in families:
        vectors = [t for t in family.terms if point[t.parameter].numel() == size and t.coefficient > 0]
        wide = [t for t in family.terms if t.coefficient < 0 and point[t.parameter].ndim > 1]
        whole = family.kind == "rescale" and family.size == size and len(vectors) + len(wide) == len(family.terms)
        if whole and vectors and wide and all(t.slot.narrow is None and len(t.slot.keep) == 1 for t in wide):
            for gain in vectors:
                parts = (*wide, *(t for t in vectors if t is not gain))
                yield tuple(MatrixTerm(t.slot, t.coefficient, (), t.slot.keep, by=gain.parameter) for t in parts)
