"""Bars per category, grouped by series where there are several."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import series_order, tidy
from normgauge.charts._theme import ROWS, frame_chart
from normgauge.errors import require

if TYPE_CHECKING:
    import altair
    import pandas


def bars(
    rows: Sequence[Mapping[str, Any]] | pandas.DataFrame,
    *,
    x: str,
    y: str = "value",
    series: str | None = None,
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    y_title: str | None = None,
    y_format: str = ".4~g",
    width: int = 420,
    height: int = 260,
) -> altair.TopLevelMixin:
    """Draw one bar per row, from zero; bars of several series stand side by side within their category.

    Args:
        rows: dicts or a DataFrame, one row per bar.
        x: column of the category, drawn in order of appearance.
        y: column of the height.
        series: column that names the group, `None` for one group.
        order: the series in the order of colours.
        title: above the chart.
        x_title: under the axis; the column's name when `None`.
        y_title: beside the axis; the column's name when `None`.
        y_format: how numbers are written, in d3's language.
        width: in pixels.
        height: in pixels.

    Raises:
        InputError: when there is no row.
        UnknownNameError: when a column does not exist.
        MissingExtraError: when altair is not installed.
    """
    alt = require("altair", "lab", "charts.bars")
    data = tidy("charts.bars", rows, {"x": x, "y": y, "series": series})
    chart = alt.Chart(alt.NamedData(name=ROWS)).mark_bar()
    tooltip = [alt.Tooltip("x:N", title=x), alt.Tooltip("y:Q", title=y, format=y_format)]
    encoded = chart.encode(
        alt.X("x:N", title=x if x_title is None else x_title, sort=None, axis=alt.Axis(labelAngle=0)),
        alt.Y("y:Q", title=y if y_title is None else y_title, axis=alt.Axis(format=y_format, tickCount=5)),
    )
    if series is not None:
        names = series_order(data, order)
        encoded = encoded.encode(
            color=alt.Color("series:N", scale=alt.Scale(domain=names)),
            xOffset=alt.XOffset("series:N", scale=alt.Scale(domain=names)),
        )
        tooltip.insert(0, alt.Tooltip("series:N", title=series))
    return frame_chart(encoded.encode(tooltip=tooltip), data, title, width, height)
