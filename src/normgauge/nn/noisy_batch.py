"""Noisy batch normalization: covariate shift put back, on purpose, behind batch normalization."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._eager import plain_autograd, sample_chunks
from normgauge.nn._layout import per_channel
from normgauge.nn._noise import ActivationNoise, factor, perturb, unit_noise
from normgauge.nn._population import BatchStatisticsNorm


class NoisyBatchNorm(BatchStatisticsNorm):
    r"""Perturb batch-normalized activations by noise whose distribution changes at every step.

    With a the batch-normalized activation (gain and bias included), unit j, sample i and step t:
    `mu_j ~ U(-n_mu, n_mu)` and `sigma_j ~ U(1, n_sigma)` are drawn per step and unit; then
    `m_ij ~ U(mu_j - r_mu, mu_j + r_mu)`, `s_ij ~ N(sigma_j, r_sigma)` with r_sigma a standard deviation, and
    `y_ij = s_ij * a_ij + m_ij`. Positions in space count as samples. Evaluation is that of batch normalization.

    The noise is a function of the buffers `seed` and `num_batches_tracked` alone: it is saved with the state, moves on
    with each training step, and neither reads nor moves torch's global random state.

    Args:
        num_features: channels, on axis 1.
        n_mu: half-width of the distribution of means.
        n_sigma: upper end of the distribution of standard deviations; the lower end is 1.
        r_mu: half-width of the noise's offset around its mean.
        r_sigma: standard deviation of the noise's factor around its mean.
        seed: of the noise. `None` draws it from torch's global stream, as initial weights are.
        eps: added to the variance.
        momentum: weight of a new batch in the stored statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias`.

    Raises:
        DataError: in training, for fewer than two values per channel; for other shapes and empty inputs.

    Deviations:
        santurkar2018 Algorithm 1 names the constants n_m, n_v, r_m, r_v in its first line and n_mu, n_sigma, r_mu,
        r_sigma below; the text's values 0.5, 1.25, 0.1, 0.1 are the defaults here. The noise takes 65,536 values.

    Example:
        >>> x = torch.randn(64, 2)
        >>> quiet = NoisyBatchNorm(2, n_mu=0.0, n_sigma=1.0, r_mu=0.0, r_sigma=0.0, seed=0)
        >>> torch.allclose(quiet(x), torch.nn.BatchNorm1d(2)(x), atol=1e-6)  # without noise: batch normalization
        True

    References:
        santurkar2018.
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
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        self.n_mu, self.n_sigma, self.r_mu, self.r_sigma = n_mu, n_sigma, r_mu, r_sigma
        drawn = int(torch.randint(2**62, ()).item()) if seed is None else seed
        self.register_buffer("seed", torch.tensor(drawn, dtype=torch.long))

    def _train(self, x: Tensor) -> Tensor:
        mean, moment = torch.zeros_like(self.running_mean), torch.ones_like(self.running_moment)
        y = torch.nn.functional.batch_norm(x, mean, moment, self.weight, self.bias, True, 1.0, self.eps)
        seed, step = int(self.seed.item()), int(self.num_batches_tracked.item())
        first, second = unit_noise(self.num_features, seed, step)
        dtype = y.dtype if y.dtype in (torch.float32, torch.float64) else torch.float32
        centre = (
            per_channel((self.n_mu * first).to(dtype), x),
            per_channel((1 + (self.n_sigma - 1) * second).to(dtype), x),
        )
        noise = ActivationNoise(x.shape, seed, step)
        spread = (self.r_mu, self.r_sigma)
        self._remember(mean, moment)
        if plain_autograd() and y.dtype == dtype and y.device.type == "cpu":
            return _Perturb.apply(y, noise, centre, spread)
        scale = factor(noise, None, centre[1], spread[1], dtype).to(x.device)
        shift = noise.uniform(dtype=dtype).mul_(spread[0]).add_(centre[0]).to(x.device)
        return (scale * y + shift).to(x.dtype)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        noise = f"n_mu={self.n_mu}, n_sigma={self.n_sigma}, r_mu={self.r_mu}, r_sigma={self.r_sigma}"
        return f"{super().extra_repr()}, {noise}, seed={int(self.seed)}"


class _Perturb(torch.autograd.Function):
    """Add the noise in place (batch normalization's backward does not need its output), keeping only the draws."""

    @staticmethod
    def forward(
        ctx: Any, y: Tensor, noise: ActivationNoise, centre: tuple[Tensor, Tensor], spread: tuple[float, float]
    ) -> Tensor:
        ctx.noise, ctx.centre, ctx.spread = noise, centre[1], spread[1]
        ctx.mark_dirty(y)
        return perturb(y, noise, centre, spread)

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, ...]:
        if torch.is_grad_enabled():
            return grad * factor(ctx.noise, None, ctx.centre, ctx.spread, grad.dtype), None, None, None
        dx = torch.empty_like(grad)
        for part in sample_chunks(grad):
            torch.mul(grad[part], factor(ctx.noise, part, ctx.centre, ctx.spread, grad.dtype), out=dx[part])
        return dx, None, None, None


registry.register(
    registry.Declaration(
        name="noisy_batch",
        title="noisy batch normalization",
        placement="activation",
        axes="batch and space per channel",
        statistics="batch",
        behaviour="Training is batch normalization followed by noise of a distribution that changes at every step; "
        "evaluation is that of batch normalization, without noise.",
        formula=r"y = s\, \mathrm{BN}(x) + m,\quad s \sim N(\sigma_j^t, r_\sigma),\ "
        r"m \sim U(\mu_j^t - r_\mu, \mu_j^t + r_\mu)",
        cite=("santurkar2018",),
        invariances=(
            registry.Invariance("input", "scale", "row", flips=False, exact=False, modes=("train",)),
            registry.Invariance("input", "shift", "row", modes=("train",)),
            registry.Invariance("weights", "scale", "row", flips=False, exact=False, modes=("train",)),
        ),
        make=lambda channels, spatial: NoisyBatchNorm(channels),
        smallest=2,
        noise=True,
    )
)
