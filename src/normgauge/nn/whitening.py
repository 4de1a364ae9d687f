"""Whitening: covariance of a group of channels made the identity, by Newton-Schulz iteration."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.nn import registry
from normgauge.nn._layout import check_channels, check_enough, per_channel
from normgauge.nn._whitening_kernel import Settings, apply_root, whiten


class WhiteningNorm(torch.nn.Module):
    r"""Decorrelate the channels of each group over batch and space (ZCA): `y = weight * S^(-1/2) (x - mean) + bias`.

    `S = mean((x - mean)(x - mean)^T) + eps I` per group. The inverse root comes from Newton-Schulz steps on
    `S / tr(S)`: `P <- (3 P - P^3 S / tr(S)) / 2` from `P = I`, and `S^(-1/2) = P / sqrt(tr(S))`. Directions of large
    variance converge first, so few steps whiten only in part: the smallest of d directions needs about
    `log(tr(S) / lambda) / (2 log 1.5)` steps. With groups of one channel it is batch normalization.

    In evaluation mean and covariance are the stored averages (the covariance times m / (m - 1), unbiased).

    Args:
        num_features: channels, on axis 1.
        groups: divides the channels; the channels of a group are whitened together.
        iterations: Newton-Schulz steps.
        eps: added to the diagonal of the covariance.
        momentum: weight of a new batch in the stored statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias` per channel.

    Raises:
        InputError: if the groups do not divide the channels.
        DataError: in training, for fewer than two values per channel; for other shapes and empty inputs.

    Examples:
        >>> x = torch.randn(500, 3, dtype=torch.float64) @ torch.randn(3, 3, dtype=torch.float64)
        >>> y = WhiteningNorm(3, iterations=40, eps=0.0, affine=False).double()(x)
        >>> torch.allclose(y.T @ y / 500, torch.eye(3, dtype=torch.float64))
        True

    Deviations:
        huang2019 iterates P alone. That form amplifies rounding: on a 3 x 3 covariance with variances 1 to 1e-4 its
        relative error is 0.01 at the 12th step and 6 at the 13th, in float64, and infinite at the 20th; the coupled
        form used here stays converged. It stores the whitening matrix; here the covariance is stored, and its root is
        taken in evaluation.

    References: huang2019.
    """

    running_mean: Tensor
    running_covariance: Tensor
    num_batches_tracked: Tensor

    def __init__(
        self,
        num_features: int,
        groups: int = 1,
        iterations: int = 5,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__()
        if groups < 1 or num_features < 1 or num_features % groups:
            raise InputError(
                "WhiteningNorm",
                "groups divides the channels",
                f"{groups} groups for {num_features} channels",
                "Choose a divisor",
            )
        self.num_features, self.groups, self.iterations = num_features, groups, iterations
        self.eps, self.momentum, self.affine = eps, momentum, affine
        size = num_features // groups
        self.weight = torch.nn.Parameter(torch.ones(num_features)) if affine else None
        self.bias = torch.nn.Parameter(torch.zeros(num_features)) if affine else None
        self.register_buffer("running_mean", torch.zeros(num_features))
        self.register_buffer("running_covariance", torch.eye(size).repeat(groups, 1, 1))
        self.register_buffer("num_batches_tracked", torch.tensor(0, dtype=torch.long))

    def forward(self, x: Tensor) -> Tensor:
        """Return the whitened input, by the batch's statistics in training and the stored ones in evaluation."""
        check_channels("WhiteningNorm", x, self.num_features)
        # Matrix products in bfloat16 would lose the covariance, and autocast must not choose them.
        with torch.autocast(x.device.type, enabled=False):
            exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
            settings = Settings(self.groups, self.iterations, self.eps)
            if self.training:
                check_enough("WhiteningNorm", x, 2)
                y, mean, covariance = whiten(exact, self.weight, self.bias, settings)
                count = x.numel() // x.shape[1]
                self._remember(mean, covariance * (count / (count - 1)))
            else:
                centred = exact - per_channel(self.running_mean, x)
                y = apply_root(centred, self.running_covariance.to(exact.dtype), self.weight, self.bias, settings)
            return y.to(x.dtype)

    def _remember(self, mean: Tensor, covariance: Tensor) -> None:
        with torch.no_grad():
            self.num_batches_tracked.add_(1)
            share = 1 / float(self.num_batches_tracked) if self.momentum is None else self.momentum
            self.running_mean.lerp_(mean.detach().to(self.running_mean.dtype), share)
            self.running_covariance.lerp_(covariance.detach().to(self.running_covariance.dtype), share)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return (
            f"{self.num_features}, groups={self.groups}, iterations={self.iterations}, eps={self.eps}, "
            f"momentum={self.momentum}, affine={self.affine}"
        )


def _make(channels: int, spatial: int) -> WhiteningNorm:
    # Groups of at most 16 channels: the covariance of a group must be estimated from one batch.
    groups = next(count for count in range(1, channels + 1) if channels % count == 0 and channels // count <= 16)
    return WhiteningNorm(channels, groups=groups)


registry.register(
    registry.Declaration(
        name="whitening",
        title="whitening (ZCA, Newton-Schulz)",
        placement="activation",
        axes="batch and space per group of channels, with the covariance inside the group",
        statistics="batch",
        behaviour="Training whitens by the batch's mean and covariance; evaluation by the stored ones. By name: groups "
        "of at most 16 channels, five steps.",
        formula=r"y = \gamma\, (\Sigma_B + \epsilon I)^{-1/2} (x - \mu_B) + \beta",
        cite=("huang2019",),
        invariances=(
            registry.Invariance("input", "scale", "group", exact=False, modes=("train",)),
            registry.Invariance("input", "shift", "row", modes=("train",)),
            registry.Invariance("weights", "scale", "group", exact=False, modes=("train",)),
        ),
        make=_make,
        smallest=2,
    )
)
