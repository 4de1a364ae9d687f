"""Fig. 2, 8: batch normalization with covariate shift put back on purpose, and the same noise without it."""

from __future__ import annotations

import copy
import math
from collections.abc import Sequence
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
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.santurkar2018.studies._setting import AS_TRAINED, PROXY, blocks, prepare, spaced_steps, study
from normgauge.papers.studies import register
from normgauge.records import Spec

CITE = ("santurkar2018",)
NORMS = ("none", "batch", "noisy", "noise")
MOMENTS = {"mean_change": "means", "variance_change": "variances"}
CHANGES = (*MOMENTS, "relative_mean_change")
CHANCE = 0.1  # CIFAR-10
WINDOW = 10


def run(spec: Spec, record: Record) -> None:
    """Train, and take the middle layer's moments on one batch before and after single steps of training."""
    network, dataset = prepare(spec)
    steps = int(spec["steps"])
    before = spaced_steps(max(steps - 1, 1), int(spec["measures"]))
    last: dict[str, Tensor] = {}
    history: dict[str, list[float]] = {name: [] for name in CHANGES}

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
                history[name].append(value)
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
    for name, values in history.items():
        finite = [value for value in values if math.isfinite(value)]
        record(steps, name, median(finite) if finite else math.nan)
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **AS_TRAINED).accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    record(steps, "diverged", float(result.diverged))
    if result.diverged and spec["norm"] != "noise":  # that noise alone prevents training is what is measured
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


@empirical(
    "S1-E2",
    place="sec 2.1, Fig 2, Alg 1; the encyclopedia article, Theoretical Understanding",
    printed="noisy BN (n_mu=.5, n_sigma=1.25, r=.1) trains as well as BN and better than no BN",
    study="noisy-batchnorm",
    criterion="training accuracy of noisy BN at most 0.02 below BN's, and above that of no BN",
    cite=CITE,
)
def _noise_does_no_harm(table: StudyTable) -> Margins:
    gains = table.paired("train_accuracy", "noisy", "batch", model="vgg")
    return {
        "0.02 + (noisy minus batch), training accuracy": [0.02 + value for value in gains],
        "noisy minus none, training accuracy": table.paired("train_accuracy", "noisy", "none", model="vgg"),
    }


@empirical(
    "S1-noise",
    place="sec 2.1, last but one paragraph",
    printed="adding the same amount of noise to the activations of the standard (non-BatchNorm) network prevents "
    "it from training entirely",
    study="noisy-batchnorm",
    criterion="training accuracy of the network with noise and without BN stays below chance + 0.05",
    cite=CITE,
    note="Not in the list the ledger started from.",
)
def _noise_alone(table: StudyTable) -> Margins:
    accuracies = table.by_seed("train_accuracy", model="vgg", norm="noise")
    return {"chance + 0.05 minus training accuracy": [CHANCE + 0.05 - value for value in accuracies.values()]}


@finding(
    "noisy-batchnorm",
    printed="the distributions behind noisy BN are less stable than those of the network without BN",
    criterion="change of the middle layer's means and of its variances in one step of training, median over training: "
    "larger with noisy BN than without BN",
)
def _less_stable(table: StudyTable) -> Margins:
    return {
        f"log10 of the change of {words} per step, noisy over none": table.paired_log10(
            name, "noisy", "none", model="vgg"
        )
        for name, words in MOMENTS.items()
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw training, and the moments' changes from step to step."""
    loss = table.band("loss", "norm")
    drawn = [
        Figure(
            "loss",
            curves(loss, y="mean", low="low", high="high", order=NORMS, y_title="training loss", y_scale="linear"),
            f"Training loss, means of {WINDOW} steps, each arm at its tuned rate; the band is the range over seeds "
            "(Santurkar et al. 2018, Fig. 2).",
        )
    ]
    for name, words in MOMENTS.items():
        band = table.band(f"{name}_now", "norm")
        drawn.append(
            Figure(
                name.replace("_", "-"),
                curves(band, y="mean", low="low", high="high", order=NORMS, y_title=f"change of {words}"),
                f"Change of the {words} of the middle layer's units in one step of training, root mean square over "
                "units, on one fixed batch (Santurkar et al. 2018, Fig. 8).",
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
    arms = [norm for norm in NORMS if table.where(norm=norm)]
    accuracy = ", ".join(
        f"{norm} {table.mean('train_accuracy', norm=norm).mean:.3f} (rate {table.where(norm=norm)[0]['lr']:g})"
        for norm in arms
    )
    lines = [f"Training accuracy with batch statistics and noise on, at the tuned rate: {accuracy}; chance is 0.1."]
    for name, words in MOMENTS.items():
        shown = ", ".join(f"{norm} {table.mean(name, norm=norm).mean:.3g}" for norm in arms)
        lines.append(f"Change of the middle layer's {words} in one step, median over training: {shown}.")
    shown = ", ".join(f"{norm} {table.mean('relative_mean_change', norm=norm).mean:.3g}" for norm in arms)
    lines.append(f"The same of the means, in units of the activations' own deviation: {shown}.")
    broken = table.by_seed("diverged", norm="noise")
    if any(broken.values()):
        count = f"{sum(broken.values()):g} of {len(broken)} seeds"
        lines.append(f"With noise and without BN training diverged on {count}: the accuracy is a broken network's.")
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
        place="Santurkar et al. 2018, sec. 2.1, Fig. 2, 8, Algorithm 1; the encyclopedia article, Theoretical "
        "Understanding",
        question="Does BN still train well when noise destroys the stability of the distributions behind it?",
        finding="Yes: noisy BN trains almost as well as BN and better than no BN, with less stable distributions than "
        "either; the same noise on the network without BN prevents it from training.",
        proxy=PROXY
        + "In this study 600 steps and no linear network; the rate is tuned for every arm on training accuracy, as "
        "the paper says it did, on the first two seeds.",
        sizes={
            "smoke": _sizes("smoke", 1, 1, (0.1,)),
            "small": _sizes("small", 6, 2, (0.03, 0.1, 0.3), steps=600),
            "paper": _sizes("paper", 5, 2, (0.03, 0.1, 0.3)),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("train_accuracy", "test_accuracy", *CHANGES),
        choose_by="train_accuracy",
        data=("cifar10",),
        minutes={"small": 6.9},
        cite=(*CITE, "batchnorm_article"),
    )
)
