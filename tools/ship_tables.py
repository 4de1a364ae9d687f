"""Write the study tables that ship with the package: `normgauge claims` judges from them until the reader runs more.

    normgauge reproduce NAME                       # leaves normgauge-studies/NAME-small/runs.sqlite
    python tools/ship_tables.py normgauge-studies [NAME[:SIZE] ...]   # small, unless a larger size was run to its end
    python tools/ship_tables.py --rejudge [normgauge-studies]   # a criterion changed: the same rows, judged anew;
                                                   # with what stores of other sizes say beside
    python docs/generate_studies.py [normgauge-studies]   # the pages

Nothing is run here, and nobody writes these tables by hand.
"""

from __future__ import annotations

import json
import sys
from dataclasses import replace
from pathlib import Path

from normgauge.documents import StudyDocument
from normgauge.papers.court import criteria, shipped
from normgauge.papers.court.sources import Source
from normgauge.papers.reproduce import conclude, criterion_document, other_sizes
from normgauge.papers.shelf import studies
from normgauge.papers.studies import find
from normgauge.records import plain
from normgauge.store import STORE_NAME, Store

ROOT = Path(__file__).parents[1] / "src" / "normgauge" / "papers"


def judged(document: StudyDocument) -> StudyDocument:
    """Return a document with the verdicts of its criteria on its own rows."""
    find(document.study)
    table = Source(document).table
    verdicts = (criterion_document(claim, table) for claim in criteria(document.study))
    return replace(document, criteria=tuple(verdicts))


def write(document: StudyDocument) -> None:
    """Write the table of one study into its paper's folder."""
    rows = tuple({name: _short(value) for name, value in row.items() if name != "sentence"} for row in document.rows)
    body = plain(judged(replace(document, rows=rows)))
    text = json.dumps({"version": document.VERSION, **body}, sort_keys=True, separators=(",", ":"))
    paper = studies()[document.study].split(".")[2]
    target = ROOT / paper / "tables" / f"{document.study}.json"
    target.write_text(text.replace('{"', '\n{"').lstrip() + "\n", encoding="utf-8")


def concluded(name: str, size: str, stores: Path) -> StudyDocument:
    """Return what a store of one size says."""
    with Store(stores / f"{name}-{size}" / STORE_NAME) as store:
        return conclude(find(name), size, store).document()


def _short(value: object) -> object:
    """Return numbers with seven digits: what a verdict needs, without the noise of the last bits."""
    return float(f"{value:.7g}") if isinstance(value, float) else value


if __name__ == "__main__":
    if sys.argv[1:2] == ["--rejudge"]:
        for name, source in shipped().items():
            find(name)
            beside = other_sizes(name, source.document.size, Path(sys.argv[2])) if sys.argv[2:] else ()
            write(replace(source.document, other_sizes=beside or source.document.other_sizes))
    else:
        stores = Path(sys.argv[1])
        for name in sys.argv[2:] or [name for name in studies() if (stores / f"{name}-small" / STORE_NAME).exists()]:
            study, _, size = name.partition(":")
            write(concluded(study, size or "small", stores))
