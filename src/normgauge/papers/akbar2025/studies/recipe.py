"""S0 sec. 9.1: normalizer x optimizer x schedule x decay, the rate tuned in every cell, and the advice of each."""

import math
from functools import partial

import torch
from torch import nn

from normgauge.papers.language import Record, Spec, build, fit, record_accuracies, register

#: A cell's rate is its optimizer's usual rate times the tuned factor.
USUAL = {"sgd": 0.01, "adam": 1e-3}


@register("recipe")
def run(spec: Spec, record: Record) -> None:
    """Train the cell's network and record its accuracies."""
    (network, dataset), steps = build(spec, model="mlp"), int(spec["steps"])
    schedule = partial(_factor, str(spec["schedule"]), steps)
    result = fit(spec, network, dataset, _optimizer(network, spec), schedule=schedule)
    record_accuracies(record, steps, network, dataset, "train", "validation", "test")
    record(steps, "weight_norm", math.sqrt(sum(float(p.detach().square().sum()) for p in network.parameters())))
    result.whole()


def _factor(schedule: str, steps: int, step: int) -> float:
    """Return what the rate is multiplied by: 1; 1, 0.1 from half and 0.01 from three quarters on; half a cosine."""
    if schedule == "constant":
        return 1.0
    if schedule == "step":
        return float(0.1 ** ((2 * step >= steps) + (4 * step >= 3 * steps)))
    return 0.5 * (1 + math.cos(math.pi * step / steps))


def _optimizer(network: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    rate, decay = USUAL[spec["optimizer"]] * float(spec["factor"]), float(spec["decay"])
    if spec["optimizer"] == "sgd":
        return torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=decay, fused=True)
    return torch.optim.Adam(network.parameters(), lr=rate, weight_decay=decay, fused=True)
