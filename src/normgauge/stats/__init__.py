"""What seeds can tell: intervals, paired differences, many arms at once, how many seeds would decide, the best setting.

The one place for all of these: tables, pages and verdicts take their intervals and their choices from here.
"""

from normgauge.stats.choose import Choice as Choice
from normgauge.stats.choose import choose as choose
from normgauge.stats.intervals import CONFIDENCE as CONFIDENCE
from normgauge.stats.intervals import FREE as FREE
from normgauge.stats.intervals import LEAST_SEEDS as LEAST_SEEDS
from normgauge.stats.intervals import MOST_SEEDS as MOST_SEEDS
from normgauge.stats.intervals import POWER as POWER
from normgauge.stats.intervals import Bounds as Bounds
from normgauge.stats.intervals import Interval as Interval
from normgauge.stats.intervals import above_chance as above_chance
from normgauge.stats.intervals import interval as interval
from normgauge.stats.intervals import joint_confidence as joint_confidence
from normgauge.stats.intervals import leads as leads
from normgauge.stats.intervals import natural_bounds as natural_bounds
from normgauge.stats.intervals import paired_difference as paired_difference
from normgauge.stats.intervals import seeds_to_decide as seeds_to_decide
from normgauge.stats.intervals import student_quantile as student_quantile
from normgauge.stats.intervals import welch_difference as welch_difference
