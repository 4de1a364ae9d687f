"""Every registered normalizer on one task, and which of its properties predict the result.

Santurkar et al. 2018, sec. 3.3, and Akbar 2025, sec. 9.5.
"""

from statistics import fmean

import torch

from normgauge.lab import data, models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, fit, register


@register("normalizer-zoo")
def run(spec: Spec, record: Record) -> None:
    """Train the same network under one normalizer at one rate."""
    dataset = data.load(spec["data"])
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    steps = int(spec["steps"])
    result = fit(spec, network, dataset, optimizer)
    for split in ("validation", "test"):
        record(steps, f"{split}_accuracy", evaluate(network, dataset, split).accuracy)
    record(steps, "train_loss", fmean(result.losses[-10:]))
    result.whole()
