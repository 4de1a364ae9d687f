"""The two rules by which numbers become words: `weigh` for theorems and quotations, `poll` for experiments."""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence

from normgauge.papers.court.verdict import Evidence, Verdict
from normgauge.records import format_number

#: Fewer seeds than this say nothing about an experiment.
SEEDS = 3


def weigh(evidence: Sequence[Evidence]) -> Verdict:
    """Judge a theorem-like claim from the discrepancies of its sentences; the only place where such verdicts arise.

    * every `printed` check is rounding: **holds**;
    * else every `conclusion` check is rounding, and so is every `corrected` one: **holds_with_correction**;
    * else: **false_as_stated**. A claim without a `conclusion` check is its own conclusion.

    A correction that fails, a correction that is not tested, and a discrepancy neither rounding nor clear are the
    ledger's own mistakes: the status is `error`, and there is no verdict.

    Args:
        evidence: the gathered checks of one claim.

    Examples:
        >>> off, rounding = 0.3, 1e-16
        >>> weigh([Evidence("bound", "printed", rounding)]).verdict
        'holds'
        >>> parts = [Evidence("bound", "printed", off), Evidence("bound with 1/m", "corrected", rounding)]
        >>> weigh(parts).verdict
        'false_as_stated'
        >>> weigh([*parts, Evidence("the norm shrinks", "conclusion", rounding)]).verdict
        'holds_with_correction'
    """
    weighty = [item for item in evidence if item.role in ("printed", "corrected", "conclusion")]
    trouble = _trouble(weighty)
    if trouble:
        return Verdict(None, None, "error", tuple(evidence), trouble)
    printed, corrected, conclusion = (_of(weighty, role) for role in ("printed", "corrected", "conclusion"))
    wrong = [item for item in printed if item.fails]
    remedy = f"; {_worst('the corrected statement', corrected)}" if corrected else ""
    if not wrong:
        return Verdict("holds", None, "judged", tuple(evidence), f"{_worst('the printed statement', printed)}.")
    fault = f"the printed statement is off by {format_number(wrong[0].value)} ({wrong[0].name})"
    lost = [item for item in conclusion if item.fails]
    if conclusion and not lost:
        survives = f"the conclusion survives ({', '.join(item.name for item in conclusion)})"
        return Verdict("holds_with_correction", None, "judged", tuple(evidence), f"{fault}{remedy}; {survives}.")
    fate = f"the conclusion fails: {lost[0].name}" if lost else "the conclusion is this statement and falls with it"
    return Verdict("false_as_stated", None, "judged", tuple(evidence), f"{fault}; {fate}{remedy}.")


def poll(margins: Mapping[str, Sequence[float]], *, level: float = 0.95) -> Verdict:
    """Judge an experiment from its margins: one number per seed, positive where that seed speaks for the claim.

    Each margin gets a Student interval over its seeds. All intervals above zero: confirmed. One interval at or below
    zero: not_confirmed. Anything else, or fewer than three seeds: inconclusive.

    Args:
        margins: per criterion its values over seeds.
        level: coverage of the intervals.

    Examples:
        >>> poll({"accuracy with minus without": [0.03, 0.02, 0.04, 0.03]}).outcome
        'confirmed'
        >>> poll({"accuracy with minus without": [0.03, -0.02, 0.01]}).outcome
        'inconclusive'
    """
    evidence = tuple(
        Evidence(name, "margin", *_interval(list(values), level), len(values)) for name, values in margins.items()
    )
    known = [item for item in evidence if item.instances >= SEEDS and math.isfinite(item.value)]
    against = [item for item in known if item.value + item.tolerance <= 0]
    if against:
        return Verdict("empirical", "not_confirmed", "judged", evidence, f"{against[0]}: the interval is not above 0.")
    if evidence and len(known) == len(evidence) and all(item.value - item.tolerance > 0 for item in known):
        return Verdict("empirical", "confirmed", "judged", evidence, f"{'; '.join(map(str, evidence))}: all above 0.")
    why = "; ".join(map(str, evidence)) or "no margin could be computed"
    return Verdict("empirical", "inconclusive", "judged", evidence, f"{why}: the arms cannot be told apart.")


def _trouble(weighty: Sequence[Evidence]) -> str:
    """Say what keeps the ledger from judging, or nothing."""
    if not _of(weighty, "printed"):
        return "no check of the printed statement was made."
    for item in weighty:
        if not item.passes and not item.fails:
            return f"undecided: {item}."
        if item.role == "corrected" and item.fails:
            return f"the correction fails: {item}."
    fails = any(item.fails for item in _of(weighty, "printed"))
    survives = _of(weighty, "conclusion") and not any(item.fails for item in _of(weighty, "conclusion"))
    if fails and survives and not _of(weighty, "corrected"):
        return "the conclusion survives, but the corrected statement is not tested."
    return ""


def _of(evidence: Sequence[Evidence], role: str) -> list[Evidence]:
    return [item for item in evidence if item.role == role]


def _worst(subject: str, items: Sequence[Evidence]) -> str:
    worst = max(items, key=lambda item: item.value / item.tolerance)
    count = max(item.instances for item in items)
    return f"{subject} holds to {format_number(worst.value, 2)} over {count} instances"


def _interval(values: Sequence[float], level: float) -> tuple[float, float]:
    """Return mean and half-width; infinite where the seeds are too few to know."""
    if not values or not all(math.isfinite(value) for value in values):
        return math.nan, math.inf
    if len(values) < SEEDS:
        return statistics.fmean(values), math.inf
    from scipy.stats import t

    spread = statistics.stdev(values) / math.sqrt(len(values))
    return statistics.fmean(values), float(t.ppf(0.5 + level / 2, len(values) - 1)) * spread
