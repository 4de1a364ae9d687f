"""The sentences after Theorem 4.1: how large its terms are in a network that trains."""

import math
from statistics import fmean, median

from torch import nn

from normgauge.measure.landscape.smoothing import LayerSmoothing, smoothing
from normgauge.objective import Objective
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.santurkar2018.studies._setting import follow, prepare

BATCHES = 4  # the larger batch over the smaller


@register("gradient-terms")
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

    follow(spec, network, dataset, watch)
    for name, values in readings.items():
        record(steps, name, median(values))
