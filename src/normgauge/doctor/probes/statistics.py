"""How far data are from stored statistics, and what sampling alone gives."""

import math

import torch
from torch import Tensor

from normgauge.doctor.probes.passes import NormCall

FAR = 0.5  # stored deviations: half the scale at which the next layer tells values apart
WIDE = math.log(4.0)  # of a ratio of variances: deviations that differ by a factor of 2


def root_mean_square(values: Tensor) -> float:
    """Return the root of the mean of squares."""
    return float(values.double().square().mean().sqrt())


def sampling_floor(call: NormCall, variance: Tensor, batches: float = 1.0) -> float:
    """Return what the mean of this batch differs by from that of `batches` such batches, in deviations."""
    own = call.x.double().flatten(2).mean(2) if call.x.ndim > 2 else call.x.double()
    spread = own.var(0) if len(own) > 1 else torch.zeros_like(variance)
    return root_mean_square((spread * (1 / len(own)) * (1 + 1 / batches) / variance.clamp_min(1e-12)).sqrt())


def stored_gap(call: NormCall, momentum: float | None = 0.1) -> tuple[float, float, float]:
    """Return the shift of the mean in stored deviations, the log ratio of variances, and the floor of the shift."""
    assert call.stored is not None
    mean, variance = call.moments
    stored_mean, stored_variance = (value.double() for value in call.stored)
    scale = stored_variance + call.eps
    shift = root_mean_square((mean - stored_mean) / scale.sqrt())
    correction = call.count / max(call.count - 1, 1)
    ratio = root_mean_square(((variance * correction + call.eps) / scale).log())
    floor = sampling_floor(call, scale, (2 - momentum) / momentum if momentum else 1e9)
    return shift, ratio, floor


def excess(call: NormCall, momentum: float | None) -> float:
    """Return how far stored statistics are off, in limits: above 1 beyond what sampling explains."""
    shift, ratio, floor = stored_gap(call, momentum)
    spread = 3 * math.sqrt(2 / max(len(call.x) - 1, 1))
    return max(shift / max(FAR, 3 * floor), ratio / max(WIDE, spread))


def call_gap(one: NormCall, two: NormCall) -> tuple[float, float]:
    """Return how far the means of two calls are apart in deviations of the first, and the sampling floor."""
    (a, va), (b, vb) = one.moments, two.moments
    scale = (torch.maximum(va, vb) + one.eps).sqrt()
    return root_mean_square((a - b) / scale), sampling_floor(one, scale.square())


def is_virgin(stored: tuple[Tensor, Tensor]) -> bool:
    """Tell whether stored statistics are those of construction: mean 0, variance 1."""
    return not bool(stored[0].any()) and bool((stored[1] == 1).all())
