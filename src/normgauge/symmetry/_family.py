"""`Family`: many generators of one shape, one per index; `Symmetry`: one of them, as users meet it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from normgauge.symmetry._axes import Slot, element_slot, whole_slot
from normgauge.symmetry._effective import PLAIN, Coordinates, LengthAndDirection
from normgauge.symmetry._terms import Scale, Term, Values, term_from_json

Kind = Literal["scale", "shift", "rescale", "matrix", "dead", "fibre"]
SymmetryStatus = Literal["exact", "exact_here", "exact_without_eps", "batch_statistics_only", "undecided"]


@dataclass(frozen=True)
class Symmetry:
    """One generator of parameter changes that leave the function unchanged, with its certificate.

    Attributes:
        kind: scale, shift, rescale, matrix, dead or fibre (no closed form).
        parameters: the tensors that change together.
        index: which slice, unit or block of them.
        residual: |<v, g>| relative to its summands, the largest over the probes at a redrawn point.
        certificate: the finite changes that were tried and how far the outputs moved.
        status: exact (at every parameter value), exact_here (at these values only), exact_without_eps,
            batch_statistics_only or undecided.
        coefficients: the exponents (scales) or factors (shifts) of `parameters`.
        dimension: how many directions this item stands for (more than one for kinds "matrix" and "fibre").
    """

    kind: Kind
    parameters: tuple[str, ...]
    index: int
    residual: float
    certificate: Mapping[str, float]
    status: SymmetryStatus
    coefficients: tuple[float, ...]
    dimension: int = 1


@dataclass(frozen=True)
class Family:
    """Generators that differ by an index only: v_i = sum over terms of coefficient times field i.

    Attributes:
        kind: what the generators are.
        terms: the tensors that change together.
        size: how many indices there are.
        indices: the indices that are symmetries; `None` for all.
        group: for kind "matrix": "GL" or "O", acting on blocks of `block` indices.
        block: the size of a block for kind "matrix".
        status: the certificate's verdict for the whole family.
        certificate: numbers behind the verdict.
        residuals: one number per index in `indices`.
        note: a sentence on what it is, where the terms do not say.
        counted: whether its generators are directions of `Symmetries.dimension` (what holds only here is not).
        coordinates: where the terms act, if not on the parameters as they are stored.
    """

    kind: Kind
    terms: tuple[Term, ...]
    size: int
    indices: tuple[int, ...] | None = None
    group: str = ""
    block: int = 1
    status: SymmetryStatus = "undecided"
    certificate: Mapping[str, float] = field(default_factory=dict)
    residuals: tuple[float, ...] = ()
    note: str = ""
    counted: bool = True
    coordinates: Coordinates = PLAIN

    @property
    def items(self) -> tuple[int, ...]:
        return tuple(range(self.size)) if self.indices is None else self.indices

    def __len__(self) -> int:
        """Return the number of generators (blocks, for kind "matrix")."""
        if self.kind == "matrix":
            return self.size // self.block
        return self.size if self.indices is None else len(self.indices)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that change together."""
        return self.coordinates.closure(tuple(dict.fromkeys(term.parameter for term in self.terms)))

    @property
    def coefficients(self) -> tuple[float, ...]:
        return tuple(term.coefficient for term in self.terms)

    @property
    def scaling(self) -> bool:
        """Whether the finite change multiplies."""
        return all(term.finite_scale for term in self.terms)

    @property
    def block_dimension(self) -> int:
        """Directions of one item: of a block those beyond the diagonal ones, which count as rescalings."""
        return 1

    def amounts(self, values: Tensor) -> Tensor:
        """Write one number per generator onto the whole index."""
        if self.indices is None:
            return values
        wide = values.new_zeros(self.size)
        wide[list(self.indices)] = values
        return wide

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return <v_i, gradient> per generator."""
        point, gradient = self._carry(point, gradient)
        total = torch.stack([term.gather(point, gradient) for term in self.terms]).sum(0)
        return total if self.indices is None else total[list(self.indices)]

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the size of `gather` if the summands had random signs."""
        point, gradient = self._carry(point, gradient)
        total = torch.stack([term.magnitude(point, gradient) for term in self.terms]).square().sum(0).sqrt()
        return total if self.indices is None else total[list(self.indices)]

    def _carry(self, point: Values, gradient: Values) -> tuple[Values, Values]:
        if not self.coordinates.frames:
            return point, gradient
        effective = self.coordinates.effective(point)
        return effective, self.coordinates.pull(effective, gradient)

    def field(self, point: Values, values: Tensor) -> dict[str, Tensor]:
        """Return the tangent vector sum_i values_i v_i, on the tensors that change."""
        result: dict[str, Tensor] = {}
        effective, wide = self.coordinates.effective(point), self.amounts(values)
        for term in self.terms:
            part = term.field(effective, wide)
            result[term.parameter] = result[term.parameter] + part if term.parameter in result else part
        return self.coordinates.push(effective, result)

    def act(self, point: dict[str, Tensor], values: Tensor) -> dict[str, Tensor]:
        """Return the parameters after the finite change with these amounts."""
        start, wide = self.coordinates.effective(point), self.amounts(values)
        result = dict(start)
        for term in self.terms:
            if term.finite_scale:
                result[term.parameter] = term.act(result, wide)
        for term in self.terms:
            if not term.finite_scale:  # shifts read weights, which a family of shifts does not change
                result[term.parameter] = result[term.parameter] + (term.act(start, wide) - start[term.parameter])
        return self.coordinates.stored(result)

    def subset(self, chosen: Sequence[int]) -> Family:
        """Return the family with some of its generators only (positions in `items`)."""
        items = self.items
        residuals = tuple(self.residuals[k] for k in chosen) if self.residuals else ()
        return replace(self, indices=tuple(items[k] for k in chosen), residuals=residuals)

    def describe(self) -> str:
        """Name the tensors with their exponents or factors."""
        parts = []
        for term in self.terms:
            sign = "" if term.coefficient == 1 else ("-" if term.coefficient == -1 else f"{term.coefficient:g} ")
            parts.append(f"{sign}{self._titled(term.describe())}")
        return ", ".join(parts)

    def _titled(self, words: str) -> str:
        for frame in self.coordinates.frames:
            for name in frame.names:
                words = words.replace(name, frame.title(name), 1) if name in words else words
        return words

    def symmetries(self) -> Iterator[Symmetry]:
        for position in range(len(self)):
            yield self.symmetry(position)

    def symmetry(self, position: int) -> Symmetry:
        matrix = self.kind in ("matrix", "fibre")
        return Symmetry(
            kind=self.kind,
            parameters=self.parameters,
            index=position if matrix else self.items[position],
            residual=self.residuals[position] if position < len(self.residuals) else float("nan"),
            certificate=self.certificate,
            status=self.status,
            coefficients=self.coefficients,
            dimension=self.block_dimension,
        )

    def to_json(self) -> dict[str, Any]:
        plain = {name: getattr(self, name) for name in Family.__dataclass_fields__}
        terms, coordinates = [term.to_json() for term in self.terms], self.coordinates.to_json()
        return {**plain, "terms": terms, "certificate": dict(self.certificate), "coordinates": coordinates}


def family_from_json(data: Mapping[str, Any]) -> Family:
    rest = dict(data)
    rest["terms"] = tuple(term_from_json(term) for term in data["terms"])
    rest["indices"] = None if data["indices"] is None else tuple(data["indices"])
    rest["residuals"] = tuple(data["residuals"])
    rest["coordinates"] = Coordinates.from_json(data["coordinates"])
    return Family(**rest)


def carry_back(family: Family, coordinates: Coordinates, point: Values) -> Family:
    """Return a family found in effective coordinates as one of the stored parameters.

    Lengths without effect are free scales of the directions; scales of a weight's slices are scales of their gains;
    everything else keeps the coordinates it needs.
    """
    framed = coordinates.about([*family.parameters, *(name for term in family.terms for name in term.reads)])
    if not framed.frames:
        return family
    if not family.terms:
        return replace(family, coordinates=framed)
    made = {f.direction: f for f in framed.frames if isinstance(f, LengthAndDirection)}
    lengths = {f.gain: f for f in made.values()}
    first = family.terms[0]
    if family.kind == "dead" and len(family.terms) == 1 and first.parameter in lengths:
        frame = lengths[first.parameter]
        slot = Slot(frame.direction, tuple(point[frame.direction].shape), (frame.axis,))
        return replace(family, kind="scale", terms=(Scale(slot),))
    terms: list[Term] = []
    for term in family.terms:
        frame_of = made.get(term.parameter)
        rows = frame_of is not None and isinstance(term, Scale) and term.slot.narrow is None
        if rows and frame_of is not None and term.slot == Slot(term.parameter, term.slot.view, (frame_of.axis,)):
            slot = element_slot(frame_of.gain, tuple(point[frame_of.gain].shape))
            terms.append(Scale(slot, term.coefficient))
        elif rows and frame_of is not None and term.slot.whole:
            terms.append(Scale(whole_slot(frame_of.gain, tuple(point[frame_of.gain].shape)), term.coefficient))
        elif coordinates.about(term.reads).frames:
            return replace(family, coordinates=framed)
        else:
            terms.append(term)
    return replace(family, terms=tuple(terms)) if family.kind != "matrix" else replace(family, coordinates=framed)


class Generators(Sequence[Symmetry]):
    """The generators of several families as one sequence, made when looked at: thousands cost nothing."""

    def __init__(self, families: Sequence[Family]) -> None:
        self._families = tuple(families)

    def __len__(self) -> int:
        return sum(len(family) for family in self._families)

    @overload
    def __getitem__(self, position: int) -> Symmetry: ...
    @overload
    def __getitem__(self, position: slice) -> list[Symmetry]: ...
    def __getitem__(self, position: int | slice) -> Symmetry | list[Symmetry]:
        if isinstance(position, slice):
            return [self[k] for k in range(*position.indices(len(self)))]
        left = position + len(self) if position < 0 else position
        for family in self._families:
            if 0 <= left < len(family):
                return family.symmetry(left)
            left -= len(family)
        raise IndexError(f"generator {position} of {len(self)}")

    def __iter__(self) -> Iterator[Symmetry]:
        for family in self._families:
            yield from family.symmetries()

    def __repr__(self) -> str:
        return f"<{len(self)} generators in {len(self._families)} families>"
