"""Charts of eigenvalues: stems with residuals, densities, blocks side by side, the rates they allow."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import plain
from normgauge.charts._theme import ROWS, frame_chart
from normgauge.errors import require

if TYPE_CHECKING:
    import altair


def stems(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    """Draw one stem per eigenvalue (`end`, `index`, `eigenvalue`, `residual`), coloured by end of the spectrum."""
    base = _eigenvalues(rows, "index", "residual")
    return frame_chart(base.mark_bar(width=3) + base.mark_point(filled=True, size=60), rows, title, 420, 260)


def blocks(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    """Draw the eigenvalues of several blocks (`variables`) side by side, in the order of the model."""
    return frame_chart(_eigenvalues(rows, "variables", "index").mark_point(filled=True, size=70), rows, title, 420, 260)


def _eigenvalues(rows: Sequence[Mapping[str, Any]], x: str, detail: str) -> altair.Chart:
    alt = require("altair", "lab", "Result.chart")
    hover = [f"{x}:N", "end:N", alt.Tooltip("eigenvalue:Q", format=".6g"), alt.Tooltip(f"{detail}:Q", format=".2g")]
    return alt.Chart(alt.NamedData(name=ROWS)).encode(
        x=alt.X(f"{x}:N", sort=list(dict.fromkeys(row[x] for row in rows)), title=x, axis=alt.Axis(labelAngle=0)),
        y=alt.Y("eigenvalue:Q", title="eigenvalue"),
        color=alt.Color("end:N"),
        tooltip=hover,
    )


def density_curve(grid: Sequence[float], values: Sequence[float], title: str) -> altair.TopLevelMixin:
    """Draw a spectral density on a logarithmic axis, cut where it has fallen by ten orders."""
    alt = require("altair", "lab", "Density.chart")
    floor = max(values) * 1e-10
    rows = [{"eigenvalue": float(x), "density": max(float(y), floor)} for x, y in zip(grid, values, strict=True)]
    area = alt.Chart(alt.NamedData(name=ROWS)).mark_area(line=True, opacity=0.4)
    drawn = area.encode(
        x=alt.X("eigenvalue:Q", title="eigenvalue"),
        y=alt.Y("density:Q", title="density", scale=alt.Scale(type="log", domainMin=floor)),
        tooltip=[alt.Tooltip("eigenvalue:Q", format=".4g"), alt.Tooltip("density:Q", format=".3g")],
    )
    return frame_chart(drawn, rows, title, 420, 260)


def rates(rows: Sequence[Mapping[str, Any]], marks: Mapping[str, float], title: str) -> altair.TopLevelMixin:
    """Draw the loss reached per learning rate (`rate`, `stable`, `loss`), and a line at every rate of `marks` by name.

    A run without a loss stands at the largest; a rate that is not finite has no line.
    """
    alt = require("altair", "lab", "StableRate.chart")
    worst = max((row["loss"] for row in rows if plain(row["loss"]) is not None), default=1.0)
    words = {True: "stable", False: "unstable"}
    data = [
        {"rate": row["rate"], "run": words[row["stable"]], "loss": worst if plain(row["loss"]) is None else row["loss"]}
        for row in rows
    ]
    axis = alt.X("rate:Q", title="learning rate", scale=alt.Scale(type="log", nice=False, padding=12))
    points = alt.Chart(alt.NamedData(name=ROWS)).mark_point(filled=True, size=80, opacity=1)
    runs = points.encode(axis, alt.Y("loss:Q", title="loss reached"), color="run:N", shape="run:N")
    at: dict[float, list[str]] = {}
    for name, rate in marks.items():
        at.setdefault(rate, []).append(name)
    lines = [{"rate": rate, "text": ", ".join(names)} for rate, names in at.items() if plain(rate) is not None]
    base = alt.Chart(alt.Data(values=lines)).encode(axis)
    note = base.mark_text(style="note", align="left", dx=4, baseline="top").encode(text="text:N", y=alt.value(0))
    layers = runs + base.mark_rule(style="quiet", strokeDash=[4, 3]) + note
    return frame_chart(layers, data, title, 420, 200)
