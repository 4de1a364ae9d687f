"""Fig. 4, 10, 11: loss and gradient along the gradient over training, with and without BN."""

from __future__ import annotations

import math
from statistics import fmean, median

import torch
from torch import nn

from normgauge.charts import against, curves
from normgauge.errors import NonFiniteError
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.measure.landscape.landscape import Landscape, landscape
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.santurkar2018.studies._setting import PROXY, batch_objective, prepare, spaced_steps, study
from normgauge.papers.studies import register
from normgauge.records import Spec

CITE = ("santurkar2018",)
NORMS = ("none", "batch")
MODELS = ("vgg", "dln")
#: The paper's App. A.2.2: steps of [1/2, 4] times the rate for VGG, [1/100, 30] times for the linear network.
MULTIPLES = {"vgg": (0.5, 1.0, 2.0, 4.0), "dln": (0.01, 0.3, 1.0, 10.0, 30.0)}
SUMMARIES = ("loss_range", "gradient_distance", "effective_beta", "random_loss_range", "relative_distance")
EARLY = 0.1


def run(spec: Spec, record: Record) -> None:
    """Train, and look along the gradient and one random direction of its length at spaced steps of training."""
    network, dataset = prepare(spec)
    rate, steps = float(spec["lr"]), int(spec["steps"])
    multiples = MULTIPLES[spec["model"]]
    at = spaced_steps(steps, int(spec["measures"]))
    history: dict[str, list[float]] = {name: [] for name in (*SUMMARIES, "early_gradient_distance")}

    def watch(step: int, network: nn.Module) -> None:
        objective = batch_objective(network, dataset, spec)
        view = landscape(objective, steps=[rate * m for m in multiples], random=1, seed=int(spec["seed"]))
        for name, value in zip(SUMMARIES, _summaries(view), strict=True):
            history[name].append(value)
            record(step, f"{name}_now", value)
        record(step, "loss", view.loss)
        record(step, "loss_low", view.min_loss)
        record(step, "loss_high", view.max_loss)
        record(step, "gradient_norm", view.gradient_norm)
        if step <= EARLY * steps:
            history["early_gradient_distance"].append(view.max_gradient_distance)
        for multiple, distance in zip(multiples, view.gradient_distances, strict=True):
            record(step, "distance_at", distance, layer=f"{multiple:g}")

    result = train(
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=rate),
        steps=steps,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        at=at,
        watch=watch,
    )
    for name, values in history.items():
        finite = [value for value in values if math.isfinite(value)]
        record(steps, name, median(finite) if finite else math.nan)
    record(steps, "train_loss", fmean(result.losses[-10:]))
    if result.diverged:
        raise NonFiniteError(f"smoothness: training diverged at step {result.diverged_at}")


def _summaries(view: Landscape) -> tuple[float, ...]:
    """Return what `SUMMARIES` names, at one step of training."""
    distance = view.max_gradient_distance
    return (
        view.loss_variation,
        distance,
        view.max_effective_beta,
        fmean(other.loss_variation for other in view.random),
        distance / view.gradient_norm,
    )


@empirical(
    "S1-land",
    place="sec 3.2, Fig 4, 10 (deep linear network)",
    printed="variation of loss and gradient along the gradient direction is much smaller with BN",
    study="smoothness",
    criterion="on the deep linear network, medians over training: the range of the loss and the largest gradient "
    "distance along the gradient are at least twice as large without BN",
    cite=CITE,
)
def _landscape(table: StudyTable) -> Margins:
    return {
        f"log10 of {name}, none over batch, minus log10(2)": [
            value - math.log10(2) for value in table.paired_log10(name, "none", "batch", model="dln")
        ]
        for name in ("loss_range", "gradient_distance")
    }


@empirical(
    "S1-E3",
    place="sec 3.2, Fig 4b",
    printed="gradient predictiveness differs by close to two orders of magnitude early in training (VGG)",
    study="smoothness",
    criterion="on VGG, over the first tenth of training: the gradient distance without BN is at least 10^1.5 times "
    "that with BN",
    cite=CITE,
)
def _predictiveness(table: StudyTable) -> Margins:
    orders = table.paired_log10("early_gradient_distance", "none", "batch", model="vgg")
    return {"orders of magnitude minus 1.5": [value - 1.5 for value in orders]}


@empirical(
    "S1-random",
    place="sec 3.2, last paragraph",
    printed="the loss behaves in a similar way when we examine other (random) directions too",
    study="smoothness",
    criterion="along random directions of the gradient's length the range of the loss is larger without BN, as it "
    "is along the gradient",
    cite=CITE,
    note="Not in the list the ledger started from. The directions are drawn uniformly on the sphere of the "
    "gradient's norm.",
)
def _random_directions(table: StudyTable) -> Margins:
    return {
        f"log10 of {name}, none over batch": table.paired_log10(name, "none", "batch", model="vgg")
        for name in ("loss_range", "random_loss_range")
    }


@finding(
    "smoothness",
    printed="loss and gradient change less along the gradient with BN, on VGG too, and the effective beta is smaller",
    criterion="medians over training: the gradient distance on VGG, and the effective beta on both networks, are "
    "larger without BN",
)
def _everywhere(table: StudyTable) -> Margins:
    cells = (("vgg", "gradient_distance"), ("vgg", "effective_beta"), ("dln", "effective_beta"))
    return {
        f"{model}: log10 of {name.replace('_', ' ')}, none over batch": table.paired_log10(
            name, "none", "batch", model=model
        )
        for model, name in cells
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw the bands of the loss, gradient distance and effective beta over training, and distance against step."""
    drawn = []
    for model in MODELS:
        drawn.append(
            Figure(
                f"{model}-loss",
                curves(_bands(table, model), y="loss", low="low", high="high", y_title="loss"),
                f"{model}: training loss, and the range of losses met along the gradient (means over seeds; the "
                f"paper's Fig. {'4a' if model == 'vgg' else '10a'}).",
            )
        )
        for name, title in (("gradient_distance", "largest |grad' - grad|"), ("effective_beta", "effective beta")):
            band = table.band(f"{name}_now", "norm", model=model)
            drawn.append(
                Figure(
                    f"{model}-{name.replace('_', '-')}",
                    curves(band, y="mean", low="low", high="high", y_title=title, y_scale="log"),
                    f"{model}: {title} along the gradient; the band is the range over seeds.",
                )
            )
    drawn.append(
        Figure(
            "distance",
            against(_distances(table), x="multiple", y="mean", x_scale="log", y_scale="log", x_title="step / rate"),
            "Distance of the gradient from where it started, against the step along it, early in training (the "
            "paper's Fig. 11; means over seeds and the first tenth of training).",
        )
    )
    return drawn


def _bands(table: StudyTable, model: str) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for norm in NORMS:
        parts = {name: table.band(name, "norm", model=model, norm=norm) for name in ("loss", "loss_low", "loss_high")}
        for middle, low, high in zip(parts["loss"], parts["loss_low"], parts["loss_high"], strict=True):
            rows.append(
                {
                    "series": norm,
                    "step": middle["step"],
                    "loss": middle["mean"],
                    "low": min(low["mean"], middle["mean"]),
                    "high": max(high["mean"], middle["mean"]),
                }
            )
    return rows


def _distances(table: StudyTable) -> list[dict[str, float | str]]:
    groups: dict[tuple[str, float], list[float]] = {}
    for row in table.curve("distance_at"):
        if row["step"] <= EARLY * row["steps"]:
            key = (f"{row['model']}, {row['norm']}", float(row["layer"]))
            groups.setdefault(key, []).append(row["value"])
    return [
        {"series": series, "multiple": multiple, "mean": fmean(values)}
        for (series, multiple), values in sorted(groups.items())
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say every ratio, none over batch, that the paper speaks of, and the relative one it does not."""
    lines = []
    for model in MODELS:
        if not all(table.where(model=model, norm=norm) for norm in NORMS):
            continue  # no run of an arm finished: nothing to compare
        ratios = {
            name: 10 ** fmean(table.paired_log10(name, "none", "batch", model=model))
            for name in (*SUMMARIES, "early_gradient_distance")
        }
        lines.append(
            f"{model}: without BN, over with: range of the loss {ratios['loss_range']:.3g}, largest gradient distance "
            f"{ratios['gradient_distance']:.3g} ({ratios['early_gradient_distance']:.3g} in the first tenth of "
            f"training), effective beta {ratios['effective_beta']:.3g}, range of the loss along a random direction of "
            f"the gradient's length {ratios['random_loss_range']:.3g} (geometric means over seeds of medians over "
            "training)."
        )
        lines.append(
            f"{model}: relative to the gradient's own length the distance is {ratios['relative_distance']:.3g} times "
            "that with BN. The gradient's length, median over training, is "
            f"{_length(table, model, 'none'):.3g} without BN and {_length(table, model, 'batch'):.3g} with: equal "
            "multiples of the rate are different distances."
        )
    return lines


def _length(table: StudyTable, model: str, norm: str) -> float:
    return median(row["value"] for row in table.curve("gradient_norm", model=model, norm=norm))


def _sizes(size: str, seeds: int) -> list[Study]:
    question = "Is the landscape smoother with BN?"
    return [study("smoothness", question, size, model, NORMS, seeds=seeds) for model in MODELS]


register(
    Experiment(
        name="smoothness",
        papers=("S1",),
        place="sec. 3.1, 3.2, Fig. 4, 10, 11",
        question="Along the gradient, do loss and gradient change less with BN, all through training?",
        finding="Yes, for VGG and the deep linear network: a narrower range of the loss, gradients that predict better "
        "(by close to two orders of magnitude early in training of VGG), a smaller effective beta; and in random "
        "directions too.",
        proxy=PROXY + "Steps along the gradient: 1/2 to 4 times the rate for VGG, 1/100 to 30 times for the DLN, as "
        "in the paper; on one fixed batch of training data.",
        sizes={"smoke": _sizes("smoke", 1), "small": _sizes("small", 6), "paper": _sizes("paper", 5)},
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("loss_range", "gradient_distance", "effective_beta", "early_gradient_distance", "random_loss_range"),
        data=("cifar10",),
        minutes={"small": 2.4},
        cite=CITE,
    )
)
