"""Conformance suites: run every declared law of normgauge's contracts on a class of your own."""

from normgauge.testing._normalizer import Conformance, NonconformingError, check_normalizer
from normgauge.testing._optimizers import OptimizerConformance, check_optimizer

__all__ = ["Conformance", "NonconformingError", "OptimizerConformance", "check_normalizer", "check_optimizer"]
