"""Write the committed pages of the papers' experiments from stores.

    normgauge reproduce NAME                       # leaves normgauge-studies/NAME-small/runs.sqlite
    python docs/generate_studies.py normgauge-studies [NAME ...]

For every store of the small size docs/papers/studies/NAME.md with its figures, and how long `normgauge reproduce --all`
took, if it wrote that. Nothing is run here; `tools/ship_tables.py` writes the tables that ship with the package.
"""

from __future__ import annotations

import sys
from pathlib import Path

from normgauge.papers.reproduce import STORE_NAME, conclude
from normgauge.papers.studies import experiments
from normgauge.report import Picture, study_markdown
from normgauge.store import Store

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "papers" / "studies"
SESSIONS = PAGES / "all-small.json"


def write(name: str, folder: Path) -> None:
    """Write the page, figures and table of one study."""
    with Store(folder / STORE_NAME) as store:
        result = conclude(experiments()[name], "small", store)
    document = result.document()
    pictures = [Picture(*entry) for entry in result.pictures()]
    figures = PAGES / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for old in figures.glob(f"{name}-*.svg"):
        old.unlink()
    for picture in pictures:
        (figures / f"{picture.name}.svg").write_text(picture.svg + "\n", encoding="utf-8")
    (PAGES / f"{name}.md").write_text(study_markdown(document, pictures, "figures"), encoding="utf-8")


def main() -> None:
    """Write what the folder holds, or only the studies that are named."""
    stores = Path(sys.argv[1])
    for name in sys.argv[2:] or [name for name in experiments() if (stores / f"{name}-small" / STORE_NAME).exists()]:
        write(name, stores / f"{name}-small")
    if (stores / SESSIONS.name).exists():
        SESSIONS.write_text((stores / SESSIONS.name).read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
