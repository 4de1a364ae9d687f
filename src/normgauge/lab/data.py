"""Data that ships with the install or is made from a seed: digits and the Gaussian regression of paper S1."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normgauge.errors import require, unknown_name
from normgauge.rng import generator

Task = Literal["classification", "regression"]


@dataclass(frozen=True)
class Dataset:
    """Three splits held in memory as tensors: train to learn, validation to tune, test to report.

    Attributes:
        name: how the dataset is called.
        task: "classification" (integer targets) or "regression".
        train: (inputs, targets).
        validation: (inputs, targets); learning rates are chosen on it.
        test: (inputs, targets); never used for a choice.
        classes: the number of outputs a model needs.
    """

    name: str
    task: Task
    train: tuple[Tensor, Tensor]
    validation: tuple[Tensor, Tensor]
    test: tuple[Tensor, Tensor]
    classes: int

    @property
    def shape(self) -> tuple[int, ...]:
        """The shape of one input."""
        return tuple(self.train[0].shape[1:])

    def loss(self, output: Tensor, target: Tensor) -> Tensor:
        """Return cross-entropy or mean squared error, a mean over the samples.

        The regression loss is |output - target|^2 summed over components and averaged over samples, as in S1.
        """
        if self.task == "classification":
            return torch.nn.functional.cross_entropy(output, target)
        return (output - target).square().sum(dim=1).mean()


def digits() -> Dataset:
    """Return scikit-learn's bundled 8x8 digits: 1797 images, 10 classes, standardized.

    The split (1149 / 288 / 360) is fixed, so that runs differ by their own seed only.
    """
    sklearn_data = require("sklearn.datasets", "lab", "the digits data")
    bunch = sklearn_data.load_digits()
    inputs = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    targets = torch.tensor(bunch.target, dtype=torch.int64)
    order = torch.randperm(len(targets), generator=generator(0))
    parts = order[:1149], order[1149:1437], order[1437:]
    mean, deviation = inputs[parts[0]].mean(), inputs[parts[0]].std()
    inputs = (inputs - mean) / deviation
    train, validation, test = ((inputs[part], targets[part]) for part in parts)
    return Dataset("digits", "classification", train, validation, test, classes=10)


def gaussian() -> Dataset:
    """Return S1's regression: x ~ N(0, I_10), target A x with A a 10x10 Gaussian matrix, 1000 training samples.

    References: santurkar2018.
    """
    source = generator(0)
    matrix = torch.randn(10, 10, generator=source)

    def draw(count: int) -> tuple[Tensor, Tensor]:
        inputs = torch.randn(count, 10, generator=source)
        return inputs, inputs @ matrix.T

    return Dataset("gaussian", "regression", draw(1000), draw(500), draw(500), classes=10)


_DATASETS: dict[str, Callable[[], Dataset]] = {"digits": digits, "gaussian": gaussian}


def names() -> tuple[str, ...]:
    """Return the names `load` knows."""
    return tuple(_DATASETS)


def load(name: str) -> Dataset:
    """Return a dataset by name.

    Raises:
        UnknownNameError: for a name that is not known, with the nearest one.
    """
    if name not in _DATASETS:
        raise unknown_name("data", name, _DATASETS)
    return _DATASETS[name]()
