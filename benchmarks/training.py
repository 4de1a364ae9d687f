"""What torch's fused optimizers and augmentation prepared ahead would save in a step of the lab's training loop.

Run with `python benchmarks/training.py`; writes benchmarks/results/training.json. Each round times the same steps of a
network both ways, in processor seconds on one thread, so that a slow moment of the machine falls on both; the ratio of
a round is theirs, and its median counts. `benchmarks/layout.py` (channels-last) measures what
the loop does use.
"""

from __future__ import annotations

import json
import platform
import statistics
import time
from pathlib import Path

import torch

from normgauge.lab import data, models
from normgauge.lab.runs.train import train
from normgauge.records import format_table

ROUNDS, TARGET = 9, Path(__file__).parent / "results" / "training.json"
CASES = (("mlp", "digits", 64, 100), ("vgg", "digits", 64, 20), ("vgg8", "images", 32, 12))


def images() -> data.Dataset:
    """Return random colour images of 32x32 in ten classes: the time of a step does not depend on what they show."""
    draw = torch.Generator().manual_seed(0)
    parts = [
        (torch.randn(n, 3, 32, 32, generator=draw), torch.randint(10, (n,), generator=draw)) for n in (512, 32, 32)
    ]
    return data.Dataset("images", "classification", *parts, classes=10)


def seconds(model: str, dataset: data.Dataset, batch: int, steps: int, *, fused: bool, augment: bool) -> float:
    """Return processor seconds of the steps, network and optimizer ready."""
    network = models.build(model, "batch", dataset.shape, dataset.classes, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3, momentum=0.9, fused=fused or None)
    start = time.process_time()
    train(network, dataset, optimizer, steps=steps, batch=batch, seed=0, augment=augment)
    return time.process_time() - start


def main() -> None:
    """Measure every case, print and write the ratios."""
    torch.set_num_threads(1)
    rows = []
    for model, name, batch, steps in CASES:
        dataset = images() if name == "images" else data.load(name)
        for change in ("fused", "augment"):
            if change == "augment" and model == "mlp":
                continue
            usual, other = ({"fused": False, "augment": change == "augment"}, {"fused": change == "fused"})
            other["augment"] = False
            pairs = [
                [seconds(model, dataset, batch, steps, **way) for way in (usual, other)] for _ in range(ROUNDS + 1)
            ][1:]
            ratios = sorted(a / b for a, b in pairs)
            low, _, high = statistics.quantiles(ratios, n=4)
            title = "fused optimizer" if change == "fused" else "augmentation for nothing (upper bound)"
            rows.append({"model": model, "change": title, "ratio": statistics.median(ratios), "low": low, "high": high})
    machine = f"{platform.machine()}, 1 thread, torch {torch.__version__}"
    TARGET.write_text(json.dumps({"machine": machine, "rounds": ROUNDS, "rows": rows}, indent=1) + "\n")
    print(format_table(rows, title="Time of a step, usual over changed"))


if __name__ == "__main__":
    main()
