"""The page of a monitored run: live while it is served, whole in one file afterwards."""

from __future__ import annotations

from normgauge import charts
from normgauge.report._markup import Markup, asset, fill_page


def watch_page(log: str, title: str, *, live: bool = False) -> str:
    """Return the page of a monitor's log (its JSON lines); a live one fetches the log from where it is served."""
    return fill_page(
        "watch.html",
        {
            "policy": Markup(charts.POLICY),
            "title": title,
            "css": asset("page.css"),
            "log": Markup(charts.script_json("" if live else log)),
            "live": Markup("true" if live else "false"),
        },
    )
