"""Values per series: curves over steps, a metric against a knob, a dot with its interval, or panels side by side."""

from __future__ import annotations

import json
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import (
    NUMBER,
    Rows,
    Scale,
    detail_field,
    free_scale,
    named_places,
    plain,
    scale_type,
    series_order,
    swept_scale,
    tidy,
    value_axis,
)
from normgauge.charts._theme import ROWS, frame_chart, themed
from normgauge.errors import require

if TYPE_CHECKING:
    import altair

_LANE = 11  # pixels per series in the strip of failures


def curves(
    rows: Rows,
    *,
    x: str = "step",
    y: str = "value",
    series: str = "series",
    low: str | None = None,
    high: str | None = None,
    detail: Sequence[str] = (),
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    y_title: str | None = "",
    y_scale: Scale = "auto",
    legend: bool = True,
    places: Sequence[str] = (),
) -> altair.TopLevelMixin:
    """Draw one line per series, with a band from `low` to `high`; a click in the legend hides or shows a series.

    A missing or non-finite value breaks the line: a hole in the data is a hole in the picture.

    `low`, `high`: columns of the band, `None` for none. `y_scale`: "auto" is log where the positive values spread over
    a factor of 100. `places`: what x = 0, 1, ... are called.

    Examples:
        >>> rows = [{"step": s, "value": 1 / (s + 1), "series": "batch"} for s in range(3)]
        >>> curves(rows, title="loss").to_dict()["title"]
        'loss'
    """
    alt = require("altair", "lab", "charts.curves")
    data = tidy("charts.curves", rows, {"x": x, "y": y, "low": low, "high": high, "series": series}, detail)
    names = series_order(data, order)
    kind = scale_type([row[key] for row in data for key in ("y", "low", "high") if key in row], y_scale)
    colour, shape = _looks(names, legend)
    heading_x, heading = x if x_title is None else x_title, y if y_title is None else y_title
    x_axis = alt.Axis(**(named_places(places, 520) if places else {"tickCount": 6}))
    across = alt.X("x:Q", title=heading_x, scale=alt.Scale(nice=False), axis=x_axis)
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(across, color=colour)
    value = alt.Y("y:Q", title=heading, scale=alt.Scale(**free_scale(kind)), axis=alt.Axis(**value_axis(kind)))
    shown_fields = [(series, "series", ""), (x, "x", "~g"), (y, "y", NUMBER)]
    shown_fields += [(edge, edge, NUMBER) for edge in ("low", "high") if edge in data[0]]
    shown_fields += [(name, detail_field(i, name), "") for i, name in enumerate(detail)]
    how = {"on": "pointerover", "clear": "pointerout", "fields": ["x"]}
    near = alt.selection_point(name="near", nearest=True, empty=False, **how)
    size, faint = (alt.condition(near, alt.value(a), alt.value(b)) for a, b in ((80, 22), (0.25, 0)))
    # the target of the pointer is invisible and wide; the small points only show where data is
    target = base.mark_point(size=400, opacity=0, tooltip=alt.ExprRef(_tooltip(shown_fields)))
    rule = base.mark_rule(style="quiet", strokeDash=[3, 3])
    layers = [
        base.mark_line().encode(value),
        base.mark_point(filled=True, opacity=1).encode(value, shape=shape, size=size),
        target.encode(value).add_params(near),
        rule.encode(color=alt.value("#888888"), opacity=faint),
    ]
    if low is not None and high is not None:
        layers.insert(0, base.mark_area(opacity=0.14).encode(alt.Y("low:Q", title=heading), alt.Y2("high:Q")))
    if legend:
        shown = legend_toggle(names)
        layers[1 if low else 0] = layers[1 if low else 0].add_params(shown)
        layers = [layer.transform_filter(shown) for layer in layers]
    return frame_chart(alt.layer(*layers), data, title, 520, 280)


def _looks(names: Sequence[str], legend: bool) -> list[Any]:
    """Return colour and shape of the series, which say the same."""
    alt = require("altair", "lab", "charts")
    room = [7 * len(name) + 46 for name in names]  # of an entry; a row wider than the plot would shrink it on a page
    columns = len(names) if sum(room) <= 640 else max(1, 640 // max(room))
    shown = alt.Legend(columns=columns, labelLimit=420) if legend else None
    told: dict[str, Any] = {"scale": alt.Scale(domain=names), "legend": shown}
    return [channel("series:N", **told) for channel in (alt.Color, alt.Shape)]


def legend_toggle(names: Sequence[str]) -> altair.Parameter:
    """Return the selection that makes each legend entry a switch; all are on at first."""
    alt = require("altair", "lab", "charts")
    on = [{"series": name} for name in names]
    return alt.selection_point("shown", on, "legend", empty=False, fields=["series"], toggle="true", clear=False)


def _tooltip(fields: Sequence[tuple[str, str, str]]) -> str:
    """Return the tooltip of the point nearest to the pointer, as a Vega expression.

    The nearest point is found through a wrapped datum, of which Vega-Lite's own tooltip unwraps only the numbers.
    """
    entries = []
    for title, field, number_format in fields:
        value = f"(datum.datum || datum)[{json.dumps(field)}]"
        shown = f"format({value}, {json.dumps(number_format)})" if number_format else value
        entries.append(f"{json.dumps(title)}: {shown}")
    return "{" + ", ".join(entries) + "}"


def against(
    rows: Rows,
    *,
    x: str,
    y: str = "value",
    series: str = "series",
    low: str | None = None,
    high: str | None = None,
    failed: str | None = None,
    total: str | None = None,
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    y_title: str | None = "",
    x_scale: Scale = "auto",
    y_scale: Scale = "auto",
    failed_label: str = "diverged",
    legend: bool = True,
    height: int = 300,
    joined: bool = True,
) -> altair.TopLevelMixin:
    """Draw the metric against the knob per series; a cross above the plot where runs at that knob value failed.

    The crosses stand in a strip of their own, one lane per series: a diverged run has no value, so a place
    inside the axes would be invented. A cross is faint where only some of the runs failed.

    `failed`, `total`: columns with the numbers of failed runs and of all. A scale of "auto" is log from a factor of 5
    on for the knob (they are swept on log grids), of 100 on for the metric; a knob that is 0 too is drawn as log
    beyond its smallest other value. `joined`: whether lines join the points of a series; not where x was measured.
    """
    alt = require("altair", "lab", "charts.against")
    channels = {"x": x, "y": y, "low": low, "high": high, "series": series, "failed": failed, "total": total}
    data = tidy("charts.against", rows, channels)
    names = series_order(data, order)
    lanes = [name for name in names if any(row.get("failed") and str(row["series"]) == name for row in data)]
    strip = 26 + _LANE * len(lanes) if lanes else 0
    for row in data:
        # y of a cross, in pixels: its lane, or nothing
        row["lane"] = 20 + _LANE * lanes.index(str(row["series"])) if row.get("failed") else None
        row["share"] = row["failed"] / row["total"] if row.get("failed") and row.get("total") else 1.0
    x_room = alt.Scale(**swept_scale([row["x"] for row in data], x_scale), nice=False, padding=18)
    y_kind = scale_type([row[key] for row in data for key in ("y", "low", "high") if key in row], y_scale)
    ticks = sorted({row["x"] for row in data if row["x"] is not None})
    x_axis = alt.Axis(values=ticks, format="~g") if len(ticks) <= 9 else alt.Axis(format="~g", tickCount=6)
    heading_x, heading = x if x_title is None else x_title, y if y_title is None else y_title
    colour, shape = _looks(names, legend)
    across = alt.X("x:Q", title=heading_x, scale=x_room, axis=x_axis)
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(across, color=colour)
    # the range keeps the strip free of lines; it is in pixels, as the lanes are
    y_room = alt.Scale(**free_scale(y_kind), range=[height, strip])
    y_axis = alt.Axis(**value_axis(y_kind))
    value = alt.Y("y:Q", title=heading, scale=y_room, axis=y_axis)
    tooltip = [alt.Tooltip("series:N", title=series), alt.Tooltip("x:Q", title=x, format="~g")]
    numbers = [alt.Tooltip("y:Q", title=y, format=NUMBER)]
    numbers += [alt.Tooltip(f"{edge}:Q", title=edge, format=NUMBER) for edge in ("low", "high") if edge in data[0]]
    counts = [alt.Tooltip(f"{name}:Q", title=channels[name]) for name in ("failed", "total") if channels[name]]
    points, told = base.mark_point(filled=True, opacity=1, size=70), [*tooltip, *numbers, *counts]
    layers = [base.mark_line(strokeWidth=1.5, strokeOpacity=0.75).encode(value)] if joined else []
    layers.append(points.encode(value, shape=shape, tooltip=told))
    if low is not None and high is not None:
        spread = alt.Y("low:Q", title=heading, scale=y_room, axis=y_axis)
        layers.insert(0, base.mark_rule(strokeWidth=3, opacity=0.35).encode(spread, alt.Y2("high:Q")))
    if strip:
        crosses = base.mark_point(shape="M-1,-1L1,1M-1,1L1,-1", size=60, strokeWidth=2.4, filled=False)
        lane = alt.Y("lane:Q", scale=None, axis=None, title=None)
        share = alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.25, 1]), legend=None)
        layers.append(crosses.encode(lane, opacity=share, tooltip=[*tooltip, *counts]))
        note = alt.Chart(alt.Data(values=[{"text": failed_label}]))
        note = note.mark_text(style="note", align="left", baseline="top")
        layers.append(note.encode(text="text:N", x=alt.value(0), y=alt.value(0)))
    if legend:
        shown = legend_toggle(names)
        layers[0] = layers[0].add_params(shown)
        drawn = len(layers) - bool(strip)  # the word beside the strip belongs to no series
        layers[:drawn] = [layer.transform_filter(shown) for layer in layers[:drawn]]
    return frame_chart(alt.layer(*layers), data, title, 520, height)


def intervals(
    rows: Rows,
    *,
    value: str = "value",
    series: str = "series",
    low: str = "low",
    high: str = "high",
    detail: Sequence[str] = (),
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    scale: Scale = "auto",
    width: int = 420,
    row_height: int = 30,
) -> altair.TopLevelMixin:
    """Draw one line per arm: a dot at the value, a bar from `low` to `high`.

    An arm without a value keeps its empty line; `order` goes from top to bottom.
    """
    alt = require("altair", "lab", "charts.intervals")
    data = tidy("charts.intervals", rows, {"x": value, "low": low, "high": high, "series": series}, detail)
    names = series_order(data, order)
    kind = scale_type([row[key] for row in data for key in ("x", "low", "high")], scale)
    told = {name: textwrap.wrap(name, 56) for name in names}  # whole: it is their ends that tell long names apart
    longest, tall = max(len(line) for lines in told.values() for line in lines), 15 * max(map(len, told.values())) + 4
    # long labels get room for a reader's font that is wider than the one they are measured by
    room: dict[str, Any] = {"labelLimit": 420, "minExtent": 7 * longest if longest > 20 else 0, "labelOverlap": False}
    labels = alt.Axis(labelFontSize=12, labelExpr=f"{json.dumps(told)}[datum.value]", **room)
    numbers = (("x", value), ("low", low), ("high", high))
    tooltip = [alt.Tooltip("series:N", title=series)]
    tooltip += [alt.Tooltip(f"{field}:Q", title=name, format=NUMBER) for field, name in numbers]
    tooltip += [alt.Tooltip(f"{detail_field(i, name)}:N", title=name) for i, name in enumerate(detail)]
    colour, shape = _looks(names, legend=False)
    lines = alt.Y("series:N", sort=names, scale=alt.Scale(domain=names), title=None, axis=labels)
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(lines, color=colour, tooltip=tooltip)
    across: dict[str, Any] = {"title": value if x_title is None else x_title}
    across |= {"axis": alt.Axis(**value_axis(kind, grid=True)), "scale": alt.Scale(**free_scale(kind), padding=12)}
    bar = base.mark_rule(strokeWidth=5, opacity=0.35, strokeCap="round")
    bar = bar.encode(alt.X("low:Q", **across), alt.X2("high:Q"))
    dot = base.mark_point(filled=True, opacity=1, size=110).encode(alt.X("x:Q", **across), shape=shape)
    return frame_chart(alt.layer(bar, dot), data, title, width, max(row_height, tall) * len(names))


def panels(
    rows: Sequence[Mapping[str, Any]],
    *,
    x: str,
    ys: Mapping[str, str],
    x_title: str = "",
    title: str = "",
    log_x: bool = False,
    places: Sequence[str] = (),
) -> altair.TopLevelMixin:
    """Draw one line with points per quantity, side by side, over the same x.

    `ys`: column -> title of its panel; `x_title` is the column's name when empty; `places`: what x = 0, 1, ... are
    called.

    Examples:
        >>> rows = [{"s": 0.1, "loss": 1.0}, {"s": 0.2, "loss": 0.8}]
        >>> len(panels(rows, x="s", ys={"loss": "loss"}).to_dict()["hconcat"])
        1
    """
    alt = require("altair", "lab", "charts.panels")
    data = alt.Data(values=[{name: plain(value) for name, value in row.items()} for row in rows])
    whole = sorted({row[x] for row in rows}) if all(isinstance(row[x], int) for row in rows) else []
    axis = alt.Axis(values=whole, format="d") if 0 < len(whole) <= 20 else alt.Axis()
    axis = alt.Axis(**named_places(places, 240)) if places else axis
    scale = alt.Scale(**free_scale("log" if log_x else "linear"))
    horizontal = alt.X(f"{x}:Q", title=x_title or x, scale=scale, axis=axis)
    drawn = []
    for column, heading in ys.items():
        kind = scale_type([row[column] for row in rows], "auto")
        vertical = alt.Y(f"{column}:Q", title="", scale=alt.Scale(**free_scale(kind)))
        tooltip = [alt.Tooltip(f"{name}:Q", format=NUMBER) for name in (x, column)]
        lines = alt.Chart(data, title=heading).mark_line(point=True).encode(horizontal, vertical, tooltip=tooltip)
        drawn.append(lines.properties(width=240, height=200))
    joined = alt.hconcat(*drawn)
    return themed(joined.properties(title=title) if title else joined)
