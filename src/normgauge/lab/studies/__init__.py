"""The experiments of the papers, one file per study; a new file registers itself."""

from normgauge.lab.studies._registry import execute as execute
from normgauge.lab.studies._registry import experiments as experiments
from normgauge.lab.studies._registry import find as find
from normgauge.lab.studies._registry import register as register

__all__ = ["execute", "experiments", "find", "register"]
