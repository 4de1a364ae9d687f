"""Named quantities of an Objective, each with its kind, cost and status."""

from normgauge.measure._operator_norm import Bracket as Bracket
from normgauge.measure._operator_norm import operator_norm as operator_norm

__all__ = ["Bracket", "operator_norm"]
