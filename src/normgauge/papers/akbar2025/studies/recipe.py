"""S0 sec. 9.1: normalizer x optimizer x schedule x decay, the rate tuned in every cell, and the advice of each."""

from __future__ import annotations

import math
from functools import partial

import torch
from torch import nn

from normgauge.lab import data, models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import EACH, Contrast, Figure, Record, Spec, empirical, fit, grid, register

DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
SCHEDULES = ("constant", "step", "cosine")
#: A cell's rate is its optimizer's usual rate times the tuned factor.
USUAL = {"sgd": 0.01, "adam": 1e-3}


def run(spec: Spec, record: Record) -> None:
    """Train the cell's network and record its accuracies."""
    dataset = data.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = models.build("mlp", spec["norm"], dataset.shape, dataset.classes, seed)
    result = fit(
        spec, network, dataset, _optimizer(network, spec), schedule=partial(_factor, str(spec["schedule"]), steps)
    )
    record(steps, "train_accuracy", evaluate(network, dataset, "train").accuracy)
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
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


empirical(
    "S0-decay",
    "recipe",
    contrasts=(
        Contrast(
            "test_accuracy",
            {"norm": "none", "decay": DECAYS[1:]},
            {"norm": "none", "decay": 0.0},
            least=0.005,
            control=({"norm": "batch", "decay": DECAYS[1:]}, {"norm": "batch", "decay": 0.0}),
            over=("optimizer", "schedule", "decay"),
        ),
    ),
)

empirical(
    "S0-sgd",
    "recipe",
    contrasts=(
        Contrast(
            "test_accuracy",
            {"optimizer": "sgd"},
            {"optimizer": "adam"},
            least=-0.01,
            at={"norm": "batch"},
            over=("schedule", "decay"),
        ),
    ),
    premise=(
        Contrast(
            "test_accuracy",
            {"optimizer": "adam"},
            {"optimizer": "sgd"},
            least=0.02,
            at={"norm": "none"},
            over=("schedule", "decay"),
        ),
    ),
)

register(
    "recipe",
    sizes=grid(
        "recipe",
        {"norm": ("none", "batch", "layer"), "optimizer": list(USUAL), "schedule": SCHEDULES, "decay": DECAYS},
        {"factor": (1.0, 3.0, 10.0)},
        smoke={"factor": (1.0,), "decay": (0.0, 1e-2), "seeds": 1, "data": "digits", "steps": 4, "batch": 64},
        small={"seeds": 5, "tuning_seeds": 1, "data": "cifar10:2000/1000/2000", "steps": 200, "batch": 64},
        paper={
            "factor": (0.1, 1 / 3, 1.0, 3.0, 10.0, 30.0),
            "seeds": 5,
            "data": "cifar10",
            "steps": 20000,
            "batch": 128,
        },
    ),
    run=run,
    figures=(Figure("test_accuracy", x="decay", where={"norm": EACH}, series=("optimizer", "schedule")),),
    choose_by="validation_accuracy",
)
