"""What a judge hands back: the `Verdict`, and the named numbers (`Evidence`) it follows from."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Literal, get_args

from normgauge.errors import InputError
from normgauge.records import format_number

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
