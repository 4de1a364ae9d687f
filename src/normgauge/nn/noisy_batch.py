"""Noisy batch normalization: covariate shift put back, on purpose, behind batch normalization."""

from __future__ import annotations

from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgauge.nn import registry
from normgauge.nn._eager import plain_autograd
from normgauge.nn._layout import per_channel
from normgauge.nn._noise import ActivationNoise, unit_noise
from normgauge.nn._population import BatchStatisticsNorm
from normgauge.nn.functional import batch_norm_backward


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
        seed, step = int(self.seed.item()), int(self.num_batches_tracked.item())
        dtype = x.dtype if x.dtype in (torch.float32, torch.float64) else torch.float32
        first, second = unit_noise(self.num_features, seed, step)
        draw = _NoiseDraw(
            seed=seed,
            step=step,
            centre=(
                per_channel((self.n_mu * first).to(dtype), x),
                per_channel((1 + (self.n_sigma - 1) * second).to(dtype), x),
            ),
            spread=(self.r_mu, self.r_sigma),
        )
        fused = x.device.type == "cpu" and x.is_contiguous() and x.dtype == dtype == self.running_mean.dtype
        if fused and plain_autograd():
            y = _Fused.apply(x, self.weight, self.bias, (mean, moment), self.eps, draw)
        else:
            y = torch.nn.functional.batch_norm(
                x, mean, moment, self.weight, self.bias, training=True, momentum=1.0, eps=self.eps
            )
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
    def forward(
        ctx: Any,
        x: Tensor,
        weight: Tensor | None,
        bias: Tensor | None,
        statistics: tuple[Tensor, Tensor],
        eps: float,
        draw: _NoiseDraw,
    ) -> Tensor:
        y, center, inverse = torch.native_batch_norm(x, weight, bias, *statistics, training=True, momentum=1.0, eps=eps)
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
    _, along, total = torch.ops.aten.native_batch_norm_backward(
        h,
        x,
        torch.ones_like(center),
        running_mean=None,
        running_var=None,
        save_mean=center,
        save_invstd=inverse,
        train=True,
        eps=0.0,
        output_mask=[False, True, True],
    )
    gain = inverse if weight is None else weight * inverse
    count = x.numel() // x.shape[1]
    slope = -gain * inverse * along / count
    shift = -gain * total / count - slope * center
    torch.addcmul(per_channel(shift, x), h, per_channel(gain, x), out=h)
    return h.addcmul_(x, per_channel(slope, x)), along, total


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
