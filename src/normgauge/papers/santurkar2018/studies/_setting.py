"""What the studies share: the paper's two networks at three sizes, layers as groups, a measuring batch, steps."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from statistics import median
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.train import Training
from normgauge.measure.signal.activations import activations
from normgauge.nn import init
from normgauge.objective import Objective
from normgauge.papers.language import Record, Spec, build, fit
from normgauge.rng import generator

# The studies' words -> the registry's. "noise" is the paper's noise on a network without normalization.
NORMS = {"none": "none", "batch": "batch", "noisy": "noisy_batch", "noise": "none"}
NORMS |= {"l1": "lp1_batch", "l2": "lp2_batch", "linf": "lpinf_batch"}
LEVELS, BINS = (0.05, 0.25, 0.5, 0.75, 0.95), 24  # of distributions
#: How accuracies on training data are taken: as training sees the first of them, in batches of the training's size.
AS_TRAINED: dict[str, Any] = {"split": "train", "statistics": "batch", "limit": 1024}


class ActivationNoise(nn.Module):
    """Algorithm 1 without the normalization: while training, y = s x + m with a distribution new at every step.

    Per step and unit mu ~ U(-0.5, 0.5) and sigma ~ U(1, 1.25); per activation m ~ U(mu - 0.1, mu + 0.1) and
    s ~ N(sigma, 0.1).
    """

    def __init__(self, seed: int) -> None:
        super().__init__()
        self._source = generator(seed)

    def __deepcopy__(self, memo: dict[int, Any]) -> ActivationNoise:
        """Return a copy with the same stream; generators cannot be copied by themselves."""
        twin = ActivationNoise(0)
        twin._source.set_state(self._source.get_state())
        twin.training = self.training
        return twin

    def forward(self, x: Tensor) -> Tensor:
        """Return s x + m in training, x in evaluation."""
        if not self.training:
            return x
        unit = (1, x.shape[1], *(1,) * (x.dim() - 2))
        mu = torch.rand(unit, generator=self._source) - 0.5
        sigma = 1 + 0.25 * torch.rand(unit, generator=self._source)
        offset = mu + 0.1 * (2 * torch.rand(x.shape, generator=self._source) - 1)
        return (sigma + 0.1 * torch.randn(x.shape, generator=self._source)) * x + offset


def prepare(spec: Spec) -> tuple[nn.Module, Dataset]:
    """Return network and data of a spec: Glorot weights that depend on the seed only, as in the paper."""
    (network, dataset), seed = build(spec, model=spec["network"], norm=NORMS[spec["norm"]]), int(spec["seed"])
    init.glorot(network, seed=seed)
    if spec["norm"] == "noise":
        for number, part in enumerate(normalized_layers(network)):
            part.norm = ActivationNoise(1000 * seed + number)
    return network, dataset


def layer_groups(network: nn.Module) -> dict[str, list[str]]:
    """Return layer -> its parameters; a layer is a linear map with the normalizer behind it."""
    groups: dict[str, list[str]] = {}
    for name, part in network.named_modules():
        inner = name.rpartition(".")[0]
        alone = isinstance(part, nn.Linear) and not isinstance(network.get_submodule(inner), models.Normalized)
        if isinstance(part, models.Normalized) or alone:
            groups[f"{len(groups) + 1:02d}"] = [f"{name}.{key}" for key, _ in part.named_parameters()]
    return groups


def follow(
    spec: Spec, network: nn.Module, dataset: Dataset, watch: Callable[[int, nn.Module], None], **more: Any
) -> Training:
    """Train by SGD at the spec's rate and watch, at spaced steps unless told."""
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    at = more.pop("at", None) or spaced_steps(int(spec["steps"]), int(spec["measures"]))
    return fit(spec, network, dataset, optimizer, at=at, watch=watch, **more)


def record_medians(record: Record, step: int, history: Mapping[str, Sequence[float]]) -> None:
    """Record the median over training of every reading, of those that are finite."""
    for name, values in history.items():
        finite = [value for value in values if math.isfinite(value)]
        record(step, name, median(finite) if finite else math.nan)


def batch_objective(network: nn.Module, dataset: Dataset, spec: Spec) -> Objective:
    """Return the training loss on one fixed batch of the training's size, with batch statistics."""
    count = int(spec["batch"])
    batch = (dataset.train[0][:count], dataset.train[1][:count])
    return Objective(network, dataset.loss, batch, mode="train")


def spaced_steps(steps: int, count: int) -> list[int]:
    """Return about `count` steps from 0 to the last, denser early, where the paper sees the largest differences.

    Examples:
        >>> spaced_steps(100, 5)
        [0, 6, 25, 56, 100]
    """
    return sorted({round(steps * (k / max(1, count - 1)) ** 2) for k in range(count)})


def record_distribution(record: Record, step: int, objective: Objective, *, histogram: bool) -> None:
    """Record quantiles and moments of an activation behind the middle layer's normalizer, at the end a histogram."""
    layers = normalized_layers(objective.model)
    chosen = layers[len(layers) // 2]
    acts = list(chosen.norm.parameters()) or isinstance(chosen.norm, ActivationNoise)
    part = chosen.norm if acts else chosen.layer
    middle = next(name for name, module in objective.model.named_modules() if module is part)
    values = next(iter(activations(objective, layers=middle).values.values()))
    ordered = values.sort().values
    for level in LEVELS:
        place = min(int(level * len(ordered)), len(ordered) - 1)
        record(step, "activation_quantile", float(ordered[place]), layer=f"{level:g}")
    record(step, "activation_mean", float(values.mean()))
    record(step, "activation_deviation", float(values.std(unbiased=False)))
    if histogram and bool(torch.isfinite(values).all()):
        low, high = float(ordered[0]), float(ordered[-1]) + 1e-9
        width = (high - low) / BINS
        for number, count in enumerate(torch.histc(values, BINS, low, high).tolist()):
            center = low + (number + 0.5) * width
            record(step, "activation_density", count / (len(values) * width), layer=f"{center:.5g}")
