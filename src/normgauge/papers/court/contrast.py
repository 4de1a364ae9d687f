"""`Contrast`: what an experiment compares, as data: arms paired by seed, against a smallest effect declared beforehand.

It is a sum of arms and nothing else, so that no choice among cells, and no maximum over them, can hide in it.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean, pstdev
from typing import Any

from normgauge.errors import DataError
from normgauge.papers.court.table import StudyTable
from normgauge.records import Row, format_number, spoken

Arm = Mapping[str, Any]


@dataclass(frozen=True)
class Pick:
    """A knob's value that is read from the table: the smallest, the largest, or one contrast for each but some."""

    which: str
    but: tuple[Any, ...] = ()

    def __str__(self) -> str:
        return f"{self.which}{f' but {_value(self.but)}' if self.but else ''}"


EACH, SMALLEST, LARGEST = Pick("each"), Pick("smallest"), Pick("largest")
PICKS: dict[Any, Pick] = {pick.which: pick for pick in (EACH, SMALLEST, LARGEST)}
OF: dict[str, Callable[[float], float]] = {"": float, "abs": abs, "at least 1": lambda value: max(value, 1.0)}


def each_but(*values: Any) -> Pick:
    """Return the pick of every value but these."""
    return Pick("each", values)


class NotRun(Exception):
    """Raised where a table has no run of an arm, nor one that failed: it was made under an older design."""


@dataclass(frozen=True)
class Contrast:
    """`reading(more) - reading(less)` per seed, minus the same of the control; it speaks for the claim above `least`.

    Args:
        reading: a column of the table; an arm may name its own under `reading`.
        more: the arm expected to have more of it; nothing where one arm is compared with a number.
        less: the arm expected to have less.
        least: the smallest effect of interest, in units of the reading (of its log10); negative where `more` may be
            that much behind, or where a number is an upper bound of `less`.
        at: knobs that all arms share; a `Pick` is resolved in the table. Several values of a knob are a tuple, and the
            knob one of `over`.
        control: where two things change at once, a pair of arms in which only the other one changes; its difference is
            subtracted.
        log: compare log10 of the reading.
        over: knobs over which the reading is averaged, on seeds that have all of their values.
        spread: a knob over which the standard deviation is taken first.
        of: what is compared of the reading, as `abs`.
        name: in words; made from the arms otherwise.
    """

    reading: str
    more: Arm | None = None
    less: Arm | None = None
    least: float = 0.0
    at: Arm | None = None
    control: tuple[Arm, Arm] | None = None
    log: bool = False
    over: tuple[str, ...] = ()
    spread: str = ""
    of: Callable[[float], float] = float
    name: str = ""

    @property
    def title(self) -> str:
        """What is compared, in words."""
        return f"minus {self._told}" if self.more is None else self._told

    @property
    def _told(self) -> str:
        if self.name:
            return self.name
        arms = (" over " if self.log else " minus ").join(_words(arm) for arm in (self.more, self.less) if arm)
        told = f"{'log10 of ' * self.log}{f'spread over {self.spread} of ' * bool(self.spread)}{spoken(self.reading)}"
        told = ": ".join(part for part in (told, arms) if part)
        told += f", minus the same of {' and '.join(map(_words, self.control))}" if self.control else ""
        told += f" ({_words(self.at)})" if self.at else ""
        return told + (f", mean over {', '.join(self.over)}" if self.over else "")

    @property
    def rule(self) -> str:
        """What must come out, in words."""
        if self.more is None:
            return f"{self._told} is below {format_number(-self.least)}"
        return f"{self.title} is above {format_number(self.least)}"

    @property
    def readings(self) -> tuple[str, ...]:
        """The columns it reads, for the table of a page."""
        named = [str(arm["reading"]) for arm in (self.more, self.less) if arm and "reading" in arm]
        return tuple(named or [self.reading])

    def resolve(self, table: StudyTable) -> Iterator[Contrast]:
        """Yield the contrast with every `Pick` replaced by what the table has."""
        for at in resolve(self.at or {}, table):
            yield replace(self, at=at)

    def effects(self, table: StudyTable) -> list[float]:
        """Return the effect on every seed that all its arms have.

        Raises:
            NotRun: where an arm was not run.
            DataError: when two rows answer for one seed: then a knob is missing from the contrast.
        """
        signed = [(1, self.more), (-1, self.less)]
        signed += [(-1, self.control[0]), (1, self.control[1])] if self.control else []
        cells = [(sign, self._by_seed(table, {**(self.at or {}), **arm})) for sign, arm in signed if arm is not None]
        seeds = sorted(set.intersection(*(set(cell) for _, cell in cells)))
        return [sum(sign * cell[seed] for sign, cell in cells) for seed in seeds]

    def _by_seed(self, table: StudyTable, arm: Arm) -> dict[int, float]:
        (knobs,) = resolve({name: value for name, value in arm.items() if name != "reading"}, table)
        own = [knob for knob in (*self.over, self.spread) if knob]
        rows = [row for row in table.where(**knobs) if all(row.get(knob) is not None for knob in own)]
        if not rows and not table.has_failed(knobs):
            raise NotRun(f"no run of {_words(knobs) or 'it'}")
        reading = str(arm.get("reading", self.reading))
        if rows and not any(reading in row for row in table.rows):
            raise NotRun(f"no run recorded {spoken(reading)}")
        groups: dict[int, list[tuple[Row, float]]] = {}
        for row in (row for row in rows if row.get(reading) is not None):
            value = self.of(row[reading])
            groups.setdefault(row["seed"], []).append((row, math.log10(value) if self.log else value))
        whole = max(map(len, groups.values()), default=0)
        if whole > 1 and not own:
            duplicate = f"{whole} for one seed of {_words(knobs)}"
            raise DataError(f"reading {reading!r}", "one row per seed", duplicate, "Name more knobs")
        return {seed: self._summary(group) for seed, group in groups.items() if len(group) == whole}

    def _summary(self, group: Sequence[tuple[Row, float]]) -> float:
        if not self.spread:
            return fmean(value for _, value in group)
        held: dict[Any, list[float]] = {}
        for row, value in group:
            held.setdefault(tuple(str(row.get(knob)) for knob in self.over), []).append(value)
        return fmean(map(pstdev, held.values()))


def read_contrast(told: Row) -> Contrast:
    """Return a contrast as `studies.toml` tells it: `factor` is the smallest ratio, `of` a word of `OF`."""
    fields = {**told, "over": tuple(told.get("over", ())), "of": OF[told.get("of", "")]}
    if "factor" in told:
        fields |= {"log": True, "least": math.log10(fields.pop("factor"))}
    fields |= {name: read_arm(told[name]) for name in ("more", "less", "at") if name in told}
    if "control" in told:
        fields["control"] = tuple(map(read_arm, told["control"]))
    return Contrast(**fields)


def read_arm(told: Row) -> dict[str, Any]:
    """Return an arm as `studies.toml` tells it: `each`, `smallest`, `largest` and `{ each_but = [...] }` are picks."""

    def read(value: Any) -> Any:
        if isinstance(value, dict):
            return each_but(*value["each_but"])
        return tuple(value) if isinstance(value, list) else PICKS.get(value, value)

    return {knob: read(value) for knob, value in told.items()}


def resolve(knobs: Arm, table: StudyTable) -> Iterator[dict[str, Any]]:
    """Yield the knobs with every `Pick` replaced by values among the rows that have the other knobs.

    Raises:
        NotRun: where no row has any.
    """
    picks = [knob for knob, value in knobs.items() if isinstance(value, Pick)]
    if not picks:
        yield dict(knobs)
        return
    pick, rows = knobs[picks[0]], table.where(**{k: v for k, v in knobs.items() if k not in picks})
    values = list(dict.fromkeys(row[picks[0]] for row in rows if row.get(picks[0]) is not None))
    if not values:
        raise NotRun(f"no run has a {spoken(picks[0])}")
    each = [value for value in values if value not in pick.but]
    for value in each if pick.which == "each" else [max(values) if pick is LARGEST else min(values)]:
        yield from resolve({**knobs, picks[0]: value}, table)


def measure(contrasts: Sequence[Contrast], table: StudyTable) -> dict[str, list[float]]:
    """Return per contrast its effects minus the smallest that counts: what `poll` judges."""
    return {
        each.title: [effect - each.least for effect in each.effects(table)]
        for contrast in contrasts
        for each in contrast.resolve(table)
    }


def least_effects(contrasts: Sequence[Contrast], table: StudyTable) -> dict[str, float]:
    """Return per contrast, as `measure` names it, the smallest effect declared."""
    return {each.title: each.least for contrast in contrasts for each in contrast.resolve(table)}


def _words(arm: Arm | None) -> str:
    named = arm or {}
    return ", ".join(spoken(v) if k == "reading" else f"{spoken(k)} {_value(v)}" for k, v in named.items())


def _value(value: Any) -> str:
    if isinstance(value, tuple):
        return " or ".join(map(_value, value))
    return format_number(value) if isinstance(value, float | bool) else str(value)
