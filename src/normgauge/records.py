"""One number with its name and kind (`Reading`), and the three ways out of every result (`Result`)."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from io import StringIO
from typing import TYPE_CHECKING, Any, Literal, get_args

from normgauge.errors import InputError, explain, require

if TYPE_CHECKING:
    import altair
    import pandas

Kind = Literal["exact", "upper", "lower", "unbiased", "estimate"]
Status = Literal["ok", "skipped", "diverged", "nonconverged", "error"]

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

    def __str__(self) -> str:
        """Return name, value, uncertainty, kind and, if something went wrong, the sentence."""
        spread = "" if self.uncertainty is None else f" +- {format_number(self.uncertainty)}"
        trouble = "" if self.status == "ok" else f" [{self.status}: {self.sentence}]"
        return f"{self.name} = {format_number(self.value)}{spread} ({self.kind}){trouble}"


class Result:
    """Base of result objects: `print(r)` for a table, `r.frame()` for pandas, `r.chart()` for Altair.

    A subclass gives `_title()`, `_rows()` (a list of flat mappings) and `_footer()` (the line a person
    needs before publishing the number), and overrides `chart()`.
    """

    def _title(self) -> str:
        return type(self).__name__

    def _rows(self) -> list[dict[str, Any]]:
        raise NotImplementedError(f"{type(self).__name__} must say what its rows are")

    def _footer(self) -> str:
        return ""

    def __str__(self) -> str:
        """Return the readable table, ending with kind, mode and cost."""
        return format_table(self._rows(), title=self._title(), footer=self._footer())

    def frame(self) -> pandas.DataFrame:
        """Return the rows as a pandas DataFrame (needs the `lab` extra)."""
        pandas = require("pandas", "lab", f"{type(self).__name__}.frame")
        return pandas.DataFrame(self._rows())

    def chart(self) -> altair.TopLevelMixin:
        """Return an Altair chart of the result (needs the `lab` extra)."""
        raise NotImplementedError(f"{type(self).__name__} has no chart")


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
