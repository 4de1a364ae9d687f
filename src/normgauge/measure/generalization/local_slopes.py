"""How steep the loss is on each cell: at its samples from below, on its ball from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import NormgaugeError
from normgauge.measure.generalization.bounded_loss import BoundedLoss
from normgauge.measure.lipschitz.lipschitz import lipschitz

_CHUNK = 256
_GROUPS = 4
_ROUNDS = 4
Forward = Callable[[nn.Module, Any], Any]
Stay = Callable[[Tensor, Tensor], Tensor]


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
    below.
    Cost: a forward and a backward pass per round.

    Args:
        model: a copy in evaluation mode.
        forward: how to call it.
        loss: of which the slope is asked.
        inputs: samples, where the walks start.
        targets: of the samples.
        stay: moves points back into their cells, `stay(points, before)`; a point it cannot move stays as before.
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
        free = [x.detach().clone().requires_grad_()]
        target = y
        if y.is_floating_point():
            target = y.detach().clone().requires_grad_()
            free.append(target)
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

    Args:
        model: a copy in evaluation mode.
        centers: inputs, `[k, ...]`.
        radii: of the balls, `[k]`.
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
