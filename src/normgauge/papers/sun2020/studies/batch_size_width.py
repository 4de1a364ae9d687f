"""App. 5.1: is the test accuracy largest where the batch is as large as the network is wide? Equal samples seen."""

from __future__ import annotations

import math
from collections.abc import Sequence
from itertools import pairwise
from statistics import fmean

import torch
from torch import nn

from normgauge.charts import against, heatmap
from normgauge.lab import data as datasets
from normgauge.lab.models import Normalized
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, empirical
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.rng import generator

CITE = ("sun2020",)
HIDDEN = 3


def run(spec: Spec, record: Record) -> None:
    """Train a BN network of this width with batches of this size until `samples` inputs were seen."""
    dataset = datasets.load(spec["data"])
    seed, size = int(spec["seed"]), min(int(spec["batch_size"]), int(spec["batch"]))
    steps = min(int(spec["steps"]), max(1, int(spec["samples"]) // size))
    network = build_network(int(spec["width"]), math.prod(dataset.shape), dataset.classes, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    done = train(network, dataset, optimizer, steps=steps, batch=size, seed=seed).whole()
    record(steps, "train_loss", fmean(done.losses[-10:]))
    for split in ("validation", "test"):
        record(steps, f"{split}_accuracy", evaluate(network, dataset, split).accuracy)


def build_network(width: int, inputs: int, classes: int, seed: int) -> nn.Sequential:
    """Return a ReLU network with three batch-normalized hidden layers of this width, weights by the seed."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise((inputs, *[width] * HIDDEN)):
        layers += [Normalized(nn.Linear(fan_in, fan_out), "batch", 0), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, classes))
    source = generator(seed)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if value.ndim == 2:
                value.copy_(torch.randn(value.shape, generator=source) * math.sqrt(2 / value.shape[1]))
            elif name.endswith("bias"):
                value.zero_()
    return network


def _grid(table: StudyTable) -> tuple[list[int], list[int]]:
    widths, sizes = ({row[knob] for row in table.rows} for knob in ("width", "batch_size"))
    return sorted(widths), sorted(sizes)


@empirical(
    "S4-E2",
    place="App 5.1, Conclusion",
    printed="conjecture: performance is maximal when batch size equals the width",
    study="batch-size-width",
    criterion="averaged over widths, the test accuracy at batch size = width minus the best at any other batch size is "
    "above 0",
    cite=CITE,
    note="The conclusion says that the batch size should be set close to the width.",
)
def _best_on_the_diagonal(table: StudyTable) -> Margins:
    widths, sizes = _grid(table)
    leads: dict[int, list[float]] = {}
    for width in widths:
        accuracies = {size: table.by_seed("test_accuracy", width=width, batch_size=size) for size in sizes}
        for seed, equal in accuracies.pop(width, {}).items():
            others = [values[seed] for values in accuracies.values() if seed in values]
            if others:
                leads.setdefault(seed, []).append(equal - max(others))
    return {"accuracy at batch size = width minus the best other": [fmean(leads[seed]) for seed in sorted(leads)]}


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracy over batch size per width, and the grid of both."""
    widths, sizes = _grid(table)
    rows, cells = [], []
    for width in widths:
        for size in sizes:
            mean = table.mean("test_accuracy", width=width, batch_size=size)
            rows.append(
                {"series": f"width {width}", "batch": size, "value": mean.mean, "low": mean.low, "high": mean.high}
            )
            cells.append({"batch": math.log2(size), "width": math.log2(width), "value": mean.mean})
    lines = against(
        rows,
        x="batch",
        low="low",
        high="high",
        x_scale="log",
        y_scale="linear",
        x_title="batch size",
        y_title="test accuracy",
    )
    grid = heatmap(
        cells, x="batch", y="width", x_title="log2 batch size", y_title="log2 width", value_title="test accuracy"
    )
    return [
        Figure("lines", lines, "Test accuracy over batch size at equal samples seen, learning rate tuned per cell."),
        Figure("grid", grid, "The same as a grid; the conjecture puts the best cells on the diagonal."),
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say the best batch size per width, and what batch = width gives."""
    widths, sizes = _grid(table)
    lines = []
    for width in widths:
        means = {size: table.mean("test_accuracy", width=width, batch_size=size).mean for size in sizes}
        best = max(means, key=lambda size: means[size])
        told = ", ".join(f"{size}: {value:.4f}" for size, value in means.items())
        lines.append(f"Width {width}: best at batch {best}; test accuracy by batch size {told}.")
    lines.append(
        f"Every cell saw {table.rows[0]['samples']} inputs; rates chosen on validation data: "
        + ", ".join(f"{size}: {_rates(table, size)}" for size in sizes)
        + "."
    )
    return lines


def _rates(table: StudyTable, size: int) -> str:
    return "/".join(f"{rate:g}" for rate in sorted({row["lr"] for row in table.where(batch_size=size)}))


def _study(seeds: int, widths: Sequence[int], sizes: Sequence[int], rates: Sequence[float], samples: int) -> Study:
    return Study(
        "batch-size-width",
        "Which batch size is best for which width?",
        scientific={"width": list(widths), "batch_size": list(sizes)},
        nuisance={"lr": list(rates)},
        fixed={"data": "digits", "samples": samples, "steps": samples, "batch": max(sizes)},
        seeds=seeds,
        tuning_seeds=min(2, seeds),
    )


register(
    Experiment(
        name="batch-size-width",
        papers=("S4",),
        place="App. 5.1, Conclusion (conjecture)",
        question="Is performance maximal where the batch size equals the width?",
        finding="Conjecture: when the width equals the batch size, it will maximize the performance (no experiment).",
        proxy="There is no published setting. Ours: three BN hidden layers on digits, every cell sees 6,000 inputs, "
        "learning rate tuned per cell on validation data.",
        sizes={
            "smoke": _study(3, (8, 16), (8, 16), (0.05,), 160),
            "small": _study(4, (8, 16, 32, 64), (8, 16, 32, 64, 128), (0.01, 0.05, 0.2), 6000),
            "paper": _study(10, (8, 16, 32, 64, 128), (4, 8, 16, 32, 64, 128, 256), (0.01, 0.03, 0.1, 0.3), 100000),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("test_accuracy", "validation_accuracy", "train_loss"),
        choose_by="validation_accuracy",
        minutes={"small": 0.5},
        cite=CITE,
    )
)
