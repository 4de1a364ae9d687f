"""Small pieces of HTML; the only place where text becomes markup, so everything is escaped once, here."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from html import escape
from typing import Any

from normgauge.records import STATUSES, format_number
from normgauge.report._content import show


def text(value: Any) -> str:
    """Return a value as escaped text, fit for an element and for a quoted attribute."""
    return escape(show(value), quote=True)


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


def badge(status: str) -> str:
    """Return a run's status as a coloured word."""
    colour = status if status in STATUSES else "other"
    return f'<span class="badge badge-{colour}">{text(status)}</span>'


def heading(title: str, *, first: str = "ascending", numeric: bool = False, tip: str = "") -> str:
    """Return a column heading that sorts: a button, so that the keyboard reaches it."""
    hint = f' title="{text(tip)}"' if tip else ""
    kind = ' class="num"' if numeric else ""
    return (
        f'<th scope="col" aria-sort="none" data-first="{first}"{kind}>'
        f'<button type="button"{hint}>{text(title)}<span class="arrow" aria-hidden="true"></span></button></th>'
    )


def pairs(items: Mapping[str, Any] | Iterable[tuple[str, Any]]) -> str:
    """Return names and values as a definition list."""
    entries = items.items() if isinstance(items, Mapping) else items
    body = "".join(f"<div><dt>{text(name)}</dt><dd>{text(value)}</dd></div>" for name, value in entries)
    return f'<dl class="pairs">{body}</dl>'


def swatch(index: int) -> str:
    """Return the mark of an arm in its colour, cycling as the charts do."""
    return f'<span class="swatch" style="--arm: var(--c{index % 8})" aria-hidden="true"></span>'
