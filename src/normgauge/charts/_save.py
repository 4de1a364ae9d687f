"""A chart as a file, by its ending, with neither network nor browser."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import TYPE_CHECKING

from normgauge.errors import InputError, explain, require

if TYPE_CHECKING:
    import altair

_ENDINGS = (".html", ".svg", ".png", ".pdf")


def save(chart: altair.TopLevelMixin, path: str | Path, *, scale: float = 2.0) -> Path:
    """Write a chart to .html (interactive, self-contained), .svg, .png or .pdf and return the path.

    Args:
        chart: what a function of this room returned, or any Altair chart.
        path: the file; its ending says the format, its folder is made.
        scale: pixels per point, for .png.

    Raises:
        InputError: for another ending.
        MissingExtraError: when altair or vl-convert is not installed.
    """
    require("altair", "lab", "charts.save")
    require("vl_convert", "lab", "charts.save")
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in _ENDINGS:
        raise InputError(
            explain("charts.save", f"the file ends in {', '.join(_ENDINGS)}", target.name, "Choose one of them")
        )
    target.parent.mkdir(parents=True, exist_ok=True)
    if ending == ".html":
        chart.save(str(target), format="html", inline=True)
    elif ending == ".png":
        chart.save(str(target), format="png", scale_factor=scale)
    else:
        chart.save(str(target), format=ending[1:])
    return target


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script for a page without network; made once per process.

    The script sets `window.vega`, `window.vegaLite` and `window.vegaEmbed`, in the version Altair writes for.
    """
    altair = require("altair", "lab", "charts.javascript")
    converter = require("vl_convert", "lab", "charts.javascript")
    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    known = version in converter.get_vegalite_versions()
    return str(converter.javascript_bundle(vl_version=version) if known else converter.javascript_bundle())
