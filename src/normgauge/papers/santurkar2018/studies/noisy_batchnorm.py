"""S1 Fig. 2, 8: batch normalization with covariate shift put back on purpose, and the same noise without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from statistics import fmean, median
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.charts import curves
from normgauge.errors import NonFiniteError
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import paired_log10
from normgauge.papers.experiment import Experiment, Figure, Record, Spec
from normgauge.papers.santurkar2018.studies._setting import AS_TRAINED, PROXY, blocks, prepare, spaced, study
from normgauge.papers.studies import register
from normgauge.papers.table import StudyTable

NORMS = ("none", "batch", "noisy", "noise")
CHANGES = ("mean_change", "variance_change", "relative_mean_change")
CHANCE = 0.1
WINDOW = 10


def run(spec: Spec, record: Record) -> None:
    """Train, and take the middle layer's moments on one batch before and after single steps of training."""
    network, dataset = prepare(spec)
    steps = int(spec["steps"])
    before = spaced(max(steps - 1, 1), int(spec["measures"]))
    last: dict[str, Tensor] = {}
    seen: dict[str, list[float]] = {name: [] for name in CHANGES}

    def watch(step: int, network: nn.Module) -> None:
        mean, variance = _moments(network, dataset, int(spec["batch"]))
        if step - 1 in before and "mean" in last:
            change = float((mean - last["mean"]).square().mean().sqrt())
            values = (
                change,
                float((variance - last["variance"]).square().mean().sqrt()),
                change / float(variance.mean().sqrt()),
            )
            for name, value in zip(CHANGES, values, strict=True):
                seen[name].append(value)
                record(step, f"{name}_now", value)
            record(step, "unit_mean", float(mean[0]))
            record(step, "unit_deviation", float(variance[0].sqrt()))
        last.update(mean=mean, variance=variance)

    result = train(
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        steps=steps,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        at={step + more for step in before for more in (0, 1)},
        watch=watch,
    )
    for end in range(WINDOW, len(result.losses) + 1, WINDOW):
        record(end, "loss", fmean(result.losses[end - WINDOW : end]))
    for name, values in seen.items():
        known = [value for value in values if math.isfinite(value)]
        record(steps, name, median(known) if known else math.nan)
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **AS_TRAINED).accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    if result.diverged:
        raise NonFiniteError(f"noisy-batchnorm: training diverged at step {result.diverged_at}")


def _moments(network: nn.Module, dataset: Dataset, batch: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance per unit of the middle layer as training would see them; nothing is written back."""
    twin = copy.deepcopy(network).train()
    layers = blocks(twin)
    outputs: list[Tensor] = []
    layers[len(layers) // 2].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        twin(dataset.train[0][:batch])
    units = outputs[0].transpose(0, 1).flatten(1).double()
    return units.mean(1), units.var(1, unbiased=False)


def contrasts(table: StudyTable) -> Mapping[str, Sequence[float]]:
    """Positive: noise costs BN at most 0.02, noisy BN beats none and is less stable, noise alone prevents training."""
    loss = table.paired("train_accuracy", "noisy", "batch", model="vgg")
    alone = table.by_seed("train_accuracy", model="vgg", norm="noise")
    return {
        "0.02 + training accuracy, noisy minus batch": [0.02 + value for value in loss],
        "training accuracy, noisy minus none": table.paired("train_accuracy", "noisy", "none", model="vgg"),
        "chance + 0.05 minus training accuracy of noise without BN": [CHANCE + 0.05 - v for v in alone.values()],
        "log10 of the change of means per step, noisy over none": paired_log10(
            table.rows, "mean_change", "noisy", "none", model="vgg"
        ),
        "log10 of the change of variances per step, noisy over none": paired_log10(
            table.rows, "variance_change", "noisy", "none", model="vgg"
        ),
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw training, and the moments' changes from step to step."""
    loss = table.band("loss", "norm")
    drawn = [
        Figure(
            "loss",
            curves(loss, y="mean", low="low", high="high", order=NORMS, y_title="training loss", y_scale="linear"),
            f"Training loss, means of {WINDOW} steps, each arm at its tuned rate; the band is the range over seeds "
            "(S1 Fig. 2).",
        )
    ]
    for name, words in (("mean_change", "means"), ("variance_change", "variances")):
        band = table.band(f"{name}_now", "norm")
        drawn.append(
            Figure(
                name.replace("_", "-"),
                curves(band, y="mean", low="low", high="high", order=NORMS, y_title=f"change of {words}"),
                f"Change of the {words} of the middle layer's units in one step of training, root mean square over "
                "units, on one fixed batch (S1 Fig. 8).",
            )
        )
    moments = [
        {"series": row["norm"], "step": row["step"], "value": row["value"]} for row in table.curve("unit_mean", seed=0)
    ]
    drawn.append(
        Figure(
            "unit-mean",
            curves(moments, order=NORMS, y_title="mean of one activation", y_scale="linear"),
            "Mean of one activation of the middle layer over training, one seed.",
        )
    )
    return drawn


def remarks(table: StudyTable) -> list[str]:
    """Say the accuracies with their rates, and how unstable the moments are."""
    accuracy = ", ".join(
        f"{norm} {table.mean('train_accuracy', norm=norm).mean:.3f} (rate {table.where(norm=norm)[0]['lr']:g})"
        for norm in NORMS
    )
    lines = [f"Training accuracy with batch statistics and noise on, at the tuned rate: {accuracy}; chance is 0.1."]
    for name, words in (("mean_change", "means"), ("variance_change", "variances")):
        shown = ", ".join(f"{norm} {table.mean(name, norm=norm).mean:.3g}" for norm in NORMS)
        lines.append(f"Change of the middle layer's {words} in one step, median over training: {shown}.")
    shown = ", ".join(f"{norm} {table.mean('relative_mean_change', norm=norm).mean:.3g}" for norm in NORMS)
    lines.append(f"The same of the means, in units of the activations' own deviation: {shown}.")
    return lines


def _sizes(size: str, seeds: int, tried: int, rates: Sequence[float], **changed: Any) -> Study:
    question = "Does BN need stable distributions?"
    return study(
        "noisy-batchnorm", question, size, "vgg", NORMS, seeds=seeds, rates=rates, tuning_seeds=tried, **changed
    )


register(
    Experiment(
        name="noisy-batchnorm",
        papers=("S1", "S3"),
        place="S1 sec. 2.1, Fig. 2, 8, Algorithm 1; S3 Theoretical Understanding",
        question="Does BN still train well when noise destroys the stability of the distributions behind it?",
        finding="Yes: noisy BN trains almost as well as BN and better than no BN, with less stable distributions than "
        "either; the same noise on the network without BN prevents it from training.",
        proxy=PROXY
        + "In this study 600 steps and no linear network; the rate is tuned for every arm on training accuracy, as S1 "
        "says it did, on the first two seeds.",
        sizes={
            "smoke": _sizes("smoke", 1, 1, (0.1,)),
            "small": _sizes("small", 6, 2, (0.03, 0.1, 0.3), steps=600),
            "paper": _sizes("paper", 5, 2, (0.03, 0.1, 0.3)),
        },
        run=run,
        contrasts=contrasts,
        figures=figures,
        remarks=remarks,
        columns=("train_accuracy", "test_accuracy", *CHANGES),
        choose_by="train_accuracy",
        data=("cifar10",),
        minutes={"small": 6.9},
        cite=("santurkar2018", "batchnorm_article"),
    )
)
