"""Laws of scale-invariant weights under torch's optimizers: growth, equilibrium norm, angle per step, relaxation.

`G` is the mean of `|w|^2 |g|^2`, the squared gradient at unit norm, which does not depend on the norm of w. Equilibria
are exact for isotropic gradients independent from step to step; a mean gradient shifts those of momentum and Adam.
For decoupled decay, `w' = a w - rate u` with `a = 1 - rate decay`, they rest on one identity,
`|w|^2 = rate^2 |u|^2 (1 + 2 sum_k rho_k a^k) / (1 - a^2)` with the autocorrelation rho_k of the updates u.
"""

import math
from collections.abc import Sequence
from functools import lru_cache
from typing import NamedTuple

import torch

NEWTON_SCHULZ = (3.4445, -4.7750, 2.0315)  # Muon's polynomial, as torch.optim.Muon has it


class Equilibrium(NamedTuple):
    """Where a norm settles: `norm`, the rms `angle` of a step there, and `relaxation`, the time constant in steps.

    The time constant is that of the power of the norm that relaxes exponentially (4 for SGD, 2 for AdamW), or of the
    norm near equilibrium (Adam with L2).
    """

    norm: float
    angle: float
    relaxation: float


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


def momentum_filter(momentum: float, nesterov: bool = False) -> tuple[float, float]:
    """Return `sum_j c_j^2` and the correlation r_1 of sums `u_t = sum_j c_j g_(t-j)` of independent gradients.

    c is (1, m, m^2, ...) for momentum m, (1 + m, m^2, m^3, ...) for Nesterov's, as torch computes both; their sums are
    1 / (1 - m), and at lag k the correlation is `r_1 m^(k - 1)`.

    Examples:
        >>> [round(value, 4) for value in (*momentum_filter(0.9), *momentum_filter(0.9, nesterov=True))]
        [5.2632, 0.9, 7.0632, 0.6579]
    """
    tail = momentum**4 / (1 - momentum**2)
    if not nesterov:
        return 1 / (1 - momentum**2), momentum
    square = (1 + momentum) ** 2 + tail
    return square, ((1 + momentum) * momentum**2 + momentum * tail) / square


def sgd_equilibrium(
    rate: float, decay: float, G: float, momentum: float = 0.0, dampening: float = 0.0, nesterov: bool = False
) -> Equilibrium:
    """Return the equilibrium of torch's SGD (decay inside the buffer): `|w|^4 = e G / (2 decay)`, `e` the total rate.

    With `e = rate (1 - dampening) / (1 - momentum)` the angle is `sqrt(2 rate decay (1 - dampening) / (1 + momentum))`,
    under Nesterov `sqrt(2 rate decay (1 - momentum) sum_j c_j^2)` with `momentum_filter`. Without momentum the norm is
    exact: `|w|^4 = rate G / (decay (2 - rate decay))`. Without decay it is infinite.

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
    angle = math.sqrt(2 * rate * decay * (1 - dampening) * (1 - momentum) * momentum_filter(momentum, nesterov)[0])
    return Equilibrium((total * G / (exact * decay)) ** 0.25, angle, 1 / (4 * total * decay))


def decoupled_equilibrium(rate: float, decay: float, square: float, memory: float = 0.0) -> Equilibrium:
    """Return the equilibrium of `w' = a w - rate u`, `a = 1 - rate decay`, for updates whose size does not depend on w.

    `|w|^2 = rate square (1 + 2 memory) / (2 decay - rate decay^2)`, exact for stationary updates; `square` is the mean
    of `|u|^2`, `memory` the sum of `rho_k a^k` over lags k >= 1, which `<w, u> = 0` would make 0: scale invariance
    gives that to gradients but not to their averages.

    Examples:
        >>> round(decoupled_equilibrium(0.1, 1.0, square=19.0).norm, 6)
        1.0

    References: kosson2024, wen2026
    """
    keep = 1 - rate * decay
    if not 0 < keep < 1:
        return Equilibrium(math.inf, 0.0, math.inf)
    norm2 = rate**2 * square * (1 + 2 * memory) / (1 - keep**2)
    return recorded_equilibrium(rate, keep, (norm2, square), memory, power=2.0)


def adamw_equilibrium(rate: float, decay: float, size: int, beta1: float = 0.9) -> Equilibrium:
    """Return the equilibrium of torch's AdamW, whatever the gradients: nearly `|w|^2 = rate size / (2 decay)`.

    `decoupled_equilibrium` with `|u|^2 = size (1 - beta1) / (1 + beta1)` and `rho_k = beta1^k`. The angle, nearly
    `sqrt(2 rate decay (1 - beta1) / (1 + beta1))`, is the same for all layers; `size` is the number of entries of w.

    Examples:
        >>> round(adamw_equilibrium(1e-5, 1.0, size=200_000).norm, 4)
        1.0

    References: kosson2024
    """
    kept = beta1 * (1 - rate * decay)
    return decoupled_equilibrium(rate, decay, size * (1 - beta1) / (1 + beta1), kept / (1 - kept))


@lru_cache(maxsize=64)
def orthogonalized_noise(
    rows: int, columns: int, coefficients: tuple[float, float, float] = NEWTON_SCHULZ, iterations: int = 5
) -> tuple[float, tuple[float, ...]]:
    """Return the mean square entry of what Muon's Newton-Schulz iteration makes of Gaussian matrices, and correlations.

    The latter are those of the outputs of two matrices correlated by sin(9 degrees), sin(18 degrees), ..., sin(81
    degrees): less than those, since the iteration forgets singular values. Drawn by a fixed seed at 64 or fewer rows
    or columns, whichever are fewer: both depend on the shape by its proportion alone once it is large.

    Examples:
        >>> square, correlations = orthogonalized_noise(64, 64)
        >>> 0.7 < 64 * square < 1.0, 0.8 < correlations[-1] < 0.99
        (True, True)
    """
    shrink = min(1.0, 64 / min(rows, columns))
    shape = (round(rows * shrink) or 1, round(columns * shrink) or 1)
    source = torch.Generator().manual_seed(0)
    draws = max(2, 8192 // (shape[0] * shape[1]))
    first, other = (torch.randn(draws, *shape, generator=source) for _ in range(2))
    turns = [step * math.pi / 20 for step in range(11)]
    pairs = torch.stack([math.sin(turn) * first + math.cos(turn) * other for turn in turns])
    x = pairs / pairs.flatten(-2).norm(dim=-1)[..., None, None]
    a, b, c = coefficients
    for _ in range(iterations):
        gram = x @ x.mT
        x = a * x + (b * gram + c * gram @ gram) @ x
    square = float(x.square().mean())
    matches = [float((x[level] * x[-1]).mean()) / square for level in range(1, 10)]
    return square * (shape[0] * shape[1]) / (rows * columns) * (min(rows, columns) / min(shape)), tuple(matches)


def muon_equilibrium(
    rate: float,
    decay: float,
    shape: tuple[int, int],
    momentum: float = 0.95,
    nesterov: bool = True,
    *,
    scale: float | None = None,
    coefficients: tuple[float, float, float] = NEWTON_SCHULZ,
    iterations: int = 5,
) -> Equilibrium:
    """Return the equilibrium of torch's Muon for noise of any size: `decoupled_equilibrium` of orthogonalized updates.

    Momentum correlates what goes into the orthogonalization (`momentum_filter`), which passes on less of it
    (`orthogonalized_noise`): rho_k is that of matrices correlated by r_1 m^(k-1). `scale` is the factor of the update,
    `sqrt(max(1, rows / columns))` if left out, as torch's "original".

    Examples:
        >>> round(muon_equilibrium(0.02, 0.1, (64, 64)).norm, 1)
        10.9
    """
    square, levels = orthogonalized_noise(*shape, coefficients, iterations)
    scale = math.sqrt(max(1.0, shape[0] / shape[1])) if scale is None else scale
    memory = filtered_memory(momentum_filter(momentum, nesterov)[1], momentum, 1 - rate * decay, levels)
    return decoupled_equilibrium(rate, decay, scale**2 * square * shape[0] * shape[1], memory)


def hyperball_equilibrium(rate: float, radius: float, momentum: float = 0.0, nesterov: bool = False) -> Equilibrium:
    """Return the norm and angle of `w' = R norm(w - rate R norm(u))`: the norm is R, the angle nearly atan(rate).

    Momentum turns updates against the way already gone, `<u, w> = -rate R |u| sum_k rho_k a^k` with a the shrinking by
    the projection, `1 - a^2 = rate^2 a^2 (1 + 2 sum_k rho_k a^k)`, solved by iteration; rho_k of `momentum_filter`.

    Examples:
        >>> hyperball_equilibrium(0.1, 2.0).norm, round(hyperball_equilibrium(0.1, 2.0).angle, 6)
        (2.0, 0.099669)

    References: wen2026
    """
    keep, memory = 1.0, 0.0
    for _ in range(20):
        memory = filtered_memory(momentum_filter(momentum, nesterov)[1], momentum, keep) if momentum else 0.0
        keep = 1 / math.sqrt(1 + rate**2 * (1 + 2 * memory))
    cosine = max(-1.0, -rate * memory)
    return Equilibrium(radius, math.atan2(rate * math.sqrt(1 - cosine**2), 1 - rate * cosine), 0.0)


def recorded_equilibrium(
    rate: float, keep: float, squares: tuple[float, float], memory: float, power: float
) -> Equilibrium:
    """Return where `|w'|^2 = a^2 |w|^2 - 2 rate a <w, u> + rate^2 |u|^2` settles, from means over recorded steps.

    `|w|^power = |w_r|^(power - 2) rate^2 |u_r|^2 (1 + 2 memory) / (1 - a^2)`, since `a <w, u> = -rate |u|^2 memory`:
    updates fall as `|w|^(1 - power / 2)`. Infinite without decay. `keep` is a, the share of the weight that decay
    leaves in a step; `squares` are the recorded means of `|w|^2` and `|u|^2`; `memory` is that of
    `decoupled_equilibrium`; `power` is 4 for SGD and 2 where the size of updates is fixed.

    Examples:
        >>> round(recorded_equilibrium(0.1, 0.9, (4.0, 19.0), memory=0.0, power=2.0).norm, 6)
        1.0
    """
    weight, update = squares
    if not 0 < keep < 1 or not weight > 0:
        return Equilibrium(math.inf, 0.0, math.inf)
    grown = rate**2 * update * max(0.0, 1 + 2 * memory)
    norm = (weight ** (power / 2 - 1) * grown / (1 - keep**2)) ** (1 / power)
    if not norm > 0:
        return Equilibrium(0.0, math.nan, math.inf)
    size = rate * math.sqrt(update * (weight / norm**2) ** (power / 2 - 1))
    back = size * min(1.0, size * memory / (keep * norm))  # the part of a step along -w
    return Equilibrium(norm, math.atan2(math.sqrt(size**2 - back**2), keep * norm + back), 2 / (power * (1 - keep**2)))


def filtered_memory(first: float, momentum: float, keep: float, levels: Sequence[float] = ()) -> float:
    """Return `sum_k rho_k keep^k` of a momentum whose correlation at lag 1 is `first`.

    rho_k is read off `levels` (those of `orthogonalized_noise`) where the update is no linear filter.
    """
    if not levels:
        return first * keep / (1 - momentum * keep)
    heights, total, correlation, kept = (0.0, *levels, 1.0), 0.0, first, keep
    while correlation > 1e-4:
        exact = 20 / math.pi * math.asin(correlation)
        place = min(int(exact), 9)
        total += kept * (heights[place] + (exact - place) * (heights[place + 1] - heights[place]))
        correlation, kept = correlation * momentum, kept * keep
    return total


def adam_l2_equilibrium(rate: float, decay: float, size: int, G: float, beta1: float = 0.9) -> Equilibrium:
    """Return the equilibrium of torch's Adam with `weight_decay`: `|w|^3 = rate sqrt(size G) / (2 decay)`.

    The angle `rate sqrt(size (1 - beta1) / (1 + beta1)) / |w|` depends on the gradients, so layers turn at different
    speeds, unlike under AdamW. `size` is the number of entries of w.

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
