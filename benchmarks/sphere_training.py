"""Whole training steps on spheres against torch's fused optimizers, interleaved.

`python benchmarks/sphere_training.py` writes benchmarks/results/sphere_training.json: one thread, CPU time, forward,
backward and step on ResNet-18 (batch 128, 32x32) and on a GPT of 12 blocks; rows of convolutions and matrices on unit
spheres, the rest flat. Each round times both arms one after the other; the number is the median ratio over rounds.
"""

from __future__ import annotations

import argparse
import json
import statistics
import time
from pathlib import Path
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

from normgauge import optim
from symmetry import gpt12, resnet18

LIMIT = 1.05


def step_time(model: nn.Module, optimizer: torch.optim.Optimizer, x: Any, y: Any) -> tuple[float, float]:
    """Return the CPU time of a whole training step and of the optimizer's part."""
    start = time.process_time()
    optimizer.zero_grad()
    out = model(x)
    F.cross_entropy(out.flatten(0, -2), y.flatten()).backward()
    middle = time.process_time()
    optimizer.step()
    end = time.process_time()
    return end - start, end - middle


def pair(model: nn.Module, family: str) -> dict[str, torch.optim.Optimizer]:
    """Return our optimizer and torch's fused one on the same parameters."""
    curved = [p for p in model.parameters() if p.ndim > 1]
    flat = [p for p in model.parameters() if p.ndim <= 1]
    groups = [{"params": curved, "geometry": "sphere"}, {"params": flat, "geometry": "euclidean"}]
    if family == "SGD":
        ours: torch.optim.Optimizer = optim.SphereSGD(groups, lr=1e-3, momentum=0.9, radius=1.0)
        return {"ours": ours, "torch": torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.9, fused=True)}
    return {
        "ours": optim.SphereAdam(groups, lr=1e-4, radius=1.0),
        "torch": torch.optim.AdamW(model.parameters(), lr=1e-4, fused=True),
    }


def main() -> None:
    """Measure, print, store."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=5)
    rounds = parser.parse_args().rounds
    torch.set_num_threads(1)
    rows = []
    for name, case, family in (("ResNet-18, batch 128", resnet18, "SGD"), ("GPT of 12 blocks", gpt12, "Adam")):
        torch.manual_seed(0)
        model, x, y = case()
        if name.startswith("ResNet"):
            x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
        arms = pair(model, family)
        ratios, shares = [], []
        for number in range(rounds + 1):
            took = {arm: step_time(model, optimizer, x, y) for arm, optimizer in arms.items()}
            if number:  # the first round fills caches and states
                ratios.append(took["ours"][0] / took["torch"][0])
                shares.append((took["ours"][1] - took["torch"][1]) / took["torch"][0])
        row = {
            "network": name,
            "optimizer": f"Sphere{family} against fused {family}",
            "ratio": statistics.median(ratios),
        }
        row |= {"low": min(ratios), "high": max(ratios), "excess of the step alone": statistics.median(shares)}
        row["met"] = row["ratio"] <= LIMIT
        rows.append(row)
        print(row, flush=True)
    path = Path(__file__).parent / "results" / "sphere_training.json"
    path.write_text(json.dumps({"rounds": rounds, "limit": LIMIT, "rows": rows}, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
