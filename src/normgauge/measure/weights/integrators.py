"""Two integrators of `d theta / dt = f(theta)`: Dormand-Prince with adaptive steps, Runge-Kutta with fixed ones."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.records import Status

Slope = Callable[[Tensor], tuple[float, Tensor]]

# Dormand and Prince's pair of orders 5 and 4; the last row is the fifth-order solution, so the last slope is reused
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass
class Path:
    """A trajectory: times, points and losses, and what it cost."""

    times: list[float]
    points: list[Tensor]
    losses: list[float]
    evaluations: int
    adaptive: bool
    rejected: int = 0
    status: Status = field(default="ok")


def runge_kutta(f: Slope, start: Tensor, time: float, *, steps: int) -> Path:
    """Integrate with `steps` steps of the classical method of order four."""
    h, theta = time / steps, start
    loss, k1 = f(theta)
    path = Path([0.0], [theta], [loss], 1, adaptive=False)
    for number in range(1, steps + 1):
        try:
            k2 = f(theta + h / 2 * k1)[1]
            k3 = f(theta + h / 2 * k2)[1]
            k4 = f(theta + h * k3)[1]
            theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            loss, k1 = f(theta)
        except NonFiniteError:
            path.status = "diverged"
            break
        path.evaluations += 4
        path.times.append(number * h)
        path.points.append(theta)
        path.losses.append(loss)
    return path


def dormand_prince(f: Slope, start: Tensor, time: float, *, rtol: float, max_evaluations: int) -> Path:
    """Integrate with steps that keep the error estimate below `rtol` times the size of theta."""
    loss, slope = f(start)
    path = Path([0.0], [start], [loss], 1, adaptive=True)
    theta, t = start, 0.0
    scale = float(start.norm()) + 1e-12
    h = min(time, 0.01 * scale / (float(slope.norm()) + 1e-300))
    while t < time * (1 - 1e-12):
        if path.evaluations + 6 > max_evaluations:
            path.status = "nonconverged"
            break
        h = min(h, time - t)
        slopes = [slope]
        try:
            for row in STAGES:
                moved = theta + h * _weighted_sum(row, slopes)
                loss, new = f(moved)
                slopes.append(new)
            error = h * float(_weighted_sum(ERROR, slopes).norm())
        except NonFiniteError:
            error = math.inf
        path.evaluations += 6
        ratio = error / (rtol * (float(theta.norm()) + 1e-12))
        if ratio <= 1:
            t, theta, slope = t + h, moved, slopes[-1]
            path.times.append(t)
            path.points.append(theta)
            path.losses.append(loss)
        else:
            path.rejected += 1
        h *= min(5.0, max(0.2, 0.9 * ratio**-0.2)) if ratio > 0 else 5.0
        if h < 1e-14 * time:
            path.status = "nonconverged"
            break
    return path


def _weighted_sum(coefficients: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    total = torch.zeros_like(slopes[0])
    for coefficient, slope in zip(coefficients, slopes, strict=True):
        total = total.add(slope, alpha=coefficient)
    return total
