"""Models, data, runs, studies, and the main job `compare`."""

from normgauge.lab.compare import compare as compare
from normgauge.lab.compare import compare_shard as compare_shard
from normgauge.lab.comparison import Comparison as Comparison
from normgauge.lab.race import Race as Race
from normgauge.lab.race import halve as halve
from normgauge.lab.race import race as race
from normgauge.lab.runs.ensemble import fit_ensemble as fit_ensemble
from normgauge.lab.runs.ensemble import train_ensemble as train_ensemble
from normgauge.lab.runs.merge import Merged as Merged
from normgauge.lab.runs.merge import merge as merge
from normgauge.lab.runs.recipe import Recipe as Recipe
from normgauge.lab.runs.sweep import sweep as sweep
from normgauge.lab.study import Study as Study

__all__ = [
    "Comparison",
    "Merged",
    "Race",
    "Recipe",
    "Study",
    "compare",
    "compare_shard",
    "fit_ensemble",
    "halve",
    "merge",
    "race",
    "sweep",
    "train_ensemble",
]
