"""One run in two real processes: with synced statistics it equals the run of one process, with its own it does not."""

import json
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from torch import nn

from normgauge.errors import ModelError
from normgauge.lab.runs import replicas
from normgauge.lab.runs.replicas import shared_copy, sync_batch_norms
from normgauge.lab.runs.run import execute
from normgauge.records import plain

DATA = """
import torch
def points():
    x = torch.randn(96, 6, generator=torch.Generator().manual_seed(0), dtype=torch.float64) + 1
    y = (x[:, 0] * x[:, 1] > 1).long()
    return (x[:64], y[:64]), (x[64:80], y[64:80]), (x[80:], y[80:])
"""
SPEC = {
    "model": "mlp",
    "norm": "batch",
    "data": "replica_points:points",
    "lr": 0.1,
    "seed": 0,
    "steps": 4,
    "batch": 16,
    "measure_at": [4],
    "measure_batch": 16,
    "target_loss": 0.6,
    "dtype": "float64",
}
COMPARED = ("test_loss", "validation_loss", "train_loss", "weight_norm")


def last(run):
    assert run.ok, run.sentence
    return torch.tensor([reading.value for reading in run.readings if reading.name in COMPARED])


@pytest.fixture
def data_module(tmp_path, monkeypatch):
    (tmp_path / "replica_points.py").write_text(DATA)
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(str(tmp_path))
    yield
    sys.modules.pop("replica_points", None)


def test_synced_equals_one_process_and_replica_does_not(data_module):
    alone = last(execute(SPEC))
    together = last(execute({**SPEC, "ddp": 2, "statistics": "synced"}))
    torch.testing.assert_close(together, alone, rtol=1e-9, atol=1e-11)
    apart = last(execute({**SPEC, "ddp": 2, "statistics": "replica"}))
    assert (apart - alone).abs().max() > 1e-4
    print(
        f"largest difference from one process: synced {(together - alone).abs().max():.1e}, "
        f"replica {(apart - alone).abs().max():.1e}"
    )


def test_wrong_settings_are_values(data_module):
    odd = execute({**SPEC, "batch": 15, "ddp": 2, "statistics": "synced"})
    assert odd.status == "error" and "multiple of the number of processes" in odd.sentence
    word = execute({**SPEC, "ddp": 2, "statistics": "both"})
    assert word.status == "error" and "statistics='both'" in word.sentence
    with pytest.raises(ModelError, match="nothing|none"):
        sync_batch_norms(nn.Sequential(nn.Linear(2, 2)))


def test_a_killed_replica_ends_the_others():
    sleepers = [
        subprocess.Popen([sys.executable, "-c", "import time; time.sleep(60)"], stderr=subprocess.PIPE, text=True)
        for _ in range(2)
    ]
    os.kill(sleepers[1].pid, 9)
    begin = time.monotonic()
    with pytest.raises(ModelError, match="replica 1: it must live until the run ends. Got exit -9"):
        replicas._wait(sleepers)
    assert time.monotonic() - begin < 30 and sleepers[0].poll() is not None


def test_the_split_network_shares_its_tensors_with_the_plain_one():
    plain = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 2))
    twin = sync_batch_norms(shared_copy(plain))
    inputs = torch.randn(8, 3)
    torch.testing.assert_close(twin(inputs), shared_copy(plain)(inputs))
    assert twin[1] is not plain[1] and twin[0].weight is plain[0].weight and twin[1].weight is plain[1].weight
    with torch.no_grad():
        twin(inputs + 5)
    assert torch.equal(twin[1].running_moment, plain[1].running_var)
    torch.testing.assert_close(twin.eval()(inputs), plain.eval()(inputs))


def test_a_run_is_the_same_in_another_process(data_module):
    """Deterministic given its spec on the same machine: readings bit for bit."""
    here = execute(SPEC)
    script = (
        "import json, sys, torch; torch.set_default_dtype(torch.float64); "
        f"torch.set_num_threads({torch.get_num_threads()}); "
        "from normgauge.lab.runs.run import execute; from normgauge.records import plain; "
        "print(json.dumps(plain(execute(json.loads(sys.argv[1])).readings)))"
    )
    words = [sys.executable, "-c", script, json.dumps(SPEC)]
    done = subprocess.run(words, capture_output=True, text=True, timeout=300)
    assert json.loads(done.stdout.strip().splitlines()[-1]) == plain(here.readings), done.stderr


@pytest.mark.skipif(not Path("/proc").exists(), reason="reads /proc")
def test_replicas_end_with_the_process_that_launched_them():
    spec = {**SPEC, "data": "gaussian", "ddp": 2, "statistics": "replica", "steps": 10**6, "measure_at": []}
    spec["lr"] = 1e-9
    code = f"from normgauge.lab.runs.run import execute; execute({spec!r})"
    parent = subprocess.Popen([sys.executable, "-c", code], stderr=subprocess.DEVNULL)

    def replicas():
        listed = subprocess.run(["ps", "-o", "pid=", "--ppid", str(parent.pid)], capture_output=True, text=True)
        return [int(pid) for pid in listed.stdout.split()]

    def running(pid):
        state = Path(f"/proc/{pid}/stat")
        return state.exists() and state.read_text().rsplit(")", 1)[1].split()[0] != "Z"

    deadline = time.monotonic() + 120
    while time.monotonic() < deadline and len(replicas()) < 2:
        time.sleep(0.05)
    started = replicas()
    parent.kill()
    parent.wait()
    assert len(started) == 2
    while time.monotonic() < deadline and any(map(running, started)):
        time.sleep(0.1)
    assert not any(map(running, started))
