"""What is read off a network during training: losses, accuracy, landscape, curvature, weight norms."""

import math
from collections.abc import Callable

import torch
from torch import nn

from normgauge.errors import InputError, NonFiniteError, NotDifferentiableError
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.measure.curvature.spectrum import spectrum
from normgauge.measure.decisions.margins import margins
from normgauge.measure.decisions.robustness import robustness
from normgauge.measure.landscape.flatness import flatness
from normgauge.measure.landscape.landscape import landscape
from normgauge.measure.signal.covariate_shift import covariate_shift
from normgauge.measure.signal.signal_propagation import signal_propagation
from normgauge.objective import Objective
from normgauge.records import Spec

Record = Callable[..., None]

# S1 App. A.2.2 looks along the gradient at [1/2, 4] times the learning rate.
LANDSCAPE_MULTIPLES = (0.5, 1.0, 2.0, 4.0)
# How the finished network is tried: test samples looked at, FGSM radius (in standard deviations of the pixels), and
# noise on every filter relative to its norm.
DECISIONS = 128
FGSM_RADIUS = 0.2
WEIGHT_NOISE = 0.2
# Samples evaluated at once: 10,000 images of CIFAR in one pass would take gigabytes per worker.
EVALUATED = 1000


def measure_network(record: Record, network: nn.Module, dataset: Dataset, spec: Spec, step: int) -> None:
    """Record every quantity at one step of training; a quantity that cannot be had becomes a hole with a status."""
    for split in ("validation", "test"):
        measured = evaluate(network, dataset, split, batch=EVALUATED)
        record(step, f"{split}_loss", measured.loss)
        if not math.isnan(measured.accuracy):
            record(step, f"{split}_accuracy", measured.accuracy)
        if dataset.metric is not None:
            record(step, f"{split}_metric", measured.metric)
    record(step, "weight_norm", _weight_norm(network))
    if not spec["measure_batch"]:
        return
    rows = slice(0, int(spec["measure_batch"]))
    batch = (dataset.train[0][rows], dataset.train[1][rows])
    objective = Objective(network, dataset.loss, batch, mode="train")
    try:
        for look in (_measure_landscape, _measure_curvature, _measure_propagation):
            try:
                look(record, objective, float(spec["lr"]), step)
            except (InputError, NotDifferentiableError):  # it cannot read a user's network: no reason to lose the run
                continue
    except NonFiniteError:
        for name in ("train_loss", "effective_beta", "gradient_distance", "loss_variation", "top_eigenvalue"):
            record(step, name, math.nan, status="diverged")
    if step == int(spec["steps"]) and dataset.task == "classification" and dataset.is_plain:
        _measure_decisions(record, network, dataset, step)


def _measure_landscape(record: Record, objective: Objective, lr: float, step: int) -> None:
    view = landscape(objective, steps=[multiple * lr for multiple in LANDSCAPE_MULTIPLES])
    record(step, "train_loss", view.loss)
    record(step, "effective_beta", view.max_effective_beta)
    record(step, "gradient_distance", view.max_gradient_distance)
    record(step, "loss_variation", view.loss_variation)


def _measure_curvature(record: Record, objective: Objective, _: float, step: int) -> None:
    curvature = spectrum(objective, top=1, tol=3e-2)
    value = curvature.top[0] if curvature.status == "ok" else math.nan
    record(step, "top_eigenvalue", value, kind="estimate", status=curvature.status)


def _measure_propagation(record: Record, objective: Objective, lr: float, step: int) -> None:
    """Record how far a layer's gradient turns when the layers before it move, and how gradients grow with depth."""
    turned = [layer.cosine for layer in covariate_shift(objective, lr).layers if math.isfinite(layer.cosine)]
    record(step, "shift_cosine", sum(turned) / len(turned) if turned else math.nan, status="skipped")
    record(step, "gradient_growth", signal_propagation(objective).growth, kind="estimate", status="skipped")


def _measure_decisions(record: Record, network: nn.Module, dataset: Dataset, step: int) -> None:
    """Record margins and accuracy under attack and under weight noise, with stored statistics on test data."""
    rows = slice(0, DECISIONS)
    batch = (dataset.test[0][rows], dataset.test[1][rows])
    objective = Objective(network, dataset.loss, batch, mode="eval")
    record(step, "margin", margins(objective).quantile(0.5, by="last_layer"), status="skipped")
    attacked = robustness(network, batch, attack="fgsm", radius=FGSM_RADIUS)
    record(step, "fgsm_accuracy", attacked.accuracy, status="skipped")
    shaken = flatness(objective, sigmas=(WEIGHT_NOISE,), samples=3, noises=("filter",), sharpness=())
    record(step, "noise_accuracy", shaken.entries[0].accuracy, kind="unbiased", status="skipped")


def _weight_norm(network: nn.Module) -> float:
    """Return the Euclidean norm of all weight tensors (two or more axes) together."""
    norms = [float(torch.linalg.vector_norm(p.detach())) for p in network.parameters() if p.ndim >= 2]
    return math.sqrt(sum(norm**2 for norm in norms))
