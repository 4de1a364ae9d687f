"""Join the stores of shards into one: every run once, only if all shards asked the same question."""

from collections.abc import Mapping, Sequence
from contextlib import ExitStack
from dataclasses import dataclass, replace
from itertools import zip_longest
from pathlib import Path
from typing import Any

from normgauge.documents import ComparisonDocument
from normgauge.errors import StoreError
from normgauge.records import Run, plain
from normgauge.store import DONE, STORE_NAME, Store, canonical, spec_id


@dataclass(frozen=True)
class Merged:
    """What a merge did."""

    store: Path  # the joined store
    stores: int  # how many were read
    added: int  # runs that were new
    known: int  # runs that were there already, in the joined store or in two shards
    total: int  # runs in the joined store now

    def __str__(self) -> str:
        known = f"{self.known} were there already, {self.total} in {self.store} now"
        return f"{self.added} runs added from {self.stores} stores, {known}"


def merge(stores: Sequence[str | Path], out: str | Path) -> Merged:
    """Copy every run of the stores that `out` does not hold yet into it; merging again changes nothing.

    Args:
        stores: files `runs.sqlite` or folders that hold one.
        out: the file or folder to join them in; it is made when it does not exist, and may be one of the stores.

    A run that failed in one store and is done in another is taken from there. Nothing is copied before all stores were
    looked at.

    Raises:
        StoreError: when a store is missing, is still being written, belongs to another study, or holds other numbers
            for the same run than another one.
    """
    target = _file(out)
    sources = [path for path in dict.fromkeys(_file(store) for store in stores) if path != target]
    for path in sources:
        if not path.exists():
            raise StoreError(f"merge {path}", "the store must exist", "no such file", "Check the path")
    added = repeated = 0
    with ExitStack() as stack:
        shards = [stack.enter_context(Store(path, write=False)) for path in sources]
        for shard in shards:
            if shard.being_written():  # it would be joined in part
                rule, step = "one process at a time writes to a store", "Wait for the shard to end, or end it"
                raise StoreError(f"merge {shard.path}", rule, "one that is being written", step)
        joined = stack.enter_context(Store(target))
        joined.claim()
        _refuse_other_questions([joined, *shards])
        _refuse_conflicts([joined, *shards])
        documents = [document for store in (joined, *shards) if (document := store.document(ComparisonDocument))]
        if documents and joined.document(ComparisonDocument) is None:
            # the question alone: what a shard's own runs said is no answer of the joined ones
            joined.put_document(replace(documents[0], arms=(), answer="", decided=False, runs=()))
        for shard in shards:  # what failed in one may have gone well in another
            there = {True: joined.finished(), False: joined.ids()}
            runs = shard.runs()
            fresh = [run for run in runs if spec_id(run.spec) not in there[run.status in DONE]]
            for run in fresh:
                joined.put(run)
            added, repeated = added + len(fresh), repeated + len(runs) - len(fresh)
        return Merged(target, len(sources), added, repeated, len(joined.ids()))


def _file(path: str | Path) -> Path:
    path = Path(path)
    return path if path.suffix == ".sqlite" else path / STORE_NAME


def _refuse_other_questions(stores: Sequence[Store]) -> None:
    """Refuse to mix answers to different questions."""
    asked = [(store, question) for store in stores if (question := _question(store))]
    for store, theirs in asked[1:]:
        first, ours = asked[0]
        differing = sorted(key for key in {*ours, *theirs} if _text(ours, key) != _text(theirs, key))
        if differing:
            key = differing[0]
            got = f"another {key}: {_text(theirs, key)} instead of {_text(ours, key)}"
            step = "Merge stores of one study, made with the same options"
            raise StoreError(f"merge {store.path}", f"all shards must ask the same question as {first.path}", got, step)


def _question(store: Store) -> Mapping[str, Any]:
    """Return what a store's runs are about: the question of its comparison, or the study that the specs name."""
    document = store.document(ComparisonDocument)
    if document is not None:
        return dict(plain(document.question))
    named = sorted({str(run.spec.get("study")) for run in store.runs()})
    return {"name": named} if named else {}


def _text(question: Mapping[str, Any], key: str) -> str:
    return canonical({"": question.get(key)})[4:-1]


def _refuse_conflicts(stores: Sequence[Store]) -> None:
    """Refuse stores that hold the same run with other readings: one of them is wrong, and nobody knows which."""
    first: dict[str, tuple[Store, Run]] = {}
    for store in stores:
        for run in store.runs():
            if run.status not in DONE:
                continue
            other, twin = first.setdefault(spec_id(run.spec), (store, run))
            difference = _difference(twin, run)
            if difference:
                rule = f"a run has the same readings in every store; {other.path} holds it too"
                step = "Delete the store you do not trust, or run its study again"
                raise StoreError(f"merge {store.path}", rule, f"run {spec_id(run.spec)} with {difference}", step)


def _difference(first: Run, second: Run) -> str:
    """Name the first thing that two runs of one spec differ by, "" if they are the same; time and place may differ."""
    if first.status != second.status:
        return f"status {second.status} here, {first.status} there"
    for one, two in zip_longest(first.readings, second.readings):
        if repr(one) != repr(two):  # holes are nan, which equals nothing
            there, here = ("no reading" if each is None else f"{each} at step {each.step}" for each in (one, two))
            return f"{here} here, {there} there"
    return ""
