"""Fig. 1: training and test performance of VGG on CIFAR-10 with and without BN, with and without augmentation."""

from statistics import fmean

import torch
from torch import nn

from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.santurkar2018.studies._setting import (
    AS_TRAINED,
    batch_objective,
    prepare,
    record_distribution,
)


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


register("performance", run=run)
