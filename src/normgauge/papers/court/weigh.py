"""The two rules by which numbers become words: `weigh` for theorems and quotations, `poll` for experiments."""

import math
from collections.abc import Mapping, Sequence

from normgauge.papers.court.verdict import Evidence, Verdict, Word
from normgauge.records import format_number
from normgauge.stats import CONFIDENCE, LEAST_SEEDS, MOST_SEEDS, interval, joint_confidence, seeds_to_decide


def weigh(evidence: Sequence[Evidence]) -> Verdict:
    """Judge a theorem-like claim from the discrepancies of its sentences; the only place where such verdicts arise.

    * every `printed` check is rounding: **holds**;
    * else every `conclusion` check is rounding, and so is every `corrected` one: **holds_with_correction**;
    * else: **false_as_stated**. A claim without a `conclusion` check is its own conclusion.

    A correction that fails, a correction that is not tested, and a discrepancy neither rounding nor clear are the
    ledger's own mistakes: the status is `error`, and there is no verdict.

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
    said = {role: [item for item in evidence if item.role == role] for role in ("printed", "corrected", "conclusion")}
    trouble = _trouble(said)
    if trouble:
        return Verdict(None, None, "error", tuple(evidence), trouble)
    word: Word = "false_as_stated"
    wrong, lost = ([item for item in said[role] if item.fails] for role in ("printed", "conclusion"))
    remedy = f"; {_describe_worst('the corrected statement', said['corrected'])}" if said["corrected"] else ""
    if not wrong:
        word, told = "holds", _describe_worst("the printed statement", said["printed"])
    else:
        fault = f"the printed statement is off by {format_number(wrong[0].value)} ({wrong[0].name})"
        if said["conclusion"] and not lost:
            survives = f"the conclusion survives ({', '.join(item.name for item in said['conclusion'])})"
            word, told = "holds_with_correction", f"{fault}{remedy}; {survives}"
        else:
            fate = f"fails: {lost[0].name}" if lost else "is this statement and falls with it"
            told = f"{fault}; the conclusion {fate}{remedy}"
    return Verdict(word, None, "judged", tuple(evidence), f"{told}.")


def poll(margins: Mapping[str, Sequence[float]], least: Mapping[str, float] | None = None) -> Verdict:
    """Judge an experiment from its margins: one number per seed, positive where that seed speaks for the claim.

    A margin is an effect minus the smallest effect of interest, which was declared before the runs. Each gets a Student
    interval over its seeds. Every 95 % interval above zero: reproduced (all must be, so the level stays 2.5 %). One of
    m intervals of confidence `1 - 0.05 / m` at or below zero: contradicted, so that a true claim of many parts is not
    contradicted by luck. Anything else, fewer than three seeds, or an interval without width: too_small_to_tell, with
    the number of seeds that would tell if mean and spread are as they look. `least` holds per contrast the smallest
    effect, for the reader; it is subtracted already.

    Examples:
        >>> poll({"accuracy with minus without": [0.03, 0.02, 0.04, 0.03]}).outcome
        'reproduced'
        >>> poll({"accuracy with minus without": [0.03, -0.02, 0.01]}).outcome
        'too_small_to_tell'
    """
    evidence = tuple(_margin(name, list(values), (least or {}).get(name, 0.0)) for name, values in margins.items())
    intervals = [item for item in evidence if math.isfinite(item.tolerance)]
    joint = joint_confidence(len(evidence))
    against = [item for item in intervals if interval(margins[item.name], confidence=joint).high <= 0]
    if against:
        told = f"{against[0]}: the interval excludes the smallest effect that counts."
        return Verdict("empirical", "contradicted", "judged", evidence, told)
    if evidence and len(intervals) == len(evidence) and all(item.value > item.tolerance for item in intervals):
        told = f"{'; '.join(map(str, evidence))}: every interval lies beyond the smallest effect that counts."
        return Verdict("empirical", "reproduced", "judged", evidence, told)
    why = "; ".join(map(str, evidence)) or "no margin could be computed"
    sentence = f"{why}: {_describe_lack(margins, evidence)}."
    return Verdict("empirical", "too_small_to_tell", "judged", evidence, sentence)


def _margin(name: str, values: list[float], least: float) -> Evidence:
    """Return mean and half width; infinite where the seeds are too few, or too equal, to know."""
    span = interval(values)
    half = (span.high - span.low) / 2 if span.n >= LEAST_SEEDS and span.has_width else math.inf
    return Evidence(name, "margin", span.mean, half, span.n, least)


def _describe_lack(margins: Mapping[str, Sequence[float]], evidence: Sequence[Evidence]) -> str:
    """Say what would tell: at least three seeds, or about how many for the intervals that contain 0."""
    few = min((item.instances for item in evidence), default=0)
    if few < LEAST_SEEDS:
        return f"{few} seed{'' if few == 1 else 's'} cannot tell, {LEAST_SEEDS} are the least"
    if any(not interval(margins[item.name]).has_width for item in evidence):
        return "equal values on every seed have an interval without width, which cannot tell"
    joint = joint_confidence(len(evidence))
    needed = [
        seeds_to_decide(margins[item.name], confidence=CONFIDENCE if item.value > 0 else joint)
        for item in evidence
        if item.value <= item.tolerance
    ]
    if None in needed:
        return f"the arms cannot be told apart, and no number of seeds up to {MOST_SEEDS:,} would if this is the spread"
    return f"the arms cannot be told apart; about {max(n for n in needed if n)} seeds would, if this is the spread"


def _trouble(said: Mapping[str, Sequence[Evidence]]) -> str:
    """Say what keeps the ledger from judging, or nothing."""
    if not said["printed"]:
        return "no check of the printed statement was made."
    for item in (item for items in said.values() for item in items):
        if not item.passes and not item.fails:
            return f"undecided: {item}."
        if item.role == "corrected" and item.fails:
            return f"the correction fails: {item}."
    survives = said["conclusion"] and not any(item.fails for item in said["conclusion"])
    if any(item.fails for item in said["printed"]) and survives and not said["corrected"]:
        return "the conclusion survives, but the corrected statement is not tested."
    return ""


def _describe_worst(subject: str, items: Sequence[Evidence]) -> str:
    worst = max(items, key=lambda item: item.value / item.tolerance)
    count = max(item.instances for item in items)
    return f"{subject} holds to {format_number(worst.value, 2)} over {count} instances"
