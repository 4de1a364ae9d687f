"""Curvature without the parts that symmetries make up: the Hessian on the product of spheres."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import InputError, explain, unknown_name
from normgauge.linalg import Operator, eigenpairs, spectral_nodes
from normgauge.measure._progress import Progress, residuals_shown
from normgauge.measure._spectrum import Spectrum, start_vectors
from normgauge.objective import HessianOperator, Objective

# A block family: slices number i, along the given axes, of the named parameters are together one block; axis None
# takes a whole tensor. `(("0.weight", 0),)` are the rows of a weight, `(("0.weight", 0), ("0.bias", 0))` the rows
# with their biases.
Family = Sequence[tuple[str, int | None]]

DENSE_LIMIT = 1500


class QuotientOperator(Operator):
    """Q = D P H P D - blockdiag_b(<w_b, g_b> P_b): the Riemannian Hessian on the product of spheres.

    H and g are Hessian and gradient, w_b the blocks, P the projector onto the vectors orthogonal to every block, D
    multiplies each block's entries by |w_b|. For a unit tangent vector v of one block, v^T Q v is the second
    derivative of the loss by the angle along the great circle in direction v. Variables in no block are left alone.

    For free scalings (scale-invariant blocks) Q does not change when a block is multiplied by a factor. Coupled
    rescalings have to be removed first by moving to a canonical point, where D is one on their blocks.

    Kind: exact (up to rounding). Cost: one Hessian product, and one gradient when made.

    Args:
        objective: model, loss, data and mode, at the point where the curvature is wanted.
        blocks: families of blocks that share no entry, or for every entry of the flat vector the number of its block
            (-1: none), as `block_owners` and `writer_owners` give it.
    """

    self_adjoint = True

    def __init__(self, objective: Objective, blocks: Sequence[Family] | Tensor) -> None:
        self.hessian = HessianOperator(objective)
        self.shape, self.dtype, self.device = self.hessian.shape, self.hessian.dtype, self.hessian.device
        self.owner = blocks if isinstance(blocks, Tensor) else block_owners(objective, blocks)
        self.count = int(self.owner.max()) + 1
        self.inside = self.owner >= 0
        self.weights = torch.where(self.inside, objective.flatten(objective.parameters), 0.0)
        slopes = objective.flatten(objective.gradient())
        squares = self._sums(self.weights * self.weights)
        if self.count and not bool((squares > 0).all()):
            raise InputError(
                explain(
                    "quotient",
                    "every block must have a positive norm",
                    f"{int((squares <= 0).sum())} blocks of zeros",
                    "Leave those rows out of the blocks",
                )
            )
        self.squares = squares
        self.radius = self._spread(squares.sqrt(), 1.0)
        self.pull = self._spread(self._sums(self.weights * slopes), 0.0)

    def _sums(self, entries: Tensor) -> Tensor:
        """Return the sum over each block, in float64."""
        sums = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        return sums.index_add_(0, self.owner[self.inside], entries[self.inside].double())

    def _spread(self, per_block: Tensor, elsewhere: float) -> Tensor:
        """Return each block's number at its entries, and `elsewhere` at the others."""
        result = torch.full((self.shape[0],), elsewhere, dtype=self.dtype, device=self.device)
        result[self.inside] = per_block[self.owner[self.inside]].to(self.dtype)
        return result

    def project(self, vector: Tensor) -> Tensor:
        """Return the part of a vector that is tangent to every block's sphere."""
        return vector - self.weights * self._spread(self._sums(self.weights * vector) / self.squares, 0.0)

    def _matvec(self, vector: Tensor) -> Tensor:
        tangent = self.project(vector)
        bent = self.project(self.radius * self.hessian.matvec(self.radius * tangent))
        return bent - self.pull * tangent

    def close(self) -> None:
        """Free the graphs."""
        self.hessian.close()


def block_owners(objective: Objective, blocks: Sequence[Family]) -> Tensor:
    """Return for every entry of the flat vector the number of its block, -1 where it is in none.

    Raises:
        UnknownNameError: for a name that is no variable.
        InputError: for an axis a parameter does not have, slices of unequal number, or overlapping blocks.
    """
    owners = {
        name: torch.full(value.shape, -1, dtype=torch.long, device=value.device)
        for name, value in objective.parameters.items()
    }
    total = 0
    for family in blocks:
        counts = {_slices(owners, name, axis) for name, axis in family}
        if len(counts) != 1:
            raise InputError(
                explain(
                    "quotient",
                    "the parts of a block family have equally many slices",
                    f"{sorted(counts)} for {list(family)!r}",
                    "Give each part the axis that counts the same units",
                )
            )
        count = counts.pop()
        numbers = torch.arange(total, total + count, device=objective.device)
        for name, axis in family:
            owner = owners[name]
            if bool((owner >= 0).any()):
                raise InputError(
                    explain("quotient", "blocks share no entry", f"{name!r} in two of them", "Name it once")
                )
            shape = [1] * owner.ndim
            if axis is not None:
                shape[axis] = count
            owner[...] = numbers.view(shape)
        total += count
    return torch.cat([owners[name].reshape(-1) for name in objective.names])


def writer_owners(objective: Objective, symmetries: Any) -> Tensor:
    """Return the blocks that the gauge "unit-writer" scales to norm one, as `block_owners` does.

    The writers of a certified scaling generator are the slices it multiplies by the largest positive power. Where
    two generators write the same entries the first one keeps them: a sphere per entry can be taken once only.
    """
    owners = {name: torch.full(value.shape, -1, dtype=torch.long) for name, value in objective.parameters.items()}
    ones = {name: torch.ones(value.shape, dtype=torch.float64) for name, value in objective.parameters.items()}
    total = 0
    for family in symmetries.families:
        if family.kind not in ("scale", "rescale") or family.status == "undecided" or not family.counted:
            continue
        exponent = max(term.coefficient for term in family.terms)
        writers = [t for t in family.terms if t.coefficient == exponent > 0 and t.parameter in owners]
        numbers = family.amounts(torch.arange(1.0, len(family) + 1, dtype=torch.float64))
        marks = [(t.parameter, t.with_coefficient(1.0).field(ones, numbers).round().long()) for t in writers]
        if any(bool(((mark > 0) & (owners[name] >= 0)).any()) for name, mark in marks):
            continue
        for name, mark in marks:
            owners[name] = torch.where(mark > 0, mark - 1 + total, owners[name])
        total += len(family)
    return torch.cat([owners[name].reshape(-1) for name in objective.names]).to(objective.device)


def _slices(owners: dict[str, Tensor], name: str, axis: int | None) -> int:
    if name not in owners:
        raise unknown_name("variable", name, owners)
    if axis is None:
        return 1
    if not -owners[name].ndim <= axis < owners[name].ndim:
        raise InputError(
            explain("quotient", f"{name!r} has {owners[name].ndim} axes", f"axis {axis}", "Count axes from zero")
        )
    return owners[name].shape[axis]


@dataclass(frozen=True)
class QuotientSpectrum(Spectrum):
    """Extreme eigenvalues of the quotient curvature, and what they say about the landscape.

    Args:
        gauge: how coupled rescalings were fixed: "given point" where blocks were passed as they are.
        blocks: the number of spheres.
        condition: largest over smallest |eigenvalue| of the non-zero part; `None` above 1500 variables.
        negatives: the number of negative eigenvalues; an estimate above 1500 variables.
        negatives_kind: exact or estimate.
    """

    gauge: str = "given point"
    blocks: int = 0
    condition: float | None = None
    negatives: float = 0.0
    negatives_kind: str = "exact"

    @property
    def sharpness(self) -> float:
        """The spherical sharpness: the largest eigenvalue."""
        return self.top[0]

    def _footer(self) -> str:
        condition = "not computed" if self.condition is None else f"{self.condition:.4g}"
        extra = (
            f"gauge: {self.gauge}, {self.blocks} spheres; condition number of the non-zero part: {condition}; "
            f"negative eigenvalues: {self.negatives:.4g} ({self.negatives_kind})"
        )
        return f"{extra}\n{super()._footer()}"


def quotient_spectrum(
    objective: Objective,
    blocks: Sequence[Family] | Tensor | None = None,
    *,
    symmetries: Any = None,
    gauge: str = "given point",
    top: int = 5,
    bottom: int = 0,
    tol: float = 1e-3,
    seed: int = 0,
    start: Spectrum | None = None,
    memory: int | None = None,
    products: int | None = None,
    progress: Progress | None = None,
) -> QuotientSpectrum:
    """Return the extreme eigenvalues of the curvature of `objective` on the product of spheres of `blocks`.

    See `QuotientOperator` for the matrix. Multiplying scale-invariant blocks by any factors changes the plain
    spectrum by orders of magnitude and this one not at all.

    Kind: estimate with true residuals. Cost: that of `spectrum`, up to 1500 variables one product for each to count
    negative eigenvalues exactly, beyond that 30 more to estimate their number.

    Args:
        objective: model, loss, data and mode, at a canonical point where blocks are coupled.
        blocks: families of blocks: `[(("0.weight", 0),)]` for the rows of one weight. By default those of the
            symmetries, at the canonical point of `objective`.
        symmetries: what `ng.symmetries(objective)` gave; discovered here when neither they nor blocks are given.
        gauge: the name of the canonical form the point is in, for the record.
        top: how many of the largest.
        bottom: how many of the smallest.
        tol: relative residual to reach.
        seed: of the random start.
        start: an earlier spectrum of the same variables.
        memory: bytes the Lanczos basis may take.
        products: most products before giving up.
        progress: called as `progress(products, residuals)`.

    Raises:
        InputError: for blocks that overlap, are zero, or whose parts do not fit.

    Examples:
        On the circle |w| = 1 the loss w_1 has second derivative -cos(angle): at w = (1, 0) it is -1.

        >>> model = torch.nn.Linear(2, 1, bias=False)
        >>> with torch.no_grad():
        ...     _ = model.weight.copy_(torch.tensor([[1.0, 0.0]]))
        >>> objective = Objective.from_step(model, lambda m, _: m.weight[0, 0], torch.ones(1), mode="eval")
        >>> round(quotient_spectrum(objective, [(("weight", 0),)], top=1, bottom=1).bottom[0], 5)
        -1.0
    """
    if blocks is None:
        found_symmetries = _discovered(objective) if symmetries is None else symmetries
        objective = objective.at(found_symmetries.canonical(objective.parameters))
        blocks, gauge = writer_owners(objective, found_symmetries), "unit-writer"
    operator = QuotientOperator(objective, blocks)
    try:
        with residuals_shown("spectrum of quotient", progress) as shown:
            found = eigenpairs(
                operator,
                top=top,
                bottom=bottom,
                tol=tol,
                seed=seed,
                start=None if start is None else start_vectors(objective, start),
                memory=memory,
                products=products,
                progress=shown,
            )
        extra, more = _counts(operator, max(map(abs, found.top + found.bottom), default=0.0), seed)
    finally:
        operator.close()
    return QuotientSpectrum(
        top=found.top,
        bottom=found.bottom,
        residuals=found.residuals,
        matvecs=found.matvecs + more,
        of="quotient",
        mode=objective.mode,
        dimension=objective.dimension,
        tol=tol,
        seed=seed,
        status=found.status,
        sentence=found.sentence,
        vectors=found.vectors,
        gauge=gauge,
        blocks=operator.count,
        **extra,
    )


def _discovered(objective: Objective) -> Any:
    from normgauge.symmetry import symmetries

    return symmetries(objective)


def _counts(operator: QuotientOperator, scale: float, seed: int) -> tuple[dict[str, Any], int]:
    """Return condition number and number of negative eigenvalues, and the products they took."""
    size = operator.shape[0]
    if size <= DENSE_LIMIT:
        dense = operator.matmat(torch.eye(size, dtype=operator.dtype, device=operator.device)).double()
        values = torch.linalg.eigvalsh((dense + dense.T) / 2)
        zero = 100 * size * torch.finfo(operator.dtype).eps * float(values.abs().max())
        rest = values[values.abs() > zero].abs()
        condition = float(rest.max() / rest.min()) if rest.numel() else None
        return {"condition": condition, "negatives": float((values < -zero).sum())}, size
    nodes = spectral_nodes(operator, probes=1, steps=30, seed=seed)
    below = [w for v, w in zip(nodes[0].values, nodes[0].weights, strict=True) if v < -1e-5 * scale]
    return {"negatives": size * sum(below), "negatives_kind": "estimate"}, len(nodes[0].values)
