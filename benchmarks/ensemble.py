"""Throughput of the batched ensemble against runs one by one: 32 small MLPs, and 32 of S1's 25-layer linear networks.

Run with `python benchmarks/ensemble.py`; writes benchmarks/results/ensemble.json. Each round times a few steps of the
separate runs (the loop of lab.runs.train, networks and data ready), then of the ensemble, on one thread, so that a slow
moment of the machine falls on both, and in processor seconds, so that other work does not count; the ratio of a round
is theirs, and its median counts.
"""

from __future__ import annotations

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch

from normgauge.lab import data, models
from normgauge.lab.runs.ensemble import fit_ensemble
from normgauge.lab.runs.train import train
from normgauge.records import format_table

MEMBERS = 32
RATE = 1e-5  # small, so that all members live: the time does not depend on it
TARGETS = {"mlp": 2.5, "dln": 8.0}
# The lab's batch of 128 is what the target is about; smaller and full batches show where the gain comes from.
CASES = (
    ("mlp", "none", "digits", 128),
    ("mlp", "batch", "digits", 128),
    ("mlp", "batch", "digits", 32),
    ("mlp", "batch", "digits", 1149),
    ("dln", "none", "gaussian", 128),
    ("dln", "batch", "gaussian", 128),
    ("dln", "batch", "gaussian", 32),
    ("dln", "none", "gaussian", 1000),
    ("dln", "batch", "gaussian", 1000),
)


def separate(networks: list[torch.nn.Module], dataset: data.Dataset, batch: int, steps: int) -> float:
    """Return processor seconds of the steps of all members, one member after the other."""
    start = time.process_time()
    for seed, network in enumerate(networks):
        optimizer = torch.optim.SGD(network.parameters(), lr=RATE)
        train(network, dataset, optimizer, steps=steps, batch=batch, seed=seed)
    return time.process_time() - start


def together(networks: list[torch.nn.Module], dataset: data.Dataset, batch: int, steps: int) -> float:
    """Return processor seconds of the steps of all members as an ensemble, stacking and writing back included."""
    start = time.process_time()
    rates, seeds = [RATE] * len(networks), list(range(len(networks)))
    fits = fit_ensemble(networks, dataset, rates=rates, seeds=seeds, steps=steps, batch=batch)
    seconds = time.process_time() - start
    if any(fit.diverged for fit in fits):
        raise RuntimeError("a member diverged, so that fewer steps were timed")
    return seconds


def measure(model: str, norm: str, name: str, batch: int, rounds: int, steps: int) -> dict[str, object]:
    """Return the median ratio of throughputs of one case, its quartiles, and steps per second."""
    dataset = data.load(name)
    networks = [models.build(model, norm, dataset.shape, dataset.classes, seed) for seed in range(MEMBERS)]
    separate(networks[:2], dataset, batch, 2), together(networks, dataset, batch, 2)
    pairs = [
        (separate(networks, dataset, batch, steps), together(networks, dataset, batch, steps)) for _ in range(rounds)
    ]
    low, middle, high = statistics.quantiles([one / other for one, other in pairs], n=4)
    return {
        "model": model,
        "norm": norm,
        "batch": batch,
        "ratio": middle,
        "low": low,
        "high": high,
        "target": TARGETS[model] if batch == 128 else None,
        "separate_steps_per_s": MEMBERS * steps / statistics.median(one for one, _ in pairs),
        "ensemble_steps_per_s": MEMBERS * steps / statistics.median(other for _, other in pairs),
    }


def main() -> None:
    """Measure, print a table, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=40)
    options = parser.parse_args()
    torch.set_num_threads(1)
    rows = [measure(*case, options.rounds, options.steps) for case in CASES]
    machine = {"processor": platform.machine(), "cores": os.cpu_count(), "threads": 1, "torch": torch.__version__}
    print(format_table(rows, title=f"{MEMBERS} members: ensemble against separate runs", footer=str(machine)))
    path = Path(__file__).parent / "results" / "ensemble.json"
    path.write_text(json.dumps({"machine": machine, "rounds": options.rounds, "rows": rows}, indent=1) + "\n")
    for row in rows:
        if row["target"] is not None:
            verdict = "reached" if row["ratio"] >= row["target"] else "MISSED"
            print(f"{row['model']} {row['norm']}: {row['ratio']:.1f}x, target {row['target']}x {verdict}")


if __name__ == "__main__":
    main()
