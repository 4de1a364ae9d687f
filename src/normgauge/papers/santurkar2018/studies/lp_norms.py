"""Fig. 5, 6, 9, 12, 13: l_p normalization against BN and none: training, smoothness, distributions."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import nn

from normgauge.charts import curves
from normgauge.errors import NonFiniteError
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.measure.landscape.landscape import landscape
from normgauge.measure.signal.activations import activations
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.santurkar2018.studies._setting import (
    AS_TRAINED,
    PROXY,
    batch_objective,
    blocks,
    prepare,
    spaced_steps,
    study,
)
from normgauge.papers.studies import register
from normgauge.records import Spec

CITE = ("santurkar2018",)
NORMS = ("none", "batch", "l1", "l2", "linf")
MODELS = ("vgg", "dln")
LP = ("l1", "l2", "linf")
MULTIPLES = {"vgg": (0.5, 2.0, 4.0), "dln": (0.01, 1.0, 30.0)}
#: The line search is taken at the paper's rates for all arms: equal steps are compared whatever rate an arm likes.
LOOK = {"vgg": 0.1, "dln": 1e-3}
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)
BINS = 24


def run(spec: Spec, record: Record) -> None:
    """Train; look along the gradient and at one layer's activations at spaced steps; record the end."""
    network, dataset = prepare(spec)
    steps, model = int(spec["steps"]), str(spec["model"])
    middle = _middle(network)
    history: dict[str, list[float]] = {"loss_range": [], "gradient_distance": [], "effective_beta": []}

    def watch(step: int, network: nn.Module) -> None:
        objective = batch_objective(network, dataset, spec)
        view = landscape(objective, steps=[LOOK[model] * m for m in MULTIPLES[model]])
        extremes = (view.loss_variation, view.max_gradient_distance, view.max_effective_beta)
        for name, value in zip(history, extremes, strict=True):
            history[name].append(value)
            record(step, f"{name}_now", value)
        record(step, "loss", view.loss)
        values = next(iter(activations(objective, layers=middle).values.values()))
        _record_distribution(record, step, values, histogram=step == steps)

    result = train(
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        steps=steps,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
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
    if result.diverged:
        raise NonFiniteError(f"lp-norms: training diverged at step {result.diverged_at}")


def _middle(network: nn.Module) -> str:
    """Return the name of the module whose outputs are looked at: the normalizer of the middle layer, or the layer."""
    chosen = blocks(network)[len(blocks(network)) // 2]
    part = chosen.norm if list(chosen.norm.parameters()) else chosen.layer
    return next(name for name, module in network.named_modules() if module is part)


def _record_distribution(record: Record, step: int, values: torch.Tensor, *, histogram: bool) -> None:
    ordered = values.sort().values
    for level in LEVELS:
        place = min(int(level * len(ordered)), len(ordered) - 1)
        record(step, "activation_quantile", float(ordered[place]), layer=f"{level:g}")
    record(step, "activation_mean", float(values.mean()))
    record(step, "activation_deviation", float(values.std(unbiased=False)))
    if histogram and bool(torch.isfinite(values).all()):
        low, high = float(ordered[0]), float(ordered[-1]) + 1e-9
        width = (high - low) / BINS
        for number, count in enumerate(torch.histc(values, BINS, low, high).tolist()):
            middle = low + (number + 0.5) * width
            record(step, "activation_density", count / (len(values) * width), layer=f"{middle:.5g}")


@empirical(
    "S1-E4",
    place="sec 3.3, Fig 5",
    printed="l1, l2, linf normalization (scale computed before the mean shift) perform comparably to BN",
    study="lp-norms",
    criterion="on VGG, training accuracy of each at most 0.02 below BN's",
    cite=CITE,
)
def _comparable(table: StudyTable) -> Margins:
    return {
        f"0.02 + ({norm} minus batch), training accuracy": [
            0.02 + value for value in table.paired("train_accuracy", norm, "batch", model="vgg")
        ]
        for norm in LP
    }


@empirical(
    "S1-l1",
    place="sec 3.3",
    printed="for deep linear networks, l1-normalization performs even better than BatchNorm",
    study="lp-norms",
    criterion="on the deep linear network the final training loss with BN is above that with l1",
    cite=CITE,
    note="Not in the list the ledger started from.",
)
def _l1_wins(table: StudyTable) -> Margins:
    return {"log10 of final training loss, batch over l1": table.paired_log10("train_loss", "batch", "l1", model="dln")}


@finding(
    "lp-norms",
    printed="l1, l2 and linf normalization train better than no normalization",
    criterion="for each: training accuracy on VGG above that without normalization, and final training loss on the "
    "deep linear network below it",
)
def _better_than_none(table: StudyTable) -> Margins:
    accuracies = {
        f"vgg: training accuracy, {norm} minus none": table.paired("train_accuracy", norm, "none", model="vgg")
        for norm in LP
    }
    losses = {
        f"dln: log10 of training loss, none over {norm}": table.paired_log10("train_loss", "none", norm, model="dln")
        for norm in LP
    }
    return {**accuracies, **losses}


def figures(table: StudyTable) -> list[Figure]:
    """Draw training, smoothness and distributions of one activation, per model."""
    drawn = []
    for model, place in zip(MODELS, ("12", "13"), strict=True):
        loss = table.band("loss", "norm", model=model)
        drawn.append(
            Figure(
                f"{model}-loss",
                curves(loss, y="mean", low="low", high="high", order=NORMS, y_title="training loss", y_scale="log"),
                f"{model}: training loss, each arm at its tuned rate; the band is the range over seeds (the "
                "paper's Fig. 5).",
            )
        )
        distance = table.band("gradient_distance_now", "norm", model=model)
        drawn.append(
            Figure(
                f"{model}-gradient-distance",
                curves(distance, y="mean", order=NORMS, y_title="largest |grad' - grad|", y_scale="log"),
                f"{model}: change of the gradient along itself, over the same multiples of the paper's rate for all "
                f"arms (its Fig. {place}c).",
            )
        )
        drawn.append(
            Figure(
                f"{model}-activations",
                curves(_quantiles(table, model), y="median", low="low", high="high", order=NORMS, y_title="activation"),
                f"{model}: one activation of the middle layer over training, median and 5 to 95 % quantiles of one "
                f"seed (the paper's Fig. {'6' if model == 'vgg' else '9'}).",
            )
        )
        density = [
            {"series": row["norm"], "activation": float(row["layer"]), "density": row["value"]}
            for row in table.curve("activation_density", model=model, seed=0)
        ]
        drawn.append(
            Figure(
                f"{model}-histogram",
                curves(density, x="activation", y="density", order=NORMS, y_scale="linear", y_title="density"),
                f"{model}: histogram of the same activation at the end of training ({BINS} bins between its extremes).",
            )
        )
    return drawn


def _quantiles(table: StudyTable, model: str) -> list[dict[str, float | str]]:
    quantiles: dict[tuple[str, int], dict[str, float]] = {}
    for row in table.curve("activation_quantile", model=model, seed=0):
        quantiles.setdefault((row["norm"], row["step"]), {})[row["layer"]] = row["value"]
    return [
        {"series": norm, "step": step, "median": values["0.5"], "low": values["0.05"], "high": values["0.95"]}
        for (norm, step), values in quantiles.items()
        if len(values) == len(LEVELS)
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say accuracies, losses and the rates that were chosen, and how the landscape compares."""
    accuracy = ", ".join(
        f"{norm} {table.mean('train_accuracy', model='vgg', norm=norm).mean:.3f} (rate {rate:g})"
        for norm, rate in _rates(table, "vgg").items()
    )
    loss = ", ".join(
        f"{norm} {table.mean('train_loss', model='dln', norm=norm).mean:.3g} (rate {rate:g})"
        for norm, rate in _rates(table, "dln").items()
    )
    lines = [
        f"vgg: training accuracy, batch statistics, at the tuned rate: {accuracy}.",
        f"dln: training loss at the tuned rate: {loss}.",
    ]
    for model in MODELS:
        orders = {norm: table.paired_log10("gradient_distance", "none", norm, model=model) for norm in NORMS[1:]}
        ratios = ", ".join(f"{norm} {10 ** fmean(values):.3g}" for norm, values in orders.items() if values)
        lines.append(f"{model}: gradient distance along the gradient, none over each norm: {ratios}.")
        spreads = {
            norm: median([row["value"] for row in table.curve("activation_deviation", model=model, norm=norm)])
            for norm in _rates(table, model)
        }
        shown = ", ".join(f"{norm} {value:.3g}" for norm, value in spreads.items())
        lines.append(f"{model}: deviation of one activation of the middle layer, median over training: {shown}.")
    return lines


def _rates(table: StudyTable, model: str) -> dict[str, float]:
    """Return norm -> its tuned rate, for the arms of which a run finished."""
    return {row["norm"]: float(row["lr"]) for norm in NORMS for row in table.where(model=model, norm=norm)}


def _sizes(size: str, seeds: int, tried: int, rates: Mapping[str, Sequence[float]]) -> list[Study]:
    question = "Do l_p norms train as well as BN?"
    return [
        study(
            "lp-norms",
            question,
            size,
            model,
            NORMS,
            seeds=seeds,
            rates=rates[model],
            tuning_seeds=tried,
            **_small_knobs(size, model),
        )
        for model in MODELS
    ]


def _small_knobs(size: str, model: str) -> dict[str, Any]:
    steps = {"steps": 500} if model == "vgg" else {}
    return {"measures": 6, **steps} if size == "small" else {}


register(
    Experiment(
        name="lp-norms",
        papers=("S1",),
        place="sec. 3.3, Fig. 5, 6, 9, 12, 13",
        question="Do normalizations by the l1, l2 and linf norm train as well as BN, with a landscape as smooth?",
        finding="Yes, although they do not fix the activations' moments; on the deep linear network l1 is even better "
        "than BN.",
        proxy=PROXY
        + "In this study 500 steps of the VGG; the rate is tuned for every arm on training performance, as the paper "
        "says it did, on the first two seeds.",
        sizes={
            "smoke": _sizes("smoke", 1, 1, {"vgg": (0.1,), "dln": (1e-3,)}),
            "small": _sizes("small", 6, 2, {"vgg": (0.03, 0.1, 0.3), "dln": (3e-4, 1e-3, 3e-3)}),
            "paper": _sizes("paper", 5, 2, {"vgg": (0.03, 0.1, 0.3), "dln": (3e-4, 1e-3, 3e-3)}),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("train_accuracy", "test_accuracy", "train_loss", "loss_range", "gradient_distance", "effective_beta"),
        choose_by="score",
        data=("cifar10",),
        minutes={"small": 8.5},
        cite=CITE,
    )
)
