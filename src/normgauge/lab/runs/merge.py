"""Join the stores of shards into one: every run once, only if all shards asked the same question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from normgauge.errors import StoreError, explain
from normgauge.store import Store, canonical

STORE_NAME = "runs.sqlite"


@dataclass(frozen=True)
class Merged:
    """What a merge did.

    Attributes:
        store: the joined store.
        stores: how many were read.
        added: runs that were new.
        known: runs that were there already, in the joined store or in two shards.
        total: runs in the joined store now.
    """

    store: Path
    stores: int
    added: int
    known: int
    total: int

    def __str__(self) -> str:
        return (
            f"{self.added} runs added from {self.stores} stores, {self.known} were there already, "
            f"{self.total} in {self.store} now"
        )


def merge(stores: Sequence[str | Path], out: str | Path) -> Merged:
    """Copy every run of the stores that `out` does not hold yet into it; merging again changes nothing.

    Args:
        stores: files `runs.sqlite` or folders that hold one.
        out: the file or folder to join them in; it is made when it does not exist, and may be one of the stores.

    Returns:
        The counts.

    Raises:
        StoreError: when a store is missing, is still being written, or belongs to another study.
    """
    target = _file(out)
    sources = [path for path in dict.fromkeys(_file(store) for store in stores) if path != target]
    for path in sources:
        if not path.exists():
            raise StoreError(explain(f"merge {path}", "the store must exist", "no such file", "Check the path"))
    added = known = 0
    with Store(target) as joined:
        joined.claim()
        for path in sources:
            with Store(path) as source:
                source.claim()  # a shard that is still running would be joined in part
                _agree(joined, source)
                fresh, old = _copy(source, joined)
                added, known = added + fresh, known + old
        return Merged(target, len(sources), added, known, len(joined.finished()))


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".sqlite" else path / STORE_NAME


def _agree(joined: Store, source: Store) -> None:
    """Refuse to mix answers to different questions; a joined store that is new takes the first one's."""
    ours, theirs = _question(joined), _question(source)
    if ours and theirs:
        differing = sorted(key for key in {*ours, *theirs} if _text(ours, key) != _text(theirs, key))
        if differing:
            key = differing[0]
            raise StoreError(
                explain(
                    f"merge {source.path}",
                    f"all shards must ask the same question as {joined.path}",
                    f"another {key}: {_text(theirs, key)} instead of {_text(ours, key)}",
                    "Merge stores of one study, made with the same options",
                )
            )
    if "study" not in joined.documents() and "study" in source.documents():
        joined.put_document("study", source.documents()["study"])


def _question(store: Store) -> dict[str, Any]:
    """Return what a store's runs are about: its study without the list of runs, or the study that the specs name."""
    study = store.documents().get("study")
    if study is not None:
        return {key: value for key, value in study.items() if key != "runs"}
    named = sorted({str(run["spec"].get("study")) for run in store.runs()})
    return {"name": named} if named else {}


def _text(study: Mapping[str, Any], key: str) -> str:
    return canonical({"": study.get(key)})[4:-1]


def _copy(source: Store, joined: Store) -> tuple[int, int]:
    here = joined.finished()
    readings: dict[str, list[dict[str, Any]]] = {}
    for reading in source.readings():
        readings.setdefault(reading["run"], []).append(reading)
    runs = source.runs()
    for run in runs:
        if run["id"] not in here:
            joined.put(run, readings.get(run["id"], []))
    fresh = sum(run["id"] not in here for run in runs)
    return fresh, len(runs) - fresh
