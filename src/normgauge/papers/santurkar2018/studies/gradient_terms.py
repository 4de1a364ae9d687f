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
from normgauge.papers.court import Contrast, empirical
from normgauge.papers.experiment import Experiment, Record
from normgauge.papers.figures import Figure
from normgauge.papers.santurkar2018.studies._setting import PROXY, prepare, spaced_steps, study
from normgauge.papers.studies import register
from normgauge.records import Spec

SHARE = 0.05  # of the squared gradient: less changes its norm by 3 % at most
SMALL: dict[str, Any] = {"steps": 300, "measures": 4}
BATCHES = 4  # the larger batch over the smaller
CONTROL = "the value without any relation between gradient and activation: a share of 1/m, m the values of a group"
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
    place="text after Theorem 4.1",
    printed="the inner product <g,yh> is bounded away from zero in practice: a gradient is rarely uncorrelated to its "
    "variable",
    study="gradient-terms",
    contrasts=(Contrast("", {"reading": "yhat_share"}, {"reading": "mean_by_chance"}, least=SHARE),),
    control=CONTROL + "; the mean over layers, the median over training",
    note="In theory it is dL/dgamma and vanishes at a stationary gamma (S1-T4.2c).",
)

empirical(
    "S1-mean",
    place="text after Theorem 4.1",
    printed="<1,g>^2 grows quadratically in the dimension, so the middle term is significant",
    study="gradient-terms",
    contrasts=(
        Contrast("mean_exponent", {}, least=1.5),
        Contrast("", {"reading": "mean_share"}, {"reading": "mean_by_chance"}, least=SHARE),
    ),
    control=CONTROL + ", an exponent of 1; the dimension grows with the batch, at the same weights",
)

empirical(
    "S1-sigma",
    place="text after Theorem 4.1",
    printed="sigma tends to be large and highly uncontrolled in practice, so the factor flattens",
    study="gradient-terms",
    contrasts=(
        Contrast("sigma_over_gamma", {}, least=1.0),
        Contrast("sigma_spread", {}, least=2.0),
    ),
    control="sigma = gamma, where the factor is 1; uncontrolled is read as a factor of two among the units of a layer",
)

register(
    Experiment(
        name="gradient-terms",
        papers=("S1",),
        place="sec. 4.1, after Theorem 4.1",
        question="How much of the gradient does BN remove in a network that trains, and is gamma / sigma small?",
        finding="The gradient is rarely uncorrelated to its variable, the mean's term grows quadratically in the "
        "dimension, and sigma is large and uncontrolled, so that the landscape flattens.",
        proxy=PROXY + "Here the VGG alone, with BN, at small size for 300 steps; shares by `ng.smoothing` on one fixed "
        "batch of training data.",
        sizes={
            size: [study("gradient-terms", size, "vgg", ["batch"], seeds=seeds, **changed)]
            for size, seeds, changed in (("smoke", 1, {}), ("small", 4, SMALL), ("medium", 6, {}), ("paper", 5, {}))
        },
        run=run,
        figures=(
            Figure({f"{name}_now": words for name, words in WHAT.items()}),
            Figure("sigma_over_gamma_now"),
        ),
        data=("cifar10",),
        minutes={"small": 3.0},
    )
)
