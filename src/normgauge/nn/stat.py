"""StatNorm: the design space of normalizers, its points by name (`stat:axes=layer,scale=l1`), with the laws of each."""

import math
import re
from typing import Any, NamedTuple, Unpack

import torch
from torch import Tensor

from normgauge.errors import InputError, unknown_name
from normgauge.nn import registry
from normgauge.nn._layout import at_least_float32, fitting_groups, per_channel
from normgauge.nn._population import BatchStatisticsNorm, Shared
from normgauge.nn.functional import check_power, lp_root
from normgauge.nn.lp_batch import lp_normalize


class _Axes(NamedTuple):
    """What is averaged, in words; the source of statistics; blocks of the input and of the weights before it."""

    words: str
    source: registry.Source
    input_block: registry.Per
    weight_block: registry.Per


AXES = {
    "batch": _Axes("batch and space per channel", "batch", "row", "row"),
    "layer": _Axes("channels and space per sample", "sample", "sample", "tensor"),
    "instance": _Axes("space per sample and channel", "sample", "sample_row", "row"),
    "group": _Axes("channels of a group and space per sample", "group", "sample_group", "group"),
}
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
    variance for std). Other axes store nothing, and a block of one value comes out as the bias. `quantile` lies between
    0 and 0.5, `groups` divides the channels; `eps`, `momentum` and `affine` are those of batch normalization.

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
        **shared: Unpack[Shared],
    ) -> None:
        super().__init__(num_features, **shared)
        _check_words(axes, center, scale, quantile)
        if groups < 1 or num_features % groups:
            got = f"{groups} groups for {num_features} channels"
            raise InputError("StatNorm", "groups divides the channels", got, "Choose a divisor")
        self.axes, self.center, self.scale, self.quantile, self.groups = axes, center, scale, quantile, groups
        words = {"std": 2.0, "rms": 2.0, "quantile": 1.0, "linf": math.inf}
        self.power = words[scale] if scale in words else float(scale[1:])
        self.smallest = 2 if axes == "batch" else 1
        if axes != "batch":  # nothing of the batch, nothing to store
            del self.running_mean, self.running_moment, self.num_batches_tracked

    def _train(self, x: Tensor) -> Tensor:
        if self.axes == "batch" and self.center == "mean" and self.scale in ("rms", "l2"):
            y, center, moment = lp_normalize(x, self.weight, self.bias, 2.0, self.eps)
            self._remember(center, moment)
            return y
        blocks = self._blocks(at_least_float32(x))
        center, moment = self._center(blocks), self._moment(blocks)
        normalized = (blocks - center[:, None]) / self._scale(moment)[:, None]
        y = self._unblock(normalized, x)
        y = y if self.weight is None else y * per_channel(self.weight, y)
        y = y if self.bias is None else y + per_channel(self.bias, y)
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
        if self.center == "none":
            return torch.zeros_like(blocks[:, 0])
        return (_order_statistic(blocks, 0.5) + _order_statistic(blocks, 0.5, upper=True)) / 2

    def _moment(self, blocks: Tensor) -> Tensor:
        if self.scale == "quantile":
            upper = _order_statistic(blocks, 1 - self.quantile, upper=True)
            return (upper - _order_statistic(blocks, self.quantile)) / 2
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

    def extra_repr(self) -> str:
        """Return the settings, as torch's layers do."""
        return f"{super().extra_repr()}, axes={self.axes}, center={self.center}, scale={self.scale}"


def _order_statistic(blocks: Tensor, share: float, *, upper: bool = False) -> Tensor:
    """Return an order statistic; the upper one at 1 - q mirrors the lower one at q, so that signs may flip."""
    count = blocks.shape[1]
    rank = math.floor((1 - share if upper else share) * (count - 1) + 1e-9)
    return blocks.kthvalue(count - rank if upper else 1 + rank, dim=1).values


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
        rule = "quantile is at least 0 and below 0.5"
        raise InputError("StatNorm", rule, str(quantile), "Use 0.25 for the quartiles")


def stat_point(options: str) -> registry.Declaration:
    """Return the declaration of a design point from `key=value` pairs joined by commas.

    Examples:
        >>> stat_point("center=median,scale=rms").layer(3, 2).center
        'median'
    """
    settings: dict[str, Any] = {"axes": "batch", "center": "mean", "scale": "std", "quantile": 0.25}
    for pair in filter(None, options.split(",")):
        key, sign, value = pair.partition("=")
        if not sign:
            raise InputError("stat:", "options are key=value, joined by commas", repr(pair), "Write stat:center=median")
        if key not in settings:
            raise unknown_name("option of StatNorm", key, settings)
        try:
            settings[key] = float(value) if key == "quantile" else value
        except ValueError:
            raise InputError("stat:", "quantile is a number", repr(value), "Write stat:quantile=0.1") from None
    _check_words(**settings)
    axes, center, scale = settings["axes"], settings["center"], settings["scale"]

    def make(channels: int, spatial: int) -> StatNorm:
        block = "layer" if axes == "instance" and not spatial else axes
        groups = fitting_groups(channels, 2 if spatial else 8) if axes == "group" else 1
        return StatNorm(channels, groups=groups, **{**settings, "axes": block})

    stored = "Training uses the batch's centre and scale; evaluation the stored averages."
    same = "The same map in training and evaluation; no statistics are stored."
    return registry.Declaration(
        name=f"stat:{options}" if options else "stat",
        title=f"StatNorm ({center} and {scale}, {axes})",
        placement="activation",
        axes=AXES[axes].words,
        statistics=AXES[axes].source,
        behaviour=stored if axes == "batch" else same,
        formula=rf"y = \gamma \frac{{x - c(x)}}{{s(x)}} + \beta,\quad c = \mathrm{{{center}}},\ s = \mathrm{{{scale}}}",
        cite=("santurkar2018", "akbar2025"),
        invariances=_laws(axes, center, scale),
        make=make,
        spatial=(1, 2, 3) if axes == "instance" else (0, 1, 2, 3),
        smallest=2 if axes == "batch" else 1,
    )


def _laws(axes: str, center: str, scale: str) -> tuple[registry.Invariance, ...]:
    modes: tuple[registry.Mode, ...] = ("train",) if axes == "batch" else ("train", "eval")
    block, rows = AXES[axes].input_block, AXES[axes].weight_block
    laws = [
        registry.Invariance("input", "scale", block, exact=False, modes=modes),
        registry.Invariance("weights", "scale", rows, exact=False, modes=modes),
    ]
    # A shift is divided out only if neither the centred value nor the scale sees it.
    if center != "none" and scale in ("std", "quantile"):
        laws.append(registry.Invariance("input", "shift", block, modes=modes))
        if axes in ("layer", "group"):
            laws.append(registry.Invariance("weights", "shift", rows, modes=modes, spatial=(0,)))
    return tuple(laws)


registry.register(stat_point(""))
registry.FAMILIES["stat"] = stat_point
