"""Sec. 1.1: are networks under spectral normalization more robust to noise, each arm at its own rate?"""

from __future__ import annotations

import torch

from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.measure.decisions.robustness import robustness
from normgauge.papers.language import Contrast, Figure, Record, Spec, empirical, fit, grid, register


def run(spec: Spec, record: Record) -> None:
    """Train, then classify the test images under Gaussian noise of the stated deviation."""
    dataset = datasets.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    fit(spec, network, dataset, optimizer).whole()
    network.eval()
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    noisy = robustness(network, dataset.test, attack="gaussian", radius=float(spec["noise"]), seed=seed)
    record(steps, "clean_accuracy", noisy.clean)
    record(steps, "noise_accuracy", noisy.accuracy, kind="unbiased")


AT = {"noise": 1.0}
SPECTRAL = {"norm": "spectral"}

empirical(
    "S4-SNrob",
    "spectral-noise",
    contrasts=[Contrast("noise_accuracy", SPECTRAL, {"norm": other}, least=0.02, at=AT) for other in ("none", "batch")],
    premise=(Contrast("clean_accuracy", SPECTRAL, least=0.9, at=AT),),
)

register(
    "spectral-noise",
    sizes=grid(
        "spectral-noise",
        {"norm": ("none", "batch", "spectral"), "noise": (1.0, 2.0)},
        {"lr": (0.03, 0.1, 0.3)},
        smoke={"model": "mlp", "noise": (1.0,), "lr": (0.1,), "data": "digits", "batch": 64, "steps": 100},
        small={"model": "mlp", "seeds": 5, "data": "digits", "batch": 64, "steps": 200},
        medium={"model": "mlp", "seeds": 10, "data": "digits", "batch": 64, "steps": 4000},
        paper={"model": "vgg", "seeds": 5, "data": "cifar10", "batch": 128, "steps": 15_000},
    ),
    run=run,
    figures=(Figure("noise_accuracy", x="noise"), Figure("clean_accuracy", kind="intervals")),
    choose_by="validation_accuracy",
)
