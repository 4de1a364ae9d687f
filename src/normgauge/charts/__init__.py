"""Rows -> Altair charts with one theme; knows no torch. Needs the `lab` extra when a chart is drawn.

What they share: `rows` are dicts or a DataFrame; `x`, `y`, `value`, `series`, `low`, `high` name columns, `detail`
further ones for the tooltip; `order` gives the series in the order of colours, others follow as they appear; a title of
an axis that is `None` is the column's name; `legend` is also the switch of the series; sizes
are set by `.properties(width=..., height=...)`. No row is an `InputError`, an unknown column an `UnknownNameError`.
"""

from normgauge.charts._bars import bars, histogram
from normgauge.charts._heatmap import contour_segments, heatmap, surface
from normgauge.charts._lines import against, curves, intervals, panels
from normgauge.charts._rows import printable
from normgauge.charts._save import POLICY, inline_svg, javascript, save, script_json, svg
from normgauge.charts._theme import PALETTES, SHAPES, config, themed

__all__ = [
    "PALETTES", "POLICY", "SHAPES", "against", "bars", "config", "contour_segments", "curves", "heatmap", "histogram",
    "inline_svg", "intervals", "javascript", "panels", "printable", "save", "script_json", "surface", "svg", "themed",
]  # fmt: skip
