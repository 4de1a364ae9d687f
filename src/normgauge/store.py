"""One SQLite file that remembers finished runs: one transaction per run, keyed by the hash of its spec."""

import hashlib
import json
import math
import sqlite3
from collections.abc import Iterable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import IO, Any, Self, TypeVar

from normgauge.documents import Document, from_plain
from normgauge.errors import StoreError
from normgauge.records import Provenance, Reading, Run, Spec, plain

SCHEMA_VERSION = 1
#: In the header of every store since it is written: "nrmg". Stores from before have 0 there, as most databases do.
APPLICATION_ID = int.from_bytes(b"nrmg", "big")

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
CREATE TABLE IF NOT EXISTS digests (run TEXT PRIMARY KEY REFERENCES runs(id), digest TEXT NOT NULL);
"""
_TABLES = {"runs", "readings", "documents"}
#: What a run that counts as done came to; others (error, skipped) are run again.
DONE = ("ok", "diverged", "nonconverged")
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

    Every run has a digest over all that is stored of it: a run that was edited by other means is refused when it is
    read. This finds accidents and idle hands, not forgers, who can write the digest too.

    Args:
        path: the file; it is made, with its folder, when it does not exist.
        write: `False` only reads: nothing is made or changed, and the folder may be read-only.

    Raises:
        StoreError: when the file cannot be opened, is damaged, is no store (it then stays as it was), or was written by
            a newer normgauge.

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
        self.path, self._write = Path(path), write
        self._claim: IO[str] | None = None
        with self._explain_errors("a store is an SQLite file that can be read" + " and written" * write):
            self._refuse_strangers_by_header()
            if write:
                self.path.parent.mkdir(parents=True, exist_ok=True)
            target = f"{self.path.absolute().as_uri()}?mode={'rwc' if write else 'ro'}"
            self._connection = sqlite3.connect(target, timeout=30.0, isolation_level=None, uri=True)
            try:
                self._open()
            except BaseException:
                self._connection.close()
                raise

    def _refuse_strangers_by_header(self) -> None:
        """Refuse a database of another program by its header alone: SQLite itself may write when it opens one."""
        if not self.path.is_file():
            return
        with self.path.open("rb") as file:
            header = file.read(100)
        if len(header) == 100 and header.startswith(b"SQLite format 3\0"):
            owner = int.from_bytes(header[68:72], "big")
            if owner not in (0, APPLICATION_ID) or header[18] == 2:  # our stores never had a write-ahead log
                raise self._stranger(f"one of another program (application_id {owner:#x})")

    def _stranger(self, problem: str) -> StoreError:
        rule = "the database must be a store of normgauge; it was left as it is"
        return StoreError(f"store {self.path}", rule, problem, "Choose another --out")

    def _open(self) -> None:
        connection = self._connection
        keys = ("user_version", "application_id")
        version, owner = (connection.execute(f"PRAGMA {key}").fetchone()[0] for key in keys)
        tables = {row[0] for row in connection.execute("SELECT name FROM sqlite_master WHERE type = 'table'")}
        if owner != APPLICATION_ID and tables and not tables >= _TABLES:
            raise self._stranger(f"tables {', '.join(sorted(tables)[:5])}")
        if version not in (0, SCHEMA_VERSION):
            rule = f"this normgauge reads stores of version {SCHEMA_VERSION}"
            step = "Upgrade normgauge, or another --out"
            raise StoreError(f"store {self.path.name}", rule, f"version {version}", step)
        (state,) = connection.execute("PRAGMA integrity_check(1)").fetchone()
        if state != "ok":
            raise sqlite3.DatabaseError(f"the file is damaged ({' '.join(state.split())})")
        if self._write and (owner != APPLICATION_ID or "digests" not in tables):
            marks = f"PRAGMA user_version={SCHEMA_VERSION}; PRAGMA application_id={APPLICATION_ID};"
            connection.executescript(f"BEGIN IMMEDIATE; {_SCHEMA} {marks} COMMIT;")  # whole or not at all
        connection.execute("SELECT 1 FROM runs, readings, documents LIMIT 0")
        self._digested = self._write or "digests" in tables  # a store of before that is only read has none

    @contextmanager
    def _explain_errors(self, rule: str) -> Iterator[None]:
        """Turn what SQLite, the system and JSON say into a sentence; what was stored stays as it is."""
        try:
            yield
        except StoreError:
            raise
        except (sqlite3.Error, OSError, ValueError, TypeError, KeyError) as error:
            step = "Choose another --out, check permissions and free space, or restore the file from a copy"
            raise StoreError(f"store {self.path}", rule, str(error) or repr(error), step) from error

    def claim(self) -> None:
        """Become the one writer of the file until it is closed; the first `put` does it too. Readers are not kept out.

        The claim is a lock on `<file>.lock` that the system releases when the process ends, however it ends.
        """
        if self._claim is not None:
            return
        try:
            file = self.path.with_name(self.path.name + ".lock").open("a")
        except OSError as error:
            rule = "its folder must be writable"
            raise StoreError(f"store {self.path.name}", rule, str(error), "Choose another --out") from error
        try:
            _lock(file)
        except OSError as error:
            file.close()
            rule, got = "one process at a time writes to a store", "a file that another one is writing to"
            step = "Wait for it or end it, or choose another --out and join them with normgauge merge"
            raise StoreError(f"store {self.path.name}", rule, got, step) from error
        self._claim = file

    def put(self, run: Run) -> None:
        """Write one run and its readings in one transaction; a run that was done is kept, one that failed replaced."""
        identity = spec_id(run.spec)
        origin = json.dumps(plain(run.provenance), sort_keys=True)
        sentence = run.sentence.encode(errors="replace").decode()  # what a user's code raises may be no text
        row: tuple[Any, ...] = (identity, canonical(run.spec), run.status, sentence, run.seconds, origin)
        rows: list[Any] = [(identity, r.step, r.name, r.layer, plain(r.value), r.kind, r.status) for r in run.readings]
        with self._transaction() as cursor:
            stored = cursor.execute("SELECT status FROM runs WHERE id = ?", (identity,)).fetchone()
            if stored is not None and stored[0] in DONE:
                return
            for table, key in (("readings", "run"), ("digests", "run"), ("runs", "id")):
                cursor.execute(f"DELETE FROM {table} WHERE {key} = ?", (identity,))
            cursor.execute("INSERT INTO runs VALUES (?,?,?,?,?,?)", row)
            cursor.executemany("INSERT INTO readings VALUES (?,?,?,?,?,?,?)", rows)
            row = next(self._select("*", "runs", "rowid", "id", [identity]))  # as SQLite has it: an integer is real now
            rows = list(self._select("*", "readings", "rowid", "run", [identity]))
            cursor.execute("INSERT INTO digests VALUES (?,?)", (identity, _digest(row, rows)))

    def put_document(self, document: Document) -> None:
        """Write what was concluded from the runs, replacing an earlier document of the same kind."""
        body = json.dumps({"version": document.VERSION, **plain(document)})
        with self._transaction() as cursor:
            cursor.execute("INSERT OR REPLACE INTO documents VALUES (?,?)", (type(document).__name__, body))

    def document(self, kind: type[D]) -> D | None:
        """Return the document of a kind, `None` where there is none."""
        query = "SELECT body FROM documents WHERE name = ?"
        with self._explain_errors(f"its {kind.__name__} is JSON in an undamaged file"):
            row = self._connection.execute(query, (kind.__name__,)).fetchone()
            data: Any = None if row is None else json.loads(row[0])
        return None if row is None else kind.of_json(data, self.path.name)

    def ids(self) -> set[str]:
        """Return the ids of all runs that are stored, whatever became of them."""
        return {identity for identity, _, _ in self._heads()}

    def finished(self) -> set[str]:
        """Return the ids of the runs that are done: ok or diverged. A run that failed may go better next time."""
        return {identity for identity, status, _ in self._heads() if status in DONE}

    def specs(self) -> list[dict[str, Any]]:
        """Return the specs of all runs that are done, without their readings."""
        return [json.loads(spec) for _, status, spec in self._heads() if status in DONE]

    def _heads(self) -> list[tuple[str, str, str]]:
        with self._explain_errors("its runs can be read"):
            return self._connection.execute("SELECT id, status, spec FROM runs").fetchall()

    def runs(self, ids: Iterable[str] | None = None) -> list[Run]:
        """Return the stored runs with their readings, all or those with the given ids, in the order they finished."""
        ids = None if ids is None else sorted(set(ids))  # asked for twice below
        table, digest = ("runs LEFT JOIN digests ON digests.run = id", "digest") if self._digested else ("runs", "NULL")
        columns = f"runs.rowid, {digest}, id, spec, status, sentence, seconds, provenance"
        with self._explain_errors("its runs can be read"):
            self._connection.execute("BEGIN")  # one state of the file: a run may be written between two queries
            try:
                heads = {head[2]: head for head in sorted(self._select(columns, table, "runs.rowid", "id", ids))}
                lines: dict[str, list[tuple[Any, ...]]] = {identity: [] for identity in heads}
                for line in self._select("*", "readings", "rowid", "run", ids):
                    lines[line[0]].append(line)
            finally:
                self._connection.execute("ROLLBACK")
            return [self._run(digest, tuple(row), lines[row[0]]) for _, digest, *row in heads.values()]

    def _run(self, digest: str | None, row: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> Run:
        if digest is not None and digest != _digest(row, rows):
            rule = "a run is read as it was written"
            problem = f"run {row[0]} ({row[1]}) with numbers or words that were changed since"
            step = "Delete it from the tables runs and readings and run the same command again, or restore the file"
            raise StoreError(f"store {self.path}", rule, problem, step)
        _, spec, status, sentence, seconds, origin = row
        readings = [
            Reading(name, math.nan if value is None else value, kind, status=state, step=step, layer=layer)
            for _, step, name, layer, value, kind, state in rows
        ]
        return Run(json.loads(spec), status, sentence, readings, seconds, from_plain(Provenance, json.loads(origin)))

    def _select(self, what: str, table: str, order: str, key: str, ids: list[str] | None) -> Iterator[tuple[Any, ...]]:
        """Yield rows in the order they were written; those with the given ids by the index, some hundred at a time."""
        query = f"SELECT {what} FROM {table}"
        if ids is None:
            yield from self._connection.execute(f"{query} ORDER BY {order}")
            return
        for start in range(0, len(ids), 500):
            some = ids[start : start + 500]
            marks = ",".join("?" * len(some))
            yield from self._connection.execute(f"{query} WHERE {key} IN ({marks}) ORDER BY {order}", some)

    def being_written(self) -> bool:
        """Say whether another process writes to the file now; nothing is made to find out."""
        try:
            with self.path.with_name(self.path.name + ".lock").open() as file:
                _lock(file, shared=True)
        except FileNotFoundError:
            return False
        except (BlockingIOError, PermissionError):
            return True
        return False

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

    @contextmanager
    def _transaction(self) -> Iterator[sqlite3.Cursor]:
        """`BEGIN IMMEDIATE ... COMMIT`, rolled back and explained on failure."""
        if not self._write:
            raise StoreError(f"store {self.path}", "it was opened for reading", "a write", "Open it to write")
        self.claim()
        try:
            self._connection.execute("BEGIN IMMEDIATE")
            yield self._connection.cursor()
            self._connection.execute("COMMIT")
        except BaseException as error:
            if self._connection.in_transaction:
                self._connection.execute("ROLLBACK")
            if not isinstance(error, sqlite3.Error):
                raise
            step = "Free disk space or end the other writer, then run the same command again: finished runs are kept"
            rule = "the file must be writable by this one process"
            raise StoreError(f"store {self.path.name}", rule, str(error), step) from error


def _digest(row: tuple[Any, ...], rows: list[tuple[Any, ...]]) -> str:
    """Return the SHA-256 over all that is stored of a run; floats in JSON are exact."""
    return hashlib.sha256(json.dumps([row, rows]).encode()).hexdigest()


def _lock(file: IO[str], *, shared: bool = False) -> None:
    """Lock an open file for this process, or raise OSError at once when another one has it; `shared` with readers."""
    try:
        import fcntl
    except ImportError:  # Windows
        import msvcrt

        msvcrt.locking(file.fileno(), msvcrt.LK_NBLCK, 1)  # type: ignore[attr-defined,unused-ignore]
        return
    fcntl.flock(file, (fcntl.LOCK_SH if shared else fcntl.LOCK_EX) | fcntl.LOCK_NB)
