"""The store: one transaction per run, nothing lost, nothing twice, clear words when the file is no store."""

import json
import math
import sqlite3
from dataclasses import dataclass

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normgauge.documents import Document
from normgauge.errors import StoreError
from normgauge.records import Provenance, Reading, Run
from normgauge.store import Store, spec_id

values = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
specs = st.dictionaries(st.text(min_size=1), values, min_size=1, max_size=5)


@dataclass(frozen=True)
class Answer(Document):
    sentence: str
    scores: tuple[float, ...] = ()


def run_of(spec, *losses, **more):
    run = Run(spec, **more)
    for step, loss in enumerate(losses):
        run.record(step, "loss", loss)
    return run


@given(specs)
def test_identity_depends_on_content_not_order(spec):
    assert spec_id(spec) == spec_id(dict(reversed(spec.items())))


@given(specs, specs)
def test_different_specs_differ(first, second):
    assert (spec_id(first) == spec_id(second)) == (repr(sorted(first.items())) == repr(sorted(second.items())))


def test_runs_readings_and_documents_come_back(tmp_path):
    path = tmp_path / "new" / "runs.sqlite"
    origin = Provenance("3.11", {"torch": "2"}, {"threads": 2}, "0123")
    stored = run_of({"lr": 0.1}, 2.0, 1.0, status="diverged", sentence="too fast", seconds=1.5, provenance=origin)
    stored.record(1, "norm", 3.0, layer="conv", kind="estimate")
    with Store(path) as store:
        store.put(stored)
        assert store.document(Answer) is None
        store.put_document(Answer("none"))
        store.put_document(Answer("batch", (1.0, math.nan)))
    with Store(path) as store:
        assert store.runs() == [stored]
        answer = store.document(Answer)
        assert answer.sentence == "batch" and answer.scores[0] == 1.0 and math.isnan(answer.scores[1])
        assert store.finished() == {spec_id({"lr": 0.1})}
        assert store.runs(ids=["other"]) == [] == store.runs(ids=[])


def test_a_hole_stays_a_hole_and_is_null_in_the_file(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    store.put(run_of({"a": 1}, 2.0, math.inf))
    (run,) = store.runs()
    assert [reading.status for reading in run.readings] == ["ok", "diverged"] and math.isnan(run.readings[1].value)
    rows = sqlite3.connect(store.path).execute("SELECT value FROM readings").fetchall()
    assert rows == [(2.0,), (None,)]


def test_runs_come_in_the_order_they_finished_each_with_its_own_readings(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    for n in (3, 1, 2):
        store.put(run_of({"n": n}, float(n), n + 0.5))
    assert [run.spec["n"] for run in store.runs()] == [3, 1, 2]
    some = store.runs(ids=[spec_id({"n": n}) for n in (1, 3)])
    assert [(run.spec["n"], run.series("loss")) for run in some] == [(3, [3.0, 3.5]), (1, [1.0, 1.5])]


def test_ids_are_looked_up_by_the_index_however_many_there_are(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    stored = [{"n": n} for n in range(1200)]
    with store._transaction() as cursor:  # one by one they would take a minute of fsync
        for spec in stored:
            cursor.execute(
                "INSERT INTO runs VALUES (?,?,?,?,?,?)", (spec_id(spec), json.dumps(spec), "ok", "", 0, "{}")
            )
            row = (spec_id(spec), 0, "loss", None, float(spec["n"]), "exact", "ok")
            cursor.execute("INSERT INTO readings VALUES (?,?,?,?,?,?,?)", row)
    seen = []
    store._connection.set_trace_callback(seen.append)
    runs = store.runs(ids=[spec_id(spec) for spec in stored[:1100]])
    store._connection.set_trace_callback(None)
    assert [run.spec for run in runs] == stored[:1100]
    assert [run.readings for run in runs[:2]] == [[Reading("loss", 0.0)], [Reading("loss", 1.0)]]
    queries = [query for query in seen if query.startswith("SELECT")]
    assert len(queries) == 6
    for query in queries:
        plan = " ".join(row[3] for row in store._connection.execute(f"EXPLAIN QUERY PLAN {query}"))
        assert "SEARCH" in plan and "USING INDEX" in plan and "SCAN" not in plan, plan


def test_documents_of_other_versions_are_refused(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    store.put_document(Answer("batch"))
    for body, word in (({"version": 9, "sentence": "x"}, "version 9"), ({"version": 1}, "TypeError")):
        store._connection.execute("UPDATE documents SET body = ?", (json.dumps(body),))
        with pytest.raises(StoreError, match=f"a Answer of version 1 is read. Got {word}"):
            store.document(Answer)


def test_a_run_written_twice_is_kept_once(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    for value in (1.0, 2.0):
        store.put(run_of({"a": 1}, value))
    assert [run.series("loss") for run in store.runs()] == [[1.0]]


def test_a_failing_run_leaves_no_half(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    broken = Run({"a": 1}, readings=[Reading("loss", 1.0), Reading("loss", 1.0, step=[])])
    with pytest.raises(StoreError, match="finished runs are kept"):
        store.put(broken)
    assert store.runs() == [] and store.finished() == set()
    store.put(run_of({"a": 1}, 1.0))
    assert len(store.runs()) == 1


def test_wrong_files_are_refused_by_name(tmp_path):
    text = tmp_path / "notes.txt"
    text.write_text("this is not a database, it is a poem " * 40)
    with pytest.raises(StoreError, match="a store is an SQLite file"):
        Store(text)
    newer = sqlite3.connect(tmp_path / "newer.sqlite")
    newer.execute("PRAGMA user_version=99")
    newer.close()
    with pytest.raises(StoreError, match="Got version 99. Upgrade normgauge"):
        Store(tmp_path / "newer.sqlite")
    with pytest.raises(StoreError, match="check permissions"):
        Store(tmp_path)


def test_a_locked_store_says_so(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    store._connection.execute("PRAGMA busy_timeout=50")
    other = sqlite3.connect(store.path, isolation_level=None)
    other.execute("BEGIN EXCLUSIVE")
    with pytest.raises(StoreError, match="end the other writer"):
        store.put(Run({"a": 1}))
    other.execute("ROLLBACK")
    store.put(Run({"a": 1}))


def test_ids_may_come_from_a_generator(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        run = Run({"a": 1})
        run.record(0, "loss", 2.0)
        store.put(run)
        (kept,) = store.runs(spec_id(spec) for spec in [{"a": 1}, {"a": 2}])
    assert kept.last("loss") == 2.0


def contents(folder):
    return {path.name: (path.read_bytes(), path.stat().st_mtime_ns) for path in folder.iterdir()}


def test_a_run_that_failed_is_not_finished_and_is_replaced(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        for status, sentence in (("error", "its worker died"), ("skipped", "no data"), ("ok", ""), ("error", "late")):
            store.put(run_of({"a": 1}, 1.0, status=status, sentence=sentence))
            (run,) = store.runs()
            kept = "ok" if sentence == "late" else status
            assert run.status == kept and len(run.readings) == 1
            assert store.finished() == ({spec_id({"a": 1})} if kept == "ok" else set())
        assert store.ids() == {spec_id({"a": 1})}


@pytest.mark.parametrize("write", [True, False])
@pytest.mark.parametrize(
    "setup",
    [
        ["CREATE TABLE photos (a)"],
        ["CREATE TABLE photos (a)", "PRAGMA user_version=1"],
        ["CREATE TABLE runs (distance)", "PRAGMA user_version=1"],
        ["CREATE TABLE photos (a)", "PRAGMA application_id=7"],
        ["PRAGMA journal_mode=WAL", "CREATE TABLE photos (a)"],
    ],
)
def test_a_database_of_another_program_is_refused_and_left_as_it_is(tmp_path, setup, write):
    other = sqlite3.connect(tmp_path / "runs.sqlite", isolation_level=None)
    for statement in setup:
        other.execute(statement)
    other.close()
    before = contents(tmp_path)
    with pytest.raises(StoreError, match="must be a store of normgauge; it was left as it is"):
        Store(tmp_path / "runs.sqlite", write=write)
    assert contents(tmp_path) == before


def test_a_store_says_whose_it_is(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        store.put(run_of({"a": 1}, 1.0))
    assert (tmp_path / "runs.sqlite").read_bytes()[68:72] == b"nrmg"


def test_a_store_from_before_digests_is_read_and_completed(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        store.put(run_of({"a": 1}, 1.0))
    old = sqlite3.connect(path, isolation_level=None)
    for statement in ("DROP TABLE digests", "PRAGMA application_id=0", "VACUUM"):
        old.execute(statement)
    old.close()
    for write in (False, True):
        with Store(path, write=write) as store:
            assert [run.last("loss") for run in store.runs()] == [1.0]
    assert path.read_bytes()[68:72] == b"nrmg"


def test_reading_makes_and_changes_nothing(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        store.put(run_of({"a": 1}, 1.0))
    (tmp_path / "runs.sqlite.lock").unlink()
    before = contents(tmp_path)
    with Store(path, write=False) as store:
        assert len(store.runs()) == 1 and store.document(Answer) is None and not store.being_written()
        with pytest.raises(StoreError, match="opened for reading"):
            store.put(run_of({"a": 2}, 1.0))
    assert contents(tmp_path) == before
    with pytest.raises(StoreError, match="unable to open"):
        Store(tmp_path / "nowhere" / "runs.sqlite", write=False)
    assert not (tmp_path / "nowhere").exists()


@pytest.mark.parametrize(
    "edit",
    [
        "UPDATE readings SET value = 3.0 WHERE step = 0",
        "UPDATE readings SET value = NULL",
        "UPDATE readings SET kind = 'upper'",
        "DELETE FROM readings WHERE step = 1",
        "UPDATE runs SET status = 'diverged'",
        "UPDATE runs SET spec = '{\"a\":2}'",
    ],
)
def test_a_run_that_was_edited_is_refused(tmp_path, edit):
    with Store(tmp_path / "runs.sqlite") as store:
        run = run_of({"a": 1}, 2.0, -0.0, 1e-300)
        run.readings.append(Reading("count", 7))  # an integer: SQLite makes it real
        store.put(run)
        assert store.runs()[0].readings[3].value == 7
        sqlite3.connect(store.path, isolation_level=None).execute(edit)
        with pytest.raises(StoreError, match="as it was written. Got run .* that were changed since"):
            store.runs()


def test_a_damaged_file_gives_a_sentence(tmp_path):
    path = tmp_path / "runs.sqlite"
    with Store(path) as store:
        for n in range(30):
            store.put(run_of({"n": n}, *[float(step) for step in range(40)]))
    whole = path.read_bytes()
    refused = 0
    for place in range(0, len(whole), 1500):
        path.write_bytes(whole[:place] + b"\xa5" * 700 + whole[place + 700 :])
        for write in (False, True):
            try:
                with Store(path, write=write) as store:
                    runs = store.runs()
                    store.finished(), store.document(Answer)
                assert [run.series("loss") for run in runs] == [[float(step) for step in range(40)]] * 30
            except StoreError as error:
                assert "store" in str(error)
                refused += 1
    path.write_bytes(whole[: len(whole) // 2])
    with pytest.raises(StoreError):
        Store(path)
    assert refused > 10


def test_words_that_are_no_text_are_stored(tmp_path):
    with Store(tmp_path / "runs.sqlite") as store:
        store.put(run_of({"a": 1}, status="error", sentence="bad name \udcff"))
        assert store.runs()[0].sentence == "bad name ?"
