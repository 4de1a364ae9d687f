"""Pages from templates that escape by construction: what is no `Markup` becomes text wherever it is put into one."""

import math
from collections.abc import Mapping
from importlib.resources import files
from typing import Any

from markupsafe import Markup as Markup

from normgauge import charts
from normgauge.records import format_number
from normgauge.report._content import show


def asset(name: str) -> Markup:
    """Return a file of ours: a style, a script or a template of a page."""
    return Markup((files("normgauge.report") / "assets" / name).read_text(encoding="utf-8"))


def render(name: str, filters: Mapping[str, Any], **parts: Any) -> str:
    """Return a page from a Jinja template, which escapes what is no markup; numbers and holes as `show` writes them."""
    from jinja2 import Environment, FunctionLoader, StrictUndefined  # a dependency of torch

    environment = Environment(
        autoescape=True,
        trim_blocks=True,
        lstrip_blocks=True,
        undefined=StrictUndefined,
        loader=FunctionLoader(asset),
        finalize=lambda value: value if isinstance(value, str) else show(value),
    )
    environment.globals["asset"] = asset
    environment.filters |= {"number": number, "seconds": seconds, "sort_key": _sort_key, **filters}
    pairs = enumerate(zip(*charts.PALETTES.values(), strict=True))
    palette = "".join(f"--c{k}: light-dark({light}, {dark});" for k, (light, dark) in pairs)
    shared = {"policy": Markup(charts.POLICY), "palette": Markup(palette)}
    return environment.get_template(name).render(**shared, **parts)


def number(value: Any, unit: str = "") -> str:
    """Write a metric's value: percents with one decimal, others with four digits, a dash where there is none.

    Examples:
        >>> number(98.765, "%"), number(12.3456), number(float("nan")), number(">= 1")
        ('98.8', '12.35', '-', '>= 1')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    return f"{value:.1f}" if unit == "%" and isinstance(value, (int, float)) else format_number(value)


def seconds(value: Any) -> str:
    """Write a duration as people say it.

    Examples:
        >>> seconds(4.25), seconds(75), seconds(7300), seconds(None)
        ('4.2 s', '1 min 15 s', '2 h 1 min', '-')
    """
    if not isinstance(value, (int, float)) or not math.isfinite(value):
        return "-"
    if value < 60:
        return f"{value:.1f} s"
    minutes, rest = divmod(round(value), 60)
    return f"{minutes} min {rest} s" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _sort_key(value: Any) -> Any:
    """Return what a column is sorted by: the number in full, or the text; empty sorts last."""
    return "" if value is None else repr(value) if isinstance(value, float) else value
