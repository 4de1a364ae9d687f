"""Forward and backward in channels-last memory against the usual one, per model and normalizer, in processor time.

Run with `OMP_NUM_THREADS=1 python benchmarks/layout.py`; writes benchmarks/results/layout.json. Both layouts take turns
step by step, so that a slow moment of the machine falls on both; moving a batch counts. `normgauge.lab.runs.train`
uses channels-last memory on images of at least 16 pixels exactly where this is faster.
"""

from __future__ import annotations

import argparse
import copy
import json
import os
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import Tensor, nn

from normgauge.lab import models
from normgauge.lab.runs.train import gains_from_channels_last
from normgauge.nn import registry
from normgauge.records import format_table

MODELS, SHAPES, BATCH = ("vgg8", "resnet"), ((3, 32, 32), (1, 8, 8)), 64
WITHOUT = ("frozen_batch", "stat")  # nothing to train; a family without a default point


def seconds(network: nn.Module, images: Tensor, targets: Tensor, layout: torch.memory_format) -> float:
    """Return the processor seconds of one forward and backward pass, with the batch moved to the layout."""
    network.zero_grad()
    begin = time.process_time()
    images = images.contiguous(memory_format=layout)
    nn.functional.cross_entropy(network(images), targets).backward()
    return time.process_time() - begin


def measure(model: str, norm: str, shape: tuple[int, ...], rounds: int) -> dict[str, object]:
    """Return usual / channels-last time, with quartiles, and whether the lab would use the latter."""
    generator = torch.Generator().manual_seed(0)
    images, targets = torch.randn(BATCH, *shape, generator=generator), torch.randint(0, 10, (BATCH,))
    usual = models.build(model, norm, shape, 10, 0)
    last = copy.deepcopy(usual).to(memory_format=torch.channels_last)  # type: ignore[call-overload]
    pairs = [
        (
            seconds(usual, images, targets, torch.contiguous_format),
            seconds(last, images, targets, torch.channels_last),
        )
        for _ in range(rounds + 1)
    ][1:]
    low, middle, high = statistics.quantiles([before / after for before, after in pairs], n=4)
    used = gains_from_channels_last(usual, images)
    return {"model": model, "image": shape[-1], "norm": norm, "speedup": middle, "low": low, "high": high, "used": used}


def main() -> None:
    """Measure, print the table and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=9)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for model in MODELS:
        for shape in SHAPES:
            for norm in registry.names():
                if norm not in WITHOUT and not (norm == "instance" and shape[-1] == 8):  # one pixel has no variance
                    rows.append(measure(model, norm, shape, rounds))
    machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}, load average {os.getloadavg()[0]:.1f}"
    print(format_table(rows, title="Step in the usual layout / in channels-last memory", footer=machine))
    path = Path(__file__).parent / "results" / "layout.json"
    path.write_text(json.dumps({"machine": machine, "rounds": rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
