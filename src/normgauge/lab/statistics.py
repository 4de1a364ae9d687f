"""Means with intervals over seeds, and paired differences that decide which arm is better, or that none is."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from scipy import stats

CONFIDENCE = 0.95


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


def interval(values: Sequence[float], confidence: float = CONFIDENCE) -> Interval:
    """Return mean and Student-t interval of independent values.

    low, high = mean -+ t_{n-1} s / sqrt(n) with s the sample deviation.

    Examples:
        >>> found = interval([1.0, 2.0, 3.0])
        >>> found.mean, round(found.low, 4), round(found.high, 4), found.n
        (2.0, -0.4841, 4.4841, 3)
    """
    n = len(values)
    if n == 0:
        return Interval(math.nan, math.nan, math.nan, 0)
    mean = sum(values) / n
    if n == 1:
        return Interval(mean, math.nan, math.nan, 1)
    deviation = math.sqrt(sum((value - mean) ** 2 for value in values) / (n - 1))
    half = float(stats.t.ppf((1 + confidence) / 2, n - 1)) * deviation / math.sqrt(n)
    return Interval(mean, mean - half, mean + half, n)


def paired_difference(
    first: Mapping[int, float], second: Mapping[int, float], confidence: float = CONFIDENCE
) -> Interval:
    """Return the interval of first - second over the seeds both have.

    Arms share seeds (weights, order of batches), so differences are taken seed by seed.
    """
    seeds = sorted(set(first) & set(second))
    return interval([first[seed] - second[seed] for seed in seeds], confidence)


def differences_from_best(
    arms: Mapping[str, Mapping[int, float]], best: str, *, higher_is_better: bool
) -> dict[str, Interval]:
    """Return for every other arm how far the best one is ahead, with intervals that hold all at once.

    The confidence is Bonferroni's, 1 - 0.05 / (number of other arms): with many arms one of them would
    otherwise look different by chance.
    """
    others = [name for name in arms if name != best]
    confidence = 1 - (1 - CONFIDENCE) / max(len(others), 1)
    sign = 1.0 if higher_is_better else -1.0
    result = {}
    for name in others:
        ahead = paired_difference(arms[best], arms[name], confidence)
        low, high = sorted((sign * ahead.low, sign * ahead.high))
        result[name] = Interval(sign * ahead.mean, low, high, ahead.n)
    return result
