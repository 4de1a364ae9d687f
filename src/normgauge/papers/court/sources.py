"""Which runs an experiment is judged from: the table that ships with the package, and the reader's own runs.

Each file of a paper's `tables` is the `StudyDocument` of one study at one size; `tools/ship_tables.py` writes them from
stores, nobody writes them by hand. The reader's own lie where `normgauge reproduce` put them.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from pathlib import Path

from normgauge.documents import SIZES, StudyDocument
from normgauge.errors import StoreError
from normgauge.papers.court.table import StudyTable
from normgauge.papers.shelf import PAPERS
from normgauge.store import STORE_NAME, Store

#: Where `normgauge reproduce` keeps its runs unless told otherwise.
DEFAULT_FOLDER = "normgauge-studies"


@dataclass(frozen=True)
class Source:
    """The runs of one study at one size (`document`, what the study left), and where they came from."""

    document: StudyDocument
    place: str = ""  # the folder of the reader's own runs; empty for the table that ships with the package

    @property
    def rank(self) -> int:
        """How large the study was run."""
        return SIZES.index(self.document.size)

    @property
    def table(self) -> StudyTable:
        """The measurements: rows of runs that finished."""
        rows = tuple(row for row in self.document.rows if row.get("status", "ok") == "ok")
        return StudyTable(rows, failed=tuple(item.run for item in self.document.failed))

    def __str__(self) -> str:
        d = self.document
        whose = f"your runs in {self.place}" if self.place else "runs shipped with normgauge"
        return f"{whose}: size {d.size}, {d.runs} runs, {d.seeds} seeds, {d.provenance.code}, {d.finished[:10]}"


@cache
def shipped() -> Mapping[str, Source]:
    """Return study -> the runs that ship with the package."""
    entries = [entry for paper in PAPERS.values() for entry in paper.files("tables")]
    texts = {entry.name: entry.read_text(encoding="utf-8") for entry in entries if entry.name.endswith(".json")}
    documents = [StudyDocument.of_json(json.loads(text), name) for name, text in sorted(texts.items())]
    return {document.study: Source(document) for document in documents}


def own_runs(folder: str | Path) -> tuple[dict[str, list[Source]], list[str]]:
    """Return study -> the reader's own runs in a folder of `normgauge reproduce`, and what could not be read.

    A study that was interrupted before it was concluded has left no document and says nothing yet.
    """
    sources: dict[str, list[Source]] = {}
    trouble = []
    for path in sorted(Path(folder).glob(f"*/{STORE_NAME}")):
        try:
            with Store(path, write=False) as store:
                document = store.document(StudyDocument)
        except StoreError as error:
            trouble.append(f"{path.parent}: {error}")  # all stores have one file name
            continue
        if document is None:
            trouble.append(f"{path.parent}: not finished; the same `normgauge reproduce` command goes on with it.")
        elif document.size not in SIZES:
            trouble.append(f"{path.parent}: its size {document.size} is none of {', '.join(SIZES)}; it does not count.")
        else:
            sources.setdefault(document.study, []).append(Source(document, str(path.parent)))
    return sources, trouble


def choose_source(study: str, reader: Sequence[Source]) -> tuple[Source | None, list[tuple[Source, str]]]:
    """Return the runs that decide, and the others with the reason why they do not.

    The reader's own runs supersede those shipped only at equal or larger size; of several the largest counts. Runs of
    which none finished measured nothing, and supersede nothing.
    """
    chosen = shipped_runs = shipped().get(study)
    empty = [source for source in reader if not source.table.rows]
    reader = [source for source in reader if source.table.rows]
    largest = max(reader, key=lambda source: source.rank, default=None)
    if largest is not None and (shipped_runs is None or largest.rank >= shipped_runs.rank):
        chosen, word = largest, f"superseded by your runs of size {largest.document.size}"
    else:
        size = shipped_runs.document.size if shipped_runs else ""
        word = f"does not supersede the runs shipped with normgauge, whose size {size} is larger"
    others = [(source, word) for source in (*reader, *([shipped_runs] if shipped_runs else [])) if source is not chosen]
    return chosen, [*others, *((source, "none of these runs finished") for source in empty)]
