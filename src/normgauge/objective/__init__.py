"""Model, loss and data as one pure function of the parameters; its curvature and Jacobian as operators."""

from normgauge.objective._data import take as take
from normgauge.objective._objective import Objective as Objective
from normgauge.objective._operators import HessianOperator as HessianOperator
from normgauge.objective._operators import ObjectiveOperator as ObjectiveOperator
from normgauge.objective._outputs import EmpiricalFisherOperator as EmpiricalFisherOperator
from normgauge.objective._outputs import GaussNewtonOperator as GaussNewtonOperator
from normgauge.objective._outputs import JacobianOperator as JacobianOperator
from normgauge.objective._sharded import ShardedOperator as ShardedOperator

__all__ = [
    "EmpiricalFisherOperator",
    "GaussNewtonOperator",
    "HessianOperator",
    "JacobianOperator",
    "Objective",
    "ObjectiveOperator",
    "ShardedOperator",
    "take",
]
