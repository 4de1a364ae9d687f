"""A chart as a file, by its ending, with neither network nor browser."""

from __future__ import annotations

import json
from functools import cache
from html import escape
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import TYPE_CHECKING, Any

from normgauge.charts._slim import adapt, slim
from normgauge.charts._theme import INK
from normgauge.errors import InputError, require

if TYPE_CHECKING:
    import altair

#: What a page may do: run the scripts it holds, without making code of strings, and ask nobody for anything.
POLICY = "default-src 'none'; script-src 'unsafe-inline'; style-src 'unsafe-inline'; img-src data: blob:"
_ENDINGS = (".html", ".svg", ".png", ".pdf")


def save(chart: altair.TopLevelMixin, path: str | Path, *, scale: float = 2.0) -> Path:
    """Write a chart to .html (interactive, self-contained), .svg, .png or .pdf and return the path.

    Args:
        chart: what a function of this room returned, or any Altair chart.
        path: the file; its ending says the format, its folder is made.
        scale: pixels per point, for .png.
    """
    require("altair", "lab", "charts.save")
    require("vl_convert", "lab", "charts.save")
    target = Path(path)
    ending = target.suffix.lower()
    if ending not in _ENDINGS:
        raise InputError("charts.save", f"the file ends in {', '.join(_ENDINGS)}", target.name, "Choose one of them")
    target.parent.mkdir(parents=True, exist_ok=True)
    if ending == ".html":
        # Altair's own inline page leaves `</script>` in a name of the data as it is, and may be opened with network.
        page = Template((files("normgauge.charts") / "page.html").read_text(encoding="utf-8"))
        told = {"policy": POLICY, "title": escape(target.stem), "spec": script_json(chart.to_dict())}
        target.write_text(page.substitute(told, runtime=javascript()), encoding="utf-8")
    else:
        chart.save(str(target), format=ending[1:], scale_factor=scale if ending == ".png" else 1)
    return target


def svg(chart: altair.TopLevelMixin, title: str = "") -> str:
    """Return a chart as SVG text for a page: small, without background, dark where the reader's scheme is dark."""
    return adapt(slim(_drawing(chart), title))


def inline_svg(chart: altair.TopLevelMixin, label: str) -> str:
    """Return a chart as SVG to stand inside a page: no background, text and lines in the colour of the page's text."""
    text = slim(_drawing(chart), label)
    for paint in ("fill", "stroke"):
        for name, opacity in (("text", 1.0), ("muted", 0.75), ("line", 0.35), ("grid", 0.12)):
            own = f'{paint}="currentColor" {paint}-opacity="{opacity:g}"'
            text = text.replace(f'{paint}="{INK["light"][name]}"', own)
    return text


@cache
def javascript() -> str:
    """Return Vega, Vega-Lite and Vega-Embed as one script for a page without network; made once per process.

    The script sets `window.vega`, `window.vegaLite` and `window.vegaEmbed`, in the version Altair writes for.
    """
    altair = require("altair", "lab", "charts.javascript")
    converter = require("vl_convert", "lab", "charts.javascript")
    version = ".".join(altair.SCHEMA_VERSION.lstrip("v").split(".")[:2])
    bundled = version in converter.get_vegalite_versions()
    bundle = converter.javascript_bundle(vl_version=version) if bundled else converter.javascript_bundle()
    return str(bundle).replace("</script", "<\\/script")


def script_json(value: Any) -> str:
    r"""Return JSON that cannot end the script element it stands in, whatever its strings say.

    Examples:
        >>> script_json({"name": "</script>"})
        '{"name":"\\u003c/script\\u003e"}'
    """
    body = json.dumps(value, allow_nan=False, separators=(",", ":"))
    return body.replace("<", "\\u003c").replace(">", "\\u003e").replace("&", "\\u0026")


def _drawing(chart: altair.TopLevelMixin) -> str:
    converter = require("vl_convert", "lab", "charts.svg")
    return str(converter.vegalite_to_svg(chart.to_dict()))
