"""Random numbers for noisy layers: a pure function of seed and step, cheap enough for every activation."""

from __future__ import annotations

import math
from functools import cache

import numpy as np
import torch
from torch import Tensor

from normgauge.nn._eager import sample_chunks
from normgauge.rng import generator

_LEVELS = 1 << 16


def unit_noise(channels: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return one number per channel from U(-1, 1) and one from U(0, 1), float64."""
    draw = torch.rand(2, channels, generator=generator(_mix(seed, step)), dtype=torch.float64)
    return 2 * draw[0] - 1, draw[1]


class ActivationNoise:
    """Independent noise for every activation of `(batch, channels, *space)`, kept as two 16-bit words each.

    One word picks one of 65,536 equally spaced values of U(-1, 1), the other one of 65,536 equally likely quantiles of
    N(0, 1): the distributions are met to 2^-17 in distribution function and to 2e-4 in variance, for a quarter of
    the time that two float draws take.

    Args:
        shape: of the activations.
        seed: of the layer.
        step: of training; every step has its own stream.
    """

    def __init__(self, shape: torch.Size, seed: int, step: int) -> None:
        words = -(-math.prod(shape) // 4)
        stream = np.random.SFC64(_mix(seed, step) + 1)
        bits = [torch.from_numpy(stream.random_raw(words).view(np.int16)[: math.prod(shape)]) for _ in range(2)]
        self._flat, self._bell = (word.view(shape) for word in bits)

    def uniform(self, part: slice | None = None, *, dtype: torch.dtype) -> Tensor:
        """Return the draws of U(-1, 1) for a slice of the batch."""
        words = self._flat if part is None else self._flat[part]
        return words.to(dtype).add_(0.5).mul_(2 / _LEVELS)

    def normal(self, part: slice | None = None, *, dtype: torch.dtype) -> Tensor:
        """Return the draws of N(0, 1) for a slice of the batch."""
        words = self._bell if part is None else self._bell[part]
        index = words.reshape(-1).to(torch.int32).add_(_LEVELS // 2)
        return _quantiles(dtype).index_select(0, index).view(words.shape)


def perturb(x: Tensor, noise: ActivationNoise, centre: tuple[Tensor, Tensor], spread: tuple[float, float]) -> Tensor:
    """Return `(centre[1] + spread[1] * normal) * x + centre[0] + spread[0] * uniform`, overwriting x in its chunks.

    The two centres are per channel and broadcast against x.
    """
    for part in sample_chunks(x):
        x[part].mul_(factor(noise, part, centre[1], spread[1], x.dtype))
        x[part].add_(noise.uniform(part, dtype=x.dtype).mul_(spread[0]).add_(centre[0]))
    return x


def factor(noise: ActivationNoise, part: slice | None, centre: Tensor, spread: float, dtype: torch.dtype) -> Tensor:
    """Return the multiplicative noise `centre + spread * normal` for a slice of the batch."""
    return noise.normal(part, dtype=dtype).mul_(spread).add_(centre)


@cache
def _quantiles(dtype: torch.dtype) -> Tensor:
    middles = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
    return torch.special.ndtri(middles).to(dtype)


def _mix(seed: int, step: int) -> int:
    """Spread (seed, step) over 63 bits, so that neighbouring steps and seeds share no stream."""
    return int(np.random.SeedSequence((seed % 2**63, step)).generate_state(1, np.uint64)[0]) >> 1
