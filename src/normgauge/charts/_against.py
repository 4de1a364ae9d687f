"""A metric against a knob, one line per series, with the runs that failed marked above the plot."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._curves import legend_toggle
from normgauge.charts._rows import Scale, detail_field, free_scale, scale_type, series_order, tidy, value_axis
from normgauge.charts._theme import ROWS, frame_chart
from normgauge.errors import require

if TYPE_CHECKING:
    import altair
    import pandas

_LANE = 11  # pixels per series in the strip of failures


def against(
    rows: Sequence[Mapping[str, Any]] | pandas.DataFrame,
    *,
    x: str,
    y: str = "value",
    series: str = "series",
    low: str | None = None,
    high: str | None = None,
    failed: str | None = None,
    total: str | None = None,
    detail: Sequence[str] = (),
    order: Sequence[str] | None = None,
    title: str = "",
    x_title: str | None = None,
    y_title: str | None = "",
    x_scale: Scale = "auto",
    y_scale: Scale = "auto",
    y_format: str = ".4~g",
    failed_label: str = "diverged",
    legend: bool = True,
    width: int = 520,
    height: int = 300,
) -> altair.TopLevelMixin:
    """Draw the metric against the knob per series; a cross above the plot where runs at that knob value failed.

    The crosses stand in a strip of their own, one lane per series: a diverged run has no value, so a place
    inside the axes would be invented. A cross is faint where only some of the runs failed.

    `failed`, `total`: columns with the numbers of failed runs and of all. A scale of "auto" is log from a factor of 5
    on for the knob (they are swept on log grids), of 100 on for the metric.
    """
    alt = require("altair", "lab", "charts.against")
    channels = {"x": x, "y": y, "low": low, "high": high, "series": series, "failed": failed, "total": total}
    data = tidy("charts.against", rows, channels, detail)
    names = series_order(data, order)
    lanes = [name for name in names if any(row.get("failed") and str(row["series"]) == name for row in data)]
    strip = 26 + _LANE * len(lanes) if lanes else 0
    for row in data:
        # y of a cross, in pixels: its lane, or nothing
        row["lane"] = 20 + _LANE * lanes.index(str(row["series"])) if row.get("failed") else None
        row["share"] = row["failed"] / row["total"] if row.get("failed") and row.get("total") else 1.0
    x_kind = scale_type([row["x"] for row in data], x_scale, span=5.0)
    y_kind = scale_type([row[key] for row in data for key in ("y", "low", "high") if key in row], y_scale)
    ticks = sorted({row["x"] for row in data if row["x"] is not None})
    x_axis = alt.Axis(values=ticks, format="~g") if len(ticks) <= 9 else alt.Axis(format="~g", tickCount=6)
    base = alt.Chart(alt.NamedData(name=ROWS)).encode(
        alt.X(
            "x:Q",
            title=x if x_title is None else x_title,
            scale=alt.Scale(**free_scale(x_kind), nice=False, padding=18),
            axis=x_axis,
        ),
        color=alt.Color("series:N", scale=alt.Scale(domain=names), legend=alt.Legend() if legend else None),
    )
    heading = y if y_title is None else y_title
    # the range keeps the strip free of lines; it is in pixels, as the lanes are
    y_room = alt.Scale(**free_scale(y_kind), range=[height, strip])
    y_axis = alt.Axis(**value_axis(y_kind, y_format))
    value = alt.Y("y:Q", title=heading, scale=y_room, axis=y_axis)
    shape = alt.Shape("series:N", scale=alt.Scale(domain=names), legend=alt.Legend() if legend else None)
    tooltip = [alt.Tooltip("series:N", title=series), alt.Tooltip("x:Q", title=x, format="~g")]
    numbers = [alt.Tooltip("y:Q", title=y, format=y_format)]
    numbers += [alt.Tooltip(f"{edge}:Q", title=edge, format=y_format) for edge in ("low", "high") if edge in data[0]]
    counts = [alt.Tooltip(f"{name}:Q", title=channels[name]) for name in ("failed", "total") if channels[name]]
    counts += [alt.Tooltip(f"{detail_field(i, name)}:N", title=name) for i, name in enumerate(detail)]
    layers = [
        base.mark_line(strokeWidth=1.5, strokeOpacity=0.75).encode(value),
        base.mark_point(filled=True, opacity=1, size=70).encode(
            value, shape=shape, tooltip=[*tooltip, *numbers, *counts]
        ),
    ]
    if low is not None and high is not None:
        spread = alt.Y("low:Q", title=heading, scale=y_room, axis=y_axis)
        layers.insert(0, base.mark_rule(strokeWidth=3, opacity=0.35).encode(spread, alt.Y2("high:Q")))
    if strip:
        layers.append(
            base.mark_point(shape="M-1,-1L1,1M-1,1L1,-1", size=60, strokeWidth=2.4, filled=False).encode(
                alt.Y("lane:Q", scale=None, axis=None, title=None),
                opacity=alt.Opacity("share:Q", scale=alt.Scale(domain=[0, 1], range=[0.25, 1]), legend=None),
                tooltip=[*tooltip, *counts],
            )
        )
        note = alt.Chart(alt.Data(values=[{"text": failed_label}])).mark_text(
            style="note", align="left", baseline="top"
        )
        layers.append(note.encode(text="text:N", x=alt.value(0), y=alt.value(0)))
    if legend:
        shown = legend_toggle(names)
        layers[0] = layers[0].add_params(shown)
        drawn = len(layers) - bool(strip)  # the word beside the strip belongs to no series
        layers[:drawn] = [layer.transform_filter(shown) for layer in layers[:drawn]]
    return frame_chart(alt.layer(*layers), data, title, width, height)
