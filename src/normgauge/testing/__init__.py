"""Conformance suites: run every declared law of normgauge's contracts on a class of your own.

What the suites themselves return are plain tables of checks, not measurements: they have no readings and no meaning.
"""

from normgauge.testing._healthy import assert_norms_healthy
from normgauge.testing._normalizer import Conformance, NonconformingError, check_normalizer
from normgauge.testing._optimizers import OptimizerConformance, check_optimizer
from normgauge.testing._results import check_result

__all__ = [
    "Conformance",
    "NonconformingError",
    "OptimizerConformance",
    "assert_norms_healthy",
    "check_normalizer",
    "check_optimizer",
    "check_result",
]
