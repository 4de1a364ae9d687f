"""The operator over two real processes (gloo), equal to one process that holds both shards as batches."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

import normgauge as ng
from reference.nets import net

WORKER = """
import json, os, sys
sys.path.insert(0, sys.argv[1])
import torch
import torch.distributed as dist
torch.set_default_dtype(torch.float64)
torch.set_num_threads(1)
import normgauge as ng
from normgauge.errors import NonFiniteError
from reference.nets import net

dist.init_process_group("gloo")
rank = dist.get_rank()
model, loss, batches = net("several batches")
share = [batches[0]] if rank == 0 else batches[1:]   # 7 samples on one rank, 9 in two batches on the other
objective = ng.Objective(model, loss, share, mode="train")
found = ng.spectrum(objective, top=3, bottom=1, tol=1e-8, group=dist.group.WORLD)
trace = ng.trace(objective, relative_error=0.5, group=dist.group.WORLD)
gauss = ng.spectrum(objective, top=2, of="gauss_newton", tol=1e-8, group=dist.group.WORLD)

def broken(out, target):
    value = loss(out, target)
    return value + (value - value.detach()).abs().sqrt() if rank == 1 else value

failure = ""
try:
    ng.spectrum(ng.Objective(model, broken, share, mode="train"), top=1, group=dist.group.WORLD)
except NonFiniteError as error:
    failure = str(error)
with open(f"{sys.argv[2]}/{rank}.json", "w") as file:
    json.dump({"top": found.top, "bottom": found.bottom, "trace": trace.value, "gauss": gauss.top,
               "failure": failure, "matvecs": found.matvecs}, file)
dist.barrier()  # no rank leaves while another still reads from it
os._exit(0)  # gloo's threads may abort a process that takes them down under load, after all is written
"""

MEETING_FAILED = ("Rendezvous", "DistNetworkError", "DistStoreError", "connectFullMesh")


@pytest.fixture(scope="module")
def ranks(tmp_path_factory):
    folder = tmp_path_factory.mktemp("ranks")
    script = folder / "worker.py"
    script.write_text(WORKER)
    here = Path(__file__).parents[1]
    environment = {**os.environ, "OMP_NUM_THREADS": "1", "PYTHONPATH": str(here.parent / "src")}
    # The loopback address by number: the name of a machine need not resolve, and need not resolve to itself.
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--local-addr=127.0.0.1"]
    command += ["--nproc-per-node=2", str(script), str(here), str(folder)]
    for attempt in range(2):
        ended = subprocess.run(command, env=environment, timeout=240, capture_output=True, text=True)
        # A meeting that failed says nothing about the operator, so it is tried once more; a wrong result is not.
        met = not any(sign in ended.stderr for sign in MEETING_FAILED)
        if ended.returncode == 0 or met or attempt:
            break
    assert ended.returncode == 0, f"torchrun ended with {ended.returncode}:\n{ended.stderr[-4000:]}"
    return [json.loads((folder / f"{rank}.json").read_text()) for rank in range(2)]


def test_two_processes_equal_one(ranks):
    model, loss, batches = net("several batches")
    objective = ng.Objective(model, loss, batches, mode="train")
    alone = ng.spectrum(objective, top=3, bottom=1, tol=1e-8)
    gauss = ng.spectrum(objective, top=2, of="gauss_newton", tol=1e-8)
    assert ranks[0]["top"] == ranks[1]["top"] and ranks[0]["matvecs"] == ranks[1]["matvecs"]
    for found in ranks:
        torch.testing.assert_close(torch.tensor(found["top"]), torch.tensor(alone.top), rtol=1e-9, atol=0)
        torch.testing.assert_close(torch.tensor(found["bottom"]), torch.tensor(alone.bottom), rtol=1e-9, atol=1e-12)
        torch.testing.assert_close(torch.tensor(found["gauss"]), torch.tensor(gauss.top), rtol=1e-9, atol=0)
        assert found["trace"] == pytest.approx(ng.trace(objective, relative_error=0.5).value, rel=1e-9)


def test_an_error_on_one_rank_ends_all(ranks):
    assert "another rank" in ranks[0]["failure"]
    assert "batch" in ranks[1]["failure"]
