"""Runs on other processes and machines: no finished run lost, none twice, whatever is killed; counts are printed."""

import json
import os
import signal
import sqlite3
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest

from normgauge.documents import ComparisonDocument, Question
from normgauge.errors import ExecutorError, InputError, StoreError
from normgauge.lab import compare_shard, merge
from normgauge.lab.question import comparison_study
from normgauge.lab.runs.executors import Workers, available_cores, cluster_executor, run_on
from normgauge.lab.runs.run import execute
from normgauge.lab.runs.sweep import parse_shard, part_of, sweep
from normgauge.records import Provenance, Run
from normgauge.store import Store, spec_id

SOURCE = Path(__file__).parents[3] / "src"
TASKS = """
import os, signal, time
from pathlib import Path
from normgauge.records import Run

def slow(spec):
    time.sleep(spec.get("seconds", 0.1))
    run = Run(dict(spec))
    run.record(0, "value", float(spec["n"]))
    return run

def fragile(spec):
    marker = Path(spec["folder"]) / f"died-{spec['n']}"
    if spec["n"] in (1, 4) and not marker.exists():
        marker.touch()
        os.kill(os.getpid(), signal.SIGKILL)
    return slow(spec)
"""
DRIVER = """
import sys
from normgauge.lab.runs.sweep import sweep
from normgauge.store import Store
import scaling_tasks

specs = [{"n": n, "seconds": 0.2} for n in range(12)]
with Store(sys.argv[1]) as store:
    print("ran", sweep(specs, store, executor=2, task=scaling_tasks.slow, progress=False))
"""


@pytest.fixture
def tasks(tmp_path, monkeypatch):
    """A module of tasks that worker processes can import."""
    (tmp_path / "scaling_tasks.py").write_text(TASKS)
    monkeypatch.syspath_prepend(str(tmp_path))
    monkeypatch.setenv("PYTHONPATH", f"{SOURCE}{os.pathsep}{tmp_path}")
    sys.modules.pop("scaling_tasks", None)
    import scaling_tasks

    yield scaling_tasks
    sys.modules.pop("scaling_tasks", None)


def counted(store, specs, what):
    """Print and check: every spec once, every run with its own readings once."""
    runs = store.runs()
    wanted = {spec_id(spec) for spec in specs}
    lost, extra = wanted - store.finished(), len(runs) - len({spec_id(run.spec) for run in runs})
    print(f"{what}: {len(wanted)} specs, {len(runs)} runs stored, {len(lost)} lost, {extra} twice")
    assert store.finished() == wanted and not extra
    assert sorted(reading.value for run in runs for reading in run.readings) == sorted(
        float(spec["n"]) for spec in specs
    )


def test_killed_workers_lose_and_double_nothing(tasks, tmp_path):
    specs = [{"n": n, "folder": str(tmp_path), "seconds": 0.01} for n in range(8)]
    with Store(tmp_path / "runs.sqlite") as store:
        sweep(specs, store, executor=2, task=tasks.fragile, progress=False)
        counted(store, specs, "SIGKILL of two workers")
        assert all(run.ok for run in store.runs())
    assert len(list(tmp_path.glob("died-*"))) == 2


def test_kept_workers_serve_many_sweeps_and_are_replaced_when_they_die(tasks, tmp_path):
    specs = [{"n": n, "folder": str(tmp_path), "seconds": 0.01} for n in range(8)]
    with Store(tmp_path / "runs.sqlite") as store, Workers(2) as workers:
        sweep(specs[5:7], store, executor=workers, task=tasks.slow, progress=False)
        first = set(workers.pool()._processes)
        sweep(specs[7:], store, executor=workers, task=tasks.slow, progress=False)
        assert set(workers.pool()._processes) == first
        sweep(specs, store, executor=workers, task=tasks.fragile, progress=False)  # two of them kill their worker
        counted(store, specs, "SIGKILL of kept workers")
        more = [{**specs[0], "n": 8 + n} for n in range(4)]
        sweep(more, store, executor=workers, task=tasks.slow, progress=False)
        second = set(workers.pool()._processes)
        assert second and not second & first
    deadline = time.monotonic() + 30
    while any(map(running, first | second)) and time.monotonic() < deadline:
        time.sleep(0.1)
    assert not any(map(running, first | second))


def children(pid):
    found = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in found]


def running(pid):
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_a_killed_driver_keeps_what_was_finished(tasks, tmp_path):
    path = tmp_path / "runs.sqlite"
    command = [sys.executable, "-c", DRIVER, str(path)]
    driver = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.DEVNULL, text=True, cwd=tmp_path)
    deadline = time.monotonic() + 90
    while time.monotonic() < deadline and not (path.exists() and _stored(path) >= 2):
        time.sleep(0.02)
    with Store(path) as second, pytest.raises(StoreError, match="one process at a time writes"):
        second.claim()
    workers = children(driver.pid)
    driver.kill()
    driver.wait()
    before = _stored(path)
    assert 2 <= before < 12, "the driver was killed in the middle"
    while time.monotonic() < deadline and any(running(pid) for pid in workers):
        time.sleep(0.05)
    assert workers and not any(running(pid) for pid in workers), "workers outlived their driver"
    done = subprocess.run(command, capture_output=True, text=True, timeout=120, cwd=tmp_path)
    assert done.stdout.split() == ["ran", str(12 - before)], done.stderr
    print(f"SIGKILL of the driver: {before} runs before, {12 - before} after")
    with Store(path) as store:
        counted(store, [{"n": n, "seconds": 0.2} for n in range(12)], "SIGKILL of the driver")


def _stored(path):
    try:
        return len(Store(path).finished())
    except StoreError:
        return 0


def bulky(spec):
    run = Run(dict(spec))
    for step in range(300):
        run.record(step, "filler" * 20, 0.0)
    return run


def test_a_full_database_keeps_what_was_finished(tmp_path):
    specs = [{"n": n} for n in range(9)]
    with Store(tmp_path / "runs.sqlite") as store:
        pages = store._connection.execute("PRAGMA page_count").fetchone()[0]
        store._connection.execute(f"PRAGMA max_page_count={pages + 60}")
        with pytest.raises(StoreError, match="full.*finished runs are kept"):
            sweep(specs, store, executor=1, task=bulky, progress=False)
        kept = len(store.finished())
        assert 0 < kept < 9
        store._connection.execute("PRAGMA max_page_count=1000000")
        assert sweep(specs, store, executor=1, task=bulky, progress=False) == 9 - kept
        print(f"full disk: {kept} runs before, {9 - kept} after, {len(store.runs())} stored")
        assert [len(run.readings) for run in store.runs()] == [300] * 9


def test_a_really_full_disk_keeps_what_was_finished(tmp_path):
    mount = ["mount", "-t", "tmpfs", "-o", "size=400k", "tmpfs", str(tmp_path)]
    if os.name != "posix" or os.geteuid() != 0 or subprocess.run(mount, capture_output=True).returncode != 0:
        pytest.skip("needs the right to mount a small file system")
    try:
        specs = [{"n": n} for n in range(20)]
        with Store(tmp_path / "runs.sqlite") as store, pytest.raises(StoreError, match="finished runs are kept"):
            sweep(specs, store, executor=1, task=bulky, progress=False)
        kept = _stored(tmp_path / "runs.sqlite")
        subprocess.run(["mount", "-o", "remount,size=8m", str(tmp_path)], check=True)
        with Store(tmp_path / "runs.sqlite") as store:
            assert sweep(specs, store, executor=1, task=bulky, progress=False) == 20 - kept
            assert 0 < kept < 20 and [len(run.readings) for run in store.runs()] == [300] * 20
            print(f"full file system: {kept} runs before, {20 - kept} after, {len(store.runs())} stored")
    finally:
        subprocess.run(["umount", "-l", str(tmp_path)], check=True)


def comparison(steps, runs=()):
    question = Question("s", "S", "?", {"norm": ("none",)}, {"lr": (0.1,)}, {"steps": steps}, 1, 1)
    return ComparisonDocument(question, (), (), "batch", True, runs, Provenance(), "normgauge compare", "2025-01-01")


def test_shards_are_disjoint_and_their_merge_is_the_whole(tmp_path):
    specs = [{"n": n} for n in range(40)]
    parts = [part_of(specs, (i, 4)) for i in range(4)]
    assert sum(map(len, parts)) == 40 and all(parts) and part_of(specs, (4, 4)) == parts[0]
    for index in range(4):
        with Store(tmp_path / str(index) / "runs.sqlite") as store:
            store.put_document(comparison(steps=3, runs=(str(index),)))
            assert sweep(specs, store, executor=1, task=bulky, shard=(index, 4), progress=False) == len(parts[index])
    folders = [tmp_path / str(index) for index in range(4)]
    first = merge(folders, tmp_path / "all")
    assert (first.added, first.known, first.total) == (40, 0, 40)
    again = merge([*folders, tmp_path / "all"], tmp_path / "all")
    assert (again.added, again.known, again.total) == (0, 40, 40)
    with Store(tmp_path / "all" / "runs.sqlite") as store:
        assert sweep(specs, store, executor=1, task=bulky, progress=False) == 0
        assert [len(run.readings) for run in store.runs()] == [300] * 40
        kept = store.document(ComparisonDocument)
        assert kept.question == comparison(steps=3).question and not (kept.runs or kept.answer or kept.decided)
    print(f"shards: {first}")


def test_merge_refuses_other_questions_running_shards_and_missing_stores(tmp_path):
    for name, steps in (("a", 3), ("b", 4)):
        with Store(tmp_path / name / "runs.sqlite") as store:
            store.put_document(comparison(steps))
            store.put(Run({"n": name}))
    with pytest.raises(StoreError, match='another fixed: {"steps":4} instead of {"steps":3}'):
        merge([tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    with pytest.raises(StoreError, match="no such file"):
        merge([tmp_path / "nowhere"], tmp_path / "all")
    with Store(tmp_path / "a" / "runs.sqlite") as busy:
        busy.claim()
        with pytest.raises(StoreError, match="one process at a time"):
            merge([tmp_path / "a"], tmp_path / "other")
    for name, study in (("c", "valley"), ("d", "margin")):  # stores without a definition are told apart by their specs
        with Store(tmp_path / name / "runs.sqlite") as store:
            store.put(Run({"study": study}))
    with pytest.raises(StoreError, match="another name"):
        merge([tmp_path / "c", tmp_path / "d"], tmp_path / "more")


def test_merge_refuses_the_same_run_with_other_readings_and_copies_nothing(tmp_path):
    for name, value, status in (("a", 1.0, "ok"), ("b", 1.0, "ok"), ("c", 1.5, "ok"), ("d", 0.0, "error")):
        with Store(tmp_path / name / "runs.sqlite") as store:
            run = Run({"n": 1}, status)
            run.record(3, "loss", value)
            run.record(4, "loss", float("nan"))
            store.put(run)
            store.put(Run({"n": name}))
    same = merge([tmp_path / "d", tmp_path / "a", tmp_path / "b"], tmp_path / "all")
    assert same.total == 4
    with Store(tmp_path / "all" / "runs.sqlite") as store:
        assert [run.last("loss") for run in store.runs() if run.spec["n"] == 1] == [None]  # the hole at the end
        assert {run.status for run in store.runs()} == {"ok"}  # what failed in d was done in a
    before = (tmp_path / "all" / "runs.sqlite").read_bytes()
    for stores in (["c"], ["b", "c"]):
        with pytest.raises(StoreError, match=r"loss = 1.5 .* here, loss = 1 .* there") as error:
            merge([tmp_path / name for name in stores], tmp_path / "all")
        assert "all/runs.sqlite" in str(error.value) and "c/runs.sqlite" in str(error.value)
    assert (tmp_path / "all" / "runs.sqlite").read_bytes() == before
    with pytest.raises(StoreError, match="loss = 1.5"):
        merge([tmp_path / "a", tmp_path / "c"], tmp_path / "fresh")


def test_a_merge_leaves_its_sources_alone(tmp_path):
    with Store(tmp_path / "a" / "runs.sqlite") as store:
        store.put(Run({"n": 1}))
    (tmp_path / "a" / "runs.sqlite.lock").unlink()
    merge([tmp_path / "a"], tmp_path / "all")
    assert [path.name for path in (tmp_path / "a").iterdir()] == ["runs.sqlite"]


def test_a_second_writer_is_refused_and_readers_are_not(tmp_path):
    first, second = Store(tmp_path / "runs.sqlite"), Store(tmp_path / "runs.sqlite")
    first.put(Run({"n": 1}))
    assert len(second.runs()) == 1
    for action in (lambda: second.put(Run({"n": 2})), lambda: sweep([{"n": 2}], second, task=bulky)):
        with pytest.raises(StoreError, match="one process at a time writes to a store"):
            action()
    first.close()
    second.put(Run({"n": 2}))
    assert sqlite3.connect(second.path).execute("SELECT count(*) FROM runs").fetchone() == (2,)


@pytest.mark.parametrize("text", ["3", "a/b", "5/4", "1/0", "-1/4", ""])
def test_wrong_shards_are_explained(text):
    with pytest.raises(InputError, match="shard"):
        parse_shard(text)


SETTINGS = {"model": "mlp", "norms": ["none", "batch"], "rates": [0.1, 0.3], "seeds": 2, "steps": 2, "size": "smoke"}


def timeless(comparison):
    """The rows without what was timed."""
    timed = ("step_time", "seconds_to_target")
    return [{k: v for k, v in row.items() if not k.startswith(timed)} for row in comparison.rows]


def test_a_comparison_in_shards_equals_one_in_a_piece(tmp_path):
    import torch

    import normgauge as ng

    torch.set_default_dtype(torch.float32)
    whole = ng.compare(**SETTINGS, executor=1, out=tmp_path / "whole")
    study = comparison_study(**SETTINGS)
    for index in (1, 2):
        done = compare_shard((index, 2), study, executor=1, out=tmp_path / f"part{index}")
        assert done.round == 1 and done.ran == done.runs
    merge([tmp_path / "part1", tmp_path / "part2"], tmp_path / "all")
    joined = ng.compare(**SETTINGS, executor=1, out=tmp_path / "all")
    assert timeless(joined) == timeless(whole) and joined.chosen == whole.chosen
    assert compare_shard((1, 2), study, executor=1, out=tmp_path / "all").round == 2


def noisy(spec):
    if spec["n"] == 2:
        raise RuntimeError("broken")
    return execute({**spec, "model": "mlp", "norm": "none", "data": "gaussian", "lr": 1e-3, "batch": 50})


def test_threads_of_an_executor_do_not_share_random_numbers():
    """Runs seed torch's global stream; two at a time in one process would disturb each other."""
    common = {"steps": 2, "measure_at": [2], "measure_batch": 20, "target_loss": 1.0}
    specs = [{**common, "seed": n, "n": n} for n in range(5)]
    with ThreadPoolExecutor(4) as executor:
        found = {run.spec["n"]: run for run in run_on(executor, specs, noisy)}
    assert found[2].status == "error" and "RuntimeError: broken" in found[2].sentence
    for n in (0, 4):
        assert found[n].readings == noisy(specs[n]).readings


def test_an_executor_that_is_gone_is_named(tasks):
    from concurrent.futures import ProcessPoolExecutor

    with ProcessPoolExecutor(1) as executor, pytest.raises(ExecutorError, match="finished runs are kept"):
        list(run_on(executor, [{"n": 1, "folder": "/nonexistent"}], _die))


def _die(spec):
    os._exit(3)


@pytest.fixture(scope="module")
def cluster(tmp_path_factory):
    """A real scheduler and two workers on loopback, as processes; yields the address and the workers."""
    pytest.importorskip("distributed")
    folder = tmp_path_factory.mktemp("cluster")
    (folder / "scaling_tasks.py").write_text(TASKS)
    environment = {**os.environ, "PYTHONPATH": f"{SOURCE}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    meeting = folder / "scheduler.json"
    quiet = {"stdout": subprocess.DEVNULL, "stderr": subprocess.DEVNULL, "env": environment, "cwd": folder}
    start = [sys.executable, "-m", "distributed.cli.dask_scheduler", "--host", "127.0.0.1", "--port", "0"]
    processes = [subprocess.Popen([*start, "--no-dashboard", "--scheduler-file", str(meeting)], **quiet)]
    work = [sys.executable, "-m", "distributed.cli.dask_worker", "--scheduler-file", str(meeting), "--nthreads", "1"]
    work += ["--no-nanny", "--host", "127.0.0.1", "--no-dashboard", "--local-directory", str(folder)]
    try:
        deadline = time.monotonic() + 60
        while not meeting.exists() and time.monotonic() < deadline:
            time.sleep(0.05)
        workers = [subprocess.Popen(work, **quiet) for _ in range(2)]
        processes += workers
        yield json.loads(meeting.read_text())["address"], workers
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_dask_cluster_runs_a_sweep_and_survives_a_killed_worker(cluster, tasks, tmp_path):
    address, workers = cluster
    specs = [{"n": n, "seconds": 0.3} for n in range(10)]
    with cluster_executor(address) as executor, Store(tmp_path / "runs.sqlite") as store:
        executor._client.wait_for_workers(2, timeout=60)
        names = executor._client.scheduler_info()["workers"]

        def kill_one(count=[0]):  # noqa: B006 (a counter)
            count[0] += 1
            if count[0] == 2:
                workers[0].send_signal(signal.SIGKILL)

        put, calls = store.put, []
        store.put = lambda run: (put(run), calls.append(1), kill_one())
        assert sweep(specs, store, executor=executor, task=tasks.slow, progress=False) == 10
        print(f"Dask: {len(names)} workers, one killed after 2 runs, {len(calls)} runs written")
        assert len(names) == 2 and len(calls) == 10
        counted(store, specs, "SIGKILL of a Dask worker")
        assert all(run.ok for run in store.runs())


@pytest.mark.heavy
def test_the_command_runs_on_a_cluster(cluster, tmp_path):
    address, _ = cluster
    words = ["compare", "--model", "mlp", "--norms", "none", "--rates", "0.1", "--seeds", "1", "--steps", "2"]
    command = [sys.executable, "-m", "normgauge", *words, "--size", "smoke", "--cluster", address, "--json"]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE)}
    done = subprocess.run([*command, "--out", str(tmp_path)], capture_output=True, text=True, env=environment)
    assert done.returncode == 0, done.stderr
    assert '"ok": 1' in done.stdout
    (run,) = Store(tmp_path / "runs.sqlite").runs()
    assert run.provenance.versions["torch"] and run.spec["seed"] == 0
    assert run.provenance.machine["processor"] and run.provenance.python


def test_no_scheduler_is_said_so(monkeypatch):
    pytest.importorskip("distributed")
    monkeypatch.setattr("normgauge.lab.runs.executors.CONNECT_SECONDS", 0.5)
    with (
        pytest.raises(ExecutorError, match="a Dask scheduler must listen there"),
        cluster_executor("tcp://127.0.0.1:9"),
    ):
        pass


def test_cores_are_counted():
    assert available_cores() >= 1
