"""Do optimizers on spheres help? A BatchNorm net on scikit-learn's digits, equal trials for each optimizer.

Run with `python benchmarks/optimizers_digits.py`; writes benchmarks/results/optimizers_digits.json. Every optimizer
gets the same grid size of learning rates and the same seeds; the rate is chosen on a validation split, the accuracy
reported on a test split. Sensitivities: accuracy over the whole grid, and at the chosen rate when the hidden weights
start larger or smaller by a factor (which changes nothing in the function). A seed fixes the initial weights and the
order of the data for every optimizer, so differences are taken per seed: means with 95 % intervals (Student's t),
p-values of all pairs with Holm's correction. The test images are the same 500 for all; intervals speak of seeds only.
"""

from __future__ import annotations

import argparse
import itertools
import json
import math
import statistics
from collections.abc import Callable
from pathlib import Path

import torch
from scipy import stats
from sklearn.datasets import load_digits
from torch import nn

from normgauge import optim
from normgauge.records import format_table

FACTORS = (0.25, 0.5, 1.0, 2.0, 4.0)
SCALES = (0.1, 1.0, 10.0)
EPOCHS, BATCH, WIDTH = 12, 64, 64


def groups(model: nn.Sequential) -> list[dict[str, object]]:
    """Return the weights before BatchNorm (scale-invariant rows) and the rest."""
    hidden = [model[0].weight, model[3].weight]
    rest = [param for param in model.parameters() if all(param is not other for other in hidden)]
    return [{"params": hidden, "geometry": "sphere"}, {"params": rest, "geometry": "euclidean"}]


MAKERS: dict[str, tuple[float, Callable[[nn.Sequential, float], torch.optim.Optimizer]]] = {
    "SphereSGD": (0.2, lambda m, lr: optim.SphereSGD(groups(m), lr=lr, momentum=0.9)),
    "SphereSGD, radius 1": (0.2, lambda m, lr: optim.SphereSGD(groups(m), lr=lr, momentum=0.9, radius=1.0)),
    "SGD + weight decay": (0.1, lambda m, lr: torch.optim.SGD(m.parameters(), lr=lr, momentum=0.9, weight_decay=5e-4)),
    "AdamW": (0.01, lambda m, lr: torch.optim.AdamW(m.parameters(), lr=lr)),
    "ProjectedAdam": (0.01, lambda m, lr: optim.ProjectedAdam(m.parameters(), lr=lr, weight_decay=0.01)),
}


def data() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Return train, validation and test splits, fixed."""
    x, y = load_digits(return_X_y=True)
    inputs, labels = torch.tensor(x / 16.0, dtype=torch.float32), torch.tensor(y)
    order = torch.randperm(len(labels), generator=torch.Generator().manual_seed(0))
    cuts = [slice(0, 897), slice(897, 1297), slice(1297, None)]
    return [(inputs[order[cut]], labels[order[cut]]) for cut in cuts]


def train(
    name: str, lr: float, seed: int, scale: float, splits: list[tuple[torch.Tensor, torch.Tensor]]
) -> list[float]:
    """Return validation and test accuracy of one trial."""
    torch.manual_seed(seed)
    layers = [nn.Linear(64, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU()]
    layers += [nn.Linear(WIDTH, WIDTH, bias=False), nn.BatchNorm1d(WIDTH), nn.ReLU(), nn.Linear(WIDTH, 10)]
    model = nn.Sequential(*layers)
    with torch.no_grad():
        model[0].weight.mul_(scale)
        model[3].weight.mul_(scale)
    optimizer = MAKERS[name][1](model, lr)
    inputs, labels = splits[0]
    total = EPOCHS * (len(labels) // BATCH)
    schedule = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, total)
    for _ in range(EPOCHS):
        for part in torch.randperm(len(labels))[: len(labels) // BATCH * BATCH].split(BATCH):
            optimizer.zero_grad()
            nn.functional.cross_entropy(model(inputs[part]), labels[part]).backward()
            optimizer.step()
            schedule.step()
    model.eval()
    with torch.no_grad():
        return [100 * float((model(a).argmax(1) == b).float().mean()) for a, b in splits[1:]]


def compare(accuracies: dict[str, list[float]]) -> list[dict[str, object]]:
    """Return every pair's mean difference over seeds with its interval; p-values corrected by Holm's method."""
    rows: list[dict[str, object]] = []
    for a, b in itertools.combinations(accuracies, 2):
        gaps = [x - y for x, y in zip(accuracies[a], accuracies[b], strict=True)]
        mean, error = statistics.mean(gaps), statistics.stdev(gaps) / math.sqrt(len(gaps))
        half = float(stats.t.ppf(0.975, len(gaps) - 1)) * error
        p = float(2 * stats.t.sf(abs(mean) / error, len(gaps) - 1)) if error else float(mean == 0)
        rows.append({"a": a, "b": b, "difference": mean, "low": mean - half, "high": mean + half, "p": p})
    worst = 0.0
    for rank, row in enumerate(sorted(rows, key=lambda row: row["p"])):  # type: ignore[arg-type, return-value]
        worst = max(worst, min(1.0, row["p"] * (len(rows) - rank)))  # type: ignore[operator]
        row["p_holm"] = worst
    return rows


def main() -> None:
    """Run all trials, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--seeds", type=int, default=8)
    seeds = range(parser.parse_args().seeds)
    torch.set_num_threads(1)
    splits = data()
    rows = []
    tests: dict[float, dict[str, list[float]]] = {scale: {} for scale in SCALES}
    for name, (middle, _) in MAKERS.items():
        grid = {
            middle * factor: [train(name, middle * factor, seed, 1.0, splits) for seed in seeds] for factor in FACTORS
        }
        best = max(grid, key=lambda lr: statistics.mean(valid for valid, _ in grid[lr]))
        means = [statistics.mean(test for _, test in trials) for trials in grid.values()]
        for scale in SCALES:
            trials = grid[best] if scale == 1.0 else [train(name, best, seed, scale, splits) for seed in seeds]
            tests[scale][name] = [test for _, test in trials]
        own = tests[1.0][name]
        row: dict[str, object] = {"optimizer": name, "lr": best, "test": statistics.mean(own)}
        row |= {"std": statistics.stdev(own), "worst_lr": min(means), "spread_over_lr": max(means) - min(means)}
        row |= {f"init_x{scale:g}": statistics.mean(tests[scale][name]) for scale in SCALES}
        rows.append(row)
        print(row, flush=True)
    footer = (
        f"{len(FACTORS)} rates x {len(seeds)} seeds each, {EPOCHS} epochs, chosen on validation, test accuracy in %"
    )
    print(format_table(rows, title="digits, BatchNorm net 64-64-64-10", footer=footer))
    pairs = {f"init_x{scale:g}": compare(tests[scale]) for scale in SCALES}
    for name, table in pairs.items():
        print(format_table(table, title=f"paired differences, {name}", footer="95 % intervals over seeds"))
    path = Path(__file__).parent / "results" / "optimizers_digits.json"
    path.parent.mkdir(exist_ok=True)
    accuracies = {f"init_x{scale:g}": tests[scale] for scale in SCALES}
    document = {"settings": footer, "rows": rows, "pairs": pairs, "accuracies": accuracies}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
