"""The store: one transaction per run, nothing lost, nothing twice, clear words when the file is no store."""

import sqlite3

import pytest
from hypothesis import given
from hypothesis import strategies as st

from normgauge.errors import StoreError
from normgauge.store import Store, spec_id

values = st.none() | st.booleans() | st.integers(-5, 5) | st.floats(allow_nan=False, allow_infinity=False) | st.text()
specs = st.dictionaries(st.text(min_size=1), values, min_size=1, max_size=5)


@given(specs)
def test_identity_depends_on_content_not_order(spec):
    assert spec_id(spec) == spec_id(dict(reversed(spec.items())))


@given(specs, specs)
def test_different_specs_differ(first, second):
    assert (spec_id(first) == spec_id(second)) == (repr(sorted(first.items())) == repr(sorted(second.items())))


def test_runs_readings_and_documents_come_back(tmp_path):
    path = tmp_path / "new" / "runs.sqlite"
    with Store(path) as store:
        store.put(
            {"spec": {"lr": 0.1}, "status": "diverged", "sentence": "too fast", "seconds": 1.5},
            [
                {"step": 0, "name": "loss", "value": 2.0},
                {"step": 1, "name": "loss", "value": None, "status": "diverged"},
            ],
        )
        store.put_document("answer", {"sentence": "none"})
        store.put_document("answer", {"sentence": "batch"})
    with Store(path) as store:
        (run,) = store.runs()
        assert (run["spec"], run["status"], run["sentence"]) == ({"lr": 0.1}, "diverged", "too fast")
        assert [(r["value"], r["status"]) for r in store.readings()] == [(2.0, "ok"), (None, "diverged")]
        assert store.documents() == {"answer": {"sentence": "batch"}}
        assert store.finished() == {spec_id({"lr": 0.1})}
        assert store.runs(ids=["other"]) == [] == store.readings(ids=["other"])


def test_a_run_written_twice_is_kept_once(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    for value in (1.0, 2.0):
        store.put({"spec": {"a": 1}}, [{"step": 0, "name": "loss", "value": value}])
    assert [r["value"] for r in store.readings()] == [1.0]


def test_a_failing_run_leaves_no_half(tmp_path):
    store = Store(tmp_path / "runs.sqlite")
    with pytest.raises(StoreError, match="finished runs are kept"):
        store.put({"spec": {"a": 1}}, [{"step": 0, "name": "loss", "value": object()}])
    assert store.runs() == [] == store.readings()
    store.put({"spec": {"a": 1}}, [{"step": 0, "name": "loss", "value": 1.0}])
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
        store.put({"spec": {"a": 1}}, [])
    other.execute("ROLLBACK")
    store.put({"spec": {"a": 1}}, [])
