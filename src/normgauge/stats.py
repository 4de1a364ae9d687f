"""What seeds can tell: intervals, paired differences, many arms at once, how many seeds would decide, the best setting.

The one place for all of these: tables, pages and verdicts take their intervals and their choices from here.
"""

from __future__ import annotations

import math
import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from statistics import fmean, stdev
from typing import Any

from normgauge.errors import InputError
from normgauge.records import Row, format_number

CONFIDENCE = 0.95
#: The share of repetitions in which a planned number of seeds should decide.
POWER = 0.8
#: More seeds than this are no plan.
MOST_SEEDS = 10_000
#: Fewer seeds than this say nothing about a difference.
LEAST_SEEDS = 3
#: Lowest and highest value a quantity can have; `None` where there is no such end.
Bounds = tuple[float | None, float | None]
FREE: Bounds = (None, None)
_SIZE = re.compile(
    r"(?:^|_)(?:loss|distance|range|norm|norm_change|error|angle|angle_rise|rises|spike|condition|condition_number|iterations"
    r"|gradients|seconds|steps|steps_to_\w+?)(?:_now)?$"
)


def natural_bounds(reading: str) -> Bounds:
    """Return the ends of a quantity that its name tells: accuracies lie in [0, 1], losses, counts and sizes above 0.

    Examples:
        >>> natural_bounds("test_accuracy"), natural_bounds("train_loss"), natural_bounds("accuracy_gain")
        ((0, 1), (0, None), (None, None))
        >>> natural_bounds("steps_to_target"), natural_bounds("log10_steps"), natural_bounds("loss_range_now")
        ((0, None), (None, None), (0, None))
    """
    if re.search(r"accuracy(_now)?$", reading):
        return 0, 1
    return (0, None) if _SIZE.search(reading) and "log10" not in reading else FREE


@dataclass(frozen=True, slots=True)
class Interval:
    """A mean with its confidence interval from n values; low and high are nan for n < 2."""

    mean: float
    low: float
    high: float
    n: int

    @property
    def excludes_zero(self) -> bool:
        """Whether the whole interval lies on one side of zero."""
        return self.low > 0 or self.high < 0

    @property
    def has_width(self) -> bool:
        """Whether the values differ by more than rounding; equal ones say nothing about what others would be."""
        return not math.isclose(self.low, self.high, rel_tol=1e-9, abs_tol=1e-12)

    def times(self, factor: float) -> Interval:
        """Return it in another unit, as shares in per cent."""
        return Interval(factor * self.mean, factor * self.low, factor * self.high, self.n)

    def __str__(self) -> str:
        """Return `mean (low..high)`, or the mean alone where one value says nothing about the spread."""
        ends = "" if math.isnan(self.low) else f" ({format_number(self.low, 3)}..{format_number(self.high, 3)})"
        return f"{format_number(self.mean, 3)}{ends}"


def interval(values: Iterable[float], *, bounds: Bounds = FREE, confidence: float = CONFIDENCE) -> Interval:
    """Return mean and Student-t interval of independent values, inside the bounds of the quantity.

    `mean -+ t_{n-1} s / sqrt(n)` with s the sample deviation. Where the quantity has one end the interval is taken on
    the scale of the log distance to it, where it has two on that of the logit, and mapped back (delta method): it
    contains the mean, and no loss, with bounds `(0, None)`, falls below 0 and no accuracy, `(0, 1)`, rises above 1.

    Raises:
        InputError: for a value that is not finite or out of bounds: a failed run is no measurement.

    Examples:
        >>> free = interval([1.0, 2.0, 3.0])
        >>> free.mean, round(free.low, 4), round(free.high, 4), free.n
        (2.0, -0.4841, 4.4841, 3)
        >>> loss = interval([1.0, 2.0, 3.0], bounds=(0, None))
        >>> round(loss.low, 4), round(loss.high, 4)
        (0.5776, 6.9255)
    """
    values = list(values)
    floor, ceiling = (-math.inf if bounds[0] is None else bounds[0]), (math.inf if bounds[1] is None else bounds[1])
    outside = [value for value in values if not (math.isfinite(value) and floor <= value <= ceiling)]
    if outside:
        rule = f"values are numbers from {format_number(floor)} to {format_number(ceiling)}"
        raise InputError("interval", rule, str(outside[0]), "Leave out runs that did not finish")
    if len(values) < 2:
        return Interval(fmean(values) if values else math.nan, math.nan, math.nan, len(values))
    mean = fmean(values)
    half = student_quantile(confidence, len(values)) * stdev(values) / math.sqrt(len(values))
    low, high = _interval_ends(mean, half, floor, ceiling)
    return Interval(mean, low, high, len(values))


def _interval_ends(mean: float, half: float, floor: float, ceiling: float) -> tuple[float, float]:
    """Return the ends of `mean -+ half` as they are on the scale on which the bounds are infinitely far."""
    below, above = mean - floor, ceiling - mean
    if math.isinf(below) and math.isinf(above):
        return mean - half, mean + half
    if half == 0 or below <= 0 or above <= 0:  # at an end all values are equal
        return mean, mean
    if math.isinf(above):
        return floor + below * math.exp(-half / below), floor + below * _exp(half / below)
    if math.isinf(below):
        return ceiling - above * _exp(half / above), ceiling - above * math.exp(-half / above)
    width, odds = ceiling - floor, below / above
    turn = half * width / (below * above)
    smaller, larger = odds * math.exp(-turn), odds * _exp(turn)
    return floor + width * smaller / (1 + smaller), ceiling - width / (1 + larger)


def _exp(exponent: float) -> float:
    return math.exp(exponent) if exponent < 700 else math.inf


@cache
def student_quantile(confidence: float, n: int) -> float:
    """Return what a Student-t mean of `n` values stays within, in standard errors; a line through m has n = m - 1."""
    from scipy.stats import t

    return float(t.ppf((1 + confidence) / 2, n - 1))


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float], *, bounds: Bounds = FREE, confidence: float = CONFIDENCE
) -> Interval:
    """Return the interval of first - second over the seeds both have.

    Arms share seeds (weights, order of batches), so differences are taken seed by seed. What lies beyond the largest
    possible difference, the width of the bounds of both quantities, is cut off, which loses no coverage and leaves the
    side of 0 on which the interval lies.
    """
    width = math.inf if bounds[0] is None or bounds[1] is None else bounds[1] - bounds[0]
    shared = sorted(first.keys() & second.keys())
    span = interval((first[seed] - second[seed] for seed in shared), confidence=confidence)
    return span if span.n < 2 else Interval(span.mean, max(span.low, -width), min(span.high, width), span.n)


def welch_difference(first: Sequence[float], second: Sequence[float], *, confidence: float = CONFIDENCE) -> Interval:
    """Return the interval of the difference of two means of independent values, whatever their spreads (Welch).

    With $v_i = s_i^2 / n_i$ it is `mean -+ t sqrt(v_1 + v_2)` at
    $(v_1 + v_2)^2 / (v_1^2 / (n_1 - 1) + v_2^2 / (n_2 - 1))$ degrees of freedom; n is the smaller number of values.

    Examples:
        >>> found = welch_difference([1.0, 2.0, 3.0], [4.0, 6.0, 8.0, 10.0])
        >>> found.mean, round(found.low, 3), round(found.high, 3), found.n
        (-5.0, -8.898, -1.102, 3)
    """
    from scipy.stats import t

    sizes, mean = (len(first), len(second)), fmean(first) - fmean(second)
    if min(sizes) < 2:
        return Interval(mean, math.nan, math.nan, min(sizes))
    parts = [stdev(values) ** 2 / len(values) for values in (first, second)]
    if not sum(parts):
        return Interval(mean, mean, mean, min(sizes))
    freedom = sum(parts) ** 2 / sum(part**2 / (size - 1) for part, size in zip(parts, sizes, strict=True))
    half = float(t.ppf((1 + confidence) / 2, freedom)) * math.sqrt(sum(parts))
    return Interval(mean, mean - half, mean + half, min(sizes))


def joint_confidence(comparisons: int) -> float:
    """Return the confidence of each of several intervals that hold all at once with 95 %: Bonferroni's 1 - 0.05 / m."""
    return 1 - (1 - CONFIDENCE) / max(comparisons, 1)


def leads(
    arms: Mapping[str, Mapping[int, float]], best: str, *, higher: bool, bounds: Bounds = FREE
) -> dict[str, Interval]:
    """Return for every other arm how far the best one is ahead, with intervals that hold all at once.

    `arms` holds arm -> seed -> value. With many arms one of them would otherwise look different by chance: see
    `joint_confidence`.
    """
    others = [name for name in arms if name != best]
    confidence = joint_confidence(len(others))
    ahead = {}
    for name in others:
        pair = (arms[best], arms[name]) if higher else (arms[name], arms[best])
        ahead[name] = paired_difference(*pair, bounds=bounds, confidence=confidence)
    return ahead


def above_chance(accuracy: float, samples: int, chance: float, *, confidence: float = CONFIDENCE) -> bool:
    """Say whether a classifier beats guessing: one-sided binomial test of its right decisions.

    `P(X >= accuracy samples) <= 1 - confidence` for X binomial with `samples` trials of probability `chance`, the share
    of the most frequent label. Seeds share the test samples, so a mean over seeds counts as one exam, not as several.

    Examples:
        >>> above_chance(0.15, 100, 0.1), above_chance(0.16, 100, 0.1)
        (False, True)
    """
    from scipy.stats import binom

    return float(binom.sf(round(accuracy * samples) - 1, samples, chance)) <= 1 - confidence


def seeds_to_decide(values: Sequence[float], *, confidence: float = CONFIDENCE, power: float = POWER) -> int | None:
    """Return how many seeds would put the interval of the mean on one side of 0, if mean and spread are as they look.

    The smallest n with `P(|T| > t_{n-1}) >= power` for T noncentral t with `n - 1` degrees of freedom and noncentrality
    `sqrt(n) |mean| / s`. An estimate from few seeds is rough. At least as many as there are values (one per seed);
    `None` where fewer than two say nothing, or more than 10,000 would be needed.

    Examples:
        >>> seeds_to_decide([0.5, 1.5, -0.5, 0.9]), seeds_to_decide([1.0, -1.0])
        (18, None)
    """
    if len(values) < 2 or not all(math.isfinite(value) for value in values):
        return None
    from scipy.stats import nct

    spread, size = stdev(values), abs(fmean(values))
    if size == 0:
        return None
    if spread == 0:
        return len(values)

    def decides(n: int) -> bool:
        return float(nct.sf(student_quantile(confidence, n), n - 1, math.sqrt(n) * size / spread)) >= power

    high = len(values)
    while not decides(high):
        if high >= MOST_SEEDS:
            return None
        high = min(2 * high, MOST_SEEDS)
    low = max(len(values), high // 2)
    while low < high:
        middle = (low + high) // 2
        low, high = (low, middle) if decides(middle) else (middle + 1, high)
    return high


# -- the one chooser of a tuned setting, such as an arm's learning rate -----------------------------------------------


@dataclass(frozen=True, slots=True)
class Choice:
    """The setting chosen for an arm, and how sure the choice is."""

    arm: Mapping[str, Any]  # the knobs that name the arm
    setting: Mapping[str, Any]  # the tuned knobs at their chosen values
    score: float  # mean over the seeds that finished, of the reading it was chosen by
    finished: int  # how many of its tried seeds finished
    tried: int  # how many were tried
    ties: tuple[Mapping[str, Any], ...] = ()  # other settings with as many finished seeds and the same score
    # tuned knobs whose chosen value is the smallest or the largest tried: beyond it nobody looked
    edges: tuple[str, ...] = ()

    def remarks(self) -> list[str]:
        """Return what a reader should know about the choice: failed seeds, ties, the edge of the grid."""
        where, what = _words(self.arm), _words(self.setting)
        lines = []
        if self.finished < self.tried:
            lines.append(f"{where}: only {self.finished} of {self.tried} tuning runs finished at the chosen {what}.")
        if self.ties:
            lines.append(f"{where}: {what} ties with {'; '.join(map(_words, self.ties))}; the first is taken.")
        if self.edges:
            lines.append(f"{where}: the chosen {what} is at the edge of the grid ({', '.join(self.edges)}).")
        return lines


def choose(
    runs: Iterable[Row], *, by: str, over: Sequence[str], within: Sequence[str] = (), higher: bool = True
) -> list[Choice]:
    """Choose the best setting of every arm: the only chooser there is.

    A run that diverged, died, failed or lacks the reading is no measurement. Settings with more finished seeds come
    first, then the better mean of `by` over those; of equals the first in sorted order, whatever run finished first.

    Runs are flat rows of the seeds that tune: knobs, `seed`, `status` (ok if absent), readings. `by` is a reading of
    validation data, so that the test stays a test; `over` are the knobs tuned, the combinations of those of `within`
    the arms. Arms of which at least one run finished have a choice, in the order of first appearance.

    Examples:
        >>> rows = [{"norm": "batch", "lr": lr, "seed": s, "fit": lr} for lr in (0.1, 1.0, 10.0) for s in (0, 1)]
        >>> rows[-1]["status"] = rows[3]["status"] = "diverged"
        >>> [(choice.setting, choice.finished, choice.edges) for choice in choose(rows, by="fit", over=["lr"])]
        [({'lr': 0.1}, 2, ('lr',))]
    """
    arms: dict[tuple[Any, ...], dict[tuple[Any, ...], list[float | None]]] = {}
    for row in runs:
        settings = arms.setdefault(tuple(_hashable(row.get(knob)) for knob in within), {})
        settings.setdefault(tuple(_hashable(row.get(knob)) for knob in over), []).append(_measured_value(row, by))
    choices = []
    for arm, settings in arms.items():
        ranks = {setting: _rank(scores, higher) for setting, scores in settings.items()}
        best = max(ranks.values())
        first, *ties = sorted((setting for setting, rank in ranks.items() if rank == best), key=_order)
        if best[0] == 0:
            continue
        named, score = dict(zip(within, arm, strict=True)), best[1] if higher else -best[1]
        chosen, *others = (dict(zip(over, setting, strict=True)) for setting in (first, *ties))
        edges = tuple(knob for place, knob in enumerate(over) if _at_edge(first[place], place, settings))
        tried = len(settings[first])
        choices.append(Choice(named, chosen, score, best[0], tried=tried, ties=tuple(others), edges=edges))
    return choices


def _measured_value(row: Row, by: str) -> float | None:
    value = row.get(by) if row.get("status", "ok") == "ok" else None
    return float(value) if value is not None and math.isfinite(value) else None


def _rank(scores: Sequence[float | None], higher: bool) -> tuple[int, float]:
    finished = [score for score in scores if score is not None]
    return len(finished), (fmean(finished) if higher else -fmean(finished)) if finished else -math.inf


def _order(setting: tuple[Any, ...]) -> list[tuple[bool, float, str]]:
    """Sort numbers by size, words after them."""
    return [(not _is_number(v), float(v) if _is_number(v) else 0.0, str(v)) for v in setting]


def _at_edge(value: Any, place: int, settings: Iterable[tuple[Any, ...]]) -> bool:
    tried = {setting[place] for setting in settings}
    return len(tried) > 1 and all(map(_is_number, tried)) and value in (min(tried), max(tried))


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _hashable(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value


def _words(knobs: Mapping[str, Any]) -> str:
    return ", ".join(f"{knob} {format_number(value)}" for knob, value in knobs.items()) or "the runs"
