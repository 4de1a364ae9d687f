"""Several quantities against the same axis, one small panel each."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.charts._rows import free_scale, plain, scale_type
from normgauge.charts._theme import themed
from normgauge.errors import require

if TYPE_CHECKING:
    import altair


def panels(
    rows: Sequence[Mapping[str, Any]],
    *,
    x: str,
    ys: Mapping[str, str],
    x_title: str = "",
    title: str = "",
    log_x: bool = False,
    width: int = 240,
    height: int = 200,
) -> altair.TopLevelMixin:
    """Draw one line with points per quantity, side by side, over the same x.

    Args:
        rows: dicts with the column `x` and the columns of `ys`.
        x: column of the common axis.
        ys: column -> title of its panel.
        x_title: under each panel; the column's name when empty.
        title: above all panels.
        log_x: a logarithmic axis.
        width: of one panel, in pixels.
        height: of one panel, in pixels.

    Examples:
        >>> rows = [{"s": 0.1, "loss": 1.0}, {"s": 0.2, "loss": 0.8}]
        >>> len(panels(rows, x="s", ys={"loss": "loss"}).to_dict()["hconcat"])
        1
    """
    alt = require("altair", "lab", "charts.panels")
    data = alt.Data(values=[{name: plain(value) for name, value in row.items()} for row in rows])
    axis = alt.Axis(tickMinStep=1) if all(isinstance(row[x], int) for row in rows) else alt.Axis()
    scale = alt.Scale(**free_scale("log" if log_x else "linear"))
    horizontal = alt.X(f"{x}:Q", title=x_title or x, scale=scale, axis=axis)
    drawn = []
    for column, heading in ys.items():
        kind = scale_type([row[column] for row in rows], "auto")
        vertical = alt.Y(f"{column}:Q", title="", scale=alt.Scale(**free_scale(kind)))
        tooltip = [alt.Tooltip(f"{name}:Q", format=".4~g") for name in (x, column)]
        lines = alt.Chart(data, title=heading).mark_line(point=True).encode(horizontal, vertical, tooltip=tooltip)
        drawn.append(lines.properties(width=width, height=height))
    joined = alt.hconcat(*drawn)
    return themed(joined.properties(title=title) if title else joined)
