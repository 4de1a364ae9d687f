"""Design points of StatNorm by name, such as `stat:axes=layer,center=median,scale=l1`, with the laws of each."""

from __future__ import annotations

from typing import Any

from normgauge.errors import InputError, unknown_name
from normgauge.nn import registry
from normgauge.nn.group import fitting_groups
from normgauge.nn.stat import StatNorm, _check_words

_OPTIONS: dict[str, type] = {"axes": str, "center": str, "scale": str, "quantile": float}
_WORDS = {
    "batch": "batch and space per channel",
    "layer": "channels and space per sample",
    "instance": "space per sample and channel",
    "group": "channels of a group and space per sample",
}
_INPUT_BLOCK: dict[str, registry.Per] = {
    "batch": "row",
    "layer": "sample",
    "instance": "sample_row",
    "group": "sample_group",
}
_WEIGHT_BLOCK: dict[str, registry.Per] = {"batch": "row", "layer": "tensor", "instance": "row", "group": "group"}
_SOURCE: dict[str, registry.Source] = {"batch": "batch", "layer": "sample", "instance": "sample", "group": "group"}


def stat_point(options: str) -> registry.Declaration:
    """Return the declaration of a design point from `key=value` pairs joined by commas.

    Raises:
        UnknownNameError: for a key or word that does not exist.
        InputError: for text that is not `key=value`.

    Examples:
        >>> stat_point("center=median,scale=rms").layer(3, 2).center
        'median'
    """
    settings: dict[str, Any] = {"axes": "batch", "center": "mean", "scale": "std", "quantile": 0.25}
    for pair in filter(None, options.split(",")):
        key, sign, value = pair.partition("=")
        if not sign:
            raise InputError("stat:", "options are key=value, joined by commas", repr(pair), "Write stat:center=median")
        if key not in _OPTIONS:
            raise unknown_name("option of StatNorm", key, _OPTIONS)
        settings[key] = _number(value) if _OPTIONS[key] is float else value
    _check_words(**settings)
    return _declare(f"stat:{options}" if options else "stat", **settings)


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        raise InputError("stat:", "quantile is a number", repr(text), "Write stat:quantile=0.1") from None


def _declare(name: str, axes: str, center: str, scale: str, quantile: float) -> registry.Declaration:
    def make(channels: int, spatial: int) -> StatNorm:
        block = "layer" if axes == "instance" and not spatial else axes
        groups = fitting_groups(channels, smallest=2 if spatial else 8) if axes == "group" else 1
        return StatNorm(channels, axes=block, center=center, scale=scale, quantile=quantile, groups=groups)

    return registry.Declaration(
        name=name,
        title=f"StatNorm ({center} and {scale}, {axes})",
        placement="activation",
        axes=_WORDS[axes],
        statistics=_SOURCE[axes],
        behaviour="Training uses the batch's centre and scale; evaluation the stored averages."
        if axes == "batch"
        else "The same map in training and evaluation; no statistics are stored.",
        formula=r"y = \gamma \frac{x - c(x)}{s(x)} + \beta,\quad "
        rf"c = \mathrm{{{center}}},\ s = \mathrm{{{scale}}}",
        cite=("santurkar2018", "akbar2025"),
        invariances=_laws(axes, center, scale),
        make=make,
        spatial=(1, 2, 3) if axes == "instance" else (0, 1, 2, 3),
        smallest=2 if axes == "batch" else 1,
    )


def _laws(axes: str, center: str, scale: str) -> tuple[registry.Invariance, ...]:
    modes: tuple[registry.Mode, ...] = ("train",) if axes == "batch" else ("train", "eval")
    laws = [
        registry.Invariance("input", "scale", _INPUT_BLOCK[axes], exact=False, modes=modes),
        registry.Invariance("weights", "scale", _WEIGHT_BLOCK[axes], exact=False, modes=modes),
    ]
    # A shift is divided out only if neither the centred value nor the scale sees it.
    if center != "none" and scale in ("std", "quantile"):
        laws.append(registry.Invariance("input", "shift", _INPUT_BLOCK[axes], modes=modes))
        if axes in ("layer", "group"):
            laws.append(registry.Invariance("weights", "shift", _WEIGHT_BLOCK[axes], modes=modes, spatial=(0,)))
    return tuple(laws)


registry.register(stat_point(""))
registry.register_family("stat", stat_point)
