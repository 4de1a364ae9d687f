"""S0 sec. 7.2, 9.4: changes of brightness and contrast, and a spurious cue of scale, under BN's three statistics."""

from dataclasses import replace
from functools import lru_cache
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import Statistics, evaluate
from normgauge.lab.runs.train import train
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

#: Offsets in standard deviations of the pixels, factors on them; 0 and 1 are the data as they are.
BRIGHTNESS = (-1.0, -0.5, 0.5, 1.0)
CONTRAST = (0.25, 0.5, 2.0, 4.0)
TRAINED = ("data", "task", "network", "norm", "lr", "steps", "batch", "seed")  # the knobs that a network depends on
BATCH = 128
#: A class's images are multiplied by a factor from 0.4 to 1.6 in training: a cue of scale and nothing else.
CUE = 0.6


@register("shift")
def run(spec: Spec, record: Record) -> None:
    """Train once per arm, then test under the arm's statistics; arms of one network share its training."""
    steps = int(spec["steps"])
    network, diverged = _train_network(**{knob: spec[knob] for knob in TRAINED})
    dataset = _dataset(spec["data"], str(spec["task"]))
    how: Statistics = "stored" if spec["statistics"] == "none" else spec["statistics"]

    def accuracy(inputs: Tensor) -> float:
        changed = replace(dataset, test=(inputs, dataset.test[1]))  # recalibrated on these inputs, without labels
        return evaluate(network, changed, statistics=how, batch=BATCH, rest=True).accuracy

    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    clean = accuracy(dataset.test[0])
    record(steps, "clean_accuracy", clean)
    if spec["task"] == "images":
        accuracies = {f"brightness {b:+g}": accuracy(dataset.test[0] + b) for b in BRIGHTNESS}
        accuracies |= {f"contrast {c:g}": accuracy(dataset.test[0] * c) for c in CONTRAST}
        for name, value in accuracies.items():
            record(steps, "accuracy_under", value, layer=name)
        for kind in ("brightness", "contrast"):
            record(steps, f"{kind}_accuracy", fmean(v for k, v in accuracies.items() if k.startswith(kind)))
        record(steps, "shift_accuracy", fmean(accuracies.values()))
        record(steps, "shift_drop", clean - fmean(accuracies.values()))
    else:
        factors = torch.rand(len(dataset.test[1]), generator=generator(7)).mul(2).sub(1).mul(CUE).add(1)
        plain = data.load(spec["data"]).test[0]
        broken = accuracy(plain * factors.view(-1, *(1,) * (plain.dim() - 1)))
        record(steps, "broken_cue_accuracy", broken)
        record(steps, "cue_drop", clean - broken)
    if diverged:
        raise NonFiniteError("shift: training diverged")


# Networks only: a copy of the data per entry would stay in workers that go on to other studies. Four: the arms of one
# network come as many runs apart as there are tuned rates, or seeds after the tuned ones.
@lru_cache(maxsize=4)
def _train_network(**spec: Any) -> tuple[nn.Module, bool]:
    """Return the trained network and whether it diverged; readers copy it before they change anything."""
    dataset, seed = _dataset(spec["data"], spec["task"]), int(spec["seed"])
    network = models.build(spec["network"], spec["norm"], dataset.shape, dataset.classes, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    result = train(network, dataset, optimizer, steps=int(spec["steps"]), batch=int(spec["batch"]), seed=seed)
    return network.eval(), result.diverged


def _dataset(name: str, task: str) -> Dataset:
    """Return the data as they are, or with the cue: made anew each time, which costs one multiplication per pixel."""
    dataset = data.load(name)
    if task != "cue":
        return dataset
    parts = (dataset.train, dataset.validation, dataset.test)
    train, validation, test = (_add_cue(part, dataset.classes) for part in parts)
    return Dataset(name, dataset.task, train, validation, test, dataset.classes)


def _add_cue(part: tuple[Tensor, Tensor], classes: int) -> tuple[Tensor, Tensor]:
    """Return the split with every image multiplied by its class's factor."""
    inputs, targets = part
    factors = 1 + CUE * (2 * targets / (classes - 1) - 1)
    return inputs * factors.view(-1, *(1,) * (inputs.dim() - 1)), targets
