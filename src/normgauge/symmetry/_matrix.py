"""Matrix symmetries: GL(d) of linear neighbours and attention heads, rotations of planes and of normalized streams.

They are proposed from rescalings and from free scales of streams, and decided by moment maps.
"""

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normgauge.rng import generator
from normgauge.symmetry._axes import Hints, Slot, refinements
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import ROLES, Scale, Term, Values

Gradients = Sequence[Mapping[str, Tensor]]
EQUATIONS_PER_READER = 20
MOST_ASKED = 128  # indices of a block whose moments are written out


@dataclass(frozen=True)
class MatrixTerm(Term):
    """One tensor's share in a change of basis A: writers get A p, readers p A^-1, along the block's index.

    `outer` axes of the view number the blocks, `inner` ones form their index; a gain `by` = g that stands before this
    tensor makes A diag(g) A diag(1/g).
    """

    outer: tuple[int, ...] = ()
    inner: tuple[int, ...] = ()
    by: str = ""

    role = "matrix"

    def blocks(self, values: Tensor) -> Tensor:
        """Return a tensor as [blocks, block index, rest]."""
        view = self.slot.view_of(values)
        rest = [axis for axis in range(view.ndim) if axis not in self.outer and axis not in self.inner]
        count = math.prod(view.shape[a] for a in self.outer)
        size = math.prod(view.shape[a] for a in self.inner)
        return view.permute(*self.outer, *self.inner, *rest).reshape(count, size, -1)

    def _unblock(self, blocks: Tensor, values: Tensor) -> Tensor:
        view = self.slot.view_of(values)
        rest = [axis for axis in range(view.ndim) if axis not in self.outer and axis not in self.inner]
        order = [*self.outer, *self.inner, *rest]
        back = blocks.reshape([view.shape[a] for a in order]).permute([order.index(a) for a in range(view.ndim)])
        result = values.clone()
        if self.slot.narrow is None:
            return back.reshape(values.shape)
        wide = result.reshape(self.slot.first or values.shape)
        part = wide.narrow(*self.slot.narrow)
        part.copy_(back.reshape(part.shape))
        return wide.reshape(values.shape)

    def _gain(self, point: Values) -> Tensor | float:
        """Return what the slope is multiplied and the value divided by: the gain before a writer, its inverse else."""
        if not self.by:
            return 1.0
        gain = point[self.by].reshape(1, -1, 1)
        return gain if self.coefficient > 0 else 1 / gain

    def moment(self, point: Values, gradient: Values, *, centred: bool = False) -> tuple[Tensor, Tensor]:
        """Return [blocks, m, m] of derivatives along the entries of A at A = 1, and their magnitude.

        Of larger blocks, `MOST_ASKED` indices stand for all; where A is `centred` it fixes the vector of ones.
        """
        gain = self._gain(point)
        value, slope = (self.blocks(values[self.slot.name]) for values in (point, gradient))
        chosen = torch.randperm(value.shape[1], generator=generator(7))[:MOST_ASKED].sort().values
        some = gain[:, chosen] if isinstance(gain, Tensor) else gain
        means = ((value / gain).mean(1, keepdim=True), (slope * gain).mean(1, keepdim=True)) if centred else (0.0, 0.0)
        value, slope = value[:, chosen] / some - means[0], slope[:, chosen] * some - means[1]
        if self.coefficient > 0:
            return slope @ value.mT, slope.square() @ value.square().mT
        return -(value @ slope.mT), value.square() @ slope.square().mT

    def transform(self, point: Values, matrices: Tensor) -> Tensor:
        value, gain = point[self.slot.name], self._gain(point)
        blocks, matrices = self.blocks(value) / gain, matrices.to(value)
        after = matrices @ blocks if self.coefficient > 0 else torch.linalg.solve(matrices.mT, blocks)
        return self._unblock(after * gain, value)


ROLES["matrix"] = MatrixTerm


@dataclass(frozen=True)
class MatrixFamily(Family):
    """Blocks of changes of basis. `group` is "GL", "O", or "O1" (rotations that fix the vector of ones)."""

    @property
    def block_dimension(self) -> int:
        m = self.block
        return {"GL": m * (m - 1), "O": m * (m - 1) // 2, "O1": (m - 1) * (m - 2) // 2}[self.group]

    def act(self, point: dict[str, Tensor], matrices: Tensor) -> dict[str, Tensor]:
        result = self.coordinates.effective(point)
        for term in self.terms:
            assert isinstance(term, MatrixTerm)
            result[term.parameter] = term.transform(result, matrices)
        return self.coordinates.stored(result)

    def tangents(self, point: Mapping[str, Tensor]) -> Iterator[dict[str, Tensor]]:
        """Yield the tangent vectors of every block, one per direction of the group beyond the diagonal ones."""
        names = {name for term in self.terms for name in term.reads}
        start = {name: point[name].double() for name in self.coordinates.closure([*self.parameters, *names])}
        eye = torch.eye(self.block, dtype=torch.float64).expand(len(self), -1, -1).contiguous()
        for number in range(len(self)):
            for direction in lie_algebra(self.group, self.block):
                step = torch.zeros_like(eye)
                step[number] = direction
                carried: tuple[Any, ...] = torch.func.jvp(lambda a: self.act(start, a), (eye,), (step,))
                yield {name: carried[1][name] for name in self.parameters}

    def act_randomly(self, point: dict[str, Tensor], source: torch.Generator) -> dict[str, Tensor]:
        return self.act(point, random_matrices(self.group, len(self), self.block, source))


def lie_algebra(group: str, size: int) -> Iterator[Tensor]:
    """Yield a basis of the directions in which a group's matrices can move, without the diagonal ones of GL."""
    frame = torch.eye(size, dtype=torch.float64)
    if group == "O1":  # rotations of the complement of the vector of ones
        frame = torch.linalg.qr(torch.cat([torch.ones(size, 1, dtype=torch.float64), frame[:, 1:]], 1)).Q[:, 1:]
    for i in range(frame.shape[1]):
        for j in range(frame.shape[1]):
            if group == "GL" and i != j:
                yield torch.outer(frame[:, i], frame[:, j])
            elif group != "GL" and i < j:
                yield torch.outer(frame[:, i], frame[:, j]) - torch.outer(frame[:, j], frame[:, i])


def random_matrices(group: str, count: int, size: int, source: torch.Generator) -> Tensor:
    """Draw well-conditioned group elements far from the identity."""
    noise = torch.randn(count, size, size, generator=source, dtype=torch.float64)
    if group == "GL":
        return torch.linalg.matrix_exp(0.5 * noise / math.sqrt(size))
    skew = noise - noise.mT
    if group == "O1":
        centre = torch.eye(size, dtype=torch.float64) - 1.0 / size
        skew = centre @ skew @ centre
    return torch.linalg.matrix_exp(skew / math.sqrt(size))


def matrix_family(group: str, terms: tuple[MatrixTerm, ...], blocks: int, block: int, residual: float) -> MatrixFamily:
    return MatrixFamily("matrix", terms, blocks * block, group=group, block=block, residuals=(residual,) * blocks)


def residual_of(
    terms: tuple[MatrixTerm, ...], group: str, point: Values, gradients: Sequence[Mapping[str, Tensor]]
) -> float:
    """Return the norm of the moment map off the diagonal (its relevant part for the group), relative.

    Terms whose blocks have other sizes, such as channels of groups of another convolution, share no basis: infinite.
    """
    worst = 0.0
    for gradient in gradients:
        if len({tuple(math.prod(t.slot.view[a] for a in axes) for axes in (t.outer, t.inner)) for t in terms}) > 1:
            return math.inf
        parts = [term.moment(point, gradient, centred=group == "O1") for term in terms]
        total = torch.stack([p[0] for p in parts]).sum(0)
        scale = torch.stack([p[1] for p in parts]).sum(0)
        if group != "GL":
            total, scale = total - total.mT, scale + scale.mT
        total = total - torch.diag_embed(torch.diagonal(total, dim1=1, dim2=2)) if group == "GL" else total
        worst = max(worst, float(total.norm() / scale.sum().sqrt().clamp_min(1e-300)))
    return worst


Unit = tuple[MatrixTerm, ...]  # what reads a stream behind one gain, and the shift beside that gain


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
    writers: Sequence[MatrixTerm], readers: Sequence[Unit], group: str, point: Values, gradients: Gradients
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
        total = torch.stack([term.moment(point, gradient, centred=group == "O1")[0] for term in terms]).sum(0)
        parts.append((total - total.mT).reshape(-1).double())
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
