"""How often a value falls where: counts per bin, binned here so that picture and table agree."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

import numpy as np

from normgauge.charts._rows import series_order, tidy
from normgauge.charts._theme import ROWS, frame_chart
from normgauge.errors import InputError, require

if TYPE_CHECKING:
    import altair
    import pandas


def histogram(
    rows: Sequence[Mapping[str, Any]] | pandas.DataFrame,
    *,
    value: str = "value",
    series: str | None = None,
    bins: int = 30,
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    y_title: str = "count",
    width: int = 420,
    height: int = 240,
) -> altair.TopLevelMixin:
    """Draw counts of `value` in `bins` equal bins shared by all series; series overlap, half transparent.

    Values that are missing or not finite are in no bin.

    Args:
        rows: dicts or a DataFrame, one row per value.
        value: column of the values.
        series: column that names the group, `None` for one group.
        bins: how many bins.
        order: the series in the order of colours.
        title: above the chart.
        x_title: under the axis; the column's name when `None`.
        y_title: beside the axis.
        width: in pixels.
        height: in pixels.

    Raises:
        InputError: when no row has a finite value, or `bins` is not positive.
        UnknownNameError: when a column does not exist.
        MissingExtraError: when altair is not installed.
    """
    alt = require("altair", "lab", "charts.histogram")
    if bins < 1:
        raise InputError("charts.histogram", "bins must be positive", str(bins), "Pass bins=30")
    data = [row for row in tidy("charts.histogram", rows, {"x": value, "series": series}) if row["x"] is not None]
    if not data:
        raise InputError("charts.histogram", "at least one value must be finite", "none", "Check the column")
    names = series_order(data, order) if series is not None else [value]
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
        alt.Y("count:Q", stack=None, title=y_title, axis=alt.Axis(tickCount=5)),
        color=alt.Color("series:N", scale=alt.Scale(domain=names), legend=alt.Legend() if len(names) > 1 else None),
        tooltip=[
            alt.Tooltip("series:N", title=series or "value"),
            alt.Tooltip("left:Q", title="from", format=".4~g"),
            alt.Tooltip("right:Q", title="to", format=".4~g"),
            alt.Tooltip("count:Q"),
        ],
    )
    return frame_chart(encoded, counted, title, width, height)
