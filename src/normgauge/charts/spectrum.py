"""Charts of eigenvalues: stems with residuals, densities, blocks side by side, the rates they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import plain
from normgauge.charts._theme import themed
from normgauge.errors import require

if TYPE_CHECKING:
    import altair


def stems(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    """Draw one stem per eigenvalue, coloured by end of the spectrum, with its residual on hover.

    Rows have `end`, `index`, `eigenvalue` and `residual`.
    """
    alt = require("altair", "lab", "Spectrum.chart")
    pandas = require("pandas", "lab", "Spectrum.chart")
    frame = pandas.DataFrame(list(rows))
    base = alt.Chart(frame, title=title).encode(
        x=alt.X("index:O", title="index"),
        y=alt.Y("eigenvalue:Q", title="eigenvalue"),
        color=alt.Color("end:N", title="end"),
        tooltip=[
            "end:N",
            "index:O",
            alt.Tooltip("eigenvalue:Q", format=".6g"),
            alt.Tooltip("residual:Q", format=".2g"),
        ],
    )
    return _size_chart(base.mark_bar(width=3) + base.mark_point(filled=True, size=60))


def _size_chart(chart: altair.TopLevelMixin) -> altair.TopLevelMixin:
    """Return the chart themed and wide enough to read with a handful of entries."""
    return themed(chart.properties(width=420, height=260))


def density_curve(grid: Sequence[float], values: Sequence[float], title: str) -> altair.TopLevelMixin:
    """Draw a spectral density on a logarithmic axis, cut where it has fallen by ten orders."""
    alt = require("altair", "lab", "Density.chart")
    pandas = require("pandas", "lab", "Density.chart")
    floor = max(values) * 1e-10
    frame = pandas.DataFrame({"eigenvalue": list(grid), "density": [max(value, floor) for value in values]})
    return _size_chart(
        alt.Chart(frame, title=title)
        .mark_area(line=True, opacity=0.4)
        .encode(
            x=alt.X("eigenvalue:Q", title="eigenvalue"),
            y=alt.Y("density:Q", title="density", scale=alt.Scale(type="log", domainMin=floor)),
            tooltip=[alt.Tooltip("eigenvalue:Q", format=".4g"), alt.Tooltip("density:Q", format=".3g")],
        )
    )


def blocks(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    """Draw the eigenvalues of several blocks side by side, in the order of the model."""
    alt = require("altair", "lab", "LayerSpectra.chart")
    pandas = require("pandas", "lab", "LayerSpectra.chart")
    return _size_chart(
        alt.Chart(pandas.DataFrame(list(rows)), title=title)
        .mark_point(filled=True, size=70)
        .encode(
            x=alt.X("variables:N", sort=None, title="variables"),
            y=alt.Y("eigenvalue:Q", title="eigenvalue"),
            color=alt.Color("end:N", title="end"),
            tooltip=["variables:N", "end:N", "index:O", alt.Tooltip("eigenvalue:Q", format=".6g")],
        )
    )


def rates(rows: Sequence[Mapping[str, Any]], edge: float, title: str) -> altair.TopLevelMixin:
    """Draw the loss reached per learning rate, each run stable or not, and a line at the rate to use.

    Args:
        rows: mappings with `rate`, `stable` and `loss`; a run without a loss stands at the largest.
        edge: the rate to use; no line where it is not finite.
        title: the chart's title.
    """
    alt = require("altair", "lab", "StableRate.chart")
    worst = max((row["loss"] for row in rows if plain(row["loss"]) is not None), default=1.0)
    words = {True: "stable", False: "unstable"}
    data = [
        {"rate": row["rate"], "run": words[row["stable"]], "loss": worst if plain(row["loss"]) is None else row["loss"]}
        for row in rows
    ]
    axis = alt.X("rate:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=12))
    points = (
        alt.Chart(alt.Data(values=data), title=title)
        .mark_point(filled=True, size=80, opacity=1)
        .encode(axis, alt.Y("loss:Q", title="loss reached"), color="run:N", shape="run:N")
    )
    line = [] if plain(edge) is None else [{"rate": edge, "text": "use"}]
    base = alt.Chart(alt.Data(values=line)).encode(axis)
    note = base.mark_text(style="note", align="left", dx=4, baseline="top").encode(text="text:N", y=alt.value(0))
    return themed((points + base.mark_rule(style="quiet", strokeDash=[4, 3]) + note).properties(width=420, height=200))


def gauge_orbit(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    """Draw a largest eigenvalue at points that are the same function, for several notions of curvature.

    Rows have `point` (number of the rescaled copy), `curvature` (which matrix) and `eigenvalue`.
    """
    alt = require("altair", "lab", "gauge_orbit")
    pandas = require("pandas", "lab", "gauge_orbit")
    return _size_chart(
        alt.Chart(pandas.DataFrame(list(rows)), title=title)
        .mark_line(point=True)
        .encode(
            x=alt.X("point:O", title="the same network, its symmetric blocks multiplied by random factors"),
            y=alt.Y("eigenvalue:Q", title="largest eigenvalue", scale=alt.Scale(type="log")),
            color=alt.Color("curvature:N", title=None),
            tooltip=["curvature:N", "point:O", alt.Tooltip("eigenvalue:Q", format=".6g")],
        )
    )
