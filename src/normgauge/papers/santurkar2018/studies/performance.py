"""Fig. 1: training and test performance of VGG on CIFAR-10 with and without BN, with and without augmentation."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from statistics import fmean

import torch
from torch import nn

from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.study import Study
from normgauge.papers.language import EACH, Contrast, Figure, Record, Spec, empirical, finding, fit, register
from normgauge.papers.santurkar2018.studies._setting import (
    AS_TRAINED,
    PANEL,
    batch_objective,
    prepare,
    record_distribution,
    study,
)

NORMS = ("none", "batch")


def run(spec: Spec, record: Record) -> None:
    """Train, recording loss and test accuracy over training, and every accuracy at the end."""
    network, dataset = prepare(spec)
    steps = int(spec["steps"])
    window = max(1, steps // 15)

    def watch(step: int, network: nn.Module) -> None:
        record(step, "test_accuracy_now", evaluate(network, dataset, limit=500).accuracy)
        record_distribution(record, step, batch_objective(network, dataset, spec), histogram=False)

    result = fit(
        spec,
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        at=range(window, steps + 1, window),
        watch=watch,
        augment=bool(spec["augmentation"]),
    )
    for end in range(window, len(result.losses) + 1, window):
        record(end, "loss", fmean(result.losses[end - window : end]))
    record(steps, "train_loss", fmean(result.losses[-window:]))
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **AS_TRAINED).accuracy)
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    result.whole()


def _sizes(size: str, seeds: int, tried: int, rates: Sequence[float]) -> Study:
    arms = {"augmentation": [False, True]}
    return study("performance", size, "vgg", NORMS, seeds=seeds, rates=rates, tuning_seeds=tried, scientific=arms)


empirical(
    "S1-E1",
    "performance",
    contrasts=(
        Contrast(
            "test_accuracy", {"norm": "batch"}, {"norm": "none"}, least=0.015, at={"model": "vgg", "augmentation": EACH}
        ),
    ),
)

finding(
    "performance",
    contrasts=(Contrast("train_loss", {"norm": "none"}, {"norm": "batch"}, least=0.05, at={"augmentation": EACH}),),
)

register(
    "performance",
    sizes={
        "smoke": _sizes("smoke", 1, 1, (0.1,)),
        "small": _sizes("small", 6, 2, (0.03, 0.1, 0.3)),
        "medium": _sizes("medium", 6, 2, (0.03, 0.1, 0.3)),
        "paper": _sizes("paper", 5, 2, (0.03, 0.1, 0.3)),
    },
    run=run,
    figures=(
        Figure("loss", series=("norm", "augmentation")),
        Figure("test_accuracy_now", series=("norm", "augmentation")),
        replace(PANEL, where={**PANEL.where, "augmentation": EACH}),
    ),
    choose_by="validation_accuracy",
)
