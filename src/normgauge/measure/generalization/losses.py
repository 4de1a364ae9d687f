"""Losses between 0 and C with a known slope in the outputs, one value per sample, and how steep they are on cells."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, InputError, NormgaugeError
from normgauge.measure.decisions.classes import decisions, raw_margins
from normgauge.measure.generalization.network_copy import Forward
from normgauge.measure.lipschitz.lipschitz import lipschitz
from normgauge.objective import pairs, to_device

_CHUNK = 256
_GROUPS = 4
_ROUNDS = 4
PerSample = Callable[[Any, Any], Tensor]
Stay = Callable[[Tensor, Tensor], Tensor]


def join_batches(model: nn.Module, data: Any) -> tuple[Tensor, Tensor]:
    """Return the inputs and the targets of all batches, each as one tensor, on the model's device."""
    device = next((p.device for p in model.parameters()), torch.device("cpu"))
    batches = [to_device(batch, device) for _, batch in pairs(data)]
    for inputs, targets in batches:
        if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or not isinstance(targets, Tensor):
            rule = "inputs must be one real tensor, samples first, and targets one tensor"
            kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
            raise DataError("generalization", rule, kind, "Measure from the embeddings on, where inputs are words")
    return torch.cat([inputs for inputs, _ in batches]), torch.cat([targets for _, targets in batches])


@dataclass(frozen=True)
class BoundedLoss:
    """A loss per sample, clipped to [0, largest]."""

    name: str  # in words
    largest: float  # C
    slope: float  # Lipschitz constant in the outputs (and in real targets); nan if it is not known
    classes: int  # number of classes where targets are classes, else 0
    outputs: int  # numbers the model gives per sample
    function: PerSample  # the loss before it is clipped
    signed: bool = False  # whether that may be negative

    def __call__(self, output: Any, target: Tensor) -> Tensor:
        """Return one value per sample, between 0 and `largest`."""
        return self.raw(output, target).clamp(0, self.largest)

    def raw(self, output: Any, target: Tensor) -> Tensor:
        """Return one value per sample before it is clipped; refused are others, nan, and negative ones of users."""
        values = self.function(output, target)
        if values.shape != target.shape[:1]:
            rule = f"the loss must give one value for each of the {len(target)} samples"
            step = "Pass a loss without its mean, for example reduction='none'"
            raise DataError("generalization", rule, f"a result of shape {tuple(values.shape)}", step)
        if bool((values.detach() < 0).any() & (not self.signed)) or bool(values.detach().isnan().any()):
            got = "a negative value or nan"
            raise DataError("generalization", "the loss must be at least 0", got, "Shift the loss")
        return values


def bounded_loss(
    loss: PerSample | None, margin: float, largest: float, slope: float | None, output: Any, target: Tensor
) -> BoundedLoss:
    """Return the user's loss, or the ramp loss `min(1, max(0, 1 - m/margin))` of the margins m for classifiers.

    The ramp loss is at least the share of wrong decisions, and sqrt(2)/margin-Lipschitz in the logits (1/margin where
    there is one logit). `largest` is C, `slope` that of the user's loss; output and target are of a few samples.
    """
    if not (margin > 0 and math.isfinite(margin) and largest > 0 and math.isfinite(largest)):
        rule, got = "margin and loss_bound must be positive", f"margin={margin!r}, loss_bound={largest!r}"
        raise InputError("generalization", rule, got, "Pass margin=1.0 and loss_bound=1.0")
    classes, made = 0, getattr(output, "logits", output)
    if loss is None or not target.is_floating_point():
        classes = decisions(output, target)[0].shape[1]
    if not isinstance(made, Tensor):
        got = type(output).__name__
        raise DataError("generalization", "the model must give one tensor", got, "Pass forward=lambda m, x: ...")
    size = max(made.numel() // max(made.shape[0], 1), 1)
    if loss is not None:
        name = getattr(loss, "__name__", type(loss).__name__)
        loss_slope = math.nan if slope is None else float(slope)
        return BoundedLoss(f"min({name}, {largest:g})", largest, loss_slope, classes, size, loss)
    steep = (1.0 if size == 1 else math.sqrt(2.0)) / margin

    def ramp(output: Any, target: Any) -> Tensor:
        logits, labels = decisions(output, target)
        return 1 - raw_margins(logits, labels) / margin

    return BoundedLoss(f"ramp loss of margin {margin:g}", 1.0, steep, classes, size, ramp, signed=True)


def values_and_slopes(
    model: nn.Module, forward: Forward, loss: BoundedLoss, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample and the norm of its gradient in the input (and in a real target), in float64.

    At a point where the loss is differentiable, the gradient's norm bounds its Lipschitz constant around it from below.
    Cost: one forward and one backward pass.
    """
    raw, slopes, _ = _raw_losses(model, forward, loss, inputs, targets)
    return raw.clamp(0, loss.largest), slopes


def climb(model: nn.Module, forward: Forward, loss: BoundedLoss, inputs: Tensor, targets: Tensor, stay: Stay) -> Tensor:
    """Return for each sample the largest slope met on a walk inside its cell to where the loss is between 0 and C.

    A loss that is cut at 0 is flat at well learned samples and may be steep between them. Each round takes Newton's
    step of the loss before it is cut to C/2. Every point met lies in the sample's cell, so its slope bounds L_i from
    below. `stay(points, before)` moves points back into their cells; one it cannot move stays as before.
    Cost: a forward and a backward pass per round.
    """
    raw, best, gradients = _raw_losses(model, forward, loss, inputs, targets)
    points = inputs
    for _ in range(_ROUNDS):
        size = gradients.double().flatten(1).square().sum(1)
        step = torch.where(size > 0, (loss.largest / 2 - raw) / size.clamp_min(1e-300), 0.0)
        moved = points + step.to(points).reshape(-1, *[1] * (points.ndim - 1)) * gradients
        points = stay(torch.where(moved.isfinite(), moved, points), points)
        raw, slopes, gradients = _raw_losses(model, forward, loss, points, targets)
        best = torch.maximum(best, slopes)
    return best


def _raw_losses(
    model: nn.Module, forward: Forward, loss: BoundedLoss, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the loss before it is cut, the slope after, and the gradient in the inputs before."""
    values, slopes, pulls = [], [], []
    for x, y in zip(inputs.split(_CHUNK), targets.split(_CHUNK), strict=True):
        free = [t.detach().clone().requires_grad_() for t in (x, y) if t.is_floating_point()]
        target = free[1] if y.is_floating_point() else y
        with torch.enable_grad():
            losses = loss.raw(forward(model, free[0]), target)
            gradients: tuple[Tensor | None, ...] = (None,) * len(free)
            if losses.requires_grad:
                gradients = torch.autograd.grad(losses.sum(), free, allow_unused=True)
        squares = [g.double().reshape(len(y), -1).square().sum(1) for g in gradients if g is not None]
        size = torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(y), dtype=torch.float64)
        losses = losses.detach().double()
        values.append(losses)
        slopes.append(torch.where((losses > 0) & (losses < loss.largest), size, 0.0))
        pulls.append(torch.zeros_like(x) if gradients[0] is None else gradients[0])
    return torch.cat(values), torch.cat(slopes), torch.cat(pulls)


def ball_slopes(model: nn.Module, centers: Tensor, radii: Tensor) -> tuple[list[float], float]:
    """Return bounds of the network's Lipschitz constant on balls, and on all inputs; inf where there is no bound.

    Balls of similar size are asked for together, at the largest radius among them: at most four brackets.
    """
    slopes, everywhere = [math.inf] * len(centers), math.inf
    order = radii.argsort()
    for group in order.chunk(min(_GROUPS, len(order))):
        size = max(float(radii[group].max()), 1e-12)
        try:
            bracket = lipschitz(model, centers[group], radius=size, climbs=0)
        except NormgaugeError:  # a layer without a rule, named in the error: then nothing is known
            return [math.inf] * len(centers), math.inf
        everywhere = min(everywhere, bracket.everywhere)
        for place, log in zip(group.tolist(), bracket.per_datum.tolist(), strict=True):
            slopes[place] = 10.0**log if log < 308 else math.inf
    return slopes, everywhere
