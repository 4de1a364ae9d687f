"""Write the committed pages of the papers' experiments, docs/papers/studies/NAME.md, from the tables that ship.

    python docs/generate_studies.py                       # words and numbers anew, figures as they are
    python docs/generate_studies.py normgauge-studies [NAME ...]   # figures anew, from stores of the small size

A page says what `normgauge claims` says: the same rows, judged by the same rule. Nothing is run here;
`tools/ship_tables.py` writes the tables.
"""

from __future__ import annotations

import re
import sys
from pathlib import Path

from normgauge.documents import StudyDocument
from normgauge.papers.court import shipped
from normgauge.papers.reproduce import conclude
from normgauge.papers.studies import find
from normgauge.report import Picture, study_markdown
from normgauge.store import STORE_NAME, Store

PAGES = Path(__file__).parent / "papers" / "studies"
SESSIONS = PAGES / "all-small.json"
SHOWN = re.compile(r"!\[(?P<caption>.*)\]\(figures/(?P<name>.*)\.svg\)")


def page(document: StudyDocument, pictures: list[Picture]) -> str:
    """Return the page of one study."""
    return study_markdown(find(document.study).about(document.size), document, pictures, "figures")


def committed(name: str) -> list[Picture]:
    """Return the figures the page shows now: they were drawn from the runs whose table ships."""
    target = PAGES / f"{name}.md"
    shown = SHOWN.finditer(target.read_text(encoding="utf-8")) if target.exists() else ()
    return [Picture(match["name"], "", match["caption"]) for match in shown]


def drawn(name: str, folder: Path) -> list[Picture]:
    """Draw the figures of a store anew, write them, and return them."""
    with Store(folder / STORE_NAME) as store:
        pictures = [Picture(*entry) for entry in conclude(find(name), "small", store).pictures()]
    figures = PAGES / "figures"
    for old in figures.glob(f"{name}-*.svg"):
        old.unlink()
    for picture in pictures:
        (figures / f"{picture.name}.svg").write_text(picture.svg + "\n", encoding="utf-8")
    return pictures


def main() -> None:
    """Write every page; the figures of those studies anew whose stores are given."""
    stores = Path(sys.argv[1]) if len(sys.argv) > 1 else None
    for name, source in shipped().items():
        folder = stores / f"{name}-small" if stores and (not sys.argv[2:] or name in sys.argv[2:]) else None
        fresh = folder is not None and (folder / STORE_NAME).exists()
        pictures = drawn(name, folder) if fresh and folder else committed(name)
        (PAGES / f"{name}.md").write_text(page(source.document, pictures), encoding="utf-8")
    if stores and (stores / SESSIONS.name).exists():
        SESSIONS.write_text((stores / SESSIONS.name).read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
