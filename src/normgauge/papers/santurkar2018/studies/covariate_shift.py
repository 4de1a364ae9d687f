"""Fig. 3: how much a layer's gradient turns when the layers before it have moved, with and without BN."""

from __future__ import annotations

from statistics import fmean

import torch
from torch import nn

from normgauge.charts import curves
from normgauge.errors import NonFiniteError
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.measure.signal.covariate_shift import covariate_shift
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.santurkar2018.studies._setting import (
    PROXY,
    batch_objective,
    layer_groups,
    prepare,
    spaced_steps,
    study,
)
from normgauge.papers.studies import register
from normgauge.records import Spec

NORMS = ("none", "batch")
MODELS = ("vgg", "dln")
# The same measurement for a tenth of the step: it tells whether the step or the network makes the gradients turn.
SHARES = {"": 1.0, "_tenth": 0.1}


def run(spec: Spec, record: Record) -> None:
    """Train, and measure S1's Definition 2.1 for one SGD step at spaced steps of training."""
    network, dataset = prepare(spec)
    rate = float(spec["lr"])
    history: dict[str, list[float]] = {}

    def watch(step: int, network: nn.Module) -> None:
        objective = batch_objective(network, dataset, spec)
        record(step, "loss", float(objective.loss()))
        for suffix, share in SHARES.items():
            layers = covariate_shift(objective, share * rate, groups=layer_groups(network)).layers
            later = [entry for entry in layers[1:] if entry.status == "ok"]  # nothing moves before the first layer
            if not later:
                continue
            values = {
                "cosine": fmean(entry.cosine for entry in later),
                "l2": fmean(entry.l2 for entry in later),
                "relative_l2": fmean(entry.l2 / entry.gradient_norm for entry in later),
            }
            for name, value in values.items():
                history.setdefault(name + suffix, []).append(value)
                record(step, f"{name}{suffix}_now", value)
            if not suffix:
                for entry in later:
                    record(step, "layer_cosine", entry.cosine, layer=entry.layer)
                    record(step, "layer_l2", entry.l2, layer=entry.layer)

    steps = int(spec["steps"])
    result = train(
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=rate),
        steps=steps,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        at=spaced_steps(steps, int(spec["measures"])),
        watch=watch,
    )
    for name, values in history.items():
        record(steps, name, fmean(values))
    record(steps, "train_loss", fmean(result.losses[-10:]))
    if result.diverged:
        raise NonFiniteError(f"covariate-shift: training diverged at step {result.diverged_at}")


@empirical(
    "S1-ICS",
    place="sec 2.2, Fig 3 (deep linear network)",
    printed="25-layer 10x10 deep linear net, full batch: with BN the gradients G, G' before/after updating earlier "
    "layers are almost uncorrelated; without BN ICS is ~0",
    study="covariate-shift",
    criterion="on the deep linear network, averaged over layers and training: |cosine| with BN below 0.3, and "
    "cosine without BN above 0.9",
    cite=("santurkar2018",),
)
def _uncorrelated(table: StudyTable) -> Margins:
    with_bn, without = (table.by_seed("cosine", model="dln", norm=norm).values() for norm in ("batch", "none"))
    return {
        "0.3 - |cosine| with BN": [0.3 - abs(value) for value in with_bn],
        "cosine without BN - 0.9": [value - 0.9 for value in without],
    }


@empirical(
    "S3-ICS",
    place="Measure",
    printed="standard VGG and DLN have higher gradient correlations than their BN counterparts",
    study="covariate-shift",
    criterion="for each model, the cosine of the gradients before and after updating earlier layers, averaged over "
    "layers and training: without BN minus with BN is above 0",
    cite=("batchnorm_article", "santurkar2018"),
)
def _less_correlated(table: StudyTable) -> Margins:
    return {
        f"{model}: cosine, none minus batch": table.paired("cosine", "none", "batch", model=model) for model in MODELS
    }


@finding(
    "covariate-shift",
    printed="with BN the gradients before and after updating earlier layers lie further apart",
    criterion="for each model, their distance |G' - G|, averaged over layers and training, is larger with BN",
)
def _further_apart(table: StudyTable) -> Margins:
    return {
        f"{model}: log10 of |G' - G|, batch over none": table.paired_log10("l2", "batch", "none", model=model)
        for model in MODELS
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw cosine and distance over training, and the cosine per layer, for each model."""
    drawn = []
    for model in MODELS:
        cosine = table.band("cosine_now", "norm", model=model)
        drawn.append(
            Figure(
                f"{model}-cosine",
                curves(cosine, y="mean", low="low", high="high", y_title="cosine of G and G'", y_scale="linear"),
                f"{model}: cosine of the gradients before and after updating earlier layers, mean over layers; the "
                "band is the range over seeds (Santurkar et al. 2018, Fig. 3).",
            )
        )
        distance = table.band("l2_now", "norm", model=model)
        drawn.append(
            Figure(
                f"{model}-l2",
                curves(distance, y="mean", low="low", high="high", y_title="|G' - G|", y_scale="log"),
                f"{model}: distance of the gradients before and after, mean over layers.",
            )
        )
        drawn.append(
            Figure(
                f"{model}-layers",
                curves(_layer_rows(table, model), x="layer", y="mean", low="low", high="high", y_scale="linear"),
                f"{model}: cosine per layer, mean over training; the band is the range over seeds.",
            )
        )
    return drawn


def _layer_rows(table: StudyTable, model: str) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for norm in NORMS:
        groups: dict[int, dict[int, list[float]]] = {}
        for row in table.curve("layer_cosine", model=model, norm=norm):
            groups.setdefault(int(row["layer"]), {}).setdefault(row["seed"], []).append(row["value"])
        for layer, seeds in sorted(groups.items()):
            means = [fmean(values) for values in seeds.values()]
            rows.append({"series": norm, "layer": layer, "mean": fmean(means), "low": min(means), "high": max(means)})
    return rows


def remarks(table: StudyTable) -> list[str]:
    """Say the cosines, what a tenth of the step changes, and who trains better."""
    lines = []
    for model in MODELS:
        failed = [row for row in table.trials if row["model"] == model and row["status"] == "diverged"]
        if failed:
            arms = ", ".join(f"norm {row['norm']}, seed {row['seed']}" for row in failed)
            lines.append(f"{model}: training diverged, so the means are without {arms}.")
        if not all(table.where(model=model, norm=norm) for norm in NORMS):
            continue  # no run of an arm finished: nothing to compare
        means = {
            (norm, name): table.mean(name, model=model, norm=norm).mean
            for norm in NORMS
            for name in ("cosine", "cosine_tenth", "relative_l2", "train_loss")
        }
        lines.append(
            f"{model}: cosine {means['batch', 'cosine']:.3f} with BN, {means['none', 'cosine']:.3f} without, averaged "
            f"over training and all layers but the first; |G' - G| / |G| {means['batch', 'relative_l2']:.3g} against "
            f"{means['none', 'relative_l2']:.3g}; training loss at the end {means['batch', 'train_loss']:.3g} against "
            f"{means['none', 'train_loss']:.3g}."
        )
        lines.append(
            f"{model}: after a tenth of the same step the cosines are {means['batch', 'cosine_tenth']:.3f} with BN and "
            f"{means['none', 'cosine_tenth']:.3f} without, so how far gradients turn is a matter of the rate too."
        )
        layers = {norm: [row for row in _layer_rows(table, model) if row["series"] == norm] for norm in NORMS}
        least = {norm: min(rows, key=lambda row: float(row["mean"])) for norm, rows in layers.items()}
        lines.append(
            f"{model}: the mean over layers hides much: the smallest cosine is {least['batch']['mean']:.2f} with BN "
            f"(layer {least['batch']['layer']}) and {least['none']['mean']:.2f} without (layer "
            f"{least['none']['layer']}); below 0 the update of earlier layers has reversed the gradient."
        )
        first, last = ({n: _mean_cosine(table, model, n, end) for n in NORMS} for end in (0, -1))
        lines.append(
            f"{model}: from the first step to the last the cosine goes from {first['batch']:.2f} to "
            f"{last['batch']:.2f} with BN and from {first['none']:.2f} to {last['none']:.2f} without."
        )
    return lines


def _mean_cosine(table: StudyTable, model: str, norm: str, end: int) -> float:
    """Return the mean cosine at the first (0) or last (-1) measured step."""
    return float(table.band("cosine_now", "norm", model=model, norm=norm)[end]["mean"])


def _sizes(size: str, seeds: int) -> list[Study]:
    question = "Does BN reduce internal covariate shift?"
    return [study("covariate-shift", question, size, model, NORMS, seeds=seeds) for model in MODELS]


register(
    Experiment(
        name="covariate-shift",
        papers=("S1", "S3"),
        place="Santurkar et al. 2018, sec. 2.2, Definition 2.1, Fig. 3; the encyclopedia article, Measure",
        question="Does a layer's gradient turn less, with BN, when the layers before it are updated?",
        finding="No: networks with BN have similar or larger internal covariate shift. In the deep linear network "
        "gradients before and after are almost uncorrelated with BN, and almost the same without.",
        proxy=PROXY + "The gradients are those of one fixed batch of training data, not of each step's own.",
        sizes={"smoke": _sizes("smoke", 1), "small": _sizes("small", 6), "paper": _sizes("paper", 5)},
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("cosine", "cosine_tenth", "l2", "relative_l2", "train_loss"),
        data=("cifar10",),
        minutes={"small": 3.3},
        cite=("santurkar2018", "batchnorm_article"),
    )
)
