"""The words a study's file is written in."""

from normgauge.papers.court import EACH, LARGEST, SMALLEST, Contrast, each_but, empirical, finding
from normgauge.papers.experiment import Record, fit, grid
from normgauge.papers.figures import Figure
from normgauge.papers.studies import register
from normgauge.records import Spec

__all__ = ["EACH", "LARGEST", "SMALLEST", "Contrast", "Figure", "Record", "Spec", "each_but", "empirical", "finding"]
__all__ += ["fit", "grid", "register"]
