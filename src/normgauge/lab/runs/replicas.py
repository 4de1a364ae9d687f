"""One large run split over processes: DistributedDataParallel with statistics of each replica, or of all together."""

import copy
import json
import os
import pickle
import subprocess
import sys
import tempfile
import threading
import time
from pathlib import Path
from typing import Any, Self

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.errors import InputError, ModelError
from normgauge.lab.data import Dataset
from normgauge.lab.runs.train import Step, descend
from normgauge.nn import SyncedBatchNorm
from normgauge.records import Run, Spec

STATISTICS = ("replica", "synced")
_RESULT = "run.pickle"


def launch(run: Run, statement: str) -> None:
    """Carry out a run in `spec["ddp"]` processes of this machine that share every batch, and take over its readings.

    Rank r takes rows r, r + n, ... of each batch, gradients are averaged; the run equals the one of a single process
    up to float error, except for batch statistics: "replica" takes them over each replica's share (stored ones are
    rank 0's), "synced" over the whole batch, as a single process does.
    """
    spec, world = run.spec, int(run.spec["ddp"])
    if spec.get("statistics", "replica") not in STATISTICS or int(spec["batch"]) % world or int(spec["batch"]) < world:
        rule = "statistics is 'replica' or 'synced', and the batch a multiple of the number of processes"
        got = f"statistics={spec.get('statistics')!r}, batch={spec['batch']}, ddp={world}"
        raise InputError("ddp", rule, got, "Correct the spec")
    with tempfile.TemporaryDirectory(prefix="normgauge-") as folder:
        path = Path(folder) / "spec.json"
        path.write_text(json.dumps(spec), encoding="utf-8")
        command = [sys.executable, "-c", statement, str(path), str(os.getpid())]
        how: dict[str, Any] = {"env": _environment(), "stderr": subprocess.PIPE, "text": True}
        _wait([subprocess.Popen([*command, str(rank)], **how) for rank in range(world)])
        done = pickle.loads((Path(folder) / _RESULT).read_bytes())
    run.status, run.sentence, run.readings = done.status, done.sentence, done.readings


class Replica:
    """This process as one of a split run: it meets the others on entering, and leaves with them."""

    def __init__(self) -> None:
        path, parent, rank = sys.argv[1:]
        threading.Thread(target=_end_with_parent, args=(int(parent),), daemon=True).start()
        self.spec: Spec = json.loads(Path(path).read_text(encoding="utf-8"))
        self.folder, self.rank = Path(path).parent, int(rank)

    def __enter__(self) -> Self:
        torch.set_default_dtype(getattr(torch, str(self.spec.get("dtype", "float32"))))
        meeting = (self.folder / "meeting").as_uri()
        dist.init_process_group("gloo", init_method=meeting, rank=self.rank, world_size=int(self.spec["ddp"]))
        return self

    def hand_over(self, run: Run) -> None:
        """Write the run for the process that launched it; rank 0 alone does."""
        if self.rank == 0:
            part = self.folder / "run.part"
            part.write_bytes(pickle.dumps(run))
            part.replace(self.folder / _RESULT)

    def __exit__(self, *_: object) -> None:
        dist.barrier()
        dist.destroy_process_group()


def replica_step(network: nn.Module, dataset: Dataset, optimizer: torch.optim.Optimizer, spec: Spec) -> Step:
    """Return a step on this process's share of the batch that gives the loss of the whole batch.

    `network` stays plain and shares its tensors with the split one.
    """
    rank, world = dist.get_rank(), dist.get_world_size()
    twin = shared_copy(network)
    if spec.get("statistics") == "synced":
        twin = sync_batch_norms(twin, dist.new_group())  # its own group: statistics and gradients must not mix
    split = nn.parallel.DistributedDataParallel(twin)
    inputs, targets = dataset.train

    def step(rows: Tensor) -> float:
        own = rows[rank::world]
        whole = descend(split, optimizer, (inputs[own], targets[own]), dataset.loss) / world
        dist.all_reduce(whole)
        return float(whole)

    return step


def _end_with_parent(parent: int) -> None:
    """End this process when the one that launched it has: when that is killed, it cannot end its replicas."""
    while os.getppid() == parent:
        time.sleep(0.2)
    os._exit(1)


def _wait(processes: list[subprocess.Popen[str]]) -> None:
    """Wait for all replicas; when one is killed the others wait for it in vain, so they are ended."""
    try:
        while any(process.poll() is None for process in processes):
            if any(process.poll() not in (None, 0) for process in processes):
                break
            time.sleep(0.02)
    finally:
        alive = [process for process in processes if process.poll() is None]
        for process in alive:
            process.kill()
        words = [process.communicate()[1] for process in processes]
    for rank, process in enumerate(processes):
        if process not in alive and process.returncode != 0:
            last = (words[rank].strip().splitlines() or ["no words"])[-1]
            got = f"exit {process.returncode}: {last}"
            raise ModelError(f"replica {rank}", "it must live until the run ends", got, "Run it again")


def _environment() -> dict[str, str]:
    """Return the environment of a replica: this normgauge, one thread as every run, the loopback interface."""
    package = str(Path(__file__).resolve().parents[3])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    interface = "lo0" if sys.platform == "darwin" else "lo"
    own = {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": interface}
    return {**os.environ, **own, "OMP_NUM_THREADS": "1"}


def shared_copy(network: nn.Module) -> nn.Module:
    """Return a copy of the modules whose parameters and buffers are the same tensors."""
    tensors = [*network.parameters(), *network.buffers()]
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def sync_batch_norms(network: nn.Module, group: Any = None) -> nn.Module:
    """Replace batch normalization by one over all processes, in place, with the same parameters and statistics."""
    children = [(part, name, child) for part in network.modules() for name, child in part.named_children()]
    layers = [(part, name, child) for part, name, child in children if isinstance(child, _BatchNorm)]
    if not layers:
        rule, step = "the network has batch normalization", "Use statistics 'replica'"
        raise ModelError("statistics 'synced'", rule, "none", step)
    for part, name, child in layers:
        layer = SyncedBatchNorm(child.num_features, group, eps=child.eps, momentum=child.momentum, affine=child.affine)
        layer.weight, layer.bias = child.weight, child.bias
        for ours, theirs in (("mean", "mean"), ("moment", "var")):
            layer._buffers[f"running_{ours}"] = child._buffers[f"running_{theirs}"]
        layer._buffers["num_batches_tracked"] = child._buffers["num_batches_tracked"]
        setattr(part, name, layer)
    return network
