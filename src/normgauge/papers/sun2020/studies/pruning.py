"""Sec. 2.2: pruning channels by small gamma, by similar gamma and beta (the paper's proposal), and at random."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import fmean

import torch
from torch import nn

from normgauge.charts import curves
from normgauge.errors import NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, differences, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.surgery import prune_norms, scale_l1

WAYS = ("gamma", "similar", "random")
SPARSITIES = (10, 20, 30, 40, 50, 60, 70, 80)
TUNED_AT = 50  # percent at which the pruned network is trained on for a while


def run(spec: Spec, record: Record) -> None:
    """Train a VGG with or without an l1 penalty on gamma, prune it in three ways at every sparsity, and tune."""
    dataset = data.load(spec["data"])
    network = models.build(spec["model"], "batch", dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    strength = float(spec["l1"])
    result = train(
        network,
        dataset,
        optimizer,
        steps=int(spec["steps"]),
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        penalty=(lambda model: strength * scale_l1(model)) if strength else None,
    )
    if result.diverged:
        raise NonFiniteError(f"pruning: the training loss left every reasonable range at step {result.diverged_at}")
    record(0, "full_accuracy", evaluate(network, dataset).accuracy)
    example = dataset.validation[0][:32]
    for way in WAYS:
        accuracies = []
        record(0, f"{way}_accuracy", evaluate(network, dataset).accuracy)
        for sparsity in spec["sparsities"]:
            done = prune_norms(network, way, sparsity / 100, example, seed=int(spec["seed"]))  # type: ignore[arg-type]
            accuracies.append(evaluate(done.model, dataset).accuracy)
            record(sparsity, f"{way}_accuracy", accuracies[-1])
            record(sparsity, f"{way}_proof", done.proof)
            if sparsity == TUNED_AT:
                record(sparsity, f"{way}_tuned_accuracy", _tuned_accuracy(done.model, dataset, spec))
        record(spec["sparsities"][-1], f"{way}_mean_accuracy", fmean(accuracies))


def _tuned_accuracy(network: nn.Module, dataset: Dataset, spec: Spec) -> float:
    model = copy.deepcopy(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(spec["lr"]) / 3, momentum=0.9)
    train(
        model,
        dataset,
        optimizer,
        steps=max(1, int(spec["steps"]) // 4),
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
    ).whole()
    return evaluate(model, dataset).accuracy


@finding(
    "pruning",
    place="sec. 2.2",
    printed="taking away channels with similar gamma and beta, or with small gamma, keeps more accuracy than taking "
    "away channels at random",
    criterion="for each strength of the l1 penalty: test accuracy without training on, averaged over sparsities, of "
    "either way minus that of random pruning is above 0",
)
def _better_than_random(table: StudyTable) -> Margins:
    margins = {}
    for strength in sorted({row["l1"] for row in table.rows}):
        means = {way: table.by_seed(f"{way}_mean_accuracy", l1=strength) for way in WAYS}
        for way in ("similar", "gamma"):
            name = f"l1 {strength:g}: accuracy over sparsities, {way} minus random"
            margins[name] = differences(means[way], means["random"])
    return margins


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracy over sparsity for each way and penalty."""
    rows = []
    for way in WAYS:
        for strength in sorted({row["l1"] for row in table.rows}):
            band = table.band(f"{way}_accuracy", lambda row, way=way: f"{way}, l1 {row['l1']:g}", l1=strength)  # type: ignore[misc]
            rows += band
    chart = curves(rows, y="mean", low="low", high="high", x_title="channels taken away, %", y_title="test accuracy")
    return [Figure("sparsity", chart, "Test accuracy after pruning, without training on; bands are ranges over seeds.")]


def remarks(table: StudyTable) -> list[str]:
    """Compare the ways at half the channels, before and after training on."""
    lines = []
    for strength in sorted({row["l1"] for row in table.rows}):
        full = table.mean("full_accuracy", l1=strength).mean
        parts = []
        for way in WAYS:
            at_half = [row["value"] for row in table.curve(f"{way}_accuracy", l1=strength) if row["step"] == TUNED_AT]
            tuned = table.mean(f"{way}_tuned_accuracy", l1=strength).mean
            parts.append(f"{way} {fmean(at_half):.3f} (after training on {tuned:.3f})")
        lines.append(f"l1 {strength:g}: full network {full:.3f}; without half of its channels: {', '.join(parts)}.")
    worst = max(row[f"{way}_proof"] for row in table.rows for way in WAYS)
    lines.append(f"The physically smaller network equals the masked one to {worst:.1g} on the example inputs.")
    return lines


def _study(
    seeds: int,
    steps: int,
    data_name: str,
    model: str = "vgg",
    sparsities: Sequence[int] = SPARSITIES,
    strengths: Sequence[float] = (0.0, 1e-3),
) -> Study:
    return Study(
        "pruning",
        "Which channels can go?",
        scientific={"l1": list(strengths)},
        fixed={
            "sparsities": list(sparsities),
            "data": data_name,
            "model": model,
            "steps": steps,
            "batch": 128,
            "lr": 0.1,
        },
        seeds=seeds,
    )


register(
    Experiment(
        name="pruning",
        papers=("S4",),
        place="sec. 2.2",
        question="Do channels with similar gamma and beta have similar outputs, so that one of each pair can go?",
        finding="The paper proposes it without an experiment: units with similar gamma and beta have similar outputs; "
        "small gamma is Liu et al.'s criterion.",
        proxy="No published setting. Small: a VGG of eight convolutions, 8 to 32 channels wide, on 10,000 images of "
        "CIFAR-10, 400 steps of 128 and 100 more after pruning; paper: wider, on all images. An earlier version on "
        "digits was too small to tell.",
        sizes={
            "smoke": _study(3, 6, "digits", sparsities=(TUNED_AT,), strengths=(0.0,)),
            "small": _study(6, 400, "cifar10:10000/1000/2000", "vgg8"),
            "paper": _study(5, 15_000, "cifar10"),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=(
            "full_accuracy",
            *(f"{way}_mean_accuracy" for way in WAYS),
            *(f"{way}_tuned_accuracy" for way in WAYS),
        ),
        data=("cifar10",),
        minutes={"small": 4.8},
        cite=("sun2020", "liu2017"),
    )
)
