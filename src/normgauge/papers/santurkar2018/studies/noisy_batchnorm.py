"""Fig. 2, 8: batch normalization with covariate shift put back on purpose, and the same noise without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import NonFiniteError
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.study import Study
from normgauge.papers.language import Contrast, Figure, Record, Spec, empirical, finding, fit, register
from normgauge.papers.santurkar2018.studies._setting import (
    AS_TRAINED,
    PANEL,
    batch_objective,
    blocks,
    prepare,
    record_distribution,
    spaced_steps,
    study,
)

NORMS = ("none", "batch", "noisy", "noise")
MOMENTS = {"mean_change": "means", "variance_change": "variances"}
CHANGES = (*MOMENTS, "relative_mean_change")
CHANCE = 0.1  # CIFAR-10
WINDOW = 10


def run(spec: Spec, record: Record) -> None:
    """Train, and take the middle layer's moments on one batch before and after single steps of training."""
    network, dataset = prepare(spec)
    steps = int(spec["steps"])
    before = spaced_steps(max(steps - 1, 1), int(spec["measures"]))
    last: dict[str, Tensor] = {}
    history: dict[str, list[float]] = {name: [] for name in CHANGES}

    def watch(step: int, network: nn.Module) -> None:
        mean, variance = _moments(network, dataset, int(spec["batch"]))
        if step - 1 in before and "mean" in last:
            change = float((mean - last["mean"]).square().mean().sqrt())
            values = (
                change,
                float((variance - last["variance"]).square().mean().sqrt()),
                change / float(variance.mean().sqrt()),
            )
            for name, value in zip(CHANGES, values, strict=True):
                history[name].append(value)
                record(step, f"{name}_now", value)
            record_distribution(record, step, batch_objective(copy.deepcopy(network), dataset, spec), histogram=False)
        last.update(mean=mean, variance=variance)

    result = fit(
        spec,
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        at={step + more for step in before for more in (0, 1)},
        watch=watch,
    )
    for end in range(WINDOW, len(result.losses) + 1, WINDOW):
        record(end, "loss", fmean(result.losses[end - WINDOW : end]))
    for name, values in history.items():
        finite = [value for value in values if math.isfinite(value)]
        record(steps, name, median(finite) if finite else math.nan)
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **AS_TRAINED).accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    record(steps, "diverged", float(result.diverged))
    if result.diverged and spec["norm"] != "noise":  # that noise alone prevents training is what is measured
        raise NonFiniteError(f"noisy-batchnorm: training diverged at step {result.diverged_at}")


def _moments(network: nn.Module, dataset: Dataset, batch: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance per unit of the middle layer as training would see them; nothing is written back."""
    twin = copy.deepcopy(network).train()
    layers = blocks(twin)
    outputs: list[Tensor] = []
    layers[len(layers) // 2].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        twin(dataset.train[0][:batch])
    units = outputs[0].transpose(0, 1).flatten(1).double()
    return units.mean(1), units.var(1, unbiased=False)


RATES = (0.03, 0.1, 0.3)


def _sizes(size: str, seeds: int, tried: int, rates: Sequence[float], **changed: Any) -> Study:
    return study("noisy-batchnorm", size, "vgg", NORMS, seeds=seeds, rates=rates, tuning_seeds=tried, **changed)


empirical(
    "S1-E2",
    "noisy-batchnorm",
    contrasts=(
        Contrast("train_accuracy", {"norm": "noisy"}, {"norm": "batch"}, least=-0.02, at={"model": "vgg"}),
        Contrast("train_accuracy", {"norm": "noisy"}, {"norm": "none"}, least=0.02, at={"model": "vgg"}),
    ),
)

empirical(
    "S1-noise",
    "noisy-batchnorm",
    contrasts=(Contrast("train_accuracy", less={"norm": "noise"}, least=-(CHANCE + 0.05), at={"model": "vgg"}),),
    premise=(Contrast("train_accuracy", {"norm": "none"}, least=CHANCE + 0.1, at={"model": "vgg"}),),
)

finding(
    "noisy-batchnorm",
    contrasts=[
        Contrast(name, {"norm": "noisy"}, {"norm": "none"}, least=0.3, at={"model": "vgg"}, log=True)
        for name in MOMENTS
    ],
)

register(
    "noisy-batchnorm",
    sizes={
        "smoke": _sizes("smoke", 1, 1, (0.1,)),
        "small": _sizes("small", 6, 2, RATES, steps=600),
        "medium": _sizes("medium", 6, 2, RATES),
        "paper": _sizes("paper", 5, 2, RATES),
    },
    run=run,
    figures=(Figure("loss"), Figure("mean_change_now"), Figure("variance_change_now"), PANEL),
    choose_by="train_accuracy",
)
