"""Products with a curvature matrix: which one `of=` names, the one on spheres, and what a terminal shows meanwhile."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

import torch
from torch import Tensor

from normgauge.errors import InputError, unknown_name
from normgauge.linalg import Operator
from normgauge.objective import (
    EmpiricalFisherOperator,
    GaussNewtonOperator,
    HessianOperator,
    Objective,
    ObjectiveOperator,
    ShardedOperator,
)

if TYPE_CHECKING:
    from torch.distributed import ProcessGroup

Of = Literal["hessian", "gauss_newton", "empirical_fisher"]
Progress = Callable[[int, Sequence[float]], None]
Group = Any  # a torch.distributed.ProcessGroup or None; torch can be built without it

_OPERATORS: dict[str, type[ObjectiveOperator]] = {
    "hessian": HessianOperator,
    "gauss_newton": GaussNewtonOperator,
    "empirical_fisher": EmpiricalFisherOperator,
}
# A block family: slices number i, along the given axes, of the named parameters are together one block; axis None
# takes a whole tensor. `(("0.weight", 0),)` are the rows of a weight, `(("0.weight", 0), ("0.bias", 0))` the rows
# with their biases.
Family = Sequence[tuple[str, int | None]]


@contextmanager
def curvature_of(
    objective: Objective, of: Of, group: ProcessGroup | None = None, memory: int | None = None
) -> Iterator[Operator]:
    """Give the operator, whose graphs may take `memory` bytes, and free them afterwards, also after an error."""
    if of not in _OPERATORS:
        raise unknown_name("curvature", of, (*get_args(Of), "quotient"))
    with _OPERATORS[of](objective, **({} if memory is None else {"memory": memory})) as operator:
        yield operator if group is None else ShardedOperator(operator, group)


@contextmanager
def show_residuals(what: str, progress: Progress | None) -> Iterator[Progress | None]:
    """Give the caller's own callback, or one that shows products and residuals on a terminal, or none."""
    from rich.console import Console
    from rich.file_proxy import FileProxy
    from rich.status import Status

    # somebody else may draw on this terminal: the parent of a worker, or a live bar of this process
    drawn = multiprocessing.parent_process() is not None or isinstance(sys.stderr, FileProxy)
    if progress is not None or not sys.stderr.isatty() or drawn:
        yield progress
        return

    with Status(f"{what}: first product", console=Console(stderr=True)) as status:

        def show(products: int, residuals: Sequence[float]) -> None:
            numbers = " ".join(f"{value:.0e}" for value in residuals)
            status.update(f"{what}: {products} products, relative residuals {numbers}")

        yield show


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
            rule, got = "every block must have a positive norm", f"{int((squares <= 0).sum())} blocks of zeros"
            raise InputError("quotient", rule, got, "Leave those rows out of the blocks")
        self.squares = squares
        self.radius = self._broadcast(squares.sqrt(), 1.0)
        self.pull = self._broadcast(self._sums(self.weights * slopes), 0.0)

    def _sums(self, entries: Tensor) -> Tensor:
        """Return the sum over each block, in float64."""
        sums = torch.zeros(self.count, dtype=torch.float64, device=self.device)
        return sums.index_add_(0, self.owner[self.inside], entries[self.inside].double())

    def _broadcast(self, per_block: Tensor, elsewhere: float) -> Tensor:
        """Return each block's number at its entries, and `elsewhere` at the others."""
        result = torch.full((self.shape[0],), elsewhere, dtype=self.dtype, device=self.device)
        result[self.inside] = per_block[self.owner[self.inside]].to(self.dtype)
        return result

    def project(self, vector: Tensor) -> Tensor:
        """Return the part of a vector that is tangent to every block's sphere."""
        return vector - self.weights * self._broadcast(self._sums(self.weights * vector) / self.squares, 0.0)

    def _matvec(self, vector: Tensor) -> Tensor:
        tangent = self.project(vector)
        bent = self.project(self.radius * self.hessian.matvec(self.radius * tangent))
        return bent - self.pull * tangent

    def close(self) -> None:
        """Free the graphs."""
        self.hessian.close()


def block_owners(objective: Objective, blocks: Sequence[Family]) -> Tensor:
    """Return for every entry of the flat vector the number of its block, -1 where it is in none."""
    owners = {name: torch.full_like(value, -1, dtype=torch.long) for name, value in objective.parameters.items()}
    total = 0
    for family in blocks:
        counts = {_slices(owners, name, axis) for name, axis in family}
        if len(counts) != 1:
            rule, got = "the parts of a block family have equally many slices", f"{sorted(counts)} for {list(family)!r}"
            raise InputError("quotient", rule, got, "Give each part the axis that counts the same units")
        count = counts.pop()
        numbers = torch.arange(total, total + count, device=objective.device)
        for name, axis in family:
            owner = owners[name]
            if bool((owner >= 0).any()):
                raise InputError("quotient", "blocks share no entry", f"{name!r} in two of them", "Name it once")
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
        raise InputError("quotient", f"{name!r} has {owners[name].ndim} axes", f"axis {axis}", "Count axes from zero")
    return owners[name].shape[axis]
