"""Random numbers for noisy layers: a pure function of seed and step, cheap enough for every activation."""

from __future__ import annotations

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any

import numpy as np
import torch
from torch import Tensor

from normgauge.rng import generator

_LEVELS = 1 << 16
_STREAMS = 4  # parts of the activations with a stream each, whatever the number of threads
_BLOCK = 1 << 15  # entries that stay in a core's cache through all passes


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
        step: of training; every step has its own streams.
    """

    def __init__(self, shape: torch.Size, seed: int, step: int) -> None:
        self.shape, self._key = shape, _mix(seed, step)
        self._rows = (shape[0] * shape[1], math.prod(shape[2:]))

    def uniform(self, *, dtype: torch.dtype) -> Tensor:
        """Return the draws of U(-1, 1)."""
        low = torch.from_numpy(self._all_words(0).astype(_numpy_dtype(dtype)))
        return low.add_(0.5 - _LEVELS // 2).mul_(2 / _LEVELS).view(self.shape)

    def normal(self, *, dtype: torch.dtype) -> Tensor:
        """Return the draws of N(0, 1)."""
        return torch.from_numpy(_quantiles(_numpy_dtype(dtype))[self._all_words(1)]).view(self.shape)

    def perturb_(self, x: Tensor, centre: tuple[Tensor, Tensor], spread: tuple[float, float]) -> Tensor:
        """Overwrite a contiguous x by `s * x + m` and return the factors s.

        `s = centre[1] + spread[1] * normal` and `m = centre[0] + spread[0] * uniform`, the two centres per channel.
        Each stream's part is worked off block by block in one thread, so that no draw leaves the cache.
        """
        factors = torch.empty_like(x)
        unit = 2 * spread[0] / _LEVELS
        offset = (centre[0] + (0.5 - _LEVELS // 2) * unit).reshape(-1, 1).repeat(self.shape[0], 1)
        arrays = (
            x.detach().view(self._rows).numpy(),
            factors.view(self._rows).numpy(),
            torch.from_numpy(_quantiles(_numpy_dtype(x.dtype))) * spread[1],
            offset.numpy(),
            centre[1].reshape(-1, 1).repeat(self.shape[0], 1).numpy(),
            x.new_tensor(unit).numpy(),
        )
        with ThreadPoolExecutor(min(_STREAMS, torch.get_num_threads())) as pool:
            list(pool.map(lambda stream: self._perturb_part(stream, *arrays), range(_STREAMS)))
        return factors

    def _perturb_part(self, stream: int, x: Any, factors: Any, table: Any, offset: Any, centre: Any, unit: Any) -> None:
        low: Any = np.empty((0, 0))
        index: Any = low
        for part, (flat, bell) in self._words(stream):
            s, y = factors[part], x[part]
            if low.shape != flat.shape:
                low, index = np.empty(flat.shape, x.dtype), np.empty(flat.shape, np.int32)
            np.copyto(index, bell)
            # torch's lookup takes half the time of numpy's, and does not start threads of its own.
            torch.index_select(table, 0, torch.from_numpy(index).view(-1), out=torch.from_numpy(s).view(-1))
            s += centre[part]
            y *= s
            np.multiply(flat, unit, out=low)
            low += offset[part]
            y += low

    def _words(self, stream: int) -> Iterator[tuple[slice, tuple[Any, Any]]]:
        """Yield slices of the rows (sample and channel) with two words of every entry, for one part of the rows."""
        rows, space = self._rows
        bits = np.random.SFC64(self._key + 1 + stream)
        step = max(1, _BLOCK // space)
        end = rows * (stream + 1) // _STREAMS
        for start in range(rows * stream // _STREAMS, end, step):
            stop = min(start + step, end)
            count = (stop - start) * space
            words = bits.random_raw(-(-count // 2)).view(np.uint16)
            shape = (stop - start, space)
            yield slice(start, stop), (words[:count].reshape(shape), words[count : 2 * count].reshape(shape))

    def _all_words(self, which: int) -> Any:
        words = np.empty(self._rows, np.uint16)
        for stream in range(_STREAMS):
            for part, drawn in self._words(stream):
                words[part] = drawn[which]
        return words


def _numpy_dtype(dtype: torch.dtype) -> str:
    return "float64" if dtype == torch.float64 else "float32"


@cache
def _quantiles(dtype: str) -> Any:
    middles = (torch.arange(_LEVELS, dtype=torch.float64) + 0.5) / _LEVELS
    return torch.special.ndtri(middles).numpy().astype(dtype)


def _mix(seed: int, step: int) -> int:
    """Spread (seed, step) over 63 bits, so that neighbouring steps and seeds share no stream."""
    return int(np.random.SeedSequence((seed % 2**63, step)).generate_state(1, np.uint64)[0]) >> 1
