"""Join the stores of shards into one: every run once, only if all shards asked the same question."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

from normgauge.documents import ComparisonDocument
from normgauge.errors import StoreError, explain
from normgauge.records import plain
from normgauge.store import STORE_NAME, Store, canonical, spec_id


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
    added = repeated = 0
    with Store(target) as joined:
        joined.claim()
        for path in sources:
            with Store(path) as source:
                source.claim()  # a shard that is still running would be joined in part
                _agree(joined, source)
                fresh, old = _copy(source, joined)
                added, repeated = added + fresh, repeated + old
        return Merged(target, len(sources), added, repeated, len(joined.finished()))


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
    document = source.document(ComparisonDocument)
    if document is not None and joined.document(ComparisonDocument) is None:
        # the question alone: what a shard's own runs said is no answer of the joined ones
        joined.put_document(replace(document, arms=(), answer="", decided=False, runs=()))


def _question(store: Store) -> Mapping[str, Any]:
    """Return what a store's runs are about: the question of its comparison, or the study that the specs name."""
    document = store.document(ComparisonDocument)
    if document is not None:
        question: Mapping[str, Any] = plain(document.question)
        return question
    named = sorted({str(run.spec.get("study")) for run in store.runs()})
    return {"name": named} if named else {}


def _text(question: Mapping[str, Any], key: str) -> str:
    return canonical({"": question.get(key)})[4:-1]


def _copy(source: Store, joined: Store) -> tuple[int, int]:
    """Return how many runs were new, and how many were there already."""
    runs, here = source.runs(), joined.finished()
    fresh = [run for run in runs if spec_id(run.spec) not in here]
    for run in fresh:
        joined.put(run)
    return len(fresh), len(runs) - len(fresh)
