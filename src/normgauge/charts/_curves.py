"""Curves over steps: one line per series, a band for the spread, the nearest point under the pointer."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import Scale, detail_field, free_scale, scale_type, series_order, tidy, value_axis
from normgauge.charts._theme import ROWS, frame_chart
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

    Args:
        rows: dicts or a DataFrame, one row per series and step.
        x: column of the steps.
        y: column of the values.
        series: column that names the line.
        low: column of the lower edge of the band, `None` for no band.
        high: column of the upper edge.
        detail: further columns for the tooltip.
        order: the series in the order of colours; others follow as they appear.
        title: above the chart.
        x_title: under the axis; the column's name when `None`.
        y_title: beside the axis; the column's name when `None`, nothing when empty.
        y_scale: "linear", "log", or "auto": log where the positive values spread over a factor of 100.
        y_format: how numbers are written, in d3's language.
        legend: show the legend, which is also the toggle.
        width: in pixels.
        height: in pixels.

    Raises:
        InputError: when there is no row.
        UnknownNameError: when a column does not exist.
        MissingExtraError: when altair is not installed.

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
