"""Named quantities of an Objective, each with its kind, cost and status."""

from normgauge.measure._landscape import Landscape as Landscape
from normgauge.measure._landscape import landscape as landscape
from normgauge.measure._operator_norm import Bracket as Bracket
from normgauge.measure._operator_norm import operator_norm as operator_norm
from normgauge.measure._spectrum import Spectrum as Spectrum
from normgauge.measure._spectrum import spectrum as spectrum

__all__ = [
    "Bracket",
    "Landscape",
    "Spectrum",
    "landscape",
    "operator_norm",
    "spectrum",
]
