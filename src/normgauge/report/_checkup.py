"""The page of a checkup: at most three findings open, the rest folded."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from textwrap import dedent
from typing import Any

from normgauge.report._markup import asset, render


def checkup_page(findings: Iterable[Mapping[str, Any]], *, title: str, summary: str, footer: str) -> str:
    """Return findings (mappings with the fields of `Finding`, the first ones the most urgent) as one offline page."""
    groups: dict[str, dict[str, Any]] = {}
    for finding in findings:
        fix, _, code = finding["remedy"].partition("\n")
        words = {"references": ", ".join(finding["references"]), "exactness": finding["exactness"].replace("_", " ")}
        group = groups.setdefault(finding["id"], {**finding, **words, "fix": fix, "code": dedent(code), "places": []})
        group["places"].append((finding["where"], finding["evidence"]))
    parts = {"title": title, "summary": summary, "footer": footer, "css": asset("page.css")}
    return render("checkup.html", {}, groups=list(groups.values()), **parts)
