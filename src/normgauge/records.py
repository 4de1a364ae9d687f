"""One number with its name and kind (`Reading`), one finished run (`Run`), and how numbers and tables are written."""

import math
import os
import re
import shutil
import sys
import textwrap
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass
from functools import partial
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, Self, get_args

from normgauge.errors import InputError

if TYPE_CHECKING:
    import altair

    Chart = altair.TopLevelMixin
else:  # altair comes with the `lab` extra and is imported by what draws
    Chart = Any

Kind = Literal["exact", "upper", "lower", "unbiased", "estimate"]
Status = Literal["ok", "skipped", "diverged", "nonconverged", "error"]
#: What a run was told, flat: knob -> a plain value. Which knobs there are is the study's own affair.
Spec = Mapping[str, Any]
#: A line of a table, flat: knobs, `seed`, `status` and readings by name.
Row = Mapping[str, Any]

KINDS: tuple[str, ...] = get_args(Kind)
STATUSES: tuple[str, ...] = get_args(Status)


@dataclass(frozen=True, slots=True)
class Reading:
    """One number with its name, what kind of number it is, its uncertainty and its status.

    Args:
        name: what was measured, as in a column of a table.
        value: the number; `nan` where the status is not `ok`.
        kind: exact, upper, lower, unbiased or estimate: what the digits mean.
        uncertainty: half-width of an interval or a residual, in the unit of `value`; `None` if exact.
        status: ok, skipped, diverged, nonconverged or error.
        sentence: why, where the status is not `ok`.
        step: after how many steps of training it was read.
        layer: which layer or part it belongs to; `None` for the whole network.

    Examples:
        >>> print(Reading("top eigenvalue", 2.0, kind="estimate", uncertainty=0.001))
        top eigenvalue = 2 +- 0.001 (estimate)
    """

    name: str
    value: float
    kind: Kind = "exact"
    uncertainty: float | None = None
    status: Status = "ok"
    sentence: str = ""
    step: int = 0
    layer: str | None = None

    def __post_init__(self) -> None:
        """Refuse words outside the vocabulary: a misspelt kind would silently lose its meaning."""
        if self.kind not in KINDS:
            rule = f"kind is one of {', '.join(KINDS)}"
            raise InputError("Reading", rule, repr(self.kind), "Name the kind of number")
        if self.status not in STATUSES:
            raise InputError("Reading", f"status is one of {', '.join(STATUSES)}", repr(self.status), "Use one of them")

    @classmethod
    def measured(cls, name: str, value: float, kind: Kind = "exact", *, why: str = "", **rest: Any) -> Self:
        """Return a reading, or where the value is not a number a hole: skipped, because of `why`."""
        hole = {"status": "skipped", "sentence": why or "it does not exist here"} if math.isnan(value) else {}
        return cls(name, float(value), kind, **{**rest, **hole})

    def __str__(self) -> str:
        """Return name, value, uncertainty, kind and, if something went wrong, the sentence."""
        spread = "" if self.uncertainty is None else f" +- {format_number(self.uncertainty)}"
        trouble = "" if self.status == "ok" else f" [{self.status}: {self.sentence}]"
        return f"{self.name} = {format_number(self.value)}{spread} ({self.kind}){trouble}"


@dataclass(frozen=True, slots=True)
class Provenance:
    """Where numbers came from: versions, machine, code revision; never names of people or hosts."""

    python: str = ""  # its version
    versions: Mapping[str, str | None] = field(default_factory=dict)  # package -> version, `None` if not installed
    machine: Mapping[str, str | int] = field(default_factory=dict)  # system, processor, device, threads
    revision: str | None = None  # of a source checkout, with `+dirty` if it had uncommitted changes; `None` elsewhere

    @property
    def code(self) -> str:
        """Which normgauge it was: the revision, or the version where there is none."""
        return self.revision or str(self.versions.get("normgauge"))


@dataclass
class Run:
    """One run: what it was told, what became of it, what was read.

    A run that diverged, died or failed is no measurement: its readings are there to be looked at, `row()` has none.

    Examples:
        >>> run = Run({"lr": 0.1, "seed": 0})
        >>> run.record(0, "loss", 2.0)
        >>> run.record(9, "loss", 1.0)
        >>> run.series("loss"), run.last("loss"), run.row()["loss"]
        ([2.0, 1.0], 1.0, 1.0)
    """

    spec: Spec  # what it was told; its hash is the run's identity
    status: Status = "ok"  # skipped: no data
    sentence: str = ""  # why, where the status is not `ok`
    readings: list[Reading] = field(default_factory=list)  # in the order they were made
    seconds: float = 0.0  # how long it took
    provenance: Provenance = field(default_factory=Provenance)  # where it ran

    @property
    def ok(self) -> bool:
        """Whether it finished, so that it counts as a measurement."""
        return self.status == "ok"

    def record(
        self,
        step: int,
        name: str,
        value: float,
        *,
        layer: str | None = None,
        kind: Kind = "exact",
        status: Status = "ok",
    ) -> None:
        """Add one reading; a value that is not finite is kept as a hole with `status` (diverged if it says ok)."""
        finite = math.isfinite(value)
        kept: Status = "ok" if finite else "diverged" if status == "ok" else status
        number = float(value) if finite else math.nan
        self.readings.append(Reading(name, number, kind, status=kept, step=step, layer=layer))

    def series(self, name: str) -> list[float]:
        """Return the values of a reading of the whole network in the order of the steps, holes left out."""
        return [reading.value for reading in self._network_readings(name) if math.isfinite(reading.value)]

    def last(self, name: str) -> float | None:
        """Return the last value of a reading of the whole network, `None` where there is none or a hole."""
        reading = next(reversed(self._network_readings(name)), None)
        return None if reading is None or not math.isfinite(reading.value) else reading.value

    def _network_readings(self, name: str) -> list[Reading]:
        own = (reading for reading in self.readings if reading.name == name and reading.layer is None)
        return sorted(own, key=lambda reading: reading.step)

    @property
    def knobs(self) -> dict[str, Any]:
        """What it was told, without lists (schedules of measuring) and the study's name, which are no knobs."""
        return {k: v for k, v in self.spec.items() if k != "study" and not isinstance(v, (list, dict))}

    def row(self) -> dict[str, Any]:
        """Return the run as a line of a table: knobs, status, and, if it is ok, the last value of every reading."""
        names = dict.fromkeys(reading.name for reading in self.readings if reading.layer is None) if self.ok else ()
        state = {"status": self.status, "sentence": self.sentence, "seconds": self.seconds}
        return {**self.knobs, **state, **{name: self.last(name) for name in names}}


def plain(value: Any) -> Any:
    """Return data as JSON can write them: dataclasses as objects, what is not finite as `null`.

    The only place where a not-a-number turns into nothing.

    Examples:
        >>> plain({"loss": math.nan, "rates": (0.1, math.inf), "reading": Reading("x", 1.0)})["rates"]
        [0.1, None]
    """
    if is_dataclass(value) and not isinstance(value, type):
        return {item.name: plain(getattr(value, item.name)) for item in fields(value)}
    if isinstance(value, Mapping):
        return {str(key): plain(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, set, frozenset)):
        return [plain(item) for item in value]
    if isinstance(value, float):
        return value if math.isfinite(value) else None
    return value if value is None or isinstance(value, (bool, int, str)) else str(value)


def format_number(value: Any, digits: int = 4) -> str:
    """Write a number for reading: `digits` significant digits, exponents only where they help, a dash for none.

    Examples:
        >>> [format_number(x) for x in (0.00001234, 3.14159265, 120000.0, 7, None, math.nan, True)]
        ['1.234e-05', '3.142', '1.2e+05', '7', '-', '-', 'yes']
    """
    if is_hole(value):
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    return f"{value:.{digits}g}" if isinstance(value, float) else str(value)


def spoken(word: Any) -> str:
    """Return a word of the code as people say it."""
    return str(word).replace("_", " ")


def dash_holes(text: str) -> str:
    """Return text with a dash wherever a number that is none was written into it.

    Examples:
        >>> dash_holes("observed nan, bracket [0.1, nan]; a banana")
        'observed -, bracket [0.1, -]; a banana'
    """
    return re.sub(r"\bnan\b", "-", text)


def is_hole(value: Any) -> bool:
    """Say whether a cell holds nothing: no value, or not a number."""
    return value is None or (isinstance(value, float) and math.isnan(value))


def format_table(rows: Sequence[Row], *, title: str = "", footer: str = "") -> str:
    """Render rows as a plain-text table with title and footer; column order is that of first appearance.

    Without rows there is no table. Where a terminal (or `COLUMNS`) sets a width, it is kept and no word is broken:
    cells and prose wrap, and columns that still do not fit stand in a second table below, beside the first column.
    """
    width = text_width()
    columns = list(dict.fromkeys(name for row in rows for name in row))
    tables = [
        _draw_table(rows, block, 2000 if width is None else max(width, _least_width(rows, block)))
        for block in _fit_columns(rows, columns, width)
    ]
    parts = wrap_words(title, width), "\n\n".join(tables), wrap_words(footer, width)
    return "\n".join(part for part in parts if part)


def text_width() -> int | None:
    """Return how many characters a line may have: `COLUMNS` or the terminal's; `None` where output is no terminal."""
    return shutil.get_terminal_size().columns if "COLUMNS" in os.environ or sys.stdout.isatty() else None


def wrap_words(text: str, width: int | None) -> str:
    """Break lines between words, none inside of a word; what follows a `label:  ` stays beneath its words.

    Examples:
        >>> print(wrap_words("note:  one two three", 14))
        note:  one two
               three
    """
    if width is None:
        return text
    wrap = partial(textwrap.fill, width=width, break_long_words=False, break_on_hyphens=False)
    starts = [re.match(r" *(?:[a-z ]+:  +)?", line) for line in text.splitlines()]
    return "\n".join(wrap(m.string, subsequent_indent=" " * m.end()) for m in starts if m)


def _fit_columns(rows: Sequence[Row], columns: Sequence[str], width: int | None) -> list[list[str]]:
    """Return the columns of each table: as many as fit at their least widths (or two), the first one in each."""
    if width is None or not columns:
        return [list(columns)] if columns else []
    blocks = [[columns[0]]]
    for name in columns[1:]:
        if len(blocks[-1]) > 1 and _least_width(rows, [*blocks[-1], name]) > width:
            blocks.append([columns[0]])
        blocks[-1].append(name)
    return blocks


def _least_width(rows: Sequence[Row], columns: Iterable[str]) -> int:
    """Return how wide a table must be: each column its longest word, or 16 characters if its texts are longer."""
    cells = [_texts(rows, name) for name in columns]
    least = (max(_longest_word(texts), min(16, max(map(len, texts)))) for texts in cells)
    return sum(least) + 3 * (len(cells) - 1)


def _longest_word(texts: Iterable[str]) -> int:
    return max(len(word) for text in texts for word in text.split() or [""])


def _texts(rows: Iterable[Row], name: str) -> list[str]:
    return [name.replace("_", " "), *(format_number(row.get(name)) for row in rows)]


def _draw_table(rows: Sequence[Row], columns: Sequence[str], width: int) -> str:
    from rich import box
    from rich.console import Console
    from rich.table import Table

    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        texts = _texts(rows, name)
        side: Any = "right" if is_numeric(rows, name) else "left"
        table.add_column(texts[0], justify=side, min_width=_longest_word(texts))
    for row in rows:
        table.add_row(*(format_number(row.get(name)) for name in columns))
    for target in range(width, max(width - 2 * len(columns), 1) - 1, -1):
        # rich overruns its width where least widths bind, and would cut the last letters: ask for less until it fits
        text = StringIO()
        console = Console(file=text, width=4 * width, color_system=None, markup=False, highlight=False)
        console.print(table, width=target)
        lines = [line.rstrip() for line in text.getvalue().splitlines()]
        if max(map(len, lines)) <= width:
            break
    return "\n".join(lines)


def without_empty_columns(rows: Sequence[Row]) -> list[dict[str, Any]]:
    """Return the rows without the columns that hold nothing in any of them: there is nothing to read.

    Examples:
        >>> without_empty_columns([{"layer": "a", "shift": math.nan, "note": ""}])
        [{'layer': 'a'}]
    """
    full = {name for row in rows for name, value in row.items() if not is_hole(value) and value != ""}
    return [{name: value for name, value in row.items() if name in full} for row in rows]


def is_numeric(rows: Iterable[Mapping[str, Any]], name: str) -> bool:
    """Say whether a column holds numbers only."""
    values = [row.get(name) for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(value, (int, float)) for value in values)
