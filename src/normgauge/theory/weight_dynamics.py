"""Laws of scale-invariant weights under torch's optimizers: growth, equilibrium norm, angle per step, relaxation.

`G` is the mean of `|w|^2 |g|^2`, the squared gradient at unit norm, which does not depend on the norm of w. Equilibria
are exact for isotropic gradients independent from step to step; a mean gradient shifts those of momentum and Adam.
"""

from __future__ import annotations

import math
from typing import NamedTuple


class Equilibrium(NamedTuple):
    """Where a norm settles: `norm`, the rms `angle` of a step there, and `relaxation`, the time constant in steps.

    The time constant is that of the power of the norm that relaxes exponentially (4 for SGD, 2 for AdamW), or of the
    norm near equilibrium (Adam with L2).
    """

    norm: float
    angle: float
    relaxation: float


def growth(squared_gradients: list[float], rate: float, momentum: float = 0.0) -> float:
    """Return the growth of `|w|^2` in the last of several steps of SGD with momentum, without weight decay.

    `rate^2 |p_t|^2 + 2 rate^2 sum_{k < t} momentum^(t - k) |p_k|^2`, p_k the update directions (for momentum 0 the
    gradients): exact, because `<w_k, g_k> = 0` at every step.

    Args:
        squared_gradients: `|p_k|^2` of all steps so far, the last one last.
        rate: learning rate.
        momentum: of the buffer.

    Examples:
        >>> growth([4.0, 1.0], rate=0.5), growth([4.0, 1.0], rate=0.5, momentum=0.5)
        (0.25, 1.25)

    References: heo2021
    """
    t = len(squared_gradients) - 1
    past = sum(momentum ** (t - k) * value for k, value in enumerate(squared_gradients[:-1]))
    return rate**2 * (squared_gradients[-1] + 2 * past)


def sgd_effective_rate(rate: float, norm: float, momentum: float = 0.0, dampening: float = 0.0) -> float:
    """Return `rate (1 - dampening) / ((1 - momentum) |w|^2)`, the rate of SGD for the unit vector `w / |w|`.

    Examples:
        >>> sgd_effective_rate(0.1, 2.0)
        0.025

    References: sun2020
    """
    return rate * (1 - dampening) / ((1 - momentum) * norm**2)


def sgd_angle(rate: float, norm: float, gradient: float) -> float:
    """Return `atan(rate |g| / |w|)`, the angle of one step of SGD without momentum on a scale-invariant loss.

    Examples:
        >>> round(sgd_angle(1.0, 2.0, 2.0), 4)
        0.7854
    """
    return math.atan2(rate * gradient, norm)


def sgd_equilibrium(rate: float, decay: float, G: float, momentum: float = 0.0, dampening: float = 0.0) -> Equilibrium:
    """Return the equilibrium of torch's SGD (decay inside the buffer): `|w|^4 = e G / (2 decay)`, `e` the total rate.

    With `e = rate (1 - dampening) / (1 - momentum)` the angle is `sqrt(2 rate decay (1 - dampening) / (1 + momentum))`.
    Without momentum the norm is exact: `|w|^4 = rate G / (decay (2 - rate decay))`.

    Args:
        rate: learning rate.
        decay: `weight_decay`; 0 gives an infinite norm.
        G: mean of `|w|^2 |g|^2`.
        momentum: of the buffer.
        dampening: of the buffer.

    Deviations: S0 sec. 5.1 lets weight decay drive the norm to zero; the growth of `|w|^2` by `rate^2 |g|^2` a step
        stops it at this norm.

    Examples:
        >>> settled = sgd_equilibrium(0.1, 0.01, G=1.0)
        >>> round(settled.norm, 4), round(settled.angle, 4), round(settled.relaxation)
        (1.4955, 0.0447, 250)

    References: wan2021, li2020
    """
    if decay == 0 or rate == 0:
        return Equilibrium(math.inf, 0.0, math.inf)
    total = rate * (1 - dampening) / (1 - momentum)
    exact = 2 - rate * decay if momentum == 0 and dampening == 0 else 2.0
    angle = math.sqrt(2 * rate * decay * (1 - dampening) / (1 + momentum))
    return Equilibrium((total * G / (exact * decay)) ** 0.25, angle, 1 / (4 * total * decay))


def adamw_equilibrium(rate: float, decay: float, size: int, beta1: float = 0.9) -> Equilibrium:
    """Return the equilibrium of torch's AdamW: `|w|^2 = rate size / (2 decay)`, whatever the gradients.

    The angle is `sqrt(2 rate decay (1 - beta1) / (1 + beta1))`, the same for all layers.

    Args:
        rate: learning rate.
        decay: `weight_decay`, which torch multiplies by the rate.
        size: number of entries of w.
        beta1: of the first moment.

    Examples:
        >>> round(adamw_equilibrium(0.01, 1.0, size=200).norm, 6)
        1.0

    References: kosson2024
    """
    if decay == 0 or rate == 0:
        return Equilibrium(math.inf, 0.0, math.inf)
    angle = math.sqrt(2 * rate * decay * (1 - beta1) / (1 + beta1))
    return Equilibrium(math.sqrt(rate * size / (2 * decay)), angle, 1 / (2 * rate * decay))


def adam_l2_equilibrium(rate: float, decay: float, size: int, G: float, beta1: float = 0.9) -> Equilibrium:
    """Return the equilibrium of torch's Adam with `weight_decay`: `|w|^3 = rate sqrt(size G) / (2 decay)`.

    The angle `rate sqrt(size (1 - beta1) / (1 + beta1)) / |w|` depends on the gradients, so layers turn at different
    speeds, unlike under AdamW.

    Args:
        rate: learning rate.
        decay: `weight_decay`, which torch adds to the gradient.
        size: number of entries of w.
        G: mean of `|w|^2 |g|^2`.
        beta1: of the first moment.

    Examples:
        >>> round(adam_l2_equilibrium(0.01, 0.5, size=100, G=100.0).norm, 6)
        1.0

    References: kosson2024
    """
    if decay == 0 or rate == 0:
        return Equilibrium(math.inf, 0.0, math.inf)
    norm = (rate * math.sqrt(size * G) / (2 * decay)) ** (1 / 3)
    angle = rate * math.sqrt(size * (1 - beta1) / (1 + beta1)) / norm if norm else math.inf
    return Equilibrium(norm, angle, norm**2 / (1.5 * rate**2 * size))


def relaxed_norm(start: float, equilibrium: float, relaxation: float, steps: float, power: float = 4.0) -> float:
    """Return the norm after some steps: `|w|^power` goes exponentially from `start` to `equilibrium`.

    Examples:
        >>> relaxed_norm(1.0, 2.0, 250.0, 0.0), round(relaxed_norm(1.0, 2.0, 250.0, 1e5), 6)
        (1.0, 2.0)

    References: li2020
    """
    left = math.exp(-steps / relaxation)
    return (start**power * left + equilibrium**power * (1 - left)) ** (1 / power)


def steps_to_equilibrium(
    start: float, equilibrium: float, relaxation: float, power: float = 4.0, within: float = 0.05
) -> float:
    """Return the steps until the norm is within a share of its equilibrium; inf where there is none.

    Examples:
        >>> steps_to_equilibrium(2.0, 2.0, 250.0)
        0.0
        >>> t = steps_to_equilibrium(1.0, 2.0, 250.0)
        >>> round(relaxed_norm(1.0, 2.0, 250.0, t), 6)  # five percent below 2
        1.9
    """
    if not (math.isfinite(equilibrium) and math.isfinite(relaxation)) or equilibrium == 0:
        return math.inf
    if abs(start / equilibrium - 1) <= within:
        return 0.0
    edge = (1 + math.copysign(within, start - equilibrium)) ** power
    return relaxation * math.log(((start / equilibrium) ** power - 1) / (edge - 1))


def equivalent_rates(rate: float, decay: float, steps: int) -> list[float]:
    """Return the rates with which SGD without decay visits the same directions as SGD with decay.

    `rate a^(-2 t - 1)` with `a = 1 - rate decay`, t from 0: weight decay on scale-invariant weights is an exponentially
    growing learning rate.

    Examples:
        >>> [round(value, 4) for value in equivalent_rates(0.1, 1.0, 3)]
        [0.1111, 0.1372, 0.1694]

    References: li2020
    """
    a = 1 - rate * decay
    return [rate * a ** (-2 * t - 1) for t in range(steps)]
