"""Ghost batch normalization: statistics of small virtual batches inside a large one."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.nn import registry
from normgauge.nn._layout import check_enough
from normgauge.nn._population import BatchStatisticsNorm


class GhostBatchNorm(BatchStatisticsNorm):
    r"""Normalize each of several virtual batches by its own mean and variance over batch and space.

    The batch of n samples is dealt out, like cards, to `k = max(1, n // ghost_size)` virtual batches: sample i goes
    to batch `i mod k`, so that sizes differ by at most one and none is smaller than `ghost_size` unless n is. Within
    each, `y = weight * (x - mean) / sqrt(var + eps) + bias`. Evaluation uses the stored averages over the virtual
    batches of their means and unbiased variances.

    Args:
        num_features: channels, on axis 1.
        ghost_size: samples of a virtual batch, at least 2.
        eps: added to the variance.
        momentum: weight of a new batch in the stored statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias`.

    Raises:
        InputError: for a ghost size below 2.
        DataError: in training, for fewer than two values per channel; for other shapes and empty inputs.

    Deviations:
        hoffer2017 cuts the batch into consecutive pieces and folds them into the stored statistics one after another.
        Dealing is the same for shuffled data, and makes the virtual batches a view that torch's fused kernel takes
        without a copy; the pieces' statistics enter the stored ones as their average.

    Examples:
        >>> x = torch.tensor([[0.0], [10.0], [2.0], [30.0]])  # dealt to (0, 2) and (10, 30)
        >>> GhostBatchNorm(1, ghost_size=2, eps=1e-12)(x).flatten().round(decimals=4).tolist()
        [-1.0, -1.0, 1.0, 1.0]

    References: hoffer2017.
    """

    def __init__(
        self,
        num_features: int,
        ghost_size: int = 32,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        if ghost_size < 2:
            raise InputError(
                "GhostBatchNorm", "ghost_size is at least 2", str(ghost_size), "Use LayerNorm for single samples"
            )
        super().__init__(num_features, eps, momentum, affine)
        self.ghost_size = ghost_size

    def _train(self, x: Tensor) -> Tensor:
        ghosts = max(1, x.shape[0] // self.ghost_size)
        mean, moment = self.running_mean.repeat(ghosts), self.running_moment.repeat(ghosts)
        # A share of 1 stores the batch's own statistics; the average over ghosts then enters the running ones.
        if x.shape[0] % ghosts == 0:
            y = self._normalize_ghosts(x, ghosts, mean, moment)
        else:
            y = torch.empty_like(x)
            for ghost, (m, v) in enumerate(zip(mean.chunk(ghosts), moment.chunk(ghosts), strict=True)):
                part = x[ghost::ghosts]
                check_enough("GhostBatchNorm", part, 2)
                y = _deal_back(y, self._normalize(part, self.weight, self.bias, m, v), ghost, ghosts)
        with torch.no_grad():
            self._remember(mean.view(ghosts, -1).mean(0), moment.view(ghosts, -1).mean(0))
        return y

    def _normalize_ghosts(self, x: Tensor, ghosts: int, mean: Tensor, moment: Tensor) -> Tensor:
        shape = (x.shape[0] // ghosts, ghosts * x.shape[1], *x.shape[2:])
        weight = None if self.weight is None else self.weight.repeat(ghosts)
        bias = None if self.bias is None else self.bias.repeat(ghosts)
        return self._normalize(x.reshape(shape), weight, bias, mean, moment).reshape(x.shape)

    def _normalize(self, x: Tensor, weight: Tensor | None, bias: Tensor | None, mean: Tensor, moment: Tensor) -> Tensor:
        return torch.nn.functional.batch_norm(x, mean, moment, weight, bias, training=True, momentum=1.0, eps=self.eps)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, ghost_size={self.ghost_size}"


def _deal_back(whole: Tensor, part: Tensor, ghost: int, ghosts: int) -> Tensor:
    index = torch.arange(ghost, whole.shape[0], ghosts, device=whole.device)
    return whole.index_copy(0, index, part)


registry.register(
    registry.Declaration(
        name="ghost_batch",
        title="ghost batch normalization",
        placement="activation",
        axes="virtual batch and space per channel",
        statistics="batch",
        behaviour="Training uses each virtual batch's mean and variance (by name: 32 samples); evaluation the stored "
        "averages, as batch normalization does.",
        formula=r"y = \gamma \frac{x - \mu_{G}}{\sqrt{\sigma_{G}^2 + \epsilon}} + \beta,\quad G \subset B",
        cite=("hoffer2017",),
        invariances=(
            registry.Invariance("input", "scale", "row", exact=False, modes=("train",)),
            registry.Invariance("input", "shift", "row", modes=("train",)),
            registry.Invariance("weights", "scale", "row", exact=False, modes=("train",)),
        ),
        make=lambda channels, spatial: GhostBatchNorm(channels),
        smallest=2,
    )
)
