"""Models, data, runs, studies, and the main job `compare`."""

from normgauge.lab.compare import compare, compare_shard
from normgauge.lab.comparison import Comparison
from normgauge.lab.race import Race, halve, race
from normgauge.lab.runs.merge import Merged, merge
from normgauge.lab.runs.recipe import Recipe
from normgauge.lab.runs.sweep import sweep
from normgauge.lab.study import Study

__all__ = ["Comparison", "Merged", "Race", "Recipe", "Study", "compare", "compare_shard", "halve", "merge"]
__all__ += ["race", "sweep"]
