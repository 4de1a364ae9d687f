"""The study tables that ship with the package: what empirical claims are judged from until the reader runs their own.

Each file of `claims/tables` holds the rows of one study at one size, with the revision and machine that made them;
`docs/generate_studies.py` writes them from stores, nobody writes them by hand.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from functools import cache
from importlib.resources import files
from typing import Any


@cache
def shipped_tables() -> Mapping[str, Mapping[str, Any]]:
    """Return study -> document with `rows`, `size`, `revision`, `machine`, `seconds`."""
    folder = files("normgauge.claims") / "tables"
    if not folder.is_dir():
        return {}
    documents = (json.loads(entry.read_text(encoding="utf-8")) for entry in sorted(folder.iterdir(), key=str))
    return {document["study"]: document for document in documents}
