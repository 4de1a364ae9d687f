"""Models, data, the training loop, studies, where their runs happen, and the main job `compare`."""

from normgauge.lab._compare import compare as compare
from normgauge.lab._reproduce import Reproduced as Reproduced
from normgauge.lab._reproduce import reproduce as reproduce
from normgauge.lab.comparison import Comparison as Comparison
from normgauge.lab.study import Study as Study
from normgauge.lab.sweep import sweep as sweep

__all__ = ["Comparison", "Reproduced", "Study", "compare", "reproduce", "sweep"]
