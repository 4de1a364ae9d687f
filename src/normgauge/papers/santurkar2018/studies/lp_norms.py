"""Fig. 5, 6, 9, 12, 13: l_p normalization against BN and none: training, smoothness, distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import nn

from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.study import Study
from normgauge.measure.landscape.landscape import landscape
from normgauge.papers.language import EACH, SMALLEST, Contrast, Figure, Record, Spec, empirical, finding, fit, register
from normgauge.papers.santurkar2018.studies._setting import (
    AS_TRAINED,
    batch_objective,
    prepare,
    record_distribution,
    spaced_steps,
    study,
)

NORMS = ("none", "batch", "l1", "l2", "linf")
MODELS = ("vgg", "dln")
LP = ("l1", "l2", "linf")
MULTIPLES = {"vgg": (0.5, 2.0, 4.0), "dln": (0.01, 1.0, 30.0)}
#: The line search is taken at the paper's rates for all arms: equal steps are compared whatever rate an arm likes.
LOOK = {"vgg": 0.1, "dln": 1e-3}


def run(spec: Spec, record: Record) -> None:
    """Train; look along the gradient and at one layer's activations at spaced steps; record the end."""
    network, dataset = prepare(spec)
    steps, model = int(spec["steps"]), str(spec["model"])
    history: dict[str, list[float]] = {"loss_range": [], "gradient_distance": [], "effective_beta": []}

    def watch(step: int, network: nn.Module) -> None:
        objective = batch_objective(network, dataset, spec)
        view = landscape(objective, steps=[LOOK[model] * m for m in MULTIPLES[model]])
        extremes = (view.loss_variation, view.max_gradient_distance, view.max_effective_beta)
        for name, value in zip(history, extremes, strict=True):
            history[name].append(value)
            record(step, f"{name}_now", value)
        record(step, "loss", view.loss)
        record_distribution(record, step, objective, histogram=step == steps)

    result = fit(
        spec,
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        at=spaced_steps(steps, int(spec["measures"])),
        watch=watch,
    )
    for name, values in history.items():
        finite = [value for value in values if math.isfinite(value)]
        record(steps, name, median(finite) if finite else math.nan)
    size = int(spec["batch"])
    loss = evaluate(network, dataset, "train", statistics="batch", limit=size, batch=size).loss
    loss = loss if math.isfinite(loss) else math.inf
    record(steps, "train_loss", loss)
    score = -loss
    if model == "vgg":
        score = evaluate(network, dataset, batch=size, **AS_TRAINED).accuracy
        record(steps, "train_accuracy", score)
        record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    record(steps, "score", score)
    result.whole()


RATES = {"vgg": (0.03, 0.1, 0.3), "dln": (3e-4, 1e-3, 3e-3)}


def _sizes(size: str, seeds: int, tried: int, rates: Mapping[str, Sequence[float]]) -> list[Study]:
    changed: dict[str, dict[str, Any]] = {"vgg": {"measures": 6, "steps": 500}, "dln": {"measures": 6}}
    return [
        study("lp-norms", size, model, NORMS, seeds=seeds, rates=rates[model], tuning_seeds=tried, **own)
        for model, own in ((model, changed[model] if size == "small" else {}) for model in MODELS)
    ]


empirical(
    "S1-E4",
    "lp-norms",
    contrasts=[
        Contrast("train_accuracy", {"norm": norm}, {"norm": "batch"}, least=-0.02, at={"model": "vgg"}) for norm in LP
    ],
)

empirical(
    "S1-l1",
    "lp-norms",
    contrasts=(Contrast("train_loss", {"norm": "batch"}, {"norm": "l1"}, least=0.1, at={"model": "dln"}, log=True),),
)

finding(
    "lp-norms",
    contrasts=(
        *(Contrast("train_accuracy", {"norm": norm}, {"norm": "none"}, least=0.02, at={"model": "vgg"}) for norm in LP),
        *(
            Contrast("train_loss", {"norm": "none"}, {"norm": norm}, least=0.1, at={"model": "dln"}, log=True)
            for norm in LP
        ),
    ),
)

register(
    "lp-norms",
    sizes={
        "smoke": _sizes("smoke", 1, 1, {"vgg": (0.1,), "dln": (1e-3,)}),
        "small": _sizes("small", 6, 2, RATES),
        "medium": _sizes("medium", 6, 2, RATES),
        "paper": _sizes("paper", 5, 2, RATES),
    },
    run=run,
    figures=(
        Figure("loss", where={"model": EACH}),
        Figure("gradient_distance_now", where={"model": EACH}),
        Figure("loss_range_now", where={"model": EACH}),
        Figure("effective_beta_now", where={"model": EACH}),
        Figure("activation_density", x="layer", where={"model": EACH, "seed": SMALLEST}),
    ),
    choose_by="score",
)
