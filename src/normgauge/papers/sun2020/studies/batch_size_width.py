"""App. 5.1: is the test accuracy largest where the batch is as large as the network is wide? Equal samples seen."""

import math
from itertools import pairwise
from statistics import fmean

import torch
from torch import nn

from normgauge.lab import data as datasets
from normgauge.nn import GhostBatchNorm
from normgauge.papers.language import Record, Spec, fit, record_accuracies, register
from normgauge.rng import generator

HIDDEN = 3


@register("batch-size-width")
def run(spec: Spec, record: Record) -> None:
    """Train a network of this width whose statistics are of `ratio` times as many samples; SGD's batch is the same."""
    dataset = datasets.load(spec["data"])
    seed, steps, width = int(spec["seed"]), int(spec["steps"]), int(spec["width"])
    network = build_network(width, round(float(spec["ratio"]) * width), math.prod(dataset.shape), dataset.classes, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    done = fit(spec, network, dataset, optimizer).whole()
    record(steps, "train_loss", fmean(done.losses[-10:]))
    record_accuracies(record, steps, network, dataset, "validation", "test")


def build_network(width: int, ghost: int, inputs: int, classes: int, seed: int) -> nn.Sequential:
    """Return a ReLU network with three hidden layers of this width, normalized over `ghost` samples, by the seed."""
    layers: list[nn.Module] = [nn.Flatten()]
    for fan_in, fan_out in pairwise((inputs, *[width] * HIDDEN)):
        layers += [nn.Linear(fan_in, fan_out), GhostBatchNorm(fan_out, ghost), nn.ReLU()]
    network = nn.Sequential(*layers, nn.Linear(width, classes))
    source = generator(seed)
    with torch.no_grad():
        for name, value in network.named_parameters():
            if value.ndim == 2:
                value.copy_(torch.randn(value.shape, generator=source) * math.sqrt(2 / value.shape[1]))
            elif name.endswith("bias"):
                value.zero_()
    return network
