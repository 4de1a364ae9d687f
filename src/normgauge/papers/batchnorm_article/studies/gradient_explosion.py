"""S3 Vanishing/exploding gradients: how gradients grow with depth under BN and whether it still trains."""

import math

import torch

from normgauge.lab import data as datasets
from normgauge.lab.runs.evaluate import recalibrated_copy
from normgauge.papers.batchnorm_article.studies._deep_batchnorm import DeepBatchNorm, squared_gradients
from normgauge.papers.language import Record, Spec, fit, record_accuracies, register
from normgauge.theory.gradient_explosion import squared_gradient_growth
from normgauge.theory.mean_field import batchnorm_layer


@register("gradient-explosion")
def run(spec: Spec, record: Record) -> None:
    """Measure growth at the start, or train: the knob `part` says which."""
    (_train if spec["part"] in ("train", "remedies") else _grow)(spec, record)


def _grow(spec: Spec, record: Record) -> None:
    activation, batch, depth = spec["activation"], int(spec["batch_size"]), int(spec["depth"])
    skip, width = bool(spec["skip"]), int(spec["width"])
    by_weights, by_states = squared_gradients(activation, batch, width, depth, skip=skip, seed=int(spec["seed"]))
    for layer, value in enumerate(by_weights):
        record(layer, "log10_gradient", math.log10(value) / 2)
    square = squared_gradient_growth(torch.tensor(by_states, dtype=torch.float64))
    record(depth, "norm_growth", math.sqrt(square))
    record(depth, "square_growth", square)
    if not skip:
        record(depth, "mean_field", batchnorm_layer(activation, batch).norm_growth)


def _train(spec: Spec, record: Record) -> None:
    dataset = datasets.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    remedy = str(spec.get("remedy", "skip" if spec.get("skip") else "none"))
    width, depth = int(spec["width"]), int(spec["depth"])
    network = DeepBatchNorm(math.prod(dataset.shape), width, depth, dataset.classes, seed=seed)
    network.skip = remedy == "skip"
    if "near-linear" in remedy:
        network.slope = 0.9
    if "orthogonal" in remedy:
        network.make_orthogonal(seed)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    if remedy == "adam":
        optimizer = torch.optim.Adam(network.parameters(), lr=float(spec["lr"]))
    done = fit(spec, network, dataset, optimizer, batch=int(spec["batch"]) * (8 if remedy == "large batch" else 1))
    for step in range(0, len(done.losses), max(1, steps // 40)):
        record(step, "train_loss", done.losses[step])
    settled = recalibrated_copy(network, [dataset.train[0]])
    # a network that broke answers all the same: whatever it says is its accuracy
    record(steps, "diverged", float(done.diverged))
    record_accuracies(record, steps, settled, dataset, "train", "validation")
