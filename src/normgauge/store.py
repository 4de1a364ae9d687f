"""One SQLite file that remembers finished runs: one transaction per run, keyed by the hash of its spec."""

from __future__ import annotations

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import closing
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from normgauge.documents import Document, from_plain
from normgauge.errors import StoreError, explain
from normgauge.records import Provenance, Reading, Run, Spec, plain

SCHEMA_VERSION = 1

_SCHEMA = """
CREATE TABLE IF NOT EXISTS runs (
    id TEXT PRIMARY KEY, spec TEXT NOT NULL, status TEXT NOT NULL, sentence TEXT NOT NULL,
    seconds REAL NOT NULL, provenance TEXT NOT NULL
);
CREATE TABLE IF NOT EXISTS readings (
    run TEXT NOT NULL REFERENCES runs(id), step INTEGER NOT NULL, name TEXT NOT NULL, layer TEXT,
    value REAL, kind TEXT NOT NULL, status TEXT NOT NULL
);
CREATE INDEX IF NOT EXISTS readings_by_run ON readings(run);
CREATE TABLE IF NOT EXISTS documents (name TEXT PRIMARY KEY, body TEXT NOT NULL);
"""
#: The file a study keeps its runs in, inside its folder.
STORE_NAME = "runs.sqlite"
D = TypeVar("D", bound=Document)


def canonical(spec: Spec) -> str:
    """Write a spec as canonical JSON: sorted keys, no spaces, so that equal specs are equal strings."""
    return json.dumps(spec, sort_keys=True, separators=(",", ":"), allow_nan=False)


def spec_id(spec: Spec) -> str:
    """Return the identity of a run: 16 hex digits of the SHA-256 of its canonical spec.

    Examples:
        >>> spec_id({"a": 1, "b": 2}) == spec_id({"b": 2, "a": 1})
        True
    """
    return hashlib.sha256(canonical(spec).encode()).hexdigest()[:16]


class Store:
    """Finished runs with their readings, and what was concluded from them, in one SQLite file with one writer.

    A run is written in one transaction when it is finished, so an interruption at any moment loses at most the
    runs in flight, and starting again runs only what is missing. The journal is SQLite's rollback journal, not
    WAL, because stores live on network file systems too.

    Args:
        path: the file; it is made, with its folder, when it does not exist.
        write: `False` only reads: nothing is made, and a file of somebody else's stays as it is.

    Raises:
        StoreError: when the file cannot be opened, is no store, or was written by a newer normgauge.

    Examples:
        >>> import tempfile
        >>> store = Store(Path(tempfile.mkdtemp()) / "runs.sqlite")
        >>> run = Run({"lr": 0.1})
        >>> run.record(0, "loss", 2.0)
        >>> store.put(run)
        >>> [(run.spec, run.last("loss")) for run in store.runs()]
        [({'lr': 0.1}, 2.0)]
    """

    def __init__(self, path: str | Path, *, write: bool = True) -> None:
        self.path = Path(path)
        self._claim: IO[str] | None = None
        try:
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            target = str(self.path) if write else f"{self.path.absolute().as_uri()}?mode=ro"
            self._connection = sqlite3.connect(target, timeout=30.0, isolation_level=None, uri=not write)
            if write:
                self._connection.execute("PRAGMA journal_mode=DELETE")
            version = self._connection.execute("PRAGMA user_version").fetchone()[0]
            if version not in (0, SCHEMA_VERSION):
                raise StoreError(
                    explain(
                        f"store {self.path.name}",
                        f"this normgauge reads stores of version {SCHEMA_VERSION}",
                        f"version {version}",
                        "Upgrade normgauge, or choose another --out",
                    )
                )
            if write:
                self._connection.executescript(_SCHEMA + f"PRAGMA user_version={SCHEMA_VERSION};")
            self._connection.execute("SELECT 1 FROM runs, readings, documents LIMIT 0")
        except (sqlite3.Error, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(
                explain(
                    f"store {self.path.name}",
                    "a store is an SQLite file that can be read and written",
                    str(error),
                    "Choose another --out, or check permissions and free space",
                )
            ) from error

    def claim(self) -> None:
        """Become the one writer of the file until it is closed; the first `put` does it too. Readers are not kept out.

        The claim is a lock on `<file>.lock` that the system releases when the process ends, however it ends.

        Raises:
            StoreError: when another process, or another `Store` of this one, writes to the file.
        """
        if self._claim is not None:
            return
        try:
            file = self.path.with_name(self.path.name + ".lock").open("a")
        except OSError as error:
            raise StoreError(
                explain(f"store {self.path.name}", "its folder must be writable", str(error), "Choose another --out")
            ) from error
        try:
            _lock(file)
        except OSError as error:
            file.close()
            raise StoreError(
                explain(
                    f"store {self.path.name}",
                    "one process at a time writes to a store",
                    "a file that another one is writing to",
                    "Wait for it or end it, or choose another --out and join them with normgauge merge",
                )
            ) from error
        self._claim = file

    def put(self, run: Run) -> None:
        """Write one finished run and its readings in one transaction; a run already there is kept as it is.

        Raises:
            StoreError: when the disk is full or the file is locked; what was stored before stays.
        """
        identity = spec_id(run.spec)
        origin = json.dumps(plain(run.provenance), sort_keys=True)
        row = (identity, canonical(run.spec), run.status, run.sentence, run.seconds, origin)
        rows = [(identity, r.step, r.name, r.layer, plain(r.value), r.kind, r.status) for r in run.readings]
        with self._transaction() as cursor:
            if cursor.execute("INSERT OR IGNORE INTO runs VALUES (?,?,?,?,?,?)", row).rowcount:
                cursor.executemany("INSERT INTO readings VALUES (?,?,?,?,?,?,?)", rows)

    def put_document(self, document: Document) -> None:
        """Write what was concluded from the runs, replacing an earlier document of the same kind."""
        body = json.dumps({"version": document.VERSION, **plain(document)})
        with self._transaction() as cursor:
            cursor.execute("INSERT OR REPLACE INTO documents VALUES (?,?)", (type(document).__name__, body))

    def document(self, kind: type[D]) -> D | None:
        """Return the document of a kind, `None` where there is none.

        Raises:
            StoreError: when another version of normgauge wrote it in a form this one does not read, or it is damaged.
        """
        query = "SELECT body FROM documents WHERE name = ?"
        try:
            row = self._connection.execute(query, (kind.__name__,)).fetchone()
            data: Any = None if row is None else json.loads(row[0])
        except (sqlite3.Error, ValueError) as error:
            rule = f"its {kind.__name__} is JSON in an undamaged file"
            raise StoreError(
                explain(f"store {self.path.name}", rule, str(error), "Choose another --out, or restore the file")
            ) from error
        return None if row is None else kind.of_json(data, self.path.name)

    def finished(self) -> set[str]:
        """Return the ids of the runs that are stored."""
        return {row[0] for row in self._connection.execute("SELECT id FROM runs")}

    def runs(self, ids: Iterable[str] | None = None) -> list[Run]:
        """Return the stored runs with their readings, all or those with the given ids, in the order they finished."""
        ids = None if ids is None else sorted(set(ids))  # asked for twice below
        columns = "rowid, id, spec, status, sentence, seconds, provenance"
        runs: dict[str, Run] = {}
        for _, identity, spec, status, sentence, seconds, origin in sorted(self._select(columns, "runs", "id", ids)):
            provenance = from_plain(Provenance, json.loads(origin))
            runs[identity] = Run(json.loads(spec), status, sentence, [], seconds, provenance)
        for run, step, name, layer, value, kind, status in self._select("*", "readings", "run", ids):
            number = math.nan if value is None else value
            runs[run].readings.append(Reading(name, number, kind, status=status, step=step, layer=layer))
        return list(runs.values())

    def _select(self, what: str, table: str, key: str, ids: list[str] | None) -> Iterator[tuple[Any, ...]]:
        """Yield rows in the order they were written; those with the given ids by the index, some hundred at a time."""
        query = f"SELECT {what} FROM {table}"
        if ids is None:
            yield from self._connection.execute(f"{query} ORDER BY rowid")
            return
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            marks = ",".join("?" * len(some))
            yield from self._connection.execute(f"{query} WHERE {key} IN ({marks}) ORDER BY rowid", some)

    def close(self) -> None:
        """Close the file and give up the claim on it."""
        self._connection.close()
        if self._claim is not None:
            self._claim.close()
            self._claim = None

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.close()

    def _transaction(self) -> _Transaction:
        self.claim()
        return _Transaction(self._connection, self.path.name)


def _lock(file: IO[str]) -> None:
    """Lock an open file for this process, or raise OSError at once when another one has it."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        return
    fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)


class _Transaction:
    """`BEGIN IMMEDIATE ... COMMIT`, rolled back and explained on failure."""

    def __init__(self, connection: sqlite3.Connection, name: str) -> None:
        self._connection, self._name = connection, name

    def __enter__(self) -> sqlite3.Cursor:
        self._run("BEGIN IMMEDIATE")
        return self._connection.cursor()

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, trace: object) -> None:
        if kind is None:
            self._run("COMMIT")
            return
        if self._connection.in_transaction:
            with closing(self._connection.cursor()) as cursor:
                cursor.execute("ROLLBACK")
        if isinstance(error, sqlite3.Error):
            raise self._store_error(error) from error

    def _run(self, statement: str) -> None:
        try:
            self._connection.execute(statement)
        except sqlite3.Error as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            raise self._store_error(error) from error

    def _store_error(self, error: sqlite3.Error) -> StoreError:
        return StoreError(
            explain(
                f"store {self._name}",
                "the file must be writable by this one process",
                str(error),
                "Free disk space or end the other writer, then run the same command again: finished runs are kept",
            )
        )
