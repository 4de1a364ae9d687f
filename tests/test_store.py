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
