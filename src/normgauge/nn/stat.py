"""StatNorm: the design space of normalizers: which values are averaged, what is the centre, what is the scale."""

from __future__ import annotations

import math
import re
from typing import Literal

import torch
from torch import Tensor

from normgauge.errors import InputError, unknown_name
from normgauge.nn._population import BatchStatisticsNorm
from normgauge.nn.functional._lp import check_power, lp_root
from normgauge.nn.lp_batch import lp_normalize

Axes = Literal["batch", "layer", "instance", "group"]
AXES = ("batch", "layer", "instance", "group")
CENTERS = ("mean", "median", "none")
SCALES = ("std", "rms", "l1", "l2", "linf", "quantile")


class StatNorm(BatchStatisticsNorm):
    r"""Normalize by any centre and any scale over any axes: `y = weight * (x - center) / scale + bias`.

    `axes`: batch (batch and space per channel), layer (channels and space per sample), instance (space per sample and
    channel), group (a group's channels and space per sample). `center`: mean, median (the middle one, or half-way
    between the two middle ones), none. `scale` over the n values of a block:

    * std: `sqrt(mean((x - mean)^2) + eps)`, around the mean whatever the centre is;
    * rms: `sqrt(mean(x^2) + eps)`, uncentred, the same as l2;
    * l1, l2, l3, l1.5, ..., linf: `(mean(|x|^p) + eps)^(1/p)`, uncentred, as in santurkar2018 sec. 3.3;
    * quantile: half the distance between the order statistics at shares `quantile` and `1 - quantile`, plus eps.

    With axes batch, evaluation uses stored averages of the centre and of the moment under the root (the unbiased
    variance for std). Other axes store nothing.

    Args:
        num_features: channels, on axis 1.
        axes: which values form a block.
        center: mean, median or none.
        scale: std, rms, l1, l2, linf, any other l<p>, or quantile.
        quantile: the lower share of `scale="quantile"`, between 0 and 0.5.
        groups: number of groups for `axes="group"`.
        eps: stabilizer of the scale.
        momentum: weight of a new batch in the stored statistics; `None` weights all batches equally.
        affine: learn `weight` and `bias` per channel.

    Raises:
        UnknownNameError: for a word outside the lists.
        InputError: for a quantile or groups out of range.
        DataError: in training with axes batch, for fewer than two values per channel; for other shapes and empty
            inputs. On other axes a block of one value comes out as the bias.

    Examples:
        >>> x = torch.tensor([[1.0], [2.0], [8.0]])
        >>> StatNorm(1, center="median", scale="linf", eps=0.0)(x).flatten().tolist()
        [-0.125, 0.0, 0.75]

    References: akbar2025, santurkar2018.
    """

    def __init__(
        self,
        num_features: int,
        axes: str = "batch",
        center: str = "mean",
        scale: str = "std",
        quantile: float = 0.25,
        groups: int = 1,
        eps: float = 1e-5,
        momentum: float | None = 0.1,
        affine: bool = True,
    ) -> None:
        super().__init__(num_features, eps, momentum, affine)
        _check_words(axes, center, scale, quantile)
        if groups < 1 or num_features % groups:
            raise InputError(
                "StatNorm",
                "groups divides the channels",
                f"{groups} groups for {num_features} channels",
                "Choose a divisor",
            )
        self.axes, self.center, self.scale, self.quantile, self.groups = axes, center, scale, quantile, groups
        self.power = _power(scale)
        self.smallest = 2 if axes == "batch" else 1
        if axes != "batch":  # nothing of the batch, nothing to store
            del self.running_mean, self.running_moment, self.num_batches_tracked

    def _train(self, x: Tensor) -> Tensor:
        if self.axes == "batch" and self.center == "mean" and self.scale in ("rms", "l2"):
            y, center, moment = lp_normalize(x, self.weight, self.bias, 2.0, self.eps)
            self._remember(center, moment)
            return y
        exact = x if x.dtype in (torch.float32, torch.float64) else x.float()
        blocks = self._blocks(exact)
        center, moment = self._center(blocks), self._moment(blocks)
        normalized = (blocks - center[:, None]) / self._scale(moment)[:, None]
        y = self._affine(self._unblock(normalized, x))
        if self.axes == "batch":
            count = blocks.shape[1]
            self._remember(center, moment * (count / (count - 1)) if self.scale == "std" else moment)
        return y.to(x.dtype)

    def _evaluate(self, x: Tensor) -> Tensor:
        return super()._evaluate(x) if self.axes == "batch" else self._train(x)

    def _scale(self, moment: Tensor) -> Tensor:
        return lp_root(moment, self.power, self.eps) if self.scale != "quantile" else moment + self.eps

    def _center(self, blocks: Tensor) -> Tensor:
        if self.center == "mean":
            return blocks.mean(1)
        return _middle(blocks, 0.5) if self.center == "median" else torch.zeros_like(blocks[:, 0])

    def _moment(self, blocks: Tensor) -> Tensor:
        if self.scale == "quantile":
            return (
                _order_statistic(blocks, 1 - self.quantile, upper=True) - _order_statistic(blocks, self.quantile)
            ) / 2
        if self.scale == "std":
            return blocks.var(1, correction=0)
        if math.isinf(self.power):
            return blocks.abs().amax(1)
        return (blocks.square() if self.power == 2 else blocks.abs().pow(self.power)).mean(1)

    def _blocks(self, x: Tensor) -> Tensor:
        if self.axes == "batch":
            return x.transpose(0, 1).reshape(x.shape[1], -1)
        rows = {"layer": x.shape[0], "instance": x.shape[0] * x.shape[1], "group": x.shape[0] * self.groups}
        return x.reshape(rows[self.axes], -1)

    def _unblock(self, blocks: Tensor, x: Tensor) -> Tensor:
        if self.axes == "batch":
            return blocks.view(x.shape[1], x.shape[0], *x.shape[2:]).transpose(0, 1)
        return blocks.view(x.shape)

    def _affine(self, y: Tensor) -> Tensor:
        shape = (1, -1, *(1,) * (y.dim() - 2))
        y = y if self.weight is None else y * self.weight.view(shape)
        return y if self.bias is None else y + self.bias.view(shape)

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, axes={self.axes}, center={self.center}, scale={self.scale}"


def _order_statistic(blocks: Tensor, share: float, *, upper: bool = False) -> Tensor:
    """Return an order statistic; the upper one at 1 - q mirrors the lower one at q, so that signs may flip."""
    count = blocks.shape[1]
    rank = math.floor((1 - share if upper else share) * (count - 1) + 1e-9)
    return blocks.kthvalue(count - rank if upper else 1 + rank, dim=1).values


def _middle(blocks: Tensor, share: float) -> Tensor:
    return (_order_statistic(blocks, share) + _order_statistic(blocks, share, upper=True)) / 2


def _power(scale: str) -> float:
    if scale in ("std", "rms", "quantile"):
        return 2.0 if scale != "quantile" else 1.0
    return math.inf if scale == "linf" else float(scale[1:])


def _check_words(axes: str, center: str, scale: str, quantile: float) -> None:
    if axes not in AXES:
        raise unknown_name("axes of StatNorm", axes, AXES)
    if center not in CENTERS:
        raise unknown_name("center of StatNorm", center, CENTERS)
    if scale not in SCALES:
        if not re.fullmatch(r"l\d+(\.\d+)?", scale):
            raise unknown_name("scale of StatNorm", scale, SCALES, "Any l<p> with p at least 1 is known too")
        check_power(float(scale[1:]))
    if not 0 <= quantile < 0.5:
        raise InputError(
            "StatNorm", "quantile is at least 0 and below 0.5", str(quantile), "Use 0.25 for the quartiles"
        )
