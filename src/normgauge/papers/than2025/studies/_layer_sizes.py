"""Per-layer operator norms and input deviations of a network in training, and what rescaling does to both (S2)."""

import copy
import math
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.measure.lipschitz.operator_norm import operator_norm
from normgauge.papers.language import Record, Spec, fit


@dataclass(frozen=True)
class Sizes:
    """Of every layer: its operator norm, its Frobenius norm, and the deviation of what it gives to what follows."""

    names: tuple[str, ...]
    norms: tuple[float, ...]
    frobenius: tuple[float, ...]
    deviations: tuple[float, ...]

    def log10_product(self, values: tuple[float, ...]) -> float:
        """Return the sum of log10 of the values."""
        return sum(math.log10(max(value, 1e-300)) for value in values)


def layer_sizes(network: nn.Module, inputs: Tensor) -> Sizes:
    """Measure every linear and convolutional layer but the last on one batch, in training mode; leaves no trace.

    The deviation is the root of the mean over channels of the variance over batch and space, before the normalizer or
    the activation: the sigma of S2's Figure 2.
    """
    model = copy.deepcopy(network).train()
    layers = [(name, m) for name, m in model.named_modules() if isinstance(m, (nn.Linear, nn.Conv2d))][:-1]
    seen: dict[nn.Module, tuple[tuple[int, ...], float]] = {}

    def watch(layer: nn.Module, args: tuple[Tensor, ...], output: Tensor) -> None:
        axes = [axis for axis in range(output.dim()) if axis != 1]
        seen[layer] = tuple(args[0].shape[1:]), float(output.var(axes, unbiased=False).mean().sqrt())

    hooks = [layer.register_forward_hook(watch) for _, layer in layers]
    with torch.no_grad():
        model(inputs)
    for hook in hooks:
        hook.remove()
    brackets = [operator_norm(layer, seen[layer][0], kind="estimate") for _, layer in layers]
    return Sizes(
        tuple(name for name, _ in layers),
        tuple(bracket.upper if math.isfinite(bracket.upper) else bracket.lower for bracket in brackets),
        tuple(float(layer.weight.detach().norm()) for _, layer in layers),
        tuple(seen[layer][1] for _, layer in layers),
    )


def scale_to_ball(dataset: Dataset, radius: float = 1.0) -> Dataset:
    """Return the data divided by the largest norm of a training sample, as S2 App. E.1 does, times a radius."""
    largest, names = float(dataset.train[0].flatten(1).norm(dim=1).max()), ("train", "validation", "test")
    splits: dict[str, Any] = {name: getattr(dataset, name) for name in names}
    return replace(dataset, **{name: (radius * (x / largest), y) for name, (x, y) in splits.items()})


def train_and_watch(spec: Spec, record: Record) -> None:
    """Train by Adam as S2 App. E.1 says, recording norms and deviations per layer and their products."""
    dataset = scale_to_ball(data.load(spec["data"]))
    network = models.build(spec["architecture"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.Adam(network.parameters(), lr=float(spec["lr"]), weight_decay=1e-4)
    batch = dataset.train[0][:128]
    steps = int(spec["steps"])

    def watch(step: int, model: nn.Module) -> None:
        sizes = layer_sizes(model, batch)
        for index, name in enumerate(sizes.names):
            layer = f"{index + 1:02d} {name}"
            record(step, "layer_norm", sizes.norms[index], layer=layer, kind="estimate")
            record(step, "layer_deviation", sizes.deviations[index], layer=layer)
        record(step, "smallest_weight_norm", min(sizes.norms), kind="estimate")
        record(step, "log10_norm_product", sizes.log10_product(sizes.norms), kind="estimate")
        record(step, "log10_frobenius_product", sizes.log10_product(sizes.frobenius))
        record(step, "log10_sigma_product", sizes.log10_product(sizes.deviations))
        record(step, "largest_deviation", max(sizes.deviations))
        record(step, "train_accuracy_now", evaluate(model, dataset, "train", limit=500).accuracy)
        if step == 0:
            record(step, "first_log10_norm_product", sizes.log10_product(sizes.norms), kind="estimate")
            record(step, "first_log10_sigma_product", sizes.log10_product(sizes.deviations))

    at = {0, steps // 4, steps // 2, steps} if steps >= 8 else {0, steps}
    fit(spec, network, dataset, optimizer, at=at, watch=watch).whole()
    record(steps, "train_accuracy", evaluate(network, dataset, "train", limit=1000).accuracy)
