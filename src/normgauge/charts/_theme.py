"""One look for every chart: colours that colour-blind eyes tell apart, in a light and a dark variant."""

import textwrap
from collections.abc import Mapping, Sequence
from typing import Any

from normgauge.errors import unknown_name
from normgauge.records import Chart

# Found by search: contrast of at least 3:1 with the background, and every pair stays apart under simulated
# protanopia, deuteranopia and tritanopia (tests/charts/test_charts.py measures both). Hue k is the same in both.
PALETTES: dict[str, tuple[str, ...]] = {
    "light": ("#2453c6", "#cd6900", "#3f9770", "#a73170", "#745306", "#1b9de1", "#5b118e", "#2c3038"),
    "dark": ("#548afc", "#f07131", "#4cd79c", "#d01c68", "#e2c026", "#9be0fe", "#8a44ce", "#95989b"),
}
BACKGROUNDS = {"light": "#ffffff", "dark": "#171a21"}
# Shape repeats what colour says, so a printed page and a ninth series still read.
SHAPES = ("circle", "square", "triangle-up", "diamond", "triangle-down", "cross", "triangle-right")
ROWS = "rows"  # the name under which the layers of a chart share their data
# A picture without a script is laid out by the widths of Arial, so it asks for that or for its metric twin.
MEASURED_FONT = 'Arial, "Liberation Sans", Helvetica, sans-serif'
FONT = 'system-ui, -apple-system, "Segoe UI", Roboto, "Helvetica Neue", Arial, sans-serif'
INK = {
    "light": {"text": "#1c2330", "muted": "#5b6474", "line": "#c9cfd9", "grid": "#eceff4"},
    "dark": {"text": "#e8ebf1", "muted": "#a0a9b8", "line": "#3c4452", "grid": "#272d38"},
}
_RAMPS = {
    "light": ("#f3f7fc", "#c3d8ef", "#7fb0de", "#2665ad", "#0e2f5c"),
    "dark": ("#1d2430", "#1f3f66", "#2f73b5", "#7db8ec", "#e2f1ff"),
}


def config(mode: str = "light") -> dict[str, Any]:
    """Return the Vega-Lite configuration of the theme, a fresh dict of plain JSON values.

    Examples:
        >>> config("dark")["range"]["category"][0] == PALETTES["dark"][0]
        True
    """
    if mode not in PALETTES:
        raise unknown_name("theme", mode, PALETTES)
    text, muted, line, grid = INK[mode].values()
    ramp = list(_RAMPS[mode])
    axis = {"labelColor": muted, "titleColor": muted, "domainColor": line, "tickColor": line, "gridColor": grid}
    quiet = {"labelFontSize": 11, "titleFontSize": 11.5, "titleFontWeight": "normal", "titlePadding": 8}
    legend = {"labelColor": text, "titleColor": muted, "labelFontSize": 12, "titleFontWeight": "normal", "title": None}
    plain = {"color": PALETTES[mode][0]}  # of marks without a series
    title = {"color": text, "subtitleColor": muted, "fontSize": 14, "fontWeight": 600, "anchor": "start", "offset": 10}
    return {
        "background": "transparent" if mode == "dark" else BACKGROUNDS["light"],
        "font": FONT,
        "padding": {"left": 12, "right": 12, "top": 5, "bottom": 5},  # the reader's font may be wider than ours
        "view": {"stroke": None},
        "range": {"category": list(PALETTES[mode]), "symbol": list(SHAPES), "heatmap": ramp, "ramp": ramp},
        "axis": {**axis, **quiet, "labelOverlap": "greedy"},
        "axisY": {"domain": False, "ticks": False, "labelPadding": 6},
        "axisX": {"grid": False},
        "legend": {**legend, "symbolSize": 90, "symbolOpacity": 1, "orient": "top", "columnPadding": 26},
        "title": title,
        "line": {**plain, "strokeWidth": 2, "strokeCap": "round", "strokeJoin": "round"},
        "point": {**plain, "opacity": 1},
        "area": plain,
        "bar": {**plain, "cornerRadiusEnd": 2},
        "style": {
            "quiet": {"color": muted, "strokeOpacity": 0.6},
            "note": {"color": muted, "fontSize": 11},
            "contour": {"stroke": text, "strokeOpacity": 0.55, "strokeWidth": 1},
        },
    }


def themed(chart: Chart, mode: str = "light") -> Any:
    """Return a copy of a chart that carries the theme; layers and concatenations are themed once, at the top."""
    copy = chart.copy(deep=["config"])
    copy.config = config(mode)
    return copy


def frame_chart(chart: Chart, rows: Sequence[Mapping[str, Any]], title: str, width: int, height: int) -> Any:
    """Return the finished chart: the rows its layers share (`ROWS`), its size, its title unless empty, the theme."""
    sized = chart.properties(width=width, height=height)
    lines = textwrap.wrap(title, max(20, (width + 60) // 8))
    finished = themed(sized.properties(title=lines if len(lines) > 1 else title) if title else sized)
    finished.datasets = {ROWS: list(rows)}
    return finished
