"""Curves over steps: one line per series, a band for the spread, the nearest point under the pointer; or panels."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import Scale, detail_field, free_scale, plain, scale_type, series_order, tidy, value_axis
from normgauge.charts._theme import ROWS, frame_chart, themed
from normgauge.errors import require

if TYPE_CHECKING:
    import altair
    import pandas


def curves(
    rows: Sequence[Mapping[str, Any]] | pandas.DataFrame,
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
    y_format: str = ".4~g",
    legend: bool = True,
    width: int = 520,
    height: int = 280,
) -> altair.TopLevelMixin:
    """Draw one line per series, with a band from `low` to `high`; a click in the legend hides or shows a series.

    A missing or non-finite value breaks the line: a hole in the data is a hole in the picture.

    `low`, `high`: columns of the band, `None` for none. `y_scale`: "auto" is log where the positive values spread over
    a factor of 100.

    Examples:
        >>> rows = [{"step": s, "value": 1 / (s + 1), "series": "batch"} for s in range(3)]
        >>> curves(rows, title="loss").to_dict()["title"]
        'loss'
    """
    alt = require("altair", "lab", "charts.curves")
    data = tidy("charts.curves", rows, {"x": x, "y": y, "low": low, "high": high, "series": series}, detail)
    names = series_order(data, order)
    kind = scale_type([row[key] for row in data for key in ("y", "low", "high") if key in row], y_scale)
    y_axis = alt.Axis(**value_axis(kind, y_format))
    colour = alt.Color("series:N", scale=alt.Scale(domain=names), legend=alt.Legend() if legend else None)
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(
        alt.X("x:Q", title=x if x_title is None else x_title, scale=alt.Scale(nice=False), axis=alt.Axis(tickCount=6)),
        color=colour,
    )
    heading = y if y_title is None else y_title
    value = alt.Y("y:Q", title=heading, scale=alt.Scale(**free_scale(kind)), axis=y_axis)
    shown_fields = [(series, "series", ""), (x, "x", "~g"), (y, "y", y_format)]
    shown_fields += [(edge, edge, y_format) for edge in ("low", "high") if edge in data[0]]
    shown_fields += [(name, detail_field(i, name), "") for i, name in enumerate(detail)]
    near = alt.selection_point(
        name="near", nearest=True, on="pointerover", clear="pointerout", fields=["x"], empty=False
    )
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names), legend=alt.Legend() if legend else None)
    layers = [
        base.mark_line().encode(value),
        base.mark_point(filled=True, opacity=1).encode(
            value, shape=shape, size=alt.condition(near, alt.value(80), alt.value(22))
        ),
        # the target of the pointer is invisible and wide; the small points above only show where data is
        base.mark_point(size=400, opacity=0, tooltip=alt.ExprRef(_tooltip(shown_fields)))
        .encode(value)
        .add_params(near),
        base.mark_rule(style="quiet", strokeDash=[3, 3]).encode(
            color=alt.value("#888888"), opacity=alt.condition(near, alt.value(0.25), alt.value(0))
        ),
    ]
    if low is not None and high is not None:
        layers.insert(0, base.mark_area(opacity=0.14).encode(alt.Y("low:Q", title=heading), alt.Y2("high:Q")))
    if legend:
        shown = legend_toggle(names)
        layers[1 if low else 0] = layers[1 if low else 0].add_params(shown)
        layers = [layer.transform_filter(shown) for layer in layers]
    return frame_chart(alt.layer(*layers), data, title, width, height)


def legend_toggle(names: Sequence[str]) -> altair.Parameter:
    """Return the selection that makes each legend entry a switch; all are on at first."""
    alt = require("altair", "lab", "charts")
    return alt.selection_point(
        name="shown",
        fields=["series"],
        bind="legend",
        toggle="true",
        clear=False,
        empty=False,
        value=[{"series": name} for name in names],
    )


def _tooltip(fields: Sequence[tuple[str, str, str]]) -> str:
    """Return the tooltip of the point nearest to the pointer, as a Vega expression.

    The nearest point is found through a wrapped datum, of which Vega-Lite's own tooltip unwraps only the numbers.
    """
    entries = []
    for title, field, number_format in fields:
        value = f"(datum.datum || datum)[{json.dumps(field)}]"
        entries.append(
            f"{json.dumps(title)}: " + (f"format({value}, {json.dumps(number_format)})" if number_format else value)
        )
    return "{" + ", ".join(entries) + "}"


def panels(
    rows: Sequence[Mapping[str, Any]],
    *,
    x: str,
    ys: Mapping[str, str],
    x_title: str = "",
    title: str = "",
    log_x: bool = False,
    width: int = 240,
    height: int = 200,
) -> altair.TopLevelMixin:
    """Draw one line with points per quantity, side by side, over the same x.

    `ys`: column -> title of its panel; `x_title` is the column's name when empty; width and height are of one panel.

    Examples:
        >>> rows = [{"s": 0.1, "loss": 1.0}, {"s": 0.2, "loss": 0.8}]
        >>> len(panels(rows, x="s", ys={"loss": "loss"}).to_dict()["hconcat"])
        1
    """
    alt = require("altair", "lab", "charts.panels")
    data = alt.Data(values=[{name: plain(value) for name, value in row.items()} for row in rows])
    whole = sorted({row[x] for row in rows}) if all(isinstance(row[x], int) for row in rows) else []
    axis = alt.Axis(values=whole, format="d") if 0 < len(whole) <= 20 else alt.Axis()
    scale = alt.Scale(**free_scale("log" if log_x else "linear"))
    horizontal = alt.X(f"{x}:Q", title=x_title or x, scale=scale, axis=axis)
    drawn = []
    for column, heading in ys.items():
        kind = scale_type([row[column] for row in rows], "auto")
        vertical = alt.Y(f"{column}:Q", title="", scale=alt.Scale(**free_scale(kind)))
        tooltip = [alt.Tooltip(f"{name}:Q", format=".4~g") for name in (x, column)]
        lines = alt.Chart(data, title=heading).mark_line(point=True).encode(horizontal, vertical, tooltip=tooltip)
        drawn.append(lines.properties(width=width, height=height))
    joined = alt.hconcat(*drawn)
    return themed(joined.properties(title=title) if title else joined)
