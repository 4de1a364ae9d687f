"""Noisy batch normalization: covariate shift put back, on purpose, behind batch normalization."""

import math
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from functools import cache
from typing import Any, NamedTuple, Unpack

import numpy as np
import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._layout import per_channel, plain_autograd
from normgauge.nn._population import BatchStatisticsNorm, Shared
from normgauge.nn.functional import batch_norm_backward
from normgauge.nn.lp_batch import gradient_sums
from normgauge.rng import generator

_LEVELS = 1 << 16
_STREAMS = 4  # parts of the activations with a stream each, whatever the number of threads
_BLOCK = 1 << 15  # entries that stay in a core's cache through all passes


class NoisyBatchNorm(BatchStatisticsNorm):
    r"""Perturb batch-normalized activations by noise whose distribution changes at every step.

    With a the batch-normalized activation (gain and bias included), unit j, sample i and step t:
    `mu_j ~ U(-n_mu, n_mu)` and `sigma_j ~ U(1, n_sigma)` are drawn per step and unit; then
    `m_ij ~ U(mu_j - r_mu, mu_j + r_mu)`, `s_ij ~ N(sigma_j, r_sigma)` with r_sigma a standard deviation, and
    `y_ij = s_ij * a_ij + m_ij`. Positions in space count as samples. Evaluation is that of batch normalization.

    The noise is a function of the buffers `seed` and `num_batches_tracked` alone: it is saved with the state, moves on
    with each training step, and neither reads nor moves torch's global random state. A seed of `None` is drawn from
    torch's global stream, as initial weights are. `eps`, `momentum` and `affine` are those of batch normalization.

    Deviations: santurkar2018 Algorithm 1 names the constants n_m, n_v, r_m, r_v in its first line and n_mu, n_sigma,
        r_mu, r_sigma below; the text's values 0.5, 1.25, 0.1, 0.1 are the defaults here. The noise takes 65,536 values.

    Examples:
        >>> x = torch.randn(64, 2)
        >>> quiet = NoisyBatchNorm(2, n_mu=0.0, n_sigma=1.0, r_mu=0.0, r_sigma=0.0, seed=0)
        >>> torch.allclose(quiet(x), torch.nn.BatchNorm1d(2)(x), atol=1e-6)  # without noise: batch normalization
        True

    References: santurkar2018.
    """

    seed: Tensor

    def __init__(
        self,
        num_features: int,
        n_mu: float = 0.5,
        n_sigma: float = 1.25,
        r_mu: float = 0.1,
        r_sigma: float = 0.1,
        seed: int | None = None,
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_features, **shared)
        self.n_mu, self.n_sigma, self.r_mu, self.r_sigma = n_mu, n_sigma, r_mu, r_sigma
        drawn = int(torch.randint(2**62, ()).item()) if seed is None else seed
        self.register_buffer("seed", torch.tensor(drawn, dtype=torch.long))

    def _train(self, x: Tensor) -> Tensor:
        mean, moment = torch.zeros_like(self.running_mean), torch.ones_like(self.running_moment)
        seed, step = int(self.seed.item()), int(self.num_batches_tracked.item())
        dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        first, second = unit_noise(self.num_features, seed, step)
        means, factors = (self.n_mu * first).to(dtype), (1 + (self.n_sigma - 1) * second).to(dtype)
        draw = _NoiseDraw(seed, step, (per_channel(means, x), per_channel(factors, x)), (self.r_mu, self.r_sigma))
        fused = x.device.type == "cpu" and x.is_contiguous() and x.dtype == dtype == self.running_mean.dtype
        if fused and plain_autograd():
            y = _Fused.apply(x, self.weight, self.bias, (mean, moment), self.eps, draw)
        else:
            affine = {"weight": self.weight, "bias": self.bias}
            y = torch.nn.functional.batch_norm(x, mean, moment, training=True, momentum=1.0, eps=self.eps, **affine)
            factor, offset = (value.to(x.device) for value in draw.noise(x.shape, dtype))
            y = (factor * y + offset).to(x.dtype)
        self._remember(mean, moment)
        return y

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        noise = f"n_mu={self.n_mu}, n_sigma={self.n_sigma}, r_mu={self.r_mu}, r_sigma={self.r_sigma}"
        return f"{super().extra_repr()}, {noise}, seed={int(self.seed)}"


class _NoiseDraw(NamedTuple):
    """What determines the noise of one step: the stream, and centre and spread of offsets and factors."""

    seed: int
    step: int
    centre: tuple[Tensor, Tensor]
    spread: tuple[float, float]

    def noise(self, shape: torch.Size, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Return factors and offsets."""
        draws = ActivationNoise(shape, self.seed, self.step)
        factor = draws.normal(dtype=dtype).mul_(self.spread[1]).add_(self.centre[1])
        return factor, self.centre[0] + self.spread[0] * draws.uniform(dtype=dtype)


class _Fused(torch.autograd.Function):
    """torch's batch normalization, and the noise written over its output, which its backward does not need.

    The factors become the gradient at the first backward pass, in their own memory; a second pass draws them again.
    Memory is what counts here: a fresh tensor costs more time than three passes over an old one.
    """

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Any, bias: Any, stored: Any, eps: float, draw: _NoiseDraw) -> Tensor:
        mean, moment = stored
        y, center, inverse = torch.native_batch_norm(x, weight, bias, mean, moment, True, 1.0, eps)
        ctx.factors = ActivationNoise(x.shape, draw.seed, draw.step).perturb_(y, draw.centre, draw.spread)
        ctx.save_for_backward(x, weight, bias, center, inverse)
        ctx.draw, ctx.eps = draw, eps
        return y

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        x, weight, bias, center, inverse = ctx.saved_tensors
        factors, ctx.factors = ctx.factors, None
        if factors is None:
            factors = ctx.draw.noise(grad.shape, grad.dtype)[0]
        if torch.is_grad_enabled():  # second derivatives wanted: the closed form in differentiable operators
            dx, dweight, dbias = batch_norm_backward(factors * grad, x, weight, ctx.eps)
        else:
            dx, dweight, dbias = _fast_backward(factors.mul_(grad), x, weight, center, inverse)
        return dx, None if weight is None else dweight, None if bias is None else dbias, None, None, None


def _fast_backward(
    h: Tensor, x: Tensor, weight: Tensor | None, center: Tensor, inverse: Tensor
) -> tuple[Tensor, Tensor, Tensor]:
    """Return the gradients of batch normalization, the first in the memory of h."""
    along, total = gradient_sums(h, x, center, inverse)
    gain = inverse if weight is None else weight * inverse
    count = x.numel() // x.shape[1]
    slope = -gain * inverse * along / count
    shift = -gain * total / count - slope * center
    torch.addcmul(per_channel(shift, x), h, per_channel(gain, x), out=h)
    return h.addcmul_(x, per_channel(slope, x)), along, total


def unit_noise(channels: int, seed: int, step: int) -> tuple[Tensor, Tensor]:
    """Return one number per channel from U(-1, 1) and one from U(0, 1), float64."""
    draw = torch.rand(2, channels, generator=generator(_mix(seed, step)), dtype=torch.float64)
    return 2 * draw[0] - 1, draw[1]


class ActivationNoise:
    """Independent noise for every activation of `(batch, channels, *space)`, from two 16-bit words each.

    One word picks one of 65,536 equally spaced values of U(-1, 1), the other one of 65,536 equally likely quantiles of
    N(0, 1): the distributions are met to 2^-17 in distribution function and to 2e-4 in variance, for a quarter of
    the time that two float draws take. Every step of training has its own streams.
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


registry.declare("noisy_batch", make=lambda channels, spatial: NoisyBatchNorm(channels))
