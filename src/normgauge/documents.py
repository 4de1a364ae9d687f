"""What is concluded from runs and kept beside them, typed and with a version: a comparison, a paper's experiment.

lab and papers write these, report draws them; no page re-derives a title, a unit or a factor from a key.
"""

from __future__ import annotations

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
    """One quantity of a comparison: where it is read, how it is written, what it means.

    Attributes:
        name: of the reading.
        title: for people.
        unit: for people; "%" where a share is shown in per cent.
        better: "higher", "lower", or `None` where neither is.
        help: one sentence.
        brief: whether the terminal shows it; the page and the frame have all of them.
        when: the "first" or "last" measured step of a run, or the "mean" over them.
        bounds: lowest and highest possible value, as stored.
    """

    name: str
    title: str
    help: str = ""
    unit: str = ""
    better: str | None = None
    brief: bool = True
    when: str = "last"
    bounds: Bounds = FREE

    @property
    def factor(self) -> float:
        """What a stored value is multiplied by for reading: shares are stored as fractions."""
        return 100.0 if self.unit == "%" else 1.0


@dataclass(frozen=True, slots=True)
class Question:
    """A study as it was asked: the knobs compared, tuned and fixed, and the seeds.

    Attributes:
        name: short.
        title: a headline.
        question: what it answers.
        scientific: knob -> values that are compared.
        nuisance: knob -> values that are tuned for each arm.
        fixed: knob -> value.
        seeds: how many.
        tuning_seeds: how many of them every tuned setting is tried on.
        cite: bibliography keys.
        held_out: whether the tuning seeds are not among those judged.
    """

    name: str
    title: str
    question: str
    scientific: Mapping[str, tuple[Any, ...]]
    nuisance: Mapping[str, tuple[Any, ...]]
    fixed: Mapping[str, Any]
    seeds: int
    tuning_seeds: int
    cite: tuple[str, ...] = ()
    held_out: bool = False


@dataclass(frozen=True, slots=True)
class Arm:
    """One line of a comparison.

    Attributes:
        knobs: what names the arm, as `{"norm": "batch"}`.
        setting: the tuned knobs at their chosen values; empty where no run finished.
        n: runs behind the means.
        values: metric -> mean and interval over seeds, as stored; a metric without a value is absent.
        stable_up_to: the largest tuned rate below which no seed failed, in words.
        remarks: what a reader should know about the choice of the setting.
        name: for people: the values of the knobs in which arms differ.
    """

    knobs: Mapping[str, Any]
    setting: Mapping[str, Any]
    n: int
    values: Mapping[str, Interval]
    stable_up_to: str = ""
    remarks: tuple[str, ...] = ()
    name: str = ""

    @property
    def title(self) -> str:
        """The name, or what stands for it in documents from before arms had one."""
        return self.name or ", ".join(map(str, self.knobs.values()))


@dataclass(frozen=True)
class ComparisonDocument(Document):
    """What a comparison found, as its page and terminal say it.

    Attributes:
        question: the study.
        metrics: the columns.
        arms: the lines, best first.
        answer: the sentence.
        decided: whether the data can tell the best arm from all others.
        runs: ids of the runs it rests on: a store may hold others too.
        provenance: where it was concluded.
        command: that runs it again.
        finished: when, in ISO form.
    """

    question: Question
    metrics: tuple[Metric, ...]
    arms: tuple[Arm, ...]
    answer: str
    decided: bool
    runs: tuple[str, ...]
    provenance: Provenance
    command: str
    finished: str


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
    """One criterion of a study and its verdict.

    Attributes:
        id: of the claim in the ledger, or the study's own name for a finding the ledger does not list.
        printed: the sentence it is about.
        criterion: the rule, in words, as it was fixed before the runs.
        outcome: reproduced, contradicted, too_small_to_tell, premise_absent or not_run.
        sentence: why.
        margins: per margin its name, mean, half width of its interval, and seeds.
        sensitivity: the same contrasts where a free choice is made otherwise; they decide nothing.
    """

    id: str
    printed: str
    criterion: str
    outcome: str
    sentence: str
    margins: tuple[Margin, ...]
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
    """A paper's experiment as it is declared: what its page says whatever the runs say.

    Attributes:
        papers: names and years.
        place: section or figure.
        question: what it answers.
        finding: what the paper says came out.
        proxy: how the size run differs from the published setting.
        knobs: those that vary.
        columns: the readings shown in the page's table.
        command: that runs it again.
        protocol: how arms were tuned, judged and controlled.
    """

    papers: tuple[str, ...]
    place: str
    question: str
    finding: str
    proxy: str
    knobs: tuple[str, ...]
    columns: tuple[str, ...]
    command: str
    protocol: tuple[str, ...] = ()


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

    Attributes:
        study: its name.
        size: one of `SIZES`.
        rows: one flat row per run at its arm's chosen setting: knobs, `seed`, `status`, last value of every reading.
        criteria: what was judged, and how it came out.
        remarks: sentences with the numbers.
        failed: runs that are no measurements.
        runs: how many there were, tuning included.
        seconds: of all runs together.
        seeds: how many.
        fixed: what was fixed, for each part of the study.
        provenance: where the last runs were made.
        finished: when, in ISO form.
        other_sizes: what runs of other sizes that lay beside say, for the trend.
    """

    study: str
    size: str
    rows: tuple[Row, ...]
    criteria: tuple[CriterionDocument, ...]
    remarks: tuple[str, ...]
    failed: tuple[FailedRun, ...]
    runs: int
    seconds: float
    seeds: int
    fixed: tuple[Mapping[str, Any], ...]
    provenance: Provenance
    finished: str
    other_sizes: tuple[SizedVerdict, ...] = ()


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
        return kind(
            **{item.name: _build(hints[item.name], data[item.name]) for item in fields(kind) if item.name in data}
        )
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
