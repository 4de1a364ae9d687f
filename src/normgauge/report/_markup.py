"""Small pieces of HTML, escaped by construction: what is not `Markup` becomes text wherever it is put into a page."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from importlib.resources import files
from string import Template
from typing import Any

from normgauge.records import STATUSES, format_number
from normgauge.report._content import show


class Markup(str):
    """HTML that may stand in a page as it is; only constants and what `format`, `join` and `text` made are.

    A plain string, however it was put together, is escaped where it meets markup, once.

    Examples:
        >>> Markup("<b>{}</b>").format("<script>")
        '<b>&lt;script&gt;</b>'
        >>> Markup("").join([Markup("<br>"), "<br>"]) + "&"
        '<br>&lt;br&gt;&amp;'
    """

    __slots__ = ()

    def format(self, *parts: Any, **named: Any) -> Markup:
        """Fill the places of a template, escaping what is no markup."""
        return Markup(super().format(*map(text, parts), **{name: text(part) for name, part in named.items()}))

    def join(self, parts: Iterable[Any]) -> Markup:
        """Join parts, escaping those that are no markup."""
        return Markup(super().join(map(text, parts)))

    def __add__(self, other: Any) -> Markup:
        return Markup(super().__add__(text(other)))


def text(value: Any) -> Markup:
    """Return a value as escaped text, fit for an element and for a quoted attribute; markup as it is."""
    return value if isinstance(value, Markup) else Markup(escape(show(value), quote=True))


def concat(parts: Iterable[Any]) -> Markup:
    """Return the parts one after the other, those that are no markup escaped."""
    return Markup("").join(parts)


def asset(name: str) -> Markup:
    """Return a file of ours: a style, a script or a template of a page."""
    return Markup((files("normgauge.report") / "assets" / name).read_text(encoding="utf-8"))


def fill_page(name: str, parts: Mapping[str, Any]) -> str:
    """Return a page from its template; what is no markup is escaped."""
    return Template(asset(name)).substitute({key: text(part) for key, part in parts.items()})


def number(value: Any, unit: str = "") -> str:
    """Write a metric's value: percents with one decimal, others with four digits, a dash where there is none.

    Examples:
        >>> number(98.765, "%"), number(12.3456), number(float("nan")), number(">= 1")
        ('98.8', '12.35', '-', '>= 1')
    """
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return "-"
    if unit == "%" and isinstance(value, (int, float)):
        return f"{value:.1f}"
    return format_number(value)


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


def badge(status: str) -> Markup:
    """Return a run's status as a coloured word."""
    colour = status if status in STATUSES else "other"
    return Markup('<span class="badge badge-{}">{}</span>').format(colour, status)


def heading(title: str, *, first: str = "ascending", numeric: bool = False, tip: str = "") -> Markup:
    """Return a column heading that sorts: a button, so that the keyboard reaches it."""
    return Markup(
        '<th scope="col" aria-sort="none" data-first="{first}"{kind}>'
        '<button type="button"{hint}>{title}<span class="arrow" aria-hidden="true"></span></button></th>'
    ).format(
        first=first,
        kind=Markup(' class="num"') if numeric else "",
        hint=Markup(' title="{}"').format(tip) if tip else "",
        title=title,
    )


def pairs(items: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> Markup:
    """Return names and values as a definition list."""
    entries = items.items() if isinstance(items, Mapping) else items
    body = concat(Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(name, value) for name, value in entries)
    return Markup('<dl class="pairs">{}</dl>').format(body)


def swatch(index: int) -> Markup:
    """Return the mark of an arm in its colour, cycling as the charts do."""
    return Markup('<span class="swatch" style="--arm: var(--c{})" aria-hidden="true"></span>').format(index % 8)
