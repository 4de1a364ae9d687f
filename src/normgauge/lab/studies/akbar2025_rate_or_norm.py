"""S0 sec. 2.3, 7.2 after Bjorck et al.: is it the normalization or the learning rate it allows?"""

from __future__ import annotations

import copy
import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from normgauge.charts import curves, intervals
from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.experiment import Experiment, Figure, Record, Spec
from normgauge.lab.fitting import DIVERGENCE_FACTOR, Batches, evaluate
from normgauge.lab.studies._networks import dataset
from normgauge.lab.studies._registry import register
from normgauge.lab.study import Study
from normgauge.lab.table import StudyTable
from normgauge.measure import quotient_spectrum
from normgauge.objective import Objective
from normgauge.symmetry import Symmetries
from normgauge.symmetry import symmetries as discover

ARMS = (("none", "plain"), ("batch", "plain"), ("batch", "own"))
MOMENTUM = 0.9
EVERY = 5  # steps between two looks at the training loss
PROBED = 512  # training images whose mean loss is the training loss
WINDOW = 10  # batches whose mean loss is drawn
NEAR = 1.2  # looking costs as much as some steps: it starts when the batches' losses are this close to the target
SUBSET = "cifar10:2000/2000/4000"
Row = tuple[int, str, float, dict[str, Any]]


@dataclass
class Trained:
    """A network where its training ended: at the target, at the last step, or where it diverged."""

    network: nn.Module
    steps: int
    loss: float
    course: list[tuple[int, float]]
    reached: bool
    diverged: bool


def run(spec: Spec, record: Record) -> None:
    """Train to the target loss and measure there; the score that chooses the rate is of the net whose rate it is."""
    settings = tuple(sorted((name, value) for name, value in spec.items() if name not in ("norm", "rate", "study")))
    found = _outcome(spec["norm"], settings)
    for step, name, value, more in found:
        record(step, name, value, **more)
    judge = "none" if spec["rate"] == "plain" else spec["norm"]
    if int(spec["seed"]) < int(spec["tuned_on"]):  # later seeds run at the chosen rate only
        score = next(row[2] for row in _outcome(judge, settings) if row[1] == "validation_accuracy")
        record(found[-1][0], "score", score)


@functools.lru_cache(maxsize=128)
def _outcome(norm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Row, ...]:
    """Return what to record of one training: step, name, value, and more about it.

    Kept, since arms share trainings: BN at the plain net's rate is scored by the plain net.
    """
    spec: Spec = {**dict(settings), "norm": norm}
    task = _task(spec["data"], int(spec["samples"]))
    found = _train(spec, task)
    values = {
        "test_accuracy": evaluate(found.network, task)[1],
        "validation_accuracy": evaluate(found.network, task, "validation")[1],
        "train_loss": found.loss,
        "reached": float(found.reached),
        "diverged": float(found.diverged),
        "steps_to_target": found.steps,
    }
    rows: list[Row] = [(step, "loss", value, {}) for step, value in found.course]
    if not found.diverged:
        sharpness, status = _sharpness(found.network, task, spec)
        rows.append((found.steps, "quotient_sharpness", sharpness, {"kind": "estimate", "status": status}))
    return (*rows, *((found.steps, name, value, {}) for name, value in values.items()))


def _train(spec: Spec, task: Dataset) -> Trained:
    """Train by SGD with momentum until the training loss is at the target, or the steps are used up."""
    seed, steps, target = int(spec["seed"]), int(spec["steps"]), float(spec["target_loss"])
    network = models.build(spec["model"], spec["norm"], task.shape, task.classes, seed).float()
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=MOMENTUM)
    batches = Batches(len(task.train[1]), int(spec["batch"]), seed)
    losses: list[float] = []
    course: list[tuple[int, float]] = []
    for step in range(1, steps + 1):
        rows = next(batches)
        network.train()
        optimizer.zero_grad()
        loss = task.loss(network(task.train[0][rows]), task.train[1][rows])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        if not math.isfinite(losses[-1]) or losses[-1] > DIVERGENCE_FACTOR * max(losses[0], 1.0):
            return Trained(network, step, math.nan, course, reached=False, diverged=True)
        if step % EVERY:
            continue
        if step % WINDOW == 0:
            course.append((step, fmean(losses[-WINDOW:])))
        if fmean(losses[-EVERY:]) <= NEAR * target and (now := _training_loss(network, task, spec)) <= target:
            return Trained(network, step, now, course, reached=True, diverged=False)
    now = _training_loss(network, task, spec)
    return Trained(network, steps, now, course, reached=now <= target, diverged=not math.isfinite(now))


def _training_loss(network: nn.Module, task: Dataset, spec: Spec) -> float:
    """Return the mean loss of the first training images as training sees them: in batches, by their statistics."""
    twin = copy.deepcopy(network).train()
    count = min(int(spec["batch"]), len(task.train[1]))
    inputs, targets = (part[: max(count, PROBED // count * count)].split(count) for part in task.train)
    with torch.no_grad():
        pairs = zip(inputs, targets, strict=True)
        return fmean(float(task.loss(twin(x), y)) for x, y in pairs if len(y) == count)


def _sharpness(network: nn.Module, task: Dataset, spec: Spec) -> tuple[float, str]:
    rows = int(spec["measured"])
    batch = (task.train[0][:rows], task.train[1][:rows])
    objective = Objective(network, nn.functional.cross_entropy, batch, mode="train")
    symmetries = _symmetries(spec["model"], spec["norm"], spec["data"], int(spec["samples"]))
    found = quotient_spectrum(objective, symmetries=symmetries, top=1, tol=0.05, products=100)
    return found.sharpness, found.status


@functools.lru_cache(maxsize=4)
def _symmetries(model: str, norm: str, data: str, samples: int) -> Symmetries:
    """Return the symmetries of the architecture; found once, since finding them costs more than using them."""
    task = _task(data, samples)
    network = models.build(model, norm, task.shape, task.classes, 0).float()
    batch = (task.train[0][:32], task.train[1][:32])
    return discover(Objective(network, nn.functional.cross_entropy, batch, mode="train"))


@functools.lru_cache(maxsize=2)
def _task(name: str, samples: int) -> Dataset:
    """Return the data with that many training samples."""
    full = dataset(name)
    return replace(full, train=(full.train[0][:samples], full.train[1][:samples]))


def contrasts(table: StudyTable) -> Mapping[str, Sequence[float]]:
    """Positive: no gain at the plain net's rate, a gain from BN's own rate, and a flatter minimum there."""
    same = table.paired("test_accuracy", "batch", "none", rate="plain")
    own, plain = (table.by_seed("quotient_sharpness", norm="batch", rate=rate) for rate in ("own", "plain"))
    return {
        "0.01 - (BN minus none) at the plain net's rate": [0.01 - value for value in same],
        "BN: test accuracy, own minus plain rate": table.paired(
            "test_accuracy", "own", "plain", knob="rate", norm="batch"
        ),
        "BN: log10 of the quotient sharpness, plain over own rate": [
            math.log10(plain[s] / own[s]) for s in sorted(plain.keys() & own.keys())
        ],
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracy and sharpness per arm, and the training loss."""
    drawn = []
    for reading in ("test_accuracy", "quotient_sharpness"):
        rows = []
        for norm, rate in ARMS:
            found = table.mean(reading, norm=norm, rate=rate)
            rows.append({"series": _arm(norm, rate), "value": found.mean, "low": found.low, "high": found.high})
        words = f"{reading.replace('_', ' ')} at equal training loss"
        caption = f"{words.capitalize()}, mean and 95 % interval over seeds."
        drawn.append(Figure(reading.split("_")[0], intervals(rows, x_title=words), caption))
    course = table.band("loss", lambda row: _arm(row["norm"], row["rate"]))
    chart = curves(course, y="mean", low="low", high="high", y_scale="linear", y_title="training loss")
    caption = (
        f"Training loss, mean of {WINDOW} batches, each run until it meets the target; band: range over the seeds "
        "still training, so that a line's end belongs to the slowest of them."
    )
    return [*drawn, Figure("loss", chart, caption)]


def _arm(norm: str, rate: str) -> str:
    if norm == "none":
        return "no BN, its best rate"
    return "BN, the plain net's rate" if rate == "plain" else "BN, its own best rate"


def remarks(table: StudyTable) -> list[str]:
    """Say accuracy, sharpness and steps per arm, which runs missed the target, and what every rate scored."""
    lines = []
    for norm, rate in ARMS:
        rows = table.where(norm=norm, rate=rate)
        mean = {name: table.mean(name, norm=norm, rate=rate).mean for name in COLUMNS}
        missed = [f"seed {row['seed']} ({_end(row)})" for row in rows if not row.get("reached")]
        lines.append(
            f"{_arm(norm, rate)} ({mean['lr']:g}): test accuracy {mean['test_accuracy']:.4f} and quotient sharpness "
            f"{mean['quotient_sharpness']:.3g} at training loss {mean['train_loss']:.3g}, after "
            f"{mean['steps_to_target']:.3g} steps. "
            + (f"Short of the target: {', '.join(missed)}." if missed else "All runs reached the target.")
        )
    return [*lines, *(_tuning(table, norm) for norm in ("none", "batch")), _same(table)]


def _end(row: Mapping[str, Any]) -> str:
    loss = row.get("train_loss")
    return "diverged" if loss is None or not math.isfinite(loss) else f"{loss:.3g}"


def _tuning(table: StudyTable, norm: str) -> str:
    """Say what every rate scored, and whether the best is the last of the grid, beyond which nobody looked."""
    arm = {"norm": norm, "rate": "plain" if norm == "none" else "own"}
    tried = [row for row in table.trials if all(row[k] == v for k, v in arm.items()) and row["seed"] < row["tuned_on"]]
    rates = sorted({row["lr"] for row in tried})
    words = []
    for lr in rates:
        runs = [row for row in tried if row["lr"] == lr]
        short = sum(not row.get("reached") for row in runs)
        words.append(
            f"{lr:g}: {fmean(row['score'] for row in runs):.4f}"
            + (f" ({short} of {len(runs)} short of the target)" if short else "")
        )
    chosen = table.where(**arm)[0]["lr"]
    edge = " The best is at the edge of the grid." if len(rates) > 1 and chosen in (rates[0], rates[-1]) else ""
    return f"Validation accuracy by rate, {'no BN' if norm == 'none' else 'BN'}: {', '.join(words)}.{edge}"


def _same(table: StudyTable) -> str:
    own, plain = (table.where(norm="batch", rate=rate)[0]["lr"] for rate in ("own", "plain"))
    if own == plain:
        return f"BN's own best rate is the plain net's ({own:g}): the two arms of BN are the same runs."
    return f"BN's own best rate is {own / plain:.3g} times the plain net's."


COLUMNS = ("lr", "test_accuracy", "quotient_sharpness", "train_loss", "reached", "steps_to_target")


def _parts(seeds: int, tried: int, rates: Sequence[float], fixed: Mapping[str, Any]) -> list[Study]:
    """Return both halves: rates of the plain net, chosen by its score for either net, and rates of BN's own."""
    return [
        Study(
            "rate-or-norm",
            "Is it the rate or the normalization?",
            scientific={"norm": norms, "rate": [rate]},
            nuisance={"lr": list(rates)},
            fixed={**fixed, "tuned_on": tried},
            seeds=seeds,
            tuning_seeds=tried,
        )
        for rate, norms in (("plain", ["none", "batch"]), ("own", ["batch"]))
    ]


def _fixed(data: str, samples: int, model: str, steps: int, batch: int, target: float) -> dict[str, Any]:
    fixed = {"data": data, "samples": samples, "model": model, "steps": steps, "batch": batch}
    return {**fixed, "target_loss": target, "measured": min(64, batch)}


register(
    Experiment(
        name="rate-or-norm",
        papers=("S0",),
        place="sec. 2.3, 7.2 (after Bjorck et al.)",
        question="Does BN test better because it normalizes, or because it allows a larger learning rate?",
        finding="At the plain network's learning rate BN has no gain in test accuracy; its gain comes from the larger "
        "rate, which finds flatter minima.",
        proxy="Bjorck et al. train a ResNet-110 on all of CIFAR-10 with decay and augmentation to the end; ours is a "
        "VGG of eight convolutions, 8 to 32 channels wide, on 2000 images of CIFAR-10, tested on 4000, by SGD with "
        "momentum 0.9 and batches of 64, without decay and augmentation. Every run stops where its training loss (512 "
        "training images, batch statistics, looked at every 5 steps) is down to 1.2, or after 500 steps: far from "
        "fitted, but a loss that a plain network was seen to reach. All is measured there, the sharpness on 64 "
        "training images with residual 5 %. Plain net and BN choose from the same four rates by validation accuracy "
        "(2000 images, the first seed) at that point. Paper size: a ResNet of three blocks on all "
        "images, to a loss of 0.1.",
        sizes={
            "smoke": _parts(3, 1, (0.03, 0.1), _fixed("digits", 128, "mlp", 20, 32, 0.5)),
            "small": _parts(8, 1, (0.003, 0.01, 0.03, 0.1), _fixed(SUBSET, 2000, "vgg8", 500, 64, 1.2)),
            "paper": _parts(5, 2, (0.0001, 0.001, 0.01, 0.1), _fixed("cifar10", 45_000, "resnet", 60_000, 128, 0.1)),
        },
        run=run,
        contrasts=contrasts,
        figures=figures,
        remarks=remarks,
        columns=COLUMNS,
        choose_by="score",
        data=("cifar10",),
        minutes={"small": 4.5},
        cite=("akbar2025",),
    )
)
