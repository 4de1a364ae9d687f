"""Write the study tables that ship with the package: `normgauge claims` judges from them until the reader runs more.

    normgauge reproduce NAME                       # leaves normgauge-studies/NAME-small/runs.sqlite
    python tools/ship_tables.py normgauge-studies [NAME ...]
    python docs/generate_studies.py normgauge-studies [NAME ...]   # the pages of the same stores

Nothing is run here, and nobody writes these tables by hand.
"""

from __future__ import annotations

import json
import math
import sys
from pathlib import Path

from normgauge.papers.reproduce import STORE_NAME, conclude
from normgauge.papers.studies import find, index
from normgauge.store import Store

ROOT = Path(__file__).parents[1] / "src" / "normgauge" / "papers"


def write(name: str, folder: Path) -> None:
    """Write the table of one study into its paper's folder."""
    with Store(folder / STORE_NAME) as store:
        document = conclude(find(name), "small", store).document()
    origin = document["provenance"]
    kept = {"study", "size", "outcome", "sentence", "runs", "seconds", "finished"}
    table = {key: document[key] for key in kept} | {"revision": origin["revision"], "machine": origin["machine"]}
    table["rows"] = [
        {key: _short(value) for key, value in row.items() if key != "sentence"} for row in document["rows"]
    ]
    body = json.dumps(table, sort_keys=True, indent=None, separators=(",", ":")).replace('{"', '\n{"')
    paper = index()[name].split(".")[2]
    (ROOT / paper / "tables" / f"{name}.json").write_text(body + "\n", encoding="utf-8")


def _short(value: object) -> object:
    """Return numbers with seven digits: what a verdict needs, without the noise of the last bits."""
    if isinstance(value, float):
        return float(f"{value:.7g}") if math.isfinite(value) else None
    return value


if __name__ == "__main__":
    stores = Path(sys.argv[1])
    for name in sys.argv[2:] or [name for name in index() if (stores / f"{name}-small" / STORE_NAME).exists()]:
        write(name, stores / f"{name}-small")
