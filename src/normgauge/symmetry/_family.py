"""`Family`: many generators of one shape, one per index; `Symmetry`: one of them, as users meet it."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, Literal, overload

import torch
from torch import Tensor

from normgauge.symmetry._terms import Term, Values, term_from_json

Kind = Literal["scale", "shift", "rescale", "matrix", "dead"]
SymmetryStatus = Literal["exact", "exact_without_eps", "batch_statistics_only", "undecided"]


@dataclass(frozen=True)
class Symmetry:
    """One generator of parameter changes that leave the function unchanged, with its certificate.

    Attributes:
        kind: scale, shift, rescale, matrix or dead.
        parameters: the tensors that change together.
        index: which slice, unit or block of them.
        residual: |<v, g>| relative to its summands, the largest over the probes at the jittered point.
        certificate: the finite changes that were tried and how far the outputs moved.
        status: exact, exact_without_eps, batch_statistics_only or undecided.
        coefficients: the exponents (scales) or factors (shifts) of `parameters`.
        dimension: how many directions this item stands for (more than one for kind "matrix" only).
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
        counted: whether its generators are directions of `Symmetries.dimension` (dead units are not: their
            parameters were not observed).
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

    @property
    def items(self) -> tuple[int, ...]:
        """The indices that are symmetries."""
        return tuple(range(self.size)) if self.indices is None else self.indices

    def __len__(self) -> int:
        """Return the number of generators (blocks, for kind "matrix")."""
        if self.kind == "matrix":
            return self.size // self.block
        return self.size if self.indices is None else len(self.indices)

    @property
    def parameters(self) -> tuple[str, ...]:
        """The tensors that change together."""
        return tuple(dict.fromkeys(term.parameter for term in self.terms))

    @property
    def coefficients(self) -> tuple[float, ...]:
        """The coefficients of the terms."""
        return tuple(term.coefficient for term in self.terms)

    @property
    def scaling(self) -> bool:
        """Whether the finite change multiplies."""
        return all(term.finite_scale for term in self.terms)

    @property
    def block_dimension(self) -> int:
        """Directions of one block beyond the diagonal ones, which count as rescalings."""
        return self.block * (self.block - 1) // (2 if self.group == "O" else 1)

    def amounts(self, values: Tensor) -> Tensor:
        """Write one number per generator onto the whole index."""
        if self.indices is None:
            return values
        wide = values.new_zeros(self.size)
        wide[list(self.indices)] = values
        return wide

    def gather(self, point: Values, gradient: Values) -> Tensor:
        """Return <v_i, gradient> per generator."""
        total = torch.stack([term.gather(point, gradient) for term in self.terms]).sum(0)
        return total if self.indices is None else total[list(self.indices)]

    def magnitude(self, point: Values, gradient: Values) -> Tensor:
        """Return the size of `gather` if the summands had random signs."""
        total = torch.stack([term.magnitude(point, gradient) for term in self.terms]).square().sum(0).sqrt()
        return total if self.indices is None else total[list(self.indices)]

    def field(self, point: Values, values: Tensor) -> dict[str, Tensor]:
        """Return the tangent vector sum_i values_i v_i, on the tensors that change."""
        result: dict[str, Tensor] = {}
        wide = self.amounts(values)
        for term in self.terms:
            part = term.field(point, wide)
            result[term.parameter] = result[term.parameter] + part if term.parameter in result else part
        return result

    def act(self, point: dict[str, Tensor], values: Tensor) -> dict[str, Tensor]:
        """Return the parameters after the finite change with these amounts."""
        result, wide = dict(point), self.amounts(values)
        for term in sorted(self.terms, key=lambda term: term.role != "gain"):  # gains read directions as they were
            if term.finite_scale:
                result[term.parameter] = term.act(result, wide)
        for term in self.terms:
            if not term.finite_scale:  # shifts read weights, which a family of shifts does not change
                result[term.parameter] = result[term.parameter] + term.field(point, wide)
        return result

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
            parts.append(f"{sign}{term.describe()}")
        return ", ".join(parts)

    def symmetries(self) -> Iterator[Symmetry]:
        """Yield the generators one by one."""
        for position in range(len(self)):
            yield self.symmetry(position)

    def symmetry(self, position: int) -> Symmetry:
        """Return one generator."""
        matrix = self.kind == "matrix"
        return Symmetry(
            kind=self.kind,
            parameters=self.parameters,
            index=position if matrix else self.items[position],
            residual=self.residuals[position] if position < len(self.residuals) else float("nan"),
            certificate=self.certificate,
            status=self.status,
            coefficients=self.coefficients,
            dimension=self.block_dimension if matrix else 1,
        )

    def to_json(self) -> dict[str, Any]:
        """Return plain data."""
        return {
            "kind": self.kind,
            "terms": [term.to_json() for term in self.terms],
            "size": self.size,
            "indices": None if self.indices is None else list(self.indices),
            "group": self.group,
            "block": self.block,
            "status": self.status,
            "certificate": dict(self.certificate),
            "residuals": list(self.residuals),
            "note": self.note,
            "counted": self.counted,
        }


def family_from_json(data: Mapping[str, Any]) -> Family:
    """Rebuild a family from plain data."""
    rest = dict(data)
    rest["terms"] = tuple(term_from_json(term) for term in data["terms"])
    rest["indices"] = None if data["indices"] is None else tuple(data["indices"])
    rest["residuals"] = tuple(data["residuals"])
    return Family(**rest)


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
