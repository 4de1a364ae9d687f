"""S0 sec. 9.1: normalizer x optimizer x weight decay, rate and schedule tuned in every cell, and the advice of each."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from itertools import product
from typing import Any

import torch
from torch import nn

from normgauge.charts import against
from normgauge.errors import NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.experiment import Experiment, Figure, Record, Spec
from normgauge.lab.fitting import evaluate, fit
from normgauge.lab.studies._registry import register
from normgauge.lab.study import Study
from normgauge.lab.table import StudyTable

NORMS = ("none", "batch", "layer")
OPTIMIZERS = ("sgd", "adam")
DECAYS = (0.0, 1e-4, 1e-3, 1e-2)
SCHEDULES = ("constant", "cosine")
#: A cell's rate is its optimizer's middle rate times the tuned factor.
MIDDLE = {"sgd": 0.01, "adam": 1e-3}
FLOOR = 1e-6  # a decay of zero, on a logarithmic axis


def run(spec: Spec, record: Record) -> None:
    """Train the cell's network and record its accuracies."""
    dataset = data.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = models.build("mlp", spec["norm"], dataset.shape, dataset.classes, seed)
    result = fit(
        network,
        dataset,
        _optimizer(network, spec),
        steps=steps,
        batch=int(spec["batch"]),
        seed=seed,
        schedule=None if spec["schedule"] == "constant" else lambda step: 0.5 * (1 + math.cos(math.pi * step / steps)),
    )
    record(steps, "train_accuracy", evaluate(network, dataset, "train")[1])
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation")[1])
    record(steps, "test_accuracy", evaluate(network, dataset)[1])
    record(steps, "weight_norm", math.sqrt(sum(float(p.detach().square().sum()) for p in network.parameters())))
    if result.diverged:
        raise NonFiniteError(f"recipe: training diverged at step {result.diverged_at}")


def _optimizer(network: nn.Module, spec: Spec) -> torch.optim.Optimizer:
    rate = MIDDLE[spec["optimizer"]] * float(spec["factor"])
    if spec["optimizer"] == "sgd":
        return torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9, weight_decay=float(spec["decay"]))
    return torch.optim.Adam(network.parameters(), lr=rate, weight_decay=float(spec["decay"]))


def contrasts(table: StudyTable) -> Mapping[str, Sequence[float]]:
    """Positive: with BN SGD suffices, Adam gains more without BN, and the best decay is smaller with BN."""
    gain = {norm: _gain(table, norm) for norm in ("none", "batch")}
    decay = {norm: {s: math.log10(max(row["decay"], FLOOR)) for s, row in _best(table, norm).items()} for norm in gain}
    seeds = sorted(gain["none"].keys() & gain["batch"].keys())
    return {
        "0.01 - Adam's gain in test accuracy over SGD with BN": [0.01 - gain["batch"][s] for s in seeds],
        "Adam's gain, none minus batch": [gain["none"][s] - gain["batch"][s] for s in seeds],
        "log10 of the best decay, none minus batch": [decay["none"][s] - decay["batch"][s] for s in seeds],
    }


def _best(table: StudyTable, norm: str, **knobs: Any) -> dict[int, Mapping[str, Any]]:
    """Return, per seed, the row with the best test accuracy."""
    found: dict[int, Mapping[str, Any]] = {}
    for row in table.where(norm=norm, **knobs):
        if row.get("test_accuracy") is not None:
            held = found.get(row["seed"])
            if held is None or row["test_accuracy"] > held["test_accuracy"]:
                found[row["seed"]] = row
    return found


def _gain(table: StudyTable, norm: str) -> dict[int, float]:
    adam, sgd = (_best(table, norm, optimizer=name) for name in ("adam", "sgd"))
    return {s: adam[s]["test_accuracy"] - sgd[s]["test_accuracy"] for s in sorted(adam.keys() & sgd.keys())}


def figures(table: StudyTable) -> list[Figure]:
    """Draw test accuracy against decay, one picture per optimizer."""
    drawn = []
    for optimizer in OPTIMIZERS:
        rows = []
        for norm, decay in product(NORMS, DECAYS):
            found = table.mean("test_accuracy", norm=norm, optimizer=optimizer, decay=decay)
            rows.append(
                {"series": norm, "decay": max(decay, FLOOR), "mean": found.mean, "low": found.low, "high": found.high}
            )
        drawn.append(
            Figure(
                optimizer,
                against(
                    rows,
                    x="decay",
                    y="mean",
                    low="low",
                    high="high",
                    x_scale="log",
                    y_scale="linear",
                    x_title="weight decay (0 drawn at 1e-6)",
                    y_title="test accuracy",
                ),
                f"{optimizer}: test accuracy against weight decay, rate and schedule tuned in every cell; 95 % "
                "intervals over seeds.",
            )
        )
    return drawn


def remarks(table: StudyTable) -> list[str]:
    """Say, per normalizer and optimizer, which recipe its cells support, and what the schedule did."""
    lines = []
    for norm, optimizer in product(NORMS, OPTIMIZERS):
        means = {d: table.mean("test_accuracy", norm=norm, optimizer=optimizer, decay=d) for d in DECAYS}
        best = max(DECAYS, key=lambda decay: means[decay].mean)
        row = table.where(norm=norm, optimizer=optimizer, decay=best)[0]
        worst = min(found.mean for found in means.values())
        lines.append(
            f"{norm} with {optimizer}: best at decay {best:g}, {row['schedule']} schedule, rate "
            f"{MIDDLE[optimizer] * row['factor']:g}: test accuracy {means[best].mean:.3f} (worst decay {worst:.3f})."
        )
    ahead = {norm: _schedule_gain(table, norm) for norm in NORMS}
    shown = ", ".join(f"{norm} {value:+.4f}" for norm, value in ahead.items())
    lines.append(f"Cosine minus constant schedule, mean validation accuracy over all tried settings: {shown}.")
    lines.append(
        "Decays within a few thousandths of each other are one advice: the intervals of neighbouring cells overlap "
        "unless the figures show otherwise."
    )
    return lines


def _schedule_gain(table: StudyTable, norm: str) -> float:
    rows = [row for row in table.trials if row["norm"] == norm and row.get("validation_accuracy") is not None]
    tried = [row for row in rows if row["seed"] == 0]
    means = []
    for schedule in SCHEDULES:
        values = [row["validation_accuracy"] for row in tried if row["schedule"] == schedule]
        means.append(sum(values) / max(len(values), 1))
    return float(means[1] - means[0])


def _study(factors: Sequence[float], decays: Sequence[float], seeds: int, tried: int, **fixed: object) -> Study:
    return Study(
        "recipe",
        "Which optimizer and decay does each normalizer want?",
        scientific={"norm": list(NORMS), "optimizer": list(OPTIMIZERS), "decay": list(decays)},
        nuisance={"factor": list(factors), "schedule": list(SCHEDULES)},
        fixed=fixed,
        seeds=seeds,
        tuning_seeds=tried,
    )


register(
    Experiment(
        name="recipe",
        papers=("S0",),
        place="sec. 9.1",
        question="With BN, does SGD suffice where Adam was needed, and is a smaller weight decay enough?",
        finding="BN with SGD might suffice where without BN one needed Adam; typically a smaller weight decay is used "
        "with BN.",
        proxy="S0 gives advice and no experiment. Small size: an MLP with three hidden layers of 64 units on 2000 "
        "images of CIFAR-10, 200 steps of batch 64; SGD with momentum 0.9 and Adam, both with decay in the gradient "
        "(l2); rate (a factor of 1 or 3 on 0.01 for SGD, 0.001 for Adam) and schedule are tuned in every cell on "
        "validation accuracy of the first seed. Paper size: the same grid on all of CIFAR-10.",
        sizes={
            "smoke": _study((1.0,), DECAYS, 1, 1, data="digits", steps=8, batch=64),
            "small": _study((1.0, 3.0), DECAYS, 4, 1, data="cifar10:2000/1000/2000", steps=200, batch=64),
            "paper": _study((1 / 3, 1.0, 3.0, 10.0), DECAYS, 5, 2, data="cifar10", steps=20000, batch=128),
        },
        run=run,
        contrasts=contrasts,
        figures=figures,
        remarks=remarks,
        columns=("test_accuracy", "validation_accuracy", "train_accuracy", "weight_norm"),
        choose_by="validation_accuracy",
        data=("cifar10",),
        minutes={"small": 1.2},
        cite=("akbar2025",),
    )
)
