"""A dot and its interval per arm: what a table's mean and low..high look like."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import Scale, detail_field, free_scale, scale_type, series_order, tidy, value_axis
from normgauge.charts._theme import ROWS, frame_chart
from normgauge.errors import require

if TYPE_CHECKING:
    import altair
    import pandas


def intervals(
    rows: Sequence[Mapping[str, Any]] | pandas.DataFrame,
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
    number_format: str = ".4~g",
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
    tooltip = [
        alt.Tooltip("series:N", title=series),
        *(
            alt.Tooltip(f"{field}:Q", title=name, format=number_format)
            for field, name in (("x", value), ("low", low), ("high", high))
        ),
        *(alt.Tooltip(f"{detail_field(i, name)}:N", title=name) for i, name in enumerate(detail)),
    ]
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(
        alt.Y("series:N", sort=names, scale=alt.Scale(domain=names), title=None, axis=alt.Axis(labelFontSize=12)),
        color=alt.Color("series:N", scale=alt.Scale(domain=names), legend=None),
        tooltip=tooltip,
    )
    axis = alt.Axis(**value_axis(kind, number_format, grid=True))
    x_scale = alt.Scale(**free_scale(kind), padding=12)
    heading = value if x_title is None else x_title
    bar = base.mark_rule(strokeWidth=5, opacity=0.35, strokeCap="round").encode(
        alt.X("low:Q", title=heading, axis=axis, scale=x_scale), alt.X2("high:Q")
    )
    dot = base.mark_point(filled=True, opacity=1, size=110).encode(
        alt.X("x:Q", title=heading, axis=axis, scale=x_scale),
        shape=alt.Shape("series:N", scale=alt.Scale(domain=names), legend=None),
    )
    return frame_chart(alt.layer(bar, dot), data, title, width, row_height * len(names))
