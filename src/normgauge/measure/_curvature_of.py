"""Which curvature matrix of an objective is meant: the words of `of=` and their operators."""

from __future__ import annotations

from collections.abc import Iterator
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
Group = Any  # a torch.distributed.ProcessGroup or None; torch can be built without it

_OPERATORS: dict[str, type[ObjectiveOperator]] = {
    "hessian": HessianOperator,
    "gauss_newton": GaussNewtonOperator,
    "empirical_fisher": EmpiricalFisherOperator,
}


@contextmanager
def curvature_of(objective: Objective, of: Of, group: ProcessGroup | None = None) -> Iterator[Operator]:
    """Give the operator and free its graphs afterwards, also after an error."""
    if of not in _OPERATORS:
        raise unknown_name("curvature", of, (*get_args(Of), "quotient"))
    with _OPERATORS[of](objective) as operator:
        yield operator if group is None else ShardedOperator(operator, group)
