"""Which curvature matrix of an objective is meant: the words of `of=` and their operators."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Literal, get_args

from normgauge.errors import unknown_name
from normgauge.objective import Objective, ObjectiveOperator

Of = Literal["hessian", "gauss_newton"]


@contextmanager
def curvature_of(objective: Objective, of: Of) -> Iterator[ObjectiveOperator]:
    """Give the operator and free its graph afterwards, also after an error."""
    operator: ObjectiveOperator
    if of == "hessian":
        operator = objective.hessian()
    elif of == "gauss_newton":
        operator = objective.gauss_newton()
    else:
        raise unknown_name("curvature", of, get_args(Of))
    with operator:
        yield operator
