"""Models, data, the training loop, studies, where their runs happen, and the main job `compare`."""

from normgauge.lab._compare import compare as compare
from normgauge.lab._compare import compare_shard as compare_shard
from normgauge.lab._merge import Merged as Merged
from normgauge.lab._merge import merge as merge
from normgauge.lab._reproduce import Reproduced as Reproduced
from normgauge.lab._reproduce import reproduce as reproduce
from normgauge.lab._reproduce import reproduce_shard as reproduce_shard
from normgauge.lab.comparison import Comparison as Comparison
from normgauge.lab.ensemble import fit_ensemble as fit_ensemble
from normgauge.lab.ensemble import train_ensemble as train_ensemble
from normgauge.lab.study import Study as Study
from normgauge.lab.sweep import sweep as sweep

__all__ = [
    "Comparison",
    "Merged",
    "Reproduced",
    "Study",
    "compare",
    "compare_shard",
    "fit_ensemble",
    "merge",
    "reproduce",
    "reproduce_shard",
    "sweep",
    "train_ensemble",
]
