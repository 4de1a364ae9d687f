"""Time of forward and backward of our layers relative to torch's BatchNorm: medians of interleaved ratios.

Run with `python benchmarks/layers.py`; writes benchmarks/results/layers.json. Each round times BatchNorm, then the
layer, so that a slow moment of the machine falls on both; the ratio of a round is theirs, and its median counts.
"""

from __future__ import annotations

import argparse
import json
import math
import os
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch

from normgauge import nn
from normgauge.records import format_table

SHAPES = ((128, 64, 32, 32), (64, 512, 768))
TARGETS: dict[str, tuple[float, Callable[[int], torch.nn.Module]]] = {
    "lp_batch p=1": (2.0, lambda channels: nn.LpBatchNorm(channels, p=1)),
    "lp_batch p=2": (2.0, lambda channels: nn.LpBatchNorm(channels, p=2)),
    "lp_batch p=inf": (2.0, lambda channels: nn.LpBatchNorm(channels, p=math.inf)),
    "batch_renorm": (2.0, lambda channels: nn.BatchRenorm(channels)),
    "noisy_batch": (2.0, lambda channels: nn.NoisyBatchNorm(channels)),
    "ghost_batch 32": (2.0, lambda channels: nn.GhostBatchNorm(channels, ghost_size=32)),
    "stat mean, rms": (2.0, lambda channels: nn.StatNorm(channels, center="mean", scale="rms")),
    "whitening, groups of 64": (6.0, lambda channels: nn.WhiteningNorm(channels, groups=channels // 64)),
}


def step_time(layer: torch.nn.Module, x: torch.Tensor, grad: torch.Tensor) -> float:
    """Return seconds of one forward and backward pass."""
    x.grad = None
    start = time.perf_counter()
    layer(x).backward(grad)
    return time.perf_counter() - start


def measure(layer: torch.nn.Module, shape: tuple[int, ...], rounds: int) -> dict[str, float]:
    """Return the median ratio to BatchNorm, its quartiles and the median times in milliseconds."""
    x, grad = torch.randn(shape, requires_grad=True), torch.randn(shape)
    base = torch.nn.BatchNorm2d(shape[1]) if len(shape) == 4 else torch.nn.BatchNorm1d(shape[1])
    for _ in range(2):
        step_time(base, x, grad), step_time(layer, x, grad)
    pairs = [(step_time(base, x, grad), step_time(layer, x, grad)) for _ in range(rounds)]
    ratios = sorted(ours / theirs for theirs, ours in pairs)
    low, middle, high = statistics.quantiles(ratios, n=4)
    return {
        "ratio": middle,
        "low": low,
        "high": high,
        "batch_norm_ms": 1e3 * statistics.median(theirs for theirs, _ in pairs),
        "layer_ms": 1e3 * statistics.median(ours for _, ours in pairs),
    }


def main() -> None:
    """Measure every layer on every shape, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=21)
    parser.add_argument("--threads", type=int, default=2)
    parser.add_argument("--only", default="", help="part of a layer's name")
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for shape in SHAPES:
        for name, (target, make) in TARGETS.items():
            if arguments.only in name:
                numbers = measure(make(shape[1]), shape, arguments.rounds)
                met = numbers["ratio"] <= target
                rows.append({"layer": name, "shape": str(shape), "target": target, "met": met, **numbers})
    machine = (
        f"{platform.machine()}, {os.cpu_count()} cores, {arguments.threads} threads, torch {torch.__version__}, "
        f"load average {os.getloadavg()[0]:.1f}"
    )
    print(format_table(rows, title="forward + backward relative to torch BatchNorm", footer=machine))
    if not arguments.only:
        path = Path(__file__).parent / "results" / "layers.json"
        path.write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
