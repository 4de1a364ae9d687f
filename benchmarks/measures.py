"""Time of the instruments relative to one forward and backward pass of the same objective.

Run with `python benchmarks/measures.py`; writes benchmarks/results/measures.json. Each round times the pass before
and after the instrument, so that a slow moment of the machine falls on both; the median of the rounds' ratios counts.
"""

from __future__ import annotations

import argparse
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from torch import nn

import normgauge as ng
from normgauge.records import format_table


def mlp() -> tuple[nn.Module, torch.Tensor]:
    """Return a batch-normalized network of ten hidden layers, and inputs."""
    layers: list[nn.Module] = []
    for _ in range(10):
        layers += [nn.Linear(256, 256), nn.BatchNorm1d(256), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(256, 10)), torch.randn(256, 256)


def vgg() -> tuple[nn.Module, torch.Tensor]:
    """Return a small VGG with batch norm, and images."""
    layers: list[nn.Module] = []
    channels = 3
    for width in (16, 16, 32, 32, 64, 64):
        layers += [nn.Conv2d(channels, width, 3, padding=1), nn.BatchNorm2d(width), nn.ReLU()]
        layers += [nn.MaxPool2d(2)] if width != channels and channels != 3 else []
        channels = width
    return nn.Sequential(*layers, nn.Flatten(), nn.LazyLinear(10)), torch.randn(32, 3, 32, 32)


def transformer() -> tuple[nn.Module, torch.Tensor]:
    """Return an encoder of four blocks with a classifying head, and sequences."""

    class Classifier(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            block = nn.TransformerEncoderLayer(64, 4, 256, dropout=0.0, batch_first=True)
            self.body, self.head = nn.TransformerEncoder(block, 4, enable_nested_tensor=False), nn.Linear(64, 10)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.head(self.body(x).mean(1))

    return Classifier(), torch.randn(32, 64, 64)


MODELS = {"mlp": mlp, "vgg": vgg, "transformer": transformer}


def targets(layers: int) -> dict[str, tuple[float, Callable[[ng.Objective], Any]]]:
    """Return instrument -> (the most passes it may take, how it is called)."""
    steps = [0.01 * 2**i for i in range(8)]
    return {
        "covariate_shift": (2.5 * layers, lambda o: ng.covariate_shift(o, 0.01)),
        "landscape of 8 steps": (10.0, lambda o: ng.landscape(o, steps=steps)),
        "signal_propagation": (2.0, ng.signal_propagation),
        "margins": (1.2, lambda o: ng.margins(o.replace(mode="eval"))),
    }


def seconds(call: Callable[[], Any]) -> float:
    """Return the time of one call."""
    start = time.perf_counter()
    call()
    return time.perf_counter() - start


def _round(objective: ng.Objective, call: Callable[[ng.Objective], Any]) -> tuple[float, float]:
    """Return the mean time of the passes just before and just after the instrument, and the instrument's own."""
    before = [seconds(objective.gradient) for _ in range(2)]
    own = seconds(lambda: call(objective))
    after = [seconds(objective.gradient) for _ in range(2)]
    return statistics.fmean(before + after), own


def main() -> None:
    """Measure every instrument on every model, print the table, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--threads", type=int, default=1)
    arguments = parser.parse_args()
    torch.set_num_threads(arguments.threads)
    torch.manual_seed(0)
    rows = []
    for name, make in MODELS.items():
        model, inputs = make()
        with torch.no_grad():
            model(inputs[:2])
        labels = torch.randint(10, (len(inputs),))
        objective = ng.Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
        layers = len(ng.covariate_shift(objective, 0.01).layers)
        for instrument, (most, call) in targets(layers).items():
            objective.gradient()
            call(objective)
            pairs = [_round(objective, call) for _ in range(arguments.rounds)]
            ratio = statistics.median(ours / theirs for theirs, ours in pairs)
            rows.append(
                {
                    "model": name,
                    "layers": layers,
                    "instrument": instrument,
                    "ratio": ratio,
                    "target": most,
                    "met": ratio <= most,
                    "pass_ms": 1e3 * statistics.median(theirs for theirs, _ in pairs),
                }
            )
            print(rows[-1], flush=True)
    machine = f"{platform.processor() or platform.machine()}, {arguments.threads} threads, torch {torch.__version__}"
    print(format_table(rows, title="instruments in forward and backward passes", footer=machine))
    path = Path(__file__).parent / "results" / "measures.json"
    path.parent.mkdir(exist_ok=True)
    path.write_text(json.dumps({"machine": machine, "rounds": arguments.rounds, "rows": rows}, indent=2) + "\n")


if __name__ == "__main__":
    main()
