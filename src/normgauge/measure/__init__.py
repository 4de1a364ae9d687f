"""Named quantities of an Objective, each with its kind, cost and status."""

from normgauge.measure._landscape import Landscape as Landscape
from normgauge.measure._landscape import landscape as landscape

__all__ = [
    "Landscape",
    "landscape",
]
