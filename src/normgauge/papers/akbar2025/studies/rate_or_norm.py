"""S0 sec. 2.3, 7.2 after Bjorck et al.: is it the normalization or the learning rate it allows?"""

import functools
import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from statistics import fmean
from typing import Any

import torch
from torch import nn

from normgauge.errors import NonFiniteError
from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.measure.curvature.spectrum import quotient_spectrum
from normgauge.objective import Objective
from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.networks import dataset
from normgauge.symmetry import Symmetries
from normgauge.symmetry import symmetries as discover

MOMENTUM = 0.9
EVERY = 5  # steps between two looks at the training loss
PROBED = 512  # training images whose mean loss is the training loss
WINDOW = 10  # batches whose mean loss is drawn
NEAR = 1.2  # looking costs as much as some steps: it starts when the batches' losses are this close to the target
POOL = 500  # training images in one batch of the recomputed statistics; divides the sizes of the training sets
TOLERANCE = 0.05  # relative residual asked of the sharpness
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


@register("rate-or-norm")
def run(spec: Spec, record: Record) -> None:
    """Train to the target loss and measure there; the score that chooses the rate is of the net whose rate it is."""
    settings = tuple(sorted((name, value) for name, value in spec.items() if name not in ("norm", "rate", "study")))
    for step, name, value, more in _outcome(spec["norm"], settings):
        record(step, name, value, **more)
    trained, _ = _train_and_score(spec["norm"], settings)
    if int(spec["seed"]) < int(spec["tuned_on"]):  # later seeds run at the chosen rate only
        judge, accuracies = _train_and_score("none" if spec["rate"] == "plain" else spec["norm"], settings)
        if not judge.diverged:  # so that this rate is the worst for both nets that are given the plain one's
            record(trained.steps, "score", accuracies["validation"])
    if trained.diverged:
        raise NonFiniteError(f"rate-or-norm: training diverged at step {trained.steps}")


@functools.lru_cache(maxsize=128)
def _outcome(norm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Row, ...]:
    """Return what to record of one training: step, name, value, and more about it.

    Only a run that reached the target has the readings that are compared at equal training loss.
    """
    spec: Spec = {**dict(settings), "norm": norm}
    training, accuracies = _train_and_score(norm, settings)
    values = {"validation_accuracy": accuracies["validation"], "reached": float(training.reached)}
    values["diverged"] = float(training.diverged)
    if math.isfinite(training.loss):
        values["train_loss"] = training.loss
    rows: list[Row] = [(step, "loss", value, {}) for step, value in training.course]
    if training.reached:
        values |= {"test_accuracy": accuracies["test"], "steps_to_target": training.steps}
        sharpness, residual, status = _sharpness(training.network, _task(spec["data"], int(spec["samples"])), spec)
        values["sharpness_residual"] = residual
        rows.append((training.steps, "quotient_sharpness", sharpness, {"kind": "estimate", "status": status}))
    else:
        values["accuracy_when_stopped"] = accuracies["test"]
    return (*rows, *((training.steps, name, value, {}) for name, value in values.items()))


@functools.lru_cache(maxsize=128)
def _train_and_score(norm: str, settings: tuple[tuple[str, Any], ...]) -> tuple[Trained, Mapping[str, float]]:
    """Return one training and its accuracies; kept, since BN at the plain net's rate is scored by the plain net."""
    spec: Spec = {**dict(settings), "norm": norm}
    task = _task(spec["data"], int(spec["samples"]))
    training = _train(spec, task)
    images = task.train[0]
    count = min(POOL, len(images))  # the moving average of training lags behind where it is stopped abruptly
    twin = recalibrated_copy(training.network, images[: len(images) // count * count].split(count))
    return training, {split: evaluate(twin, task, split).accuracy for split in ("validation", "test")}


def _train(spec: Spec, task: Dataset) -> Trained:
    """Train by SGD with momentum until the training loss is at the target, or the steps are used up."""
    seed, steps, target = int(spec["seed"]), int(spec["steps"]), float(spec["target_loss"])
    network = models.build(spec["model"], spec["norm"], task.shape, task.classes, seed).float()
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=MOMENTUM)
    now = math.nan

    def at_target(step: int, losses: Sequence[float]) -> bool:
        nonlocal now
        if step % EVERY or fmean(losses[-EVERY:]) > NEAR * target:
            return False
        now = _training_loss(network, task, spec)
        return now <= target

    done = fit(spec, network, task, optimizer, until=at_target)
    taken = len(done.losses)
    ends = range(WINDOW, taken + (not done.diverged), WINDOW)
    course = [(end, fmean(done.losses[end - WINDOW : end])) for end in ends]
    if done.diverged:
        return Trained(network, taken, math.nan, course, reached=False, diverged=True)
    if taken == steps:
        now = _training_loss(network, task, spec)
    return Trained(network, taken, now, course, reached=now <= target, diverged=not math.isfinite(now))


def _training_loss(network: nn.Module, task: Dataset, spec: Spec) -> float:
    """Return the mean loss of the first training images as training sees them: in batches, by their statistics."""
    count = min(int(spec["batch"]), len(task.train[1]))
    return evaluate(network, task, "train", statistics="batch", limit=max(count, PROBED), batch=count).loss


def _sharpness(network: nn.Module, task: Dataset, spec: Spec) -> tuple[float, float, str]:
    """Return the largest eigenvalue without symmetries, its relative residual, and whether the search converged."""
    rows = int(spec["measured"])
    batch = (task.train[0][:rows], task.train[1][:rows])
    objective = Objective(network, nn.functional.cross_entropy, batch, mode="train")
    symmetries = _symmetries(spec["model"], spec["norm"], spec["data"], int(spec["samples"]))
    spectrum = quotient_spectrum(objective, symmetries=symmetries, top=1, tol=TOLERANCE, max_products=100)
    return spectrum.sharpness, spectrum.residuals[0], spectrum.status


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
