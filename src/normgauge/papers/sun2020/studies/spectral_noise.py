"""Sec. 1.1: are networks under spectral normalization more robust to noise, each arm at its own rate?"""

import torch

from normgauge.measure.decisions.robustness import robustness
from normgauge.papers.language import Record, Spec, build, fit, record_accuracies, register


@register("spectral-noise")
def run(spec: Spec, record: Record) -> None:
    """Train, then classify the test images under Gaussian noise of the stated deviation."""
    (network, dataset), seed, steps = build(spec), int(spec["seed"]), int(spec["steps"])
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    fit(spec, network, dataset, optimizer).whole()
    network.eval()
    record_accuracies(record, steps, network, dataset, "validation")
    noisy = robustness(network, dataset.test, attack="gaussian", radius=float(spec["noise"]), seed=seed)
    record(steps, "clean_accuracy", noisy.clean)
    record(steps, "noise_accuracy", noisy.accuracy, kind="unbiased")
