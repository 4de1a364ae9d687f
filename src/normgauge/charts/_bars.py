"""Bars per category, grouped by series where there are several; counts per bin, so that picture and table agree."""

from collections.abc import Sequence

import numpy as np

from normgauge.charts._rows import NUMBER, Rows, series_order, tidy
from normgauge.charts._theme import ROWS, frame_chart
from normgauge.errors import InputError, require
from normgauge.records import Chart


def bars(
    rows: Rows,
    *,
    x: str,
    y: str = "value",
    series: str | None = None,
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    y_title: str | None = None,
) -> Chart:
    """Draw one bar per row, from zero; bars that share a category stand side by side; few bars make a narrow chart."""
    alt = require("altair", "lab", "charts.bars")
    data = tidy("charts.bars", rows, {"x": x, "y": y, "series": series})
    chart = alt.Chart(alt.NamedData(name=ROWS)).mark_bar()
    few = all(row["y"] in range(6) and isinstance(row["y"], int) for row in data)  # counts: no tick between them
    ticks = {"values": [*range(max(row["y"] for row in data) + 1)]} if few else {"tickCount": 5}
    tooltip = [alt.Tooltip("x:N", title=x), alt.Tooltip("y:Q", title=y, format=NUMBER)]
    width = min(420, max(80 + 50 * len(data), 8 * len(title)))
    places = list(dict.fromkeys(str(row["x"]) for row in data))
    tight = (
        7 * max(map(len, places)) * len(places) > width
    )  # turned rather than left out: a bar without a name says nothing
    names_axis = alt.Axis(labelAngle=-40 if tight else 0, labelOverlap=False, labelLimit=180)
    encoded = chart.encode(
        alt.X("x:N", title=x if x_title is None else x_title, sort=None, axis=names_axis),
        alt.Y("y:Q", title=y if y_title is None else y_title, axis=alt.Axis(format=NUMBER, **ticks)),
    )
    if series is not None:
        names = series_order(data, order)
        scale = alt.Scale(domain=names)
        encoded = encoded.encode(color=alt.Color("series:N", scale=scale))
        if len({row["x"] for row in data}) < len(data):  # else every bar stands over its name
            encoded = encoded.encode(xOffset=alt.XOffset("series:N", scale=scale))
        tooltip.insert(0, alt.Tooltip("series:N", title=series))
    return frame_chart(encoded.encode(tooltip=tooltip), data, title, width, 260)


def histogram(
    rows: Rows,
    *,
    value: str = "value",
    series: str | None = None,
    bins: int = 30,
    title: str = "",
    x_title: str | None = None,
) -> Chart:
    """Draw counts of `value` in `bins` equal bins shared by all series; series overlap, half transparent.

    Values that are missing or not finite are in no bin.
    """
    alt = require("altair", "lab", "charts.histogram")
    if bins < 1:
        raise InputError("charts.histogram", "bins must be positive", str(bins), "Pass bins=30")
    data = [row for row in tidy("charts.histogram", rows, {"x": value, "series": series}) if row["x"] is not None]
    if not data:
        raise InputError("charts.histogram", "at least one value must be finite", "none", "Check the column")
    names = series_order(data, None) if series is not None else [value]
    edges = np.histogram_bin_edges([float(row["x"]) for row in data], bins=bins)
    counted = []
    for name in names:
        mine = [float(row["x"]) for row in data if series is None or str(row["series"]) == name]
        heights = np.histogram(mine, bins=edges)[0]
        counted += [
            {"series": name, "left": float(left), "right": float(right), "count": int(count)}
            for left, right, count in zip(edges[:-1], edges[1:], heights, strict=True)
            if count
        ]
    chart = alt.Chart(alt.NamedData(name=ROWS)).mark_bar(opacity=0.9 if len(names) == 1 else 0.55, binSpacing=0.5)
    encoded = chart.encode(
        alt.X("left:Q", bin="binned", title=value if x_title is None else x_title, axis=alt.Axis(format="~g")),
        alt.X2("right:Q"),
        alt.Y("count:Q", stack=None, title="count", axis=alt.Axis(tickCount=5)),
        color=alt.Color("series:N", scale=alt.Scale(domain=names), legend=alt.Legend() if len(names) > 1 else None),
        tooltip=[
            alt.Tooltip("series:N", title=series or "value"),
            alt.Tooltip("left:Q", title="from", format=NUMBER),
            alt.Tooltip("right:Q", title="to", format=NUMBER),
            alt.Tooltip("count:Q"),
        ],
    )
    return frame_chart(encoded, counted, title, 420, 240)
