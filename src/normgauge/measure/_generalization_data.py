"""Options and data of `ng.generalization`: what was asked for, the samples, and the cells they fall into."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, InputError, explain
from normgauge.measure._bounded_loss import BoundedLoss, PerSample
from normgauge.measure._classes import decisions
from normgauge.measure._network_copy import Forward
from normgauge.measure._partition import Partition, around, assigned, fitted
from normgauge.objective._data import to_device
from normgauge.objective._recipe import LossRecipe, call_model
from normgauge.rng import generator


@dataclass(frozen=True)
class Settings:
    """The options of `generalization`, as given."""

    loss: PerSample | None
    loss_bound: float
    loss_slope: float | None
    margin: float
    partition: int | Tensor | Sequence[int] | None
    radius: float | None
    holdout: float
    delta: float
    seed: int
    forward: Forward


def check(settings: Settings) -> None:
    """Refuse options out of range.

    Raises:
        InputError: for delta, holdout or radius that make no sense.
    """
    if not 0 < settings.delta < 1 or not 0 < settings.holdout < 1:
        raise InputError(
            explain(
                "generalization",
                "delta and holdout lie between 0 and 1",
                f"delta={settings.delta!r}, holdout={settings.holdout!r}",
                "Pass delta=0.05 and holdout=0.2",
            )
        )
    if settings.radius is not None and not (settings.radius > 0 and math.isfinite(settings.radius)):
        raise InputError(
            explain(
                "generalization", "radius must be positive", repr(settings.radius), "Leave it out, or pass a number"
            )
        )


def joined(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """Return all inputs and all targets, on the model's device.

    Raises:
        DataError: when inputs are not one real tensor or targets not one tensor.
    """
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    pairs = [to_device(batch, device) for _, batch in LossRecipe(cross_entropy, call_model).batches(data)]
    for inputs, targets in pairs:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not isinstance(targets, Tensor):
            kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise DataError(
                explain(
                    "generalization",
                    "inputs must be one real tensor, samples first, and targets one tensor",
                    kind,
                    "Measure from the embeddings on, where inputs are words",
                )
            )
    return torch.cat([inputs for inputs, _ in pairs]), torch.cat([targets for _, targets in pairs])


def points_of(inputs: Tensor, targets: Tensor) -> Tensor:
    """Return inputs, with real targets beside them, as rows in float64: the space the cells lie in."""
    flat = inputs.detach().double().reshape(len(inputs), -1).cpu()
    if not targets.is_floating_point():
        return flat
    return torch.cat([flat, targets.detach().double().reshape(len(targets), -1).cpu()], dim=1)


def partition_of(
    inputs: Tensor, targets: Tensor, loss: BoundedLoss, settings: Settings
) -> tuple[Partition, Tensor, Tensor | None]:
    """Return the partition, which samples the bound uses, and their cells where the user gave them."""
    points, classes, every = points_of(inputs, targets), max(loss.classes, 1), torch.arange(len(inputs))
    given = settings.partition
    if given is None or isinstance(given, int):
        source = generator(settings.seed)
        order = torch.randperm(len(points), generator=source)
        held = max(1, round(settings.holdout * len(points)))
        count = max(1, (len(points) - held) // (100 * classes)) if given is None else given
        part = fitted(points[order[:held]], count, classes, settings.radius, source)
        return part, order[held:].sort().values, None
    table = torch.as_tensor(given)
    if table.is_floating_point():
        centers = table.double().reshape(len(table), -1)
        if centers.shape[1] != points.shape[1] or settings.radius is None:
            raise InputError(
                explain(
                    "generalization",
                    f"centres have {points.shape[1]} entries each (inputs, and real targets) and need a radius",
                    f"centres of {centers.shape[1]} entries, radius={settings.radius}",
                    "Pass partition=centres with radius=, or a number of cells",
                )
            )
        return around(centers, classes, settings.radius), every, None
    if table.shape != (len(points),) or int(table.min()) < 0:
        raise InputError(
            explain(
                "generalization",
                f"a given partition has one cell number >= 0 for each of the {len(points)} samples",
                f"shape {tuple(table.shape)}",
                "Pass a number of cells instead",
            )
        )
    return assigned(points, table.long(), classes), every, table.long()


def cross_entropy(output: Any, target: Any) -> Tensor:
    """Return the mean cross-entropy of every decision that counts."""
    return nn.functional.cross_entropy(*decisions(output, target))
