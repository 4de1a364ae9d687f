"""Sec. 1.1: are networks under spectral normalization more robust to noise, each arm at its own rate?"""

import torch

from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.measure.decisions.robustness import robustness
from normgauge.papers.language import Record, Spec, fit, register


@register("spectral-noise")
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
