"""Perturbations of inputs within a ball: random noise and gradient ascent, as pure functions of a gradient."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor

from normgauge.errors import InputError, unknown_name

Ball = Literal["linf", "l2"]
Slope = Callable[[Tensor], Tensor]
Bounds = tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Attack:
    """How the inputs of a batch are changed.

    Args:
        name: the word users type.
        ball: the norm of the radius.
        steps: gradient steps; 0 for noise.
        restarts: random starts inside the ball; 0 starts at the clean input.
        step: size of a step as a share of the radius.
    """

    name: str
    ball: Ball
    steps: int
    restarts: int = 0
    step: float = 1.0


ATTACKS = {
    "gaussian": Attack("gaussian", "l2", 0),
    "fgsm": Attack("fgsm", "linf", 1),
    "bim": Attack("bim", "linf", 10, step=0.25),
    "pgd": Attack("pgd", "linf", 20, restarts=1, step=0.1),
    "pgd_l2": Attack("pgd_l2", "l2", 20, restarts=1, step=0.1),
}


def attack_named(name: str, steps: int | None, restarts: int | None, step: float | None) -> Attack:
    """Return an attack by name with some of its settings replaced."""
    if name not in ATTACKS:
        raise unknown_name("attack", name, ATTACKS)
    base = ATTACKS[name]
    chosen = Attack(
        name,
        base.ball,
        base.steps if steps is None or name in ("gaussian", "fgsm") else steps,
        base.restarts if restarts is None or name not in ("pgd", "pgd_l2") else restarts,
        base.step if step is None else step,
    )
    if chosen.steps < (name != "gaussian") or chosen.restarts < 0 or not chosen.step > 0:
        raise InputError(
            f"attack {name!r}",
            "iterations must be at least 1, restarts at least 0 and the step positive",
            f"iterations={chosen.steps}, restarts={chosen.restarts}, step={chosen.step:g}",
            "Leave them out for the defaults",
        )
    return chosen


def gaussian_noise(inputs: Tensor, sigma: float, source: torch.Generator, bounds: Bounds) -> Tensor:
    """Return `inputs + sigma N(0, 1)`, clipped to the bounds."""
    draw = torch.randn(inputs.shape, generator=source, dtype=torch.float64).to(inputs)
    return _clip(inputs + sigma * draw, bounds)


def ascend(
    inputs: Tensor, start: Tensor, slope: Slope, *, ball: Ball, radius: float, steps: int, step: float, bounds: Bounds
) -> Tensor:
    """Return where gradient ascent from `start` ends, each step projected onto the ball around `inputs` and the bounds.

    A step has length `step` in the norm of the ball: by the sign of the gradient (linf), along it (l2).

    Examples:
        One step of size 1 in the ball of radius 1 is FGSM:

        >>> x = torch.tensor([[0.5, 0.5]])
        >>> ascend(x, x, lambda z: torch.tensor([[2.0, -3.0]]), ball="linf", radius=0.1, steps=1, step=0.1, bounds=None)
        tensor([[0.6000, 0.4000]])
    """
    points = start
    for _ in range(steps):
        gradient = slope(points)
        if ball == "linf":
            points = points + step * gradient.sign()
        else:
            length = _lengths(gradient)
            points = points + step * gradient / length.clamp_min(torch.finfo(gradient.dtype).tiny)
        points = _clip(project(points, inputs, ball, radius), bounds)
    return points


def random_start(inputs: Tensor, ball: Ball, radius: float, source: torch.Generator, bounds: Bounds) -> Tensor:
    """Return a point drawn uniformly from the ball around each input, clipped to the bounds."""
    if ball == "linf":
        draw = 2 * torch.rand(inputs.shape, generator=source, dtype=torch.float64) - 1
        return _clip(inputs + radius * draw.to(inputs), bounds)
    draw = torch.randn(inputs.shape, generator=source, dtype=torch.float64)
    size = torch.rand(inputs.shape[0], generator=source, dtype=torch.float64) ** (1 / max(inputs[0].numel(), 1))
    draw = draw / _lengths(draw) * size.reshape(-1, *(1,) * (inputs.ndim - 1))
    return _clip(inputs + radius * draw.to(inputs), bounds)


def project(points: Tensor, centres: Tensor, ball: Ball, radius: float) -> Tensor:
    """Return the nearest points of the balls of `radius` around `centres`, one ball per sample.

    Examples:
        >>> project(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), "l2", 1.0)
        tensor([[0.6000, 0.8000]])
    """
    away = points - centres
    if ball == "linf":
        return centres + away.clamp(-radius, radius)
    length = _lengths(away)
    return centres + away * (radius / length.clamp_min(radius))


def _lengths(values: Tensor) -> Tensor:
    flat = values.reshape(values.shape[0], -1).norm(dim=1)
    return flat.reshape(-1, *(1,) * (values.ndim - 1))


def _clip(values: Tensor, bounds: Bounds) -> Tensor:
    return values if bounds is None else values.clamp(*bounds)
