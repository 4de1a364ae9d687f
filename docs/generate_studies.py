"""Write the committed pages of the papers' experiments, and the tables that ship with the package, from stores.

    normgauge reproduce NAME                       # leaves normgauge-studies/NAME-small/runs.sqlite
    python docs/generate_studies.py normgauge-studies [NAME ...]

For every store of the small size: docs/papers/studies/NAME.md with its figures, and claims/tables/NAME.json, from which
`normgauge claims` judges; and how long `normgauge reproduce --all` took, if it wrote that. Nothing is run here.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from normgauge.lab._reproduce import STORE_NAME, conclude
from normgauge.lab.studies import experiments
from normgauge.report import Picture, study_markdown
from normgauge.store import Store

ROOT = Path(__file__).parents[1]
PAGES = ROOT / "docs" / "papers" / "studies"
SESSIONS = PAGES / "all-small.json"
TABLES = ROOT / "src" / "normgauge" / "claims" / "tables"


def write(name: str, folder: Path) -> None:
    """Write the page, figures and table of one study."""
    with Store(folder / STORE_NAME) as store:
        result = conclude(experiments()[name], "small", store)
    document = result.document()
    origin = document["provenance"]
    pictures = [Picture(*entry) for entry in result.pictures()]
    figures = PAGES / "figures"
    figures.mkdir(parents=True, exist_ok=True)
    for old in figures.glob(f"{name}-*.svg"):
        old.unlink()
    for picture in pictures:
        (figures / f"{picture.name}.svg").write_text(picture.svg + "\n", encoding="utf-8")
    (PAGES / f"{name}.md").write_text(study_markdown(document, pictures, "figures"), encoding="utf-8")
    TABLES.mkdir(parents=True, exist_ok=True)
    kept = {"study", "size", "outcome", "sentence", "runs", "seconds", "finished"}
    table = {key: document[key] for key in kept} | {"revision": origin["revision"], "machine": origin["machine"]}
    table["rows"] = [
        {key: _short(value) for key, value in row.items() if key != "sentence"} for row in document["rows"]
    ]
    body = json.dumps(table, sort_keys=True, indent=None, separators=(",", ":")).replace('{"', '\n{"')
    (TABLES / f"{name}.json").write_text(body + "\n", encoding="utf-8")


def _short(value: object) -> object:
    """Return numbers with seven digits: what a verdict needs, without the noise of the last bits."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


def main() -> None:
    """Write what the folder holds, or only the studies that are named."""
    stores = Path(sys.argv[1])
    for name in sys.argv[2:] or [name for name in experiments() if (stores / f"{name}-small" / STORE_NAME).exists()]:
        write(name, stores / f"{name}-small")
    if (stores / SESSIONS.name).exists():
        SESSIONS.write_text((stores / SESSIONS.name).read_text(encoding="utf-8"), encoding="utf-8")


if __name__ == "__main__":
    main()
