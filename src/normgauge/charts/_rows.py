"""What every chart does first: take rows or a frame, keep the columns asked for, under names Vega can read."""

from __future__ import annotations

import json
import math
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING, Any, Literal, TypeAlias

from normgauge.errors import InputError, unknown_name

if TYPE_CHECKING:
    import pandas

Scale = Literal["auto", "linear", "log"]
Rows: TypeAlias = "Sequence[Mapping[str, Any]] | pandas.DataFrame"
NUMBER = ".4~g"  # how a value is written
CHANNELS = ("x", "y", "low", "high", "series", "failed", "total")


def tidy(
    subject: str, rows: Rows, channels: Mapping[str, str | None], detail: Sequence[str] = ()
) -> list[dict[str, Any]]:
    """Return the rows with columns renamed to their channel, and every non-finite number as `None`.

    A column may be called `weights[0].norm` or `</script>`: Vega reads dots and brackets in field names as paths,
    so no name of the caller reaches a specification as a field.

    `channels`: channel -> column, `None` where it is not used; `detail`: further columns for the tooltip.
    """
    records: list[Mapping[str, Any]] = list(rows.to_dict("records") if hasattr(rows, "to_dict") else rows)
    if not records:
        raise InputError(subject, "a chart needs at least one row", "none", "Draw it where there is data")
    wanted = {channel: column for channel, column in channels.items() if column is not None}
    wanted.update({detail_field(i, column): column for i, column in enumerate(detail)})
    columns = {str(name) for row in records for name in row}
    for column in wanted.values():
        if column not in columns:
            raise unknown_name(f"column of {subject}", column, columns)
    return [{field: plain(row.get(column)) for field, column in wanted.items()} for row in records]


def detail_field(index: int, column: str) -> str:
    """Return the field under which the tooltip column number `index` is kept: its own name where that is safe."""
    return column if column.isidentifier() and column not in CHANNELS else f"detail_{index}"


def plain(value: Any) -> Any:
    """Return a value JSON can hold: numpy scalars unpacked, `nan` and infinities as `None`."""
    if hasattr(value, "item") and not isinstance(value, (str, bytes)):
        value = value.item()
    if isinstance(value, float) and not math.isfinite(value):
        return None
    if value is None or isinstance(value, (bool, int, float)):
        return value
    return printable(str(value))


def printable(text: str) -> str:
    r"""Return text with what cannot be seen written out: a line separator ends Vega's expressions, a zero its drawing.

    Examples:
        >>> print(printable("two\nlines"), printable("plain"))
        two\nlines plain
    """
    return "".join(c if c.isprintable() else c.encode("unicode_escape").decode() for c in text)


def series_order(rows: Iterable[Mapping[str, Any]], order: Sequence[str] | None) -> list[str]:
    """Return the names of the series: as ordered by the caller, the others after them as they appear."""
    return list(dict.fromkeys([*map(printable, order or ()), *(str(row["series"]) for row in rows)]))


def scale_type(values: Iterable[Any], scale: Scale, span: float = 100.0) -> str:
    """Choose "log" where it is asked for, or where all values are positive and spread over a factor of `span`.

    Examples:
        >>> scale_type([0.01, 10.0], "auto"), scale_type([0.5, 2.0], "auto"), scale_type([0.0, 9.0], "auto")
        ('log', 'linear', 'linear')
    """
    if scale not in ("auto", "linear", "log"):
        raise unknown_name("scale", scale, ("auto", "linear", "log"))
    numbers = [v for v in values if isinstance(v, (int, float))]
    positive = bool(numbers) and min(numbers) > 0
    if scale == "log" and not positive:
        least = f"{min(numbers, default=None)}"
        raise InputError("charts", "a log axis needs positive values", least, "Use scale='linear'")
    if scale == "auto":
        return "log" if positive and max(numbers) >= span * min(numbers) else "linear"
    return scale


def free_scale(kind: str) -> dict[str, Any]:
    """Return the settings of a scale that need not reach zero; Vega warns where a log scale, which cannot, says so."""
    return {"type": kind} if kind == "log" else {"type": kind, "zero": False}


def swept_scale(values: Iterable[Any], scale: Scale) -> dict[str, Any]:
    """Return the settings of a knob's scale: log from a factor of 5 on; with 0 among decades, log beyond the smallest.

    Examples:
        >>> swept_scale([0.0, 0.001, 0.1], "auto")
        {'type': 'symlog', 'constant': 0.001}
    """
    numbers = [v for v in values if isinstance(v, (int, float))]
    beyond = [v for v in numbers if v > 0]
    if scale == "auto" and beyond and min(numbers) == 0 and max(beyond) >= 20 * min(beyond):
        return {"type": "symlog", "constant": min(beyond)}
    return free_scale(scale_type(numbers, scale, span=5.0))


def value_axis(kind: str, **settings: Any) -> dict[str, Any]:
    """Return the settings of a value axis; a log axis draws grid lines at powers of ten only."""
    if kind == "linear":
        return {"format": NUMBER, "tickCount": 5, **settings}
    power = "abs(log(datum.value) / LN10 - round(log(datum.value) / LN10)) < 1e-9"
    shown = {"condition": {"test": power, "value": 1}, "value": 0}
    return {"format": ".6~g", "tickCount": 5, "gridOpacity": shown, **settings}


def named_places(names: Sequence[str], width: int) -> dict[str, Any]:
    """Return the settings of an axis that says the names of the places 0, 1, ..., turned where they need the room.

    Examples:
        >>> named_places(["stem", "head"], 500)
        {'values': [0, 1], 'labelExpr': '["stem", "head"][datum.value]'}
    """
    told = {"values": [*range(len(names))], "labelExpr": f"{json.dumps([*map(printable, names)])}[datum.value]"}
    if 7 * sum(len(name) + 1 for name in names) <= width:
        return told
    return {**told, "labelAngle": -40, "labelLimit": 140, "labelOverlap": len(names) > width / 14}
