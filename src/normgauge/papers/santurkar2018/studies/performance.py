"""Fig. 1: training and test performance of VGG on CIFAR-10 with and without BN, with and without augmentation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

import torch
from torch import nn

from normgauge.charts import curves
from normgauge.errors import NonFiniteError
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.santurkar2018.studies._setting import AS_TRAINED, PROXY, prepare, study
from normgauge.papers.studies import register
from normgauge.records import Spec

CITE = ("santurkar2018",)
NORMS = ("none", "batch")
WORDS = {False: "without augmentation", True: "with augmentation"}


def run(spec: Spec, record: Record) -> None:
    """Train, recording loss and test accuracy over training, and every accuracy at the end."""
    network, dataset = prepare(spec)
    steps = int(spec["steps"])
    window = max(1, steps // 15)

    def watch(step: int, network: nn.Module) -> None:
        record(step, "test_accuracy_now", evaluate(network, dataset, limit=500).accuracy)

    result = train(
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=float(spec["lr"])),
        steps=steps,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        at=range(window, steps + 1, window),
        watch=watch,
        augment=bool(spec["augmentation"]),
    )
    for end in range(window, len(result.losses) + 1, window):
        record(end, "loss", fmean(result.losses[end - window : end]))
    record(steps, "train_loss", fmean(result.losses[-window:]))
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **AS_TRAINED).accuracy)
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    if result.diverged:
        raise NonFiniteError(f"performance: training diverged at step {result.diverged_at}")


@empirical(
    "S1-E1",
    place="Fig 1, App A",
    printed="VGG on CIFAR-10: test accuracy 83 % with BN vs 80 % without (92/88 % with augmentation), 15000 steps, "
    "batch 128, lr .1",
    study="performance",
    criterion="test accuracy with BN minus without is above 0, with and without augmentation",
    cite=CITE,
)
def _tests_better(table: StudyTable) -> Margins:
    return {
        f"test accuracy, batch minus none, augmentation {'on' if on else 'off'}": table.paired(
            "test_accuracy", "batch", "none", model="vgg", augmentation=on
        )
        for on in WORDS
    }


@finding(
    "performance",
    printed="with BN the network trains faster: it ends with the lower training loss",
    criterion="training loss of the last steps without BN minus with BN is above 0, with and without augmentation",
)
def _trains_faster(table: StudyTable) -> Margins:
    return {
        f"training loss, none minus batch, {words}": table.paired("train_loss", "none", "batch", augmentation=on)
        for on, words in WORDS.items()
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw training loss and test accuracy over training."""
    return [
        Figure(
            "loss",
            curves(table.band("loss", _arm), y="mean", low="low", high="high", y_title="training loss"),
            "Training loss over training, each arm at its tuned rate; the band is the range over seeds (the paper's "
            "Fig. 1a).",
        ),
        Figure(
            "accuracy",
            curves(
                table.band("test_accuracy_now", _arm),
                y="mean",
                low="low",
                high="high",
                y_title="test accuracy",
                y_scale="linear",
            ),
            "Test accuracy over training, stored statistics, on 500 test images (the paper's Fig. 1b).",
        ),
    ]


def _arm(row: Mapping[str, object]) -> str:
    return f"{row['norm']}, {WORDS[bool(row['augmentation'])]}"


def remarks(table: StudyTable) -> list[str]:
    """Say the accuracies beside the paper's, with the rates that were chosen."""
    published = {False: (0.83, 0.80), True: (0.92, 0.88)}
    lines = []
    for on, words in WORDS.items():
        rates = {row["norm"]: row["lr"] for row in table.where(augmentation=on)}
        if len(rates) < len(NORMS):
            continue  # no run of an arm finished: nothing to compare
        means = {norm: table.mean("test_accuracy", norm=norm, augmentation=on) for norm in NORMS}
        lines.append(
            f"{words.capitalize()}: test accuracy {means['batch'].mean:.3f} with BN (rate {rates['batch']:g}) and "
            f"{means['none'].mean:.3f} without (rate {rates['none']:g}); the paper has {published[on][0]:.2f} and "
            f"{published[on][1]:.2f} after 15,000 steps on all data."
        )
    gap = {norm: table.mean("test_accuracy", norm=norm, augmentation=True).mean for norm in NORMS}
    bare = {norm: table.mean("test_accuracy", norm=norm, augmentation=False).mean for norm in NORMS}
    lines.append(
        f"Augmentation changes the test accuracy by {gap['batch'] - bare['batch']:+.3f} with BN and by "
        f"{gap['none'] - bare['none']:+.3f} without: in so few steps it can cost more than it gives."
    )
    return lines


def _sizes(size: str, seeds: int, tried: int, rates: Sequence[float], **changed: Any) -> Study:
    return study(
        "performance",
        "Does BN train faster and generalize better?",
        size,
        "vgg",
        NORMS,
        seeds=seeds,
        rates=rates,
        tuning_seeds=tried,
        scientific={"augmentation": list(WORDS)},
        **changed,
    )


register(
    Experiment(
        name="performance",
        papers=("S1",),
        place="Fig. 1, App. A",
        question="Does VGG train faster and test better with BN, with and without augmentation?",
        finding="Test accuracy 83 % with BN and 80 % without; with augmentation 92 % and 88 %; training is faster.",
        proxy=PROXY
        + "In this study no linear network; the rate is tuned for every arm on validation accuracy of the first two "
        "seeds.",
        sizes={
            "smoke": _sizes("smoke", 1, 1, (0.1,)),
            "small": _sizes("small", 6, 2, (0.03, 0.1, 0.3)),
            "paper": _sizes("paper", 5, 2, (0.03, 0.1, 0.3)),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("test_accuracy", "validation_accuracy", "train_accuracy", "train_loss"),
        choose_by="validation_accuracy",
        data=("cifar10",),
        minutes={"small": 8.4},
        cite=CITE,
    )
)
