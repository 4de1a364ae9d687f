"""Sec. 7.2: by how much does the confidence of a network exceed its accuracy, with and without BN?"""

import torch
from torch import Tensor, nn

from normgauge.papers.language import Record, Spec, build, fit, record_accuracies, register


def overconfidence(network: nn.Module, inputs: Tensor, targets: Tensor) -> float:
    """Return the mean of the largest class probability minus the accuracy; positive: surer than right."""
    with torch.no_grad():
        scores, classes = network(inputs).softmax(1).max(1)
    return float(scores.mean() - (classes == targets).float().mean())


@register("overconfidence")
def run(spec: Spec, record: Record) -> None:
    """Train by SGD with momentum, then hold confidence against accuracy, with stored statistics."""
    (network, dataset), steps = build(spec, model="mlp"), int(spec["steps"])
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    fit(spec, network, dataset, optimizer).whole()
    network.eval()
    record_accuracies(record, steps, network, dataset, "train", "validation", "test")
    for split in ("train", "test"):
        record(steps, f"{split}_overconfidence", overconfidence(network, *getattr(dataset, split)))
