"""What a judge hands back: the `Verdict`, and the named numbers (`Evidence`) it follows from by one of two rules.

`weigh` is that of theorems and quotations, `poll` that of experiments.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Literal, get_args

from normgauge.errors import InputError
from normgauge.records import format_number
from normgauge.stats import CONFIDENCE, LEAST_SEEDS, MOST_SEEDS, interval, joint_confidence, seeds_to_decide

Word = Literal["holds", "holds_with_correction", "false_as_stated", "empirical"]
Outcome = Literal["reproduced", "contradicted", "too_small_to_tell", "premise_absent", "not_run"]
Standing = Literal["judged", "not_run", "error"]
Role = Literal["printed", "corrected", "conclusion", "fact", "margin"]

WORDS: tuple[str, ...] = get_args(Word)
OUTCOMES: tuple[str, ...] = get_args(Outcome)
STANDINGS: tuple[str, ...] = get_args(Standing)

#: A discrepancy up to its tolerance is rounding; one above `CLEAR` tolerances is a failure; between them nobody knows.
CLEAR = 1e3


@dataclass(frozen=True, slots=True)
class Evidence:
    """One named number a verdict rests on.

    Args:
        name: what was compared or counted.
        role: which sentence it speaks for: `printed`, `corrected`, `conclusion` (what the paper draws from it);
            `fact` shows a size and weighs nothing; `margin` is an experiment's mean margin in favour of the claim.
        value: the largest discrepancy over all instances (0 is perfect), or the fact's or margin's value.
        tolerance: how large a discrepancy may be and still be rounding; for a margin the half-width of its interval.
        instances: over how many instances (or seeds) the value was taken.
        least: of a margin, the smallest effect that was declared to count, subtracted from the effect already.
    """

    name: str
    role: Role
    value: float
    tolerance: float = 1e-8
    instances: int = 1
    least: float = 0.0

    @property
    def passes(self) -> bool:
        """Whether the discrepancy is rounding."""
        return self.value <= self.tolerance

    @property
    def fails(self) -> bool:
        """Whether the discrepancy is far beyond rounding (not a number and infinity are)."""
        return not self.passes and not self.value < CLEAR * self.tolerance

    def __str__(self) -> str:
        """Return role, name, value and what the value is over, on one line."""
        if self.role == "fact":
            return f"fact: {self.name} = {format_number(self.value)}"
        if self.role == "margin":
            seeds = f"{self.instances} seed{'' if self.instances == 1 else 's'}"
            spread = f" +- {format_number(self.tolerance)}" if math.isfinite(self.tolerance) else ""
            effect = format_number(self.value + self.least)
            return f"margin: {self.name} = {effect}{spread} over {seeds} (counts above {format_number(self.least)})"
        word = "holds" if self.passes else "fails" if self.fails else "undecided"
        bound = f"tolerance {format_number(self.tolerance)}, {self.instances} instances"
        return f"{self.role} {word}: {self.name}: discrepancy {format_number(self.value)} ({bound})"


@dataclass(frozen=True, slots=True)
class Verdict:
    """What became of a claim, and the numbers it follows from.

    Args:
        verdict: holds, holds_with_correction, false_as_stated or empirical; `None` where the status is `error`.
        outcome: of an experiment at the scale run: reproduced, contradicted, too_small_to_tell, premise_absent (what
            the sentence presupposes did not come about) or not_run; `None` for other claims.
        status: judged, not_run or error.
        evidence: the numbers.
        sentence: one sentence that says why.
        rests_on: which runs an experiment was judged from.
        beside: verdicts of the same criterion on other runs, which do not count: each says why.
    """

    verdict: Word | None
    outcome: Outcome | None
    status: Standing
    evidence: tuple[Evidence, ...]
    sentence: str
    rests_on: str = ""
    beside: tuple[Verdict, ...] = ()

    def __post_init__(self) -> None:
        """Refuse words outside the vocabulary: the ledger is read by machines too."""
        known = {"verdict": (*WORDS, None), "outcome": (*OUTCOMES, None), "status": STANDINGS}
        for name, words in known.items():
            if getattr(self, name) not in words:
                rule = f"{name} is one of {', '.join(map(str, words))}"
                raise InputError("Verdict", rule, repr(getattr(self, name)), "Use one of them")

    @property
    def word(self) -> str:
        """The one word for it: an experiment's outcome, a theorem's verdict, or why there is none."""
        return self.outcome or (self.status if self.status != "judged" else str(self.verdict))


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
