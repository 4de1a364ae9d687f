"""What is concluded from runs and kept beside them, typed and with a version: a comparison, a paper's experiment.

lab and papers write these, report draws them; no page re-derives a title, a unit or a factor from a key.
"""

import os
import types
import typing
from collections.abc import Mapping
from dataclasses import dataclass, fields, is_dataclass
from functools import cache
from pathlib import Path
from typing import Any, ClassVar, Self, TypeVar

from normgauge.errors import StoreError
from normgauge.records import Provenance, Row
from normgauge.stats import FREE, Bounds, Interval

T = TypeVar("T")
#: How much a study runs, from the least to the most.
SIZES = ("smoke", "small", "medium", "paper")
#: The sizes every study has; `medium`, a night on two cores for all that have it, is for those that decide much.
NEEDED = ("smoke", "small", "paper")


@dataclass(frozen=True)
class Document:
    """Base of stored documents; a subclass is a frozen dataclass of plain values, tuples, mappings and dataclasses.

    A change of its fields that old files do not survive raises its `VERSION`.
    """

    VERSION: ClassVar[int] = 1

    @classmethod
    def of_json(cls, data: Mapping[str, Any], origin: str) -> Self:
        """Return the document that was written as JSON."""
        try:
            if data["version"] == cls.VERSION:
                return from_plain(cls, data)
            problem = f"version {data['version']}"
        except (KeyError, TypeError, ValueError, AttributeError) as error:
            problem = f"{type(error).__name__} {error}"
        rule = f"a {cls.__name__} of version {cls.VERSION} is read"
        raise StoreError(origin, rule, problem, "Run the same command again: finished runs are kept")


@dataclass(frozen=True, slots=True)
class Metric:
    """One quantity of a comparison: where it is read, how it is written, what it means."""

    name: str  # of the reading
    title: str  # for people
    help: str = ""  # one sentence
    unit: str = ""  # for people; "%" where a share is shown in per cent
    better: str | None = None  # "higher", "lower", or `None` where neither is
    brief: bool = True  # whether the terminal shows it; the page and the frame have all of them
    when: str = "last"  # the "first" or "last" measured step of a run, or the "mean" over them
    bounds: Bounds = FREE  # lowest and highest possible value, as stored

    @property
    def factor(self) -> float:
        """What a stored value is multiplied by for reading: shares are stored as fractions."""
        return 100.0 if self.unit == "%" else 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """A study as it was asked: the knobs compared, tuned and fixed, and the seeds."""

    name: str  # short
    title: str  # a headline
    question: str  # what it answers
    scientific: Mapping[str, tuple[Any, ...]]  # knob -> values that are compared
    nuisance: Mapping[str, tuple[Any, ...]]  # knob -> values that are tuned for each arm
    fixed: Mapping[str, Any]  # knob -> value
    seeds: int  # how many
    tuning_seeds: int  # how many of them every tuned setting is tried on
    cite: tuple[str, ...] = ()  # bibliography keys
    held_out: bool = False  # whether the tuning seeds are not among those judged


@dataclass(frozen=True, slots=True)
class Arm:
    """One line of a comparison."""

    knobs: Mapping[str, Any]  # what names the arm, as `{"norm": "batch"}`
    setting: Mapping[str, Any]  # the tuned knobs at their chosen values; empty where no run finished
    n: int  # runs behind the means
    # metric -> mean and interval over seeds, as stored; a metric without a value is absent
    values: Mapping[str, Interval]
    stable_up_to: str = ""  # the largest tuned rate below which no seed failed, in words
    remarks: tuple[str, ...] = ()  # what a reader should know about the choice of the setting
    name: str = ""  # for people: the values of the knobs in which arms differ

    @property
    def title(self) -> str:
        """The name, or what stands for it in documents from before arms had one."""
        return self.name or ", ".join(map(str, self.knobs.values()))


@dataclass(frozen=True)
class ComparisonDocument(Document):
    """What a comparison found, as its page and terminal say it."""

    question: Question  # the study
    metrics: tuple[Metric, ...]  # the columns
    arms: tuple[Arm, ...]  # the lines, best first
    answer: str  # the sentence
    decided: bool  # whether the data can tell the best arm from all others
    runs: tuple[str, ...]  # ids of the runs it rests on: a store may hold others too
    provenance: Provenance  # where it was concluded
    command: str  # that runs it again
    finished: str  # when, in ISO form


@dataclass(frozen=True, slots=True)
class Margin:
    """A margin over seeds, positive where they speak for the claim: mean, half width of its interval, seeds.

    `least` is the smallest effect that was declared to count; the effect itself is mean + least.
    """

    name: str
    mean: float
    half_width: float
    seeds: int
    least: float = 0.0


@dataclass(frozen=True, slots=True)
class CriterionDocument:
    """One criterion of a study and its verdict."""

    id: str  # of the claim in the ledger, or the study's own name for a finding the ledger does not list
    printed: str  # the sentence it is about
    criterion: str  # the rule, in words, as it was fixed before the runs
    outcome: str  # reproduced, contradicted, too_small_to_tell, premise_absent or not_run
    sentence: str  # why
    margins: tuple[Margin, ...]  # per margin its name, mean, half width of its interval, and seeds
    # the same contrasts where a free choice is made otherwise; they decide nothing
    sensitivity: tuple[Margin, ...] = ()


@dataclass(frozen=True, slots=True)
class SizedVerdict:
    """What runs of another size say of a criterion: its id, the size, the outcome and the margins."""

    id: str
    size: str
    outcome: str
    margins: tuple[Margin, ...]


@dataclass(frozen=True, slots=True)
class About:
    """A paper's experiment as it is declared: what its page says whatever the runs say."""

    papers: tuple[str, ...]  # names and years
    place: str  # section or figure
    question: str  # what it answers
    finding: str  # what the paper says came out
    proxy: str  # how the size run differs from the published setting
    knobs: tuple[str, ...]  # those that vary
    columns: tuple[str, ...]  # the readings shown in the page's table
    command: str  # that runs it again
    protocol: tuple[str, ...] = ()  # how arms were tuned, judged and controlled


@dataclass(frozen=True, slots=True)
class FailedRun:
    """A run that is no measurement: which, what became of it, why."""

    run: str
    status: str
    sentence: str


@dataclass(frozen=True)
class StudyDocument(Document):
    """A paper's experiment as it came out: the rows its verdicts rest on, and all its page says beside the figures.

    A table that ships with the package is one of these too.
    """

    study: str  # its name
    size: str  # one of `SIZES`
    # one flat row per run at its arm's chosen setting: knobs, `seed`, `status`, last value of every reading
    rows: tuple[Row, ...]
    criteria: tuple[CriterionDocument, ...]  # what was judged, and how it came out
    remarks: tuple[str, ...]  # sentences with the numbers
    failed: tuple[FailedRun, ...]  # runs that are no measurements
    runs: int  # how many there were, tuning included
    seconds: float  # of all runs together
    seeds: int  # how many
    fixed: tuple[Mapping[str, Any], ...]  # what was fixed, for each part of the study
    provenance: Provenance  # where the last runs were made
    finished: str  # when, in ISO form
    other_sizes: tuple[SizedVerdict, ...] = ()  # what runs of other sizes that lay beside say, for the trend


def write_whole(path: Path, text: str) -> None:
    """Write a text file so that it is there as a whole or as it was before; its folder is made."""
    part = path.with_name(f".{path.name}.{os.getpid()}.part")
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        try:
            part.write_text(text, encoding="utf-8")
            part.replace(path)
        finally:
            part.unlink(missing_ok=True)
    except OSError as error:
        step = "Free space, or choose another place with --out"
        raise StoreError(str(path), "a file must be writable there", str(error), step) from error


def from_plain(kind: type[T], data: Any) -> T:
    """Return what `records.plain` made plain: dataclasses, tuples and mappings are built as their annotations say.

    Keys that the dataclass does not have are left alone.

    Examples:
        >>> from normgauge.stats import Interval
        >>> from_plain(Interval, {"mean": 1.0, "low": None, "high": 2.0, "n": 3}).high
        2.0
    """
    return typing.cast(T, _build(kind, data))


def _build(kind: Any, data: Any) -> Any:
    origin, arguments = typing.get_origin(kind), typing.get_args(kind)
    if origin in (types.UnionType, typing.Union):
        if data is None:
            return None
        choices = [choice for choice in arguments if choice is not type(None)]
        return _build(choices[0], data) if len(choices) == 1 else data
    if kind is float:
        return float("nan") if data is None else float(data)
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        there = [item.name for item in fields(kind) if item.name in data]
        return kind(**{name: _build(hints[name], data[name]) for name in there})
    if origin is tuple:
        inner = arguments[0] if arguments[-1] is Ellipsis else None
        pairs = zip(data, [inner] * len(data) if inner else arguments, strict=True)
        return tuple(_build(part, item) for item, part in pairs)
    if isinstance(origin, type) and issubclass(origin, Mapping) and data is not None:
        return {key: _build(arguments[1], item) for key, item in data.items()}
    return data


@cache
def _hints(kind: Any) -> dict[str, Any]:
    return typing.get_type_hints(kind)
