"""Model, loss and data as one pure function of the parameters; its Hessian and Gauss-Newton matrix."""

from normgauge.objective._data import take as take
from normgauge.objective._objective import Objective as Objective
from normgauge.objective._operators import GaussNewtonOperator as GaussNewtonOperator
from normgauge.objective._operators import HessianOperator as HessianOperator
from normgauge.objective._operators import ObjectiveOperator as ObjectiveOperator

__all__ = ["GaussNewtonOperator", "HessianOperator", "Objective", "ObjectiveOperator", "take"]
