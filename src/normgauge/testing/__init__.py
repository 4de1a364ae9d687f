"""Conformance suites: run every declared law of normgauge's contracts on a class of your own."""

from normgauge.testing._normalizer import Conformance, NonconformingError, check_normalizer

__all__ = ["Conformance", "NonconformingError", "check_normalizer"]
