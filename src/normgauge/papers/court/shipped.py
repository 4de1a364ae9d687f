"""The study tables that ship with the package: what empirical claims are judged from until the reader runs their own.

Each file of a paper's `tables` holds the rows of one study at one size, with the revision and machine that made them;
`tools/ship_tables.py` writes them from stores, nobody writes them by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from typing import Any

from normgauge.papers.shelf import PAPERS


@cache
def shipped_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return study -> document with `rows`, `size`, `revision`, `machine`, `seconds`."""
    entries = [entry for paper in PAPERS.values() for entry in (paper.folder / "tables").iterdir()]
    documents = (json.loads(entry.read_text(encoding="utf-8")) for entry in entries if entry.name.endswith(".json"))
    return {document["study"]: document for document in documents}
