"""Conformance suites: run every declared law of normgauge's contracts on a class of your own.

What the suites themselves return are plain tables of checks, not measurements: they have no readings and no meaning.
"""

from normgauge.testing._normalizer import check_normalizer
from normgauge.testing._optimizers import check_optimizer
from normgauge.testing._results import assert_norms_healthy, check_result
from normgauge.testing._verdict import Conformance, NonconformingError

__all__ = ["Conformance", "NonconformingError", "assert_norms_healthy", "check_normalizer", "check_optimizer"]
__all__ += ["check_result"]
