"""A value over a plane as a heat map with contours, and trajectories on it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._heatmap import heatmap
from normgauge.charts._rows import tidy
from normgauge.charts._theme import themed
from normgauge.errors import require

if TYPE_CHECKING:
    import altair
    import pandas


def surface(
    rows: Sequence[Mapping[str, Any]] | pandas.DataFrame,
    *,
    x: str,
    y: str,
    value: str = "value",
    paths: Sequence[Mapping[str, Any]] = (),
    path: str = "path",
    step: str = "step",
    levels: Sequence[float] | int = 8,
    title: str = "",
    width: int = 380,
    height: int = 340,
) -> altair.TopLevelMixin:
    """Draw a heat map with contour lines and one line per trajectory, its points in the order of `step`.

    Args:
        rows: one row per grid point.
        x: column of the first coordinate.
        y: column of the second.
        value: column of the value.
        paths: one row per point of a trajectory, with the columns `x`, `y`, `path` and `step`; may be empty.
        path: column that names the trajectory.
        step: column of the order along it.
        levels: heights of the contour lines, or how many.
        title: above the chart.
        width: in pixels.
        height: in pixels.

    Raises:
        InputError: when there is no row.
        UnknownNameError: when a column does not exist.
        MissingExtraError: when altair is not installed.

    Examples:
        >>> rows = [{"a": a, "b": b, "value": a * a + b * b} for a in (0, 1) for b in (0, 1)]
        >>> drawn = surface(rows, x="a", y="b", paths=[{"a": 0, "b": 0, "path": 0, "step": 0}])
        >>> len(drawn.to_dict()["layer"])
        2
    """
    alt = require("altair", "lab", "charts.surface")
    ground = heatmap(rows, x=x, y=y, value=value, levels=levels, title=title, width=width, height=height)
    if not paths:
        return ground
    points = tidy("charts.surface", paths, {"x": x, "y": y, "series": path, "low": step})
    lines = (
        alt.Chart(alt.Data(values=points))
        .mark_line(point=True, stroke="#ffffff", strokeWidth=1.5)
        .encode(
            alt.X("x:Q"),
            alt.Y("y:Q"),
            order=alt.Order("low:Q"),
            detail="series:N",
            tooltip=[alt.Tooltip("series:N", title=path), alt.Tooltip("low:Q", title=step)],
        )
    )
    kept = ground.datasets
    ground.datasets = ground.config = alt.Undefined  # rows and theme belong to the whole, not to a layer
    layered = themed(alt.layer(ground, lines))
    layered.datasets = kept
    return layered
