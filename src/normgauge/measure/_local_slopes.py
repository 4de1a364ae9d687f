"""How steep the loss is on each cell: at its samples from below, on its ball from above."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import NormgaugeError
from normgauge.measure._bounded_loss import BoundedLoss
from normgauge.measure._lipschitz import lipschitz

_CHUNK = 256
_GROUPS = 4
Forward = Callable[[nn.Module, Any], Any]


def values_and_slopes(
    model: nn.Module, forward: Forward, loss: BoundedLoss, inputs: Tensor, targets: Tensor
) -> tuple[Tensor, Tensor]:
    """Return the loss of each sample and the norm of its gradient in the input (and in a real target), in float64.

    At a point where the loss is differentiable, the gradient's norm bounds its Lipschitz constant around it from below.
    Cost: one forward and one backward pass.
    """
    values, slopes = [], []
    for x, y in zip(inputs.split(_CHUNK), targets.split(_CHUNK), strict=True):
        free = [x.detach().clone().requires_grad_()]
        target = y
        if y.is_floating_point():
            target = y.detach().clone().requires_grad_()
            free.append(target)
        with torch.enable_grad():
            found = loss(forward(model, free[0]), target)
            gradients: tuple[Tensor | None, ...] = (None,) * len(free)
            if found.requires_grad:
                gradients = torch.autograd.grad(found.sum(), free, allow_unused=True)
        squares = [g.double().reshape(len(y), -1).square().sum(1) for g in gradients if g is not None]
        values.append(found.detach().double())
        slopes.append(torch.stack(squares).sum(0).sqrt() if squares else torch.zeros(len(y), dtype=torch.float64))
    return torch.cat(values), torch.cat(slopes)


def ball_slopes(model: nn.Module, centers: Tensor, radii: Tensor) -> tuple[list[float], float]:
    """Return bounds of the network's Lipschitz constant on balls, and on all inputs; inf where there is no bound.

    Balls of similar size are asked for together, at the largest radius among them: at most four brackets.

    Args:
        model: a copy in evaluation mode.
        centers: inputs, `[k, ...]`.
        radii: of the balls, `[k]`.
    """
    found, everywhere = [math.inf] * len(centers), math.inf
    order = radii.argsort()
    for group in order.chunk(min(_GROUPS, len(order))):
        size = max(float(radii[group].max()), 1e-12)
        try:
            bracket = lipschitz(model, centers[group], radius=size, climbs=0)
        except NormgaugeError:  # a layer without a rule, named in the error: then nothing is known
            return [math.inf] * len(centers), math.inf
        everywhere = min(everywhere, bracket.everywhere)
        for place, log in zip(group.tolist(), bracket.per_datum.tolist(), strict=True):
            found[place] = 10.0**log if log < 308 else math.inf
    return found, everywhere
