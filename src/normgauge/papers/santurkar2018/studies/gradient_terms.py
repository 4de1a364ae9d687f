"""The sentences after Theorem 4.1: how large its terms are in a network that trains."""

from __future__ import annotations

import math
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from normgauge.lab.runs.train import train
from normgauge.measure.landscape.smoothing import LayerSmoothing, smoothing
from normgauge.objective import Objective
from normgauge.papers.language import Contrast, Figure, Record, Spec, empirical, register
from normgauge.papers.santurkar2018.studies._setting import prepare, spaced_steps, study

SHARE = 0.05  # of the squared gradient: less changes its norm by 3 % at most
SMALL: dict[str, Any] = {"steps": 300, "measures": 4}
BATCHES = 4  # the larger batch over the smaller
WHAT = {
    "mean_share": "removed by the mean",
    "yhat_share": "removed along the activations",
    "mean_by_chance": "either, by chance",
}


def run(spec: Spec, record: Record) -> None:
    """Train with BN, and take the terms apart at spaced steps, on one fixed batch and on one four times as large."""
    network, dataset = prepare(spec)
    steps, count = int(spec["steps"]), int(spec["batch"])

    def look(network: nn.Module, size: int) -> list[LayerSmoothing]:
        batch = (dataset.train[0][:size], dataset.train[1][:size])
        return [e for e in smoothing(Objective(network, dataset.loss, batch, mode="train")).measured if e.gain > 0]

    readings: dict[str, list[float]] = {}

    def watch(step: int, network: nn.Module) -> None:
        few, many = look(network, count), look(network, BATCHES * count)
        # of a mean loss the slopes shrink with the batch, so <1, g>^2 / |g|^2 = m share is compared, with |g|^2 like m
        grown = [math.log(b.mean_share / a.mean_share) / math.log(b.m / a.m) for a, b in zip(few, many, strict=True)]
        now = {
            "mean_share": fmean(entry.mean_share for entry in few),
            "yhat_share": fmean(entry.yhat_share for entry in few),
            "lowest_yhat_share": min(entry.yhat_share for entry in few),
            "mean_by_chance": fmean(1 / entry.m for entry in few),
            "mean_exponent": 2 + median(grown),
            "sigma_over_gamma": fmean(1 / entry.gain for entry in few),
            "sigma_spread": fmean(entry.sigma_high / entry.sigma_low for entry in few),
        }
        for name, value in now.items():
            record(step, f"{name}_now", value)
            readings.setdefault(name, []).append(value)

    train(
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        steps=steps,
        batch=count,
        seed=int(spec["seed"]),
        at=spaced_steps(steps, int(spec["measures"])),
        watch=watch,
    )
    for name, values in readings.items():
        record(steps, name, median(values))


empirical(
    "S1-inner",
    "gradient-terms",
    contrasts=(Contrast("", {"reading": "yhat_share"}, {"reading": "mean_by_chance"}, least=SHARE),),
)

empirical(
    "S1-mean",
    "gradient-terms",
    contrasts=(
        Contrast("mean_exponent", {}, least=1.5),
        Contrast("", {"reading": "mean_share"}, {"reading": "mean_by_chance"}, least=SHARE),
    ),
)

empirical(
    "S1-sigma",
    "gradient-terms",
    contrasts=(Contrast("sigma_over_gamma", {}, least=1.0), Contrast("sigma_spread", {}, least=2.0)),
)

register(
    "gradient-terms",
    sizes={
        size: [study("gradient-terms", size, "vgg", ["batch"], seeds=seeds, **changed)]
        for size, seeds, changed in (("smoke", 1, {}), ("small", 4, SMALL), ("medium", 6, {}), ("paper", 5, {}))
    },
    run=run,
    figures=(Figure({f"{name}_now": words for name, words in WHAT.items()}), Figure("sigma_over_gamma_now")),
)
