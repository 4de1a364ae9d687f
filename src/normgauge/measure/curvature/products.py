"""Products with a curvature matrix: which matrix `of=` names, and what a terminal shows while they are made."""

from __future__ import annotations

import multiprocessing
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any, Literal, get_args

from normgauge.errors import unknown_name
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
