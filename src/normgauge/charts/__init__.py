"""Rows -> Altair charts with one theme; knows no torch. Needs the `lab` extra when a chart is drawn."""

from normgauge.charts._against import against as against
from normgauge.charts._bars import bars as bars
from normgauge.charts._curves import curves as curves
from normgauge.charts._heatmap import contour_segments as contour_segments
from normgauge.charts._heatmap import heatmap as heatmap
from normgauge.charts._histogram import histogram as histogram
from normgauge.charts._intervals import intervals as intervals
from normgauge.charts._panels import panels as panels
from normgauge.charts._rows import printable as printable
from normgauge.charts._save import POLICY as POLICY
from normgauge.charts._save import inline_svg as inline_svg
from normgauge.charts._save import javascript as javascript
from normgauge.charts._save import save as save
from normgauge.charts._save import script_json as script_json
from normgauge.charts._save import svg as svg
from normgauge.charts._surface import surface as surface
from normgauge.charts._theme import PALETTES as PALETTES
from normgauge.charts._theme import SHAPES as SHAPES
from normgauge.charts._theme import config as config
from normgauge.charts._theme import themed as themed

__all__ = [
    "PALETTES",
    "POLICY",
    "SHAPES",
    "against",
    "bars",
    "config",
    "contour_segments",
    "curves",
    "heatmap",
    "histogram",
    "inline_svg",
    "intervals",
    "javascript",
    "panels",
    "printable",
    "save",
    "script_json",
    "surface",
    "svg",
    "themed",
]
