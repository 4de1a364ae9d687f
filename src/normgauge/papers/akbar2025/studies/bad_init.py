"""S0 Experiment 4 and S3: training from bad weights, the spread over initializations, and (c W, c^2 eta)."""

import math
from collections.abc import Callable

import torch
from torch import nn

from normgauge.lab.data import Dataset
from normgauge.nn import init
from normgauge.papers.language import Record, Spec, fit, record_accuracies, register
from normgauge.papers.networks import dataset, relu_network

SCALES = {"small": 0.1, "large": 10.0}  # on every weight of He's draw: 10^5 on the output of the plain network
WIDTH, DEPTH = 32, 5


@register("bad-init")
def run(spec: Spec, record: Record) -> None:
    """Train from scaled weights (`scale`), or from a scheme times a gain (`init`)."""
    digits = dataset(spec["data"])
    sizes = (math.prod(digits.shape), *[WIDTH] * (DEPTH - 1), digits.classes)
    network = relu_network(sizes, spec["norm"], int(spec["seed"]), dtype=torch.float32)
    if "scale" in spec:
        for module in network.modules():
            if isinstance(module, nn.Linear):
                module.weight.data.mul_(SCALES[spec["scale"]])
    else:
        _initialize(network, spec["init"], digits, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    steps = int(spec["steps"])
    course = fit(spec, network, digits, optimizer)
    for step in range(0, len(course.losses), max(1, steps // 25)):
        record(step, "loss", course.losses[step])
    # That a network cannot be trained is what is measured here: one that is no longer finite decides for the first
    # class, and its accuracy is that of a constant.
    record_accuracies(record, steps, network, digits, "train", "validation")
    record(steps, "diverged", float(course.diverged))


def _initialize(network: nn.Module, words: str, digits: Dataset, seed: int) -> None:
    """Draw the weights anew as `scheme x gain` says."""
    scheme, gain = words.split(" x ")
    size = float(gain)
    draws: dict[str, Callable[[], nn.Module]] = {
        "he": lambda: init.he(network, gain=math.sqrt(2.0) * size, seed=seed),
        "glorot": lambda: init.glorot(network, gain=size, seed=seed),
        "orthogonal": lambda: init.orthogonal(network, gain=size, seed=seed),
        "lsuv": lambda: init.lsuv(network, digits.train[0][:256], gain=size, seed=seed),
    }
    draws[scheme]()
