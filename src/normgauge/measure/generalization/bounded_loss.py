"""Losses between 0 and C with a known slope in the outputs, which generalization bounds need, one value per sample."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, InputError
from normgauge.measure.decisions.classes import decisions, raw_margins

PerSample = Callable[[Any, Any], Tensor]


@dataclass(frozen=True)
class BoundedLoss:
    """A loss per sample, clipped to [0, largest].

    Attributes:
        name: in words.
        largest: C.
        slope: Lipschitz constant in the outputs (and in real targets); nan if it is not known.
        classes: number of classes where targets are classes, else 0.
        outputs: numbers the model gives per sample.
        function: the loss before it is clipped.
        signed: whether that may be negative.
    """

    name: str
    largest: float
    slope: float
    classes: int
    outputs: int
    function: PerSample
    signed: bool = False

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return one value per sample, between 0 and `largest`."""
        return self.raw(output, target).clamp(0, self.largest)

    def raw(self, output: Any, target: Tensor) -> Tensor:
        """Return one value per sample before it is clipped.

        Raises:
            DataError: when there is not one value per sample, or one is not a number or, of a user's loss, negative.
        """
        values = self.function(output, target)
        if values.shape != target.shape[:1]:
            raise DataError(
                "generalization",
                f"the loss must give one value for each of the {len(target)} samples",
                f"a result of shape {tuple(values.shape)}",
                "Pass a loss without its mean, for example reduction='none'",
            )
        if bool((values.detach() < 0).any() & (not self.signed)) or bool(values.detach().isnan().any()):
            raise DataError(
                "generalization", "the loss must be at least 0", "a negative value or nan", "Shift the loss"
            )
        return values


def bounded_loss(
    loss: PerSample | None, margin: float, largest: float, slope: float | None, output: Any, target: Tensor
) -> BoundedLoss:
    """Return the user's loss, or the ramp loss `min(1, max(0, 1 - m/margin))` of the margins m for classifiers.

    The ramp loss is at least the share of wrong decisions, and sqrt(2)/margin-Lipschitz in the logits (1/margin where
    there is one logit).

    Args:
        loss: `loss(output, target)` per sample, or `None`.
        margin: of the ramp loss.
        largest: C.
        slope: of the user's loss in the outputs.
        output: the model's on a few samples.
        target: of these samples.

    Raises:
        InputError: when margin or C is not positive.
        NotClasses: when there is no loss and targets are not classes.
    """
    if not (margin > 0 and math.isfinite(margin) and largest > 0 and math.isfinite(largest)):
        raise InputError(
            "generalization",
            "margin and loss_bound must be positive",
            f"margin={margin!r}, loss_bound={largest!r}",
            "Pass margin=1.0 and loss_bound=1.0",
        )
    classes = 0
    if loss is None or not target.is_floating_point():
        logits, _ = decisions(output, target)
        classes = logits.shape[1]
    size = _outputs(output)
    if loss is not None:
        name = getattr(loss, "__name__", type(loss).__name__)
        loss_slope = math.nan if slope is None else float(slope)
        return BoundedLoss(f"min({name}, {largest:g})", largest, loss_slope, classes, size, loss)
    steep = (1.0 if size == 1 else math.sqrt(2.0)) / margin

    def ramp(output: Any, target: Any) -> Tensor:
        logits, labels = decisions(output, target)
        return 1 - raw_margins(logits, labels) / margin

    return BoundedLoss(f"ramp loss of margin {margin:g}", 1.0, steep, classes, size, ramp, signed=True)


def cross_entropy(output: Any, target: Any) -> Tensor:
    """Return the mean cross-entropy of every decision that counts."""
    return nn.functional.cross_entropy(*decisions(output, target))


def _outputs(output: Any) -> int:
    value = getattr(output, "logits", output)
    if not isinstance(value, torch.Tensor):
        raise DataError(
            "generalization", "the model must give one tensor", type(output).__name__, "Pass forward=lambda m, x: "
        )
    return max(value.numel() // max(value.shape[0], 1), 1)
