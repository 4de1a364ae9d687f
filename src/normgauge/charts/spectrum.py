"""Charts of eigenvalues: a stem per eigenvalue with its residual."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from normgauge.errors import require

if TYPE_CHECKING:
    import altair


def stems(rows: Sequence[Mapping[str, Any]], title: str) -> altair.TopLevelMixin:
    """Draw one stem per eigenvalue, coloured by end of the spectrum, with its residual on hover.

    Args:
        rows: mappings with `end`, `index`, `eigenvalue` and `residual`.
        title: the chart's title.
    """
    alt = require("altair", "lab", "Spectrum.chart")
    pandas = require("pandas", "lab", "Spectrum.chart")
    frame = pandas.DataFrame(list(rows))
    base = alt.Chart(frame, title=title).encode(
        x=alt.X("index:O", title="index"),
        y=alt.Y("eigenvalue:Q", title="eigenvalue"),
        color=alt.Color("end:N", title="end"),
        tooltip=[
            "end:N",
            "index:O",
            alt.Tooltip("eigenvalue:Q", format=".6g"),
            alt.Tooltip("residual:Q", format=".2g"),
        ],
    )
    return base.mark_bar(width=3) + base.mark_point(filled=True, size=60)
