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
    """Independent noise for every activation of `(batch, channels, *space)`, from two 16-bit words each.

    One word picks one of 65,536 equally spaced values of U(-1, 1), the other one of 65,536 equally likely quantiles of
    N(0, 1): the distributions are met to 2^-17 in distribution function and to 2e-4 in variance, for a quarter of
    the time that two float draws take.

    Args:
        shape: of the activations.
        seed: of the layer.
        step: of training; every step has its own stream.
    """

    def __init__(self, shape: torch.Size, seed: int, step: int) -> None:
        count = math.prod(shape)
        raw = np.random.SFC64(_mix(seed, step) + 1).random_raw(-(-count // 2))
        self._words = torch.from_numpy(raw.view(np.int32)[:count]).view(shape)

    def uniform(self, *, dtype: torch.dtype) -> Tensor:
        """Return the draws of U(-1, 1)."""
        return _low(self._words).to(dtype).add_(0.5 - _LEVELS // 2).mul_(2 / _LEVELS)

    def normal(self, *, dtype: torch.dtype) -> Tensor:
        """Return the draws of N(0, 1)."""
        return _bell(self._words, dtype)

    def perturb_(self, x: Tensor, centre: tuple[Tensor, Tensor], spread: tuple[float, float]) -> Tensor:
        """Overwrite x by `s * x + m` in chunks and return the factors s; the draws are used up.

        `s = centre[1] + spread[1] * normal` and `m = centre[0] + spread[0] * uniform`; the two centres are per channel
        and broadcast against x. In float32 the factors take the memory of the draws: fresh memory costs as much time
        as drawing does.
        """
        factors = self._words.view(torch.float32) if x.dtype == torch.float32 else torch.empty_like(x)
        table = _quantiles(x.dtype) * spread[1]
        unit = 2 * spread[0] / _LEVELS
        offset = centre[0] + (0.5 - _LEVELS // 2) * unit
        pieces = [self._words[part] for part in sample_chunks(x)]
        index, low = torch.empty_like(pieces[0]), torch.empty(pieces[0].shape, dtype=x.dtype)
        for part, words in zip(sample_chunks(x), pieces, strict=True):
            picked, lower, s = index[: len(words)], low[: len(words)], factors[part]
            lower.copy_(torch.bitwise_and(words, _LEVELS - 1, out=picked))
            torch.bitwise_right_shift(words, 16, out=picked).add_(_LEVELS // 2)
            torch.index_select(table, 0, picked.view(-1), out=s.view(-1))
            s.add_(centre[1])
            torch.addcmul(offset, s, x[part], out=x[part]).add_(lower, alpha=unit)
        return factors


def _low(words: Tensor) -> Tensor:
    return words.bitwise_and(_LEVELS - 1)


def _bell(words: Tensor, dtype: torch.dtype) -> Tensor:
    index = words.reshape(-1).bitwise_right_shift(16).add_(_LEVELS // 2)
    return _quantiles(dtype).index_select(0, index).view(words.shape)


@cache
def _quantiles(dtype: torch.dtype) -> Tensor:
    middles = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
    return torch.special.ndtri(middles).to(dtype)


def _mix(seed: int, step: int) -> int:
    """Spread (seed, step) over 63 bits, so that neighbouring steps and seeds share no stream."""
    return int(np.random.SeedSequence((seed % 2**63, step)).generate_state(1, np.uint64)[0]) >> 1
