"""One number with its name and kind (`Reading`), one finished run (`Run`), what every instrument gives (`Result`)."""

from __future__ import annotations

import functools
import inspect
import math
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from contextvars import ContextVar
from dataclasses import dataclass, field, fields, is_dataclass, replace
from html import escape
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, ParamSpec, Self, TypeVar, get_args

from normgauge.errors import InputError, MissingExtraError, explain, require

if TYPE_CHECKING:
    import altair
    import pandas

Kind = Literal["exact", "upper", "lower", "unbiased", "estimate"]
Status = Literal["ok", "skipped", "diverged", "nonconverged", "error"]
#: What a run was told, flat: knob -> a plain value. Which knobs there are is the study's own affair.
Spec = Mapping[str, Any]
#: A line of a table, flat: knobs, `seed`, `status` and readings by name.
Row = Mapping[str, Any]

KINDS: tuple[str, ...] = get_args(Kind)
STATUSES: tuple[str, ...] = get_args(Status)
MOST_ROWS = 60  # of a table in a notebook; all of them are in `.frame()`
P = ParamSpec("P")
R = TypeVar("R", bound="Result")


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
            raise InputError(
                explain("Reading", f"kind is one of {', '.join(KINDS)}", repr(self.kind), "Name the kind of number")
            )
        if self.status not in STATUSES:
            raise InputError(
                explain("Reading", f"status is one of {', '.join(STATUSES)}", repr(self.status), "Use one of them")
            )

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
    """Where numbers came from: versions, machine, code revision; never names of people or hosts.

    Attributes:
        python: version of Python.
        versions: package -> version, `None` where it is not installed.
        machine: system, processor, device, threads.
        revision: of a source checkout, with `+dirty` if it had uncommitted changes; `None` elsewhere.
    """

    python: str = ""
    versions: Mapping[str, str | None] = field(default_factory=dict)
    machine: Mapping[str, str | int] = field(default_factory=dict)
    revision: str | None = None

    @property
    def code(self) -> str:
        """Which normgauge it was: the revision, or the version where there is none."""
        return self.revision or str(self.versions.get("normgauge"))


@dataclass
class Run:
    """One run: what it was told, what became of it, what was read.

    A run that diverged, died or failed is no measurement: its readings are there to be looked at, `row()` has none.

    Args:
        spec: what it was told; its hash is the run's identity.
        status: ok, skipped (no data), diverged, nonconverged or error.
        sentence: why, where the status is not `ok`.
        readings: in the order they were made.
        seconds: how long it took.
        provenance: where it ran.

    Examples:
        >>> run = Run({"lr": 0.1, "seed": 0})
        >>> run.record(0, "loss", 2.0)
        >>> run.record(9, "loss", 1.0)
        >>> run.series("loss"), run.last("loss"), run.row()["loss"]
        ([2.0, 1.0], 1.0, 1.0)
    """

    spec: Spec
    status: Status = "ok"
    sentence: str = ""
    readings: list[Reading] = field(default_factory=list)
    seconds: float = 0.0
    provenance: Provenance = field(default_factory=Provenance)

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
        if math.isfinite(value):
            self.readings.append(Reading(name, float(value), kind, step=step, layer=layer))
        else:
            hole = "diverged" if status == "ok" else status
            self.readings.append(Reading(name, math.nan, kind, status=hole, step=step, layer=layer))

    def series(self, name: str) -> list[float]:
        """Return the values of a reading of the whole network in the order of the steps, holes left out."""
        return [reading.value for reading in self._whole(name) if math.isfinite(reading.value)]

    def last(self, name: str) -> float | None:
        """Return the last value of a reading of the whole network, `None` where there is none or a hole."""
        reading = next(reversed(self._whole(name)), None)
        return None if reading is None or not math.isfinite(reading.value) else reading.value

    def _whole(self, name: str) -> list[Reading]:
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


#: What a call costs, in gradients: a forward is a third of a forward with its backward; a product with a curvature
#: matrix on a kept graph took 2.1 to 2.2 gradients on a ResNet and 1.5 on an MLP (`benchmarks/results/curvature.json`).
FORWARD, PRODUCT = 1 / 3, 2.2


@dataclass(frozen=True, slots=True)
class Cost:
    """Counted calls, each a pass over the data of whoever made it; part of the data is part of a call.

    Args:
        forwards: forward passes without a backward one.
        gradients: forward passes with their backward one.
        products: products with a curvature matrix or a Jacobian.

    Examples:
        >>> print(Cost(9, 3, 3))
        cost 12.6 gradients' worth (9 forwards, 3 gradients, 3 products)
    """

    forwards: float = 0.0
    gradients: float = 0.0
    products: float = 0.0

    @property
    def gradients_worth(self) -> float:
        """The whole in gradients."""
        return FORWARD * self.forwards + self.gradients + PRODUCT * self.products

    def __add__(self, other: Cost) -> Cost:
        return Cost(*(getattr(self, item.name) + getattr(other, item.name) for item in fields(Cost)))

    def __str__(self) -> str:
        """Return the sum and its parts."""
        counts = {item.name: getattr(self, item.name) for item in fields(self)}
        parts = [f"{n:.3g} {name.removesuffix('s') if n == 1 else name}" for name, n in counts.items() if n]
        return f"cost {self.gradients_worth:.3g} gradients' worth ({', '.join(parts)})" if parts else "cost none"


Tally = dict[tuple[str, Callable[[], float]], float]
_OPEN: ContextVar[tuple[Tally, ...]] = ContextVar("tallies", default=())


def _one() -> float:
    return 1.0


def spend(calls: str, amount: float = 1.0, whole: Callable[[], float] = _one) -> None:
    """Add calls ("forwards", "gradients" or "products") to every cost that is being counted.

    Args:
        calls: a field of `Cost`.
        amount: how many, or how much of the data.
        whole: returns the size of the data `amount` is a part of; asked when the count is over.
    """
    for tally in _OPEN.get():
        tally[calls, whole] += amount


@contextmanager
def counting() -> Iterator[Callable[[], Cost]]:
    """Give a function that returns what was counted since; counts may be nested, the outer one holds the inner.

    Examples:
        >>> with counting() as cost:
        ...     spend("gradients", 3)
        >>> cost().gradients
        3.0
    """
    tally: Tally = defaultdict(float)
    token = _OPEN.set((*_OPEN.get(), tally))

    def cost() -> Cost:
        sums = dict.fromkeys((item.name for item in fields(Cost)), 0.0)
        for (calls, whole), amount in tally.items():
            sums[calls] += amount / (whole() or 1.0)
        return Cost(**{name: round(value, 6) for name, value in sums.items()})  # thirds of a pass add up to one

    try:
        yield cost
    finally:
        _OPEN.reset(token)


#: Every instrument by its name, in the order of import.
INSTRUMENTS: dict[str, Callable[..., Result]] = {}


def instrument(measure: Callable[P, R]) -> Callable[P, R]:
    """Make a function an instrument: registered by its name, its result told `cost`, `mode` and `seed`.

    The mode is that of the argument `objective`, the seed that of the argument `seed`; what has neither says so
    itself. A result that was put together from others without a call of its own keeps the cost it came with.
    """
    signature = inspect.signature(measure)

    @functools.wraps(measure)
    def measured(*args: P.args, **kwargs: P.kwargs) -> R:
        with counting() as cost:
            result = measure(*args, **kwargs)
            spent = cost()
        given = signature.bind(*args, **kwargs)
        given.apply_defaults()
        objective = given.arguments.get("objective")
        return replace(
            result,
            mode=result.mode if objective is None else objective.mode,
            seed=given.arguments.get("seed", result.seed),
            cost=spent if spent.gradients_worth else result.cost,
        )

    INSTRUMENTS[measure.__name__] = measured
    return measured


@dataclass(frozen=True, kw_only=True)
class Result:
    """What every instrument gives: numbers that say what kind they are, what they mean and what they cost.

    * `print(r)`: the table, `meaning()`, and one line with kind, mode, seed, cost and status.
    * `r.readings()`: the headline numbers first, each a `Reading` with kind, uncertainty and status.
    * `r.meaning()`: what the numbers say of this network and what to do, with the threshold that decided; a status
      other than ok is said first.
    * `r.frame()`, `r.chart()`: pandas and Altair (the `lab` extra); in a notebook `r` shows all of it at once.

    A subclass is a frozen dataclass with fields of its own. It gives `_title()`, `_rows()` (flat mappings),
    `readings()`, `_meaning()` and, where there is more to know, `_notes()`; it overrides `chart()`. What makes it is
    decorated with `instrument`, which fills in `mode`, `seed` and `cost`. `normgauge.testing.check_result` holds a
    result to all this.

    Attributes:
        mode: "train" or "eval"; empty where no mode matters.
        seed: of what was drawn at random; `None` where nothing was.
        status: of the whole; single readings have their own.
        sentence: why, where the status is not ok.
        cost: counted calls.
    """

    mode: str = ""
    seed: int | None = None
    status: Status = "ok"
    sentence: str = ""
    cost: Cost = field(default=Cost(), compare=False)

    def __init_subclass__(cls) -> None:
        """Keep the short `repr`: a dataclass would list every float it holds."""
        if "__repr__" not in cls.__dict__:
            cls.__repr__ = Result.__repr__  # type: ignore[method-assign]

    def readings(self) -> tuple[Reading, ...]:
        """Return the numbers, the headline first."""
        return ()

    def meaning(self) -> str:
        """Return one or two sentences: what the numbers say of this network, by which threshold, and what to do."""
        if self.status == "ok":
            return self._meaning()
        why = f": {self.sentence.rstrip('.')}" if self.sentence else ""
        return f"{self.status.capitalize()}{why}. {self._meaning()}".strip()

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas DataFrame (needs the `lab` extra)."""
        pandas = require("pandas", "lab", f"{type(self).__name__}.frame")
        return pandas.DataFrame(self._rows())

    def chart(self) -> altair.TopLevelMixin:
        """Return an Altair chart of the result (needs the `lab` extra)."""
        raise NotImplementedError(f"{type(self).__name__} has no chart")

    def _title(self) -> str:
        return type(self).__name__

    def _rows(self) -> list[dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} must say what its rows are")

    def _shown(self) -> list[dict[str, Any]]:
        """Return the rows a person reads, where they are not all."""
        return self._rows()

    def _meaning(self) -> str:
        return ""

    def _notes(self) -> str:
        """Return what else a person needs before publishing the numbers: what they assume, what eps does."""
        return ""

    def _footer(self) -> str:
        kinds = ", ".join(dict.fromkeys(reading.kind for reading in self.readings()))
        parts = [
            f"kind {kinds}" if kinds else "",
            f"mode {self.mode or 'none'}",
            "no seed" if self.seed is None else f"seed {self.seed}",
            str(self.cost),
            f"status {self.status}" + (f" ({self.sentence})" if self.sentence and self.status == "ok" else ""),
            self._notes(),
        ]
        return "; ".join(part for part in parts if part)

    def __str__(self) -> str:
        """Return the table, what it means, and the line a person needs before publishing the numbers."""
        return format_table(self._shown(), title=self._title(), footer=f"{self.meaning()}\n{self._footer()}".strip())

    def __repr__(self) -> str:
        """Return the class, the headline number and the status in one line."""
        headline = f"{next(iter(self.readings()), '')}"[:140]
        return f"{type(self).__name__}({headline}; {self.status})" if headline else f"{type(self).__name__}()"

    def _repr_html_(self) -> str:
        """Return the result for a notebook: self-contained, in the colours of the page around it."""
        title, *rest = self._title().splitlines()
        paragraphs = "".join(f"<p>{escape(text)}</p>" for text in (*rest, self.meaning()) if text)
        table, picture, footer = _html_table(self._shown()), self._picture(), escape(self._footer())
        return (
            f'<div style="max-width:60em"><p><strong>{escape(title)}</strong></p>{paragraphs}{picture}{table}'
            f'<p style="opacity:0.7;font-size:smaller">{footer}</p></div>'
        )

    def _picture(self) -> str:
        """Return the chart as SVG text; nothing where the extra is missing or there is nothing to draw."""
        from normgauge.charts import inline_svg

        try:
            return inline_svg(self.chart(), label=self._title().splitlines()[0])
        except (MissingExtraError, NotImplementedError, InputError):
            return ""


def _html_table(rows: Sequence[Mapping[str, Any]]) -> str:
    columns = list(dict.fromkeys(name for row in rows for name in row))
    sides = {name: "right" if _is_numeric(rows, name) else "left" for name in columns}

    def cells(tag: str, texts: Mapping[str, str]) -> str:
        return "".join(f'<{tag} style="text-align:{sides[n]}">{escape(texts[n])}</{tag}>' for n in columns)

    head = cells("th", {name: name.replace("_", " ") for name in columns})
    body = [cells("td", {name: format_number(row.get(name)) for name in columns}) for row in rows[:MOST_ROWS]]
    more = f"<p>{len(rows) - MOST_ROWS} more rows in .frame()</p>" if len(rows) > MOST_ROWS else ""
    lines = "".join(f"<tr>{line}</tr>" for line in (head, *body))
    return f'<div style="overflow-x:auto"><table>{lines}</table></div>{more}'


def format_number(value: Any, digits: int = 4) -> str:
    """Write a number for reading: `digits` significant digits, exponents only where they help.

    Examples:
        >>> [format_number(x) for x in (0.00001234, 3.14159265, 120000.0, 7, None, True)]
        ['1.234e-05', '3.142', '1.2e+05', '7', '-', 'yes']
    """
    if value is None:
        return "-"
    if isinstance(value, bool):
        return "yes" if value else "no"
    if isinstance(value, int):
        return str(value)
    if isinstance(value, float):
        return "nan" if math.isnan(value) else f"{value:.{digits}g}"
    return str(value)


def format_table(rows: Sequence[Mapping[str, Any]], *, title: str = "", footer: str = "") -> str:
    """Render rows as a plain-text table with title and footer; column order is that of first appearance."""
    from rich import box
    from rich.console import Console
    from rich.table import Table

    columns = list(dict.fromkeys(name for row in rows for name in row))
    table = Table(box=box.SIMPLE_HEAD, pad_edge=False, show_edge=False)
    for name in columns:
        table.add_column(name.replace("_", " "), justify="right" if _is_numeric(rows, name) else "left")
    for row in rows:
        table.add_row(*(format_number(row.get(name)) for name in columns))
    width = 2000  # a table in a string never wraps; the terminal or pager decides
    text = StringIO()
    Console(file=text, width=width, color_system=None, markup=False, highlight=False).print(table)
    body = "\n".join(line.rstrip() for line in text.getvalue().splitlines())
    return "\n".join(part for part in (title, body, footer) if part)


def _is_numeric(rows: Iterable[Mapping[str, Any]], name: str) -> bool:
    values = [row.get(name) for row in rows if row.get(name) is not None]
    return bool(values) and all(isinstance(value, (int, float)) for value in values)
