"""One large run split over processes: DistributedDataParallel with statistics of each replica, or of all together."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
import tempfile
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.errors import InputError, ModelError, explain
from normgauge.lab.data import Dataset
from normgauge.lab.runs.run import Outcome, Trainer, guarded
from normgauge.nn.synced_batch import SyncedBatchNorm

STATISTICS = ("replica", "synced")


def execute_split(spec: Mapping[str, Any]) -> Outcome:
    """Run one spec in `spec["ddp"]` processes of this machine that share every batch, and never raise.

    Rank r takes rows r, r + n, ... of each batch, gradients are averaged; the run equals the one of a single process
    up to float error, except for batch statistics: "replica" takes them over each replica's share (stored ones are
    rank 0's), "synced" over the whole batch, as a single process does.

    Args:
        spec: as in `normgauge.lab.runs.run.execute`, with `ddp` >= 2 and `statistics` "replica" or "synced".
    """
    outcome = Outcome(dict(spec))
    return guarded(outcome, lambda: _launch(outcome))


def _launch(outcome: Outcome) -> None:
    spec = outcome.spec
    world = int(spec["ddp"])
    if spec.get("statistics", "replica") not in STATISTICS or int(spec["batch"]) % world or int(spec["batch"]) < world:
        raise InputError(
            explain(
                "ddp",
                "statistics is 'replica' or 'synced', and the batch a multiple of the number of processes",
                f"statistics={spec.get('statistics')!r}, batch={spec['batch']}, ddp={world}",
                "Correct the spec",
            )
        )
    with tempfile.TemporaryDirectory(prefix="normgauge-") as folder:
        job = {"spec": spec, "world": world, "folder": folder, "dtype": str(spec.get("dtype", "float32"))}
        path = Path(folder) / "job.json"
        path.write_text(json.dumps(job), encoding="utf-8")
        command = [sys.executable, "-c", "from normgauge.lab.runs.replicas import main; main()", str(path)]
        processes = [
            subprocess.Popen([*command, str(rank)], env=_environment(world), stderr=subprocess.PIPE, text=True)
            for rank in range(world)
        ]
        _wait(processes)
        found = json.loads((Path(folder) / "outcome.json").read_text(encoding="utf-8"))
    outcome.status, outcome.sentence, outcome.readings = found["status"], found["sentence"], found["readings"]


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
            raise ModelError(
                explain(
                    f"replica {rank}",
                    "it must live until the run ends",
                    f"exit {process.returncode}: {last}",
                    "Run it again",
                )
            )


def _environment(world: int) -> dict[str, str]:
    """Return the environment of a replica: this normgauge, its share of the cores, the loopback interface."""
    package = str(Path(__file__).resolve().parents[2])
    paths = [package, *filter(None, [os.environ.get("PYTHONPATH")])]
    interface = "lo0" if sys.platform == "darwin" else "lo"
    own = {"PYTHONPATH": os.pathsep.join(paths), "GLOO_SOCKET_IFNAME": interface}
    return {**os.environ, **own, "OMP_NUM_THREADS": str(max(1, (os.cpu_count() or 1) // world))}


def main() -> None:
    """Run as one replica: `job.json` and the rank are the arguments; rank 0 writes `outcome.json`."""
    job, rank = json.loads(Path(sys.argv[1]).read_text(encoding="utf-8")), int(sys.argv[2])
    torch.set_default_dtype(getattr(torch, job["dtype"]))
    meeting = (Path(job["folder"]) / "meeting").as_uri()
    dist.init_process_group("gloo", init_method=meeting, rank=rank, world_size=job["world"])
    from normgauge.lab.runs.run import train

    outcome = Outcome(job["spec"])
    guarded(outcome, lambda: train(outcome, Replica))
    if rank == 0:
        found = {"status": outcome.status, "sentence": outcome.sentence, "readings": outcome.readings}
        part = Path(job["folder"]) / "outcome.part"
        part.write_text(json.dumps(found), encoding="utf-8")
        part.replace(Path(job["folder"]) / "outcome.json")
    dist.barrier()
    dist.destroy_process_group()


class Replica(Trainer):
    """Trains this process's share of every batch; `network` stays plain and shares its tensors with the split one."""

    def __init__(self, network: nn.Module, dataset: Dataset, spec: Mapping[str, Any]) -> None:
        super().__init__(network, dataset, spec)
        self.layout.channels_last = False  # gradients are reduced in buckets of the layout the weights had first
        self.rank, self.world = dist.get_rank(), dist.get_world_size()
        twin = shared_copy(network)
        if spec.get("statistics") == "synced":
            twin = synced(twin, dist.new_group())  # its own group: statistics and gradients must not mix
        self.split = nn.parallel.DistributedDataParallel(twin)

    def step(self, rows: Tensor) -> float:
        """Take one step on this process's share of the batch, and return the loss of the whole batch."""
        self.split.train()
        self.optimizer.zero_grad()
        share = rows[self.rank :: self.world]
        loss = self.dataset.loss(self.split(self.dataset.train[0][share]), self.dataset.train[1][share])
        loss.backward()
        self.optimizer.step()
        whole = loss.detach() / self.world
        dist.all_reduce(whole)
        return float(whole)

    def measure(self, outcome: Outcome, step: int) -> None:
        """Measure on rank 0, on the plain network: the other ranks wait at the next reduction."""
        if self.rank == 0:
            super().measure(outcome, step)


def shared_copy(network: nn.Module) -> nn.Module:
    """Return a copy of the modules whose parameters and buffers are the same tensors."""
    tensors = [*network.parameters(), *network.buffers()]
    return copy.deepcopy(network, {id(tensor): tensor for tensor in tensors})


def synced(network: nn.Module, group: Any = None) -> nn.Module:
    """Replace batch normalization by one over all processes, in place, with the same parameters and statistics.

    Raises:
        ModelError: when the network has no batch normalization, so that there would be nothing to sync.
    """
    found = [
        (part, name, child)
        for part in network.modules()
        for name, child in part.named_children()
        if isinstance(child, _BatchNorm)
    ]
    if not found:
        raise ModelError(
            explain("statistics 'synced'", "the network has batch normalization", "none", "Use statistics 'replica'")
        )
    for part, name, child in found:
        layer = SyncedBatchNorm(child.num_features, child.eps, child.momentum, child.affine, group)
        layer.weight, layer.bias = child.weight, child.bias
        for ours, theirs in _BUFFERS.items():
            layer._buffers[ours] = child._buffers[theirs]
        setattr(part, name, layer)
    return network


_BUFFERS = {
    "running_mean": "running_mean",
    "running_moment": "running_var",
    "num_batches_tracked": "num_batches_tracked",
}
