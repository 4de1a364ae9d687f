"""S0 sec. 1.1, 5.1, 7.1 and S1: the largest learning rate that trains, per normalizer, predicted and observed."""

import math

import torch
from torch import nn

from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.models.normalized import normalized_layers
from normgauge.measure.curvature.stable_rate import stable_rate
from normgauge.objective import Objective
from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.networks import dataset

FACTOR = 3.0  # on the weights before the normalizers, for the second search
TRAINED = 0.5  # of the first loss


@register("learning-rate-range")
def run(spec: Spec, record: Record) -> None:
    """Predict 2 / lambda_max at the start, observe it in full-batch runs, and search the largest rate that trains."""
    digits = dataset(spec["data"])
    rows = int(spec["measured"])
    network = _network(spec, digits)
    batch = (digits.train[0][:rows], digits.train[1][:rows])
    objective = Objective(network, nn.functional.cross_entropy, batch, mode="train")
    rates = stable_rate(objective, iterations=int(spec["probe_steps"]), tol=0.2)
    record(0, "lambda_max", rates.top_eigenvalue, kind="estimate")
    record(0, "predicted_rate", rates.predicted, kind="estimate")
    record(0, "observed_start_rate", rates.observed, kind="estimate", status=rates.status)
    steps = int(spec["steps"])
    record(steps, "largest_stable_rate", _search(spec, record, digits, 1.0, "final_loss"))
    record(steps, "largest_stable_rate_scaled", _search(spec, record, digits, FACTOR, "final_loss_scaled"))


def _network(spec: Spec, digits: Dataset, factor: float = 1.0) -> nn.Module:
    """Build the network with the weights of its normalized layers times a factor; weight normalizers keep g."""
    network = models.build(spec["model"], spec["norm"], digits.shape, digits.classes, int(spec["seed"])).float()
    for part in normalized_layers(network):
        for value in part.layer.parameters():
            if value.ndim > 1 and value.shape[1] > 1:
                value.data.mul_(factor)
    return network


def _search(spec: Spec, record: Record, digits: Dataset, factor: float, reading: str) -> float:
    """Return the largest rate of the grid after which the loss has halved, from the top down; nan if none does.

    A search from the bottom would stop at the first rate that fails; this one cannot miss a larger one that trains.
    """
    rate, lowest = float(spec["highest"]), float(spec["lowest"])
    while rate >= lowest:
        network = _network(spec, digits, factor)
        optimizer = torch.optim.SGD(network.parameters(), lr=rate)
        course = fit(spec, network, digits, optimizer)
        recent = course.losses[-10:]
        last = sum(recent) / len(recent)
        ended = not course.diverged and math.isfinite(last)
        record(0, reading, last / course.losses[0] if ended else math.nan, layer=f"{rate:.6g}")
        if ended and last <= TRAINED * course.losses[0]:
            return rate
        rate /= 2
    return math.nan
