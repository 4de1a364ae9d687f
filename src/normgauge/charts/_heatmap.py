"""A value over two knobs as coloured cells, with contour lines found by marching squares, and trajectories on it."""

from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np

from normgauge.charts._rows import NUMBER, Rows, tidy
from normgauge.charts._theme import PALETTES, ROWS, frame_chart, themed
from normgauge.errors import InputError, require
from normgauge.records import Chart

# Corners of a cell are numbered counter-clockwise from (x0, y0); edge k joins corner k and k + 1.
_CORNERS = ((0, 0), (1, 0), (1, 1), (0, 1))


def heatmap(
    rows: Rows,
    *,
    x: str,
    y: str,
    value: str = "value",
    levels: Sequence[float] | int = 0,
    title: str = "",
    width: int = 360,
    height: int = 320,
) -> Chart:
    """Draw a cell per grid point, coloured by its value, and contour lines at the levels.

    Missing points stay empty. `levels`: heights of the contour lines, or how many to space evenly between the extremes.
    """
    alt = require("altair", "lab", "charts.heatmap")
    data = tidy("charts.heatmap", rows, {"x": x, "y": y, "value": value})
    if not all(isinstance(row[axis], (int, float)) for row in data for axis in ("x", "y")):
        raise InputError("charts.heatmap", "both knobs must be finite numbers", "another value", "Encode them")
    xs, ys = sorted({row["x"] for row in data}), sorted({row["y"] for row in data})
    x_edges, y_edges = _edges(xs), _edges(ys)
    for row in data:
        row["x0"], row["x1"] = x_edges[row["x"]]
        row["y0"], row["y1"] = y_edges[row["y"]]
    exact, ends = alt.Scale(nice=False, zero=False), (alt.X2("x1:Q"), alt.Y2("y1:Q"))
    named = (("x", x), ("y", y), ("value", value))
    cells = alt.Chart(alt.NamedData(name=ROWS)).mark_rect()
    cells = cells.encode(
        alt.X("x0:Q", title=x, scale=exact, axis=alt.Axis(format="~g")),
        alt.Y("y0:Q", title=y, scale=exact, axis=alt.Axis(format="~g")),
        *ends,
        color=alt.Color("value:Q", title=value).legend(orient="right"),
        tooltip=[alt.Tooltip(f"{field}:Q", title=name, format=NUMBER) for field, name in named],
    )
    table = {(row["x"], row["y"]): row["value"] for row in data}
    grid = np.array([[table.get((a, b)) for a in xs] for b in ys], dtype=float)
    segments = [s for level in _heights(grid, levels) for s in contour_segments(xs, ys, grid, level)]
    if not segments:
        return frame_chart(cells, data, title, width, height)
    lines = alt.Chart(alt.Data(values=segments)).mark_rule(style="contour")
    starts, tooltip = (alt.X("x0:Q", scale=exact), alt.Y("y0:Q", scale=exact)), alt.Tooltip("level:Q", format=NUMBER)
    drawn = alt.layer(cells, lines.encode(*starts, *ends, tooltip=tooltip))
    return frame_chart(drawn, data, title, width, height)


def contour_segments(
    xs: Sequence[float], ys: Sequence[float], grid: np.ndarray, level: float
) -> list[dict[str, float]]:
    """Return the line where the bilinear surface through `grid[j, i] = f(xs[i], ys[j])` crosses `level`.

    Marching squares: each cell whose corners lie on both sides gives one segment, a saddle two, split by the
    mean of its corners. Cells with a missing corner give none.

    Examples:
        >>> segment = contour_segments([0, 1], [0, 1], np.array([[0.0, 1.0], [0.0, 1.0]]), 0.25)[0]
        >>> segment["x0"], segment["x1"]
        (0.25, 0.25)
    """
    segments = []
    for j in range(len(ys) - 1):
        for i in range(len(xs) - 1):
            corner = [grid[j + dy, i + dx] for dx, dy in _CORNERS]
            if not np.all(np.isfinite(corner)):
                continue
            crossings = {}
            for edge in range(4):
                here, there = corner[edge], corner[(edge + 1) % 4]
                if (here >= level) != (there >= level):
                    part = (level - here) / (there - here)
                    (ax, ay), (bx, by) = _CORNERS[edge], _CORNERS[(edge + 1) % 4]
                    x, y = xs[i + ax], ys[j + ay]
                    crossings[edge] = (x + part * (xs[i + bx] - x), y + part * (ys[j + by] - y))
            for first, second in _pairs(corner, list(crossings), level):
                (x0, y0), (x1, y1) = crossings[first], crossings[second]
                ends = {"x0": x0, "y0": y0, "x1": x1, "y1": y1, "level": level}
                segments.append({name: float(value) for name, value in ends.items()})
    return segments


def _pairs(corner: Sequence[float], edges: Sequence[int], level: float) -> list[tuple[int, int]]:
    if len(edges) < 4:
        return [(edges[0], edges[1])] if edges else []
    # a saddle: corners 0 and 2 are on one side; the centre says whether they are joined
    joined = (np.mean(corner) >= level) == (corner[0] >= level)
    return [(0, 1), (2, 3)] if joined else [(3, 0), (1, 2)]


def _edges(values: Sequence[float]) -> dict[float, tuple[float, float]]:
    """Return for each grid value the cell around it: halfway to its neighbours, and as far beyond the ends."""
    points = np.asarray(values, dtype=float)
    gaps = np.diff(points) / 2 if len(points) > 1 else np.array([0.5])
    sides = np.concatenate([[points[0] - gaps[0]], points[:-1] + gaps[: len(points) - 1], [points[-1] + gaps[-1]]])
    return {value: (float(sides[k]), float(sides[k + 1])) for k, value in enumerate(values)}


def _heights(grid: np.ndarray, levels: Sequence[float] | int) -> list[float]:
    finite = grid[np.isfinite(grid)]
    if isinstance(levels, int) and (levels < 1 or finite.size == 0):
        return []
    return np.linspace(finite.min(), finite.max(), levels + 2)[1:-1].tolist() if isinstance(levels, int) else [*levels]


def surface(
    rows: Rows,
    *,
    x: str,
    y: str,
    value: str = "value",
    paths: Sequence[Mapping[str, Any]] = (),
    levels: Sequence[float] | int = 8,
    title: str = "",
) -> Chart:
    """Draw a heat map with contour lines and one line per trajectory, its points in the order of `step`.

    `paths` has the columns of `x` and `y`, `path` (its name) and `step`, one row per point.

    Examples:
        >>> rows = [{"a": a, "b": b, "value": a * a + b * b} for a in (0, 1) for b in (0, 1)]
        >>> drawn = surface(rows, x="a", y="b", paths=[{"a": 0, "b": 0, "path": 0, "step": 0}])
        >>> len(drawn.to_dict()["layer"])
        2
    """
    alt = require("altair", "lab", "charts.surface")
    ground = heatmap(rows, x=x, y=y, value=value, levels=levels, title=title, width=380, height=340)
    if not paths:
        return ground
    points = tidy("charts.surface", paths, {"x": x, "y": y, "series": "path", "low": "step"})
    tooltip = [alt.Tooltip("series:N", title="path"), alt.Tooltip("low:Q", title="step")]
    path = alt.Chart(alt.Data(values=points)).encode(
        alt.X("x:Q"), alt.Y("y:Q"), order=alt.Order("low:Q"), detail="series:N", tooltip=tooltip
    )
    ink = PALETTES["light"][1]  # a colour that the ramp has not, cased in white where the ground is dark
    lines = path.mark_line(stroke="#ffffff", strokeWidth=5) + path.mark_line(stroke=ink, strokeWidth=2.5)
    lines += path.mark_point(filled=True, size=40, fill=ink, stroke="#ffffff", strokeWidth=1)
    kept = ground.datasets
    ground.datasets = ground.config = alt.Undefined  # rows and theme belong to the whole, not to a layer
    layered = themed(alt.layer(ground, lines))
    layered.datasets = kept
    return layered
