"""A sweep: failures are tried again and said, results do not depend on where runs run, interrupts store nothing."""

import os
import signal
import subprocess
import sys
import time
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

from normgauge.lab.runs import progress
from normgauge.lab.runs.run import execute
from normgauge.lab.runs.sweep import parse_shard, sweep
from normgauge.records import Run
from normgauge.store import Store

SOURCE = Path(__file__).parents[3] / "src"
SPEC = {"model": "mlp", "norm": "batch", "data": "digits", "steps": 3, "batch": 256, "measure_at": [0, 3]}
SPEC |= {"measure_batch": 256, "target_loss": 0.5, "lr": 0.1, "seed": 0}


def test_runs_that_failed_are_tried_again_with_a_notice(tmp_path, capsys):
    outcomes = iter(["error", "ok", "skipped", "diverged", "ok", "ok"])

    def task(spec):
        return Run(dict(spec), next(outcomes), "the disk was full")

    specs = [{"n": n} for n in range(4)]
    with Store(tmp_path / "runs.sqlite") as store:
        assert sweep(specs, store, executor=1, task=task) == 4
        assert "again" not in capsys.readouterr().err
        assert sweep(specs, store, executor=1, task=task) == 2
        assert "Stored runs that failed are tried again: 2 (" in (words := capsys.readouterr().err)
        assert "the disk was full" in words
        assert sorted(run.status for run in store.runs()) == ["diverged", "ok", "ok", "ok"]
        assert sweep(specs, store, executor=1, task=task) == 0


def test_results_do_not_depend_on_where_runs_run(tmp_path):
    """Serial with two threads, two processes, threads of an executor: bitwise equal."""
    torch.set_default_dtype(torch.float32)
    threads = torch.get_num_threads()
    specs = [{**SPEC, "seed": seed} for seed in range(2)]
    readings = []
    try:
        torch.set_num_threads(2)
        with ThreadPoolExecutor(1) as pool:
            for name, executor in (("serial", 1), ("processes", 2), ("threads", pool)):
                with Store(tmp_path / name) as store:
                    sweep(specs, store, executor=executor, progress=False)
                    runs = sorted(store.runs(), key=lambda run: run.spec["seed"])
                    assert all(run.ok and run.provenance.machine["threads"] == 1 for run in runs)
                    readings.append([run.readings for run in runs])
        assert torch.get_num_threads() == 2
    finally:
        torch.set_num_threads(threads)
    assert len(readings[0][0]) > 10
    assert all(other == readings[0] for other in readings[1:])


def test_ctrl_c_in_a_measurement_of_a_run_stores_nothing(tmp_path, monkeypatch):
    from normgauge.linalg import lanczos

    calls = []
    usual = lanczos.Sequences._step

    def step(self):
        calls.append(1)
        if len(calls) == 4:
            raise KeyboardInterrupt
        usual(self)

    monkeypatch.setattr(lanczos.Sequences, "_step", step)
    torch.set_default_dtype(torch.float32)
    with Store(tmp_path / "runs.sqlite") as store:
        with pytest.raises(KeyboardInterrupt):
            sweep([SPEC], store, executor=1, progress=False)
        assert store.runs() == []
        monkeypatch.undo()
        sweep([SPEC], store, executor=1, progress=False)
        assert store.runs()[0].readings == execute(SPEC).readings


def test_a_line_now_and_then_where_there_is_no_terminal(tmp_path, capsys, monkeypatch):
    monkeypatch.setattr(progress, "LINE_SECONDS", 0.0)
    with Store(tmp_path / "runs.sqlite") as store:
        sweep([{"n": n} for n in range(3)], store, executor=1, task=lambda spec: Run(dict(spec)), label="tuning")
        assert [line[:18] for line in capsys.readouterr().err.splitlines()] == [
            f"tuning: {n} of 3 runs"[:18] for n in (1, 2, 3)
        ]
        sweep([{"n": 9}], store, executor=1, task=lambda spec: Run(dict(spec)), progress=False)
        assert capsys.readouterr().err == ""


@pytest.mark.parametrize("text", ["\u00b2/4", "1/\u0664", "1 /4", "1/4/5", "9" * 5000 + "/4", "+1/4"])
def test_odd_digits_of_a_shard_are_explained(text):
    from normgauge.errors import InputError

    with pytest.raises(InputError, match="two numbers i/n"):
        parse_shard(text)


COMMAND = ["compare", "--model", "mlp", "--norms", "none,batch", "--rates", "0.1,0.3", "--seeds", "3", "--steps", "60"]


def children(pid):
    listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(pid)], capture_output=True, text=True).stdout.split()
    return [int(child) for child in listed]


def running(pid):
    state = Path(f"/proc/{pid}/stat")
    return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
@pytest.mark.parametrize(
    ("jobs", "signals", "group"),
    [
        ("1", [signal.SIGINT], True),
        ("1", [signal.SIGTERM], False),
        ("2", [signal.SIGINT, signal.SIGINT], True),
        ("2", [signal.SIGTERM], False),
    ],
    ids=["Ctrl-C", "SIGTERM", "Ctrl-C twice", "SIGTERM of two workers"],
)
def test_an_interrupted_command_says_one_line_and_leaves_nobody(tmp_path, jobs, signals, group):
    command = [sys.executable, "-m", "normgauge", *COMMAND, "--jobs", jobs, "--out", str(tmp_path / "out")]
    environment = {**os.environ, "PYTHONPATH": str(SOURCE), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(
        command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True, env=environment, start_new_session=True
    )
    store = tmp_path / "out" / "runs.sqlite"
    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and not store.exists():
        time.sleep(0.02)
    time.sleep(1.0)  # workers are starting: before they run our code they must not answer a signal either
    workers = children(process.pid)
    for number in signals:
        (os.killpg if group else os.kill)(process.pid, number)
        time.sleep(0.05)
    out, words = process.communicate(timeout=120)
    assert process.returncode == (130 if signals[0] == signal.SIGINT else 143), words
    lines = [line for line in words.splitlines() if line.strip()]
    assert len(lines) <= 1 and out == "", words
    assert "run the same command again" in words or len(signals) == 2
    while time.monotonic() < deadline and any(map(running, workers)):
        time.sleep(0.05)
    assert not any(map(running, workers)), "workers outlived the command"
    with Store(store, write=False) as kept:
        assert {run.status for run in kept.runs()} <= {"ok", "diverged"}
