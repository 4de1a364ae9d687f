"""Model, loss and data as one pure function of the parameters; its curvature and Jacobian as operators."""

from normgauge.objective._data import copy_batch, join_batches, sample_count, take, take_rows, tensors, to_device
from normgauge.objective._objective import Objective
from normgauge.objective._operators import HessianOperator, ObjectiveOperator, ShardedOperator
from normgauge.objective._outputs import EmpiricalFisherOperator, GaussNewtonOperator, JacobianOperator
from normgauge.objective._purity import Mode, as_written, call_purely, twice_differentiable, untouched
from normgauge.objective._recipe import call_model, guess_loss, pairs

__all__ = ["Mode", "Objective", "ObjectiveOperator", "HessianOperator", "GaussNewtonOperator"]
__all__ += ["EmpiricalFisherOperator", "JacobianOperator", "ShardedOperator", "as_written", "call_model"]
__all__ += ["call_purely", "copy_batch", "guess_loss", "join_batches", "pairs", "sample_count", "take", "take_rows"]
__all__ += ["tensors", "to_device", "twice_differentiable", "untouched"]
