"""Model, loss and data as one pure function of the parameters; its curvature and Jacobian as operators."""

from normgauge.objective._data import copy_batch as copy_batch
from normgauge.objective._data import join_batches as join_batches
from normgauge.objective._data import sample_count as sample_count
from normgauge.objective._data import take as take
from normgauge.objective._data import take_rows as take_rows
from normgauge.objective._data import tensors as tensors
from normgauge.objective._data import to_device as to_device
from normgauge.objective._functional import call_purely as call_purely
from normgauge.objective._objective import Objective as Objective
from normgauge.objective._operators import HessianOperator as HessianOperator
from normgauge.objective._operators import ObjectiveOperator as ObjectiveOperator
from normgauge.objective._outputs import EmpiricalFisherOperator as EmpiricalFisherOperator
from normgauge.objective._outputs import GaussNewtonOperator as GaussNewtonOperator
from normgauge.objective._outputs import JacobianOperator as JacobianOperator
from normgauge.objective._purity import Mode as Mode
from normgauge.objective._purity import as_written as as_written
from normgauge.objective._purity import twice_differentiable as twice_differentiable
from normgauge.objective._purity import untouched as untouched
from normgauge.objective._recipe import call_model as call_model
from normgauge.objective._recipe import guess_loss as guess_loss
from normgauge.objective._recipe import pairs as pairs
from normgauge.objective._sharded import ShardedOperator as ShardedOperator

__all__ = [
    "EmpiricalFisherOperator",
    "GaussNewtonOperator",
    "HessianOperator",
    "JacobianOperator",
    "Mode",
    "Objective",
    "ObjectiveOperator",
    "ShardedOperator",
    "as_written",
    "call_model",
    "call_purely",
    "copy_batch",
    "guess_loss",
    "join_batches",
    "pairs",
    "sample_count",
    "take",
    "take_rows",
    "tensors",
    "to_device",
    "twice_differentiable",
    "untouched",
]
