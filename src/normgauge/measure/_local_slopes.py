"""How steep the loss is on each cell: at its samples from below, on its ball from above."""

from __future__ import annotations

import importlib
import math
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.measure._bounded_loss import BoundedLoss

_CHUNK = 256
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


def ball_slope(model: nn.Module, center: Tensor, radius: float) -> float:
    """Return a bound of the network's Lipschitz constant on a ball; inf where there is no rule for a layer.

    Args:
        model: a copy in evaluation mode.
        center: one input, without batch axis.
        radius: of the ball.
    """
    try:
        room = importlib.import_module("normgauge.measure._lipschitz")
    except ImportError:
        return math.inf
    try:
        return float(room.lipschitz(model, center[None], radius=radius).upper)
    except InputError:  # a layer without a rule, named in the error: then nothing is known on the ball
        return math.inf
