"""Every registered normalizer on one task, and which of its properties predict the result.

Santurkar et al. 2018, sec. 3.3, and Akbar 2025, sec. 9.5.
"""

from statistics import fmean

import torch

from normgauge.papers.language import Record, Spec, build, fit, record_accuracies, register


@register("normalizer-zoo")
def run(spec: Spec, record: Record) -> None:
    """Train the same network under one normalizer at one rate."""
    network, dataset = build(spec)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    steps = int(spec["steps"])
    result = fit(spec, network, dataset, optimizer)
    record_accuracies(record, steps, network, dataset, "validation", "test")
    record(steps, "train_loss", fmean(result.losses[-10:]))
    result.whole()
