"""`prune_norms`: take away channels that a normalizer's scale says do little, or that have a twin, and prove it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normgauge.errors import InputError, explain, unknown_name
from normgauge.network import copy_model
from normgauge.objective import call_model
from normgauge.results import instrument, spend
from normgauge.rng import generator
from normgauge.surgery._channels import PER_CHANNEL, SHARED, ChannelPath, channel_paths
from normgauge.surgery._surgery import Surgery

By = Literal["gamma", "similar", "random"]
_WAYS = ("gamma", "similar", "random")


def scale_l1(model: nn.Module) -> Tensor:
    """Return the sum of |gamma| over all normalizers: the penalty of network slimming, to be added to a loss.

    References: liu2017.
    """
    scales = [
        m.weight.abs().sum() for m in model.modules() if isinstance(m, (*PER_CHANNEL, *SHARED)) and m.weight is not None
    ]
    return torch.stack(scales).sum() if scales else torch.zeros(())


@instrument
def prune_norms(model: nn.Module, by: By, share: float, example: Any, *, seed: int = 0) -> Surgery:
    """Return the model without a share of its normalized channels, taken away physically: smaller layers, same code.

    A channel that goes is replaced, in the layers that read it, by what stands in for it:

    * `gamma`: the channels with the smallest |gamma|; each is about constant, so phi(beta) times its outgoing weights
      goes into the reader's bias (phi: the activation between).
    * `similar`: of pairs of channels of one layer nearest in (gamma, beta), S4's proposal; the outgoing weights of the
      one that goes are added to its twin's, as they could be if the two had equal outputs.
    * `random`: any, replaced as for `gamma`: the baseline.

    Kind: exact for what is said above: the smaller model equals, on the example, the full one with those channels set
    to zero and the readers changed (`proof`, in eval mode). `change` is what pruning did to the outputs.
    Cost: three forward passes.

    Args:
        model: any model whose steps do not depend on the values of its inputs; it is not touched.
        by: how channels are chosen.
        share: of all prunable channels to take away, 0 <= share < 1; each layer keeps at least one.
        example: a tensor, tuple or mapping of inputs on which the result is proved.
        seed: of `random`.

    Returns:
        The surgery: `.model`, a row per normalizer with channels before and after or why it was left alone.

    Raises:
        UnknownNameError: for another `by`.
        InputError: for a share out of range.
        ModelError: when its steps depend on values.

    Deviations:
        S4 sec. 2.2 says units with similar gamma and beta have similar outputs, hence can be removed. Equal gamma and
        beta say that outputs have equal mean and variance, not that they are equal: the directions of the weights
        differ. The study `pruning` measures what that costs.

    Examples:
        >>> torch.manual_seed(0) and None
        >>> net = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2)).eval()
        >>> done = prune_norms(net, "gamma", 0.5, torch.randn(5, 3))
        >>> done.model[0].out_features, net[0].out_features, done.proof < 1e-6
        (2, 4, True)

    References: sun2020, liu2017.
    """
    if by not in _WAYS:
        raise unknown_name("by", by, _WAYS)
    if not 0 <= share < 1:
        raise InputError(explain("prune_norms", "share lies in 0 <= share < 1", str(share), "Give 0.5 for half"))
    paths = channel_paths(model, example)
    open_paths = [path for path in paths if not path.blocked]
    modules = dict(model.named_modules())
    gone = _select(open_paths, modules, by, share, generator(seed))
    full, small = copy_model(model).eval(), copy_model(model).eval()
    for path in open_paths:
        removed, twins = gone[path.norm]
        for either in (full, small):
            _compensate(dict(either.named_modules()), path, removed, twins)
    for path in open_paths:
        _shrink(dict(small.named_modules()), path, gone[path.norm][0])
    hooks = [
        dict(full.named_modules())[name].register_forward_pre_hook(
            _silence(modules[name], path, gone[path.norm][0], modules)
        )
        for path in open_paths
        for name in path.consumers
    ]
    with torch.no_grad():
        spend("forwards", 3)
        before, masked, after = (call_model(m, example) for m in (copy_model(model).eval(), full, small))
    for hook in hooks:
        hook.remove()
    small.train(model.training)
    rows = tuple(_row(path, modules[path.norm], gone.get(path.norm)) for path in paths)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    note = f"parameters {sizes[0]} -> {sizes[1]}"
    return Surgery(small, rows, _distance(masked, after), _distance(before, after), model, note, mode="eval")


def _select(
    paths: list[ChannelPath], modules: Mapping[str, nn.Module], by: str, share: float, source: torch.Generator
) -> dict[str, tuple[list[int], dict[int, int]]]:
    """Return, per normalizer, the channels that go and, for `similar`, the twin of each."""
    affine = {
        path.norm: [_tensor(modules[path.norm], name).detach().double() for name in ("weight", "bias")]
        for path in paths
    }
    total = sum(len(gamma) for gamma, _ in affine.values())
    wanted = round(share * total)
    ranked: list[tuple[float, str, int, int]] = []
    for name, (gamma, beta) in affine.items():
        if by == "similar":
            ranked += _pairs(name, gamma, beta)
        else:
            scores = gamma.abs() if by == "gamma" else torch.rand(len(gamma), generator=source, dtype=torch.float64)
            ranked += [(float(score), name, channel, -1) for channel, score in enumerate(scores)]
    chosen: dict[str, tuple[list[int], dict[int, int]]] = {name: ([], {}) for name in affine}
    count = 0
    for _, name, channel, twin in sorted(ranked):
        removed, twins = chosen[name]
        if count == wanted:
            break
        if channel in removed or twin in removed or len(removed) + 1 == len(affine[name][0]):
            continue
        removed.append(channel)
        if twin >= 0:
            twins[channel] = twin
        count += 1
    for removed, twins in chosen.values():
        for channel in removed:  # a twin may have gone later: follow to the one that stays
            while twins.get(channel) in removed:
                twins[channel] = twins[twins[channel]]
    return chosen


def _pairs(name: str, gamma: Tensor, beta: Tensor) -> list[tuple[float, str, int, int]]:
    """Return all pairs of a layer by distance in (gamma, beta); the one with the smaller |gamma| goes."""
    points = torch.stack([gamma, beta], 1)
    distances = torch.cdist(points, points)
    pairs = []
    for i in range(len(gamma)):
        for j in range(i + 1, len(gamma)):
            goes, stays = (i, j) if abs(gamma[i]) <= abs(gamma[j]) else (j, i)
            pairs.append((float(distances[i, j]), name, goes, stays))
    return pairs


@torch.no_grad()
def _compensate(modules: Mapping[str, nn.Module], path: ChannelPath, removed: list[int], twins: dict[int, int]) -> None:
    """Put what stands in for the removed channels into the readers: a constant into the bias, or the twin's weights."""
    norm = modules[path.norm]
    constants = path.activation(_tensor(norm, "bias").detach())
    for name in path.consumers:
        reader = modules[name]
        block = _block(reader, len(constants))
        weight = _tensor(reader, "weight")
        shift = torch.zeros(weight.shape[0], dtype=weight.dtype)
        for channel in removed:
            here = _columns(channel, block)
            if channel in twins:
                weight[:, _columns(twins[channel], block)] += weight[:, here]
            else:
                shift += constants[channel] * weight[:, here].flatten(1).sum(1)
        if not twins and removed:
            base = torch.zeros_like(shift) if reader.bias is None else _tensor(reader, "bias")
            reader.bias = nn.Parameter(base + shift)


@torch.no_grad()
def _shrink(modules: Mapping[str, nn.Module], path: ChannelPath, removed: list[int]) -> None:
    """Take the channels out of the layer before, the normalizer and the readers."""
    norm, producer = modules[path.norm], modules[path.producer]
    channels = len(_tensor(norm, "weight"))
    keep = torch.tensor([c for c in range(channels) if c not in set(removed)])
    for holder, names in ((norm, ("weight", "bias", "running_mean", "running_var")), (producer, ("weight", "bias"))):
        for name in names:
            _keep(holder, name, keep, 0)
    norm.__dict__["num_features"] = len(keep)
    setattr(producer, "out_channels" if isinstance(producer, _ConvNd) else "out_features", len(keep))
    for name in path.consumers:
        reader = modules[name]
        block = _block(reader, channels)
        columns = torch.cat([torch.arange(c * block, (c + 1) * block) for c in keep.tolist()])
        _keep(reader, "weight", columns, 1)
        setattr(reader, "in_channels" if isinstance(reader, _ConvNd) else "in_features", len(columns))


def _keep(module: nn.Module, name: str, index: Tensor, dimension: int) -> None:
    value = getattr(module, name, None)
    if isinstance(value, nn.Parameter):
        setattr(module, name, nn.Parameter(value.index_select(dimension, index), value.requires_grad))
    elif isinstance(value, Tensor):
        setattr(module, name, value.index_select(dimension, index))


def _silence(layer: nn.Module, path: ChannelPath, removed: list[int], modules: Mapping[str, nn.Module]) -> Any:
    """Return a hook that sets the removed channels of a reader's input to zero."""
    block = _block(layer, len(_tensor(modules[path.norm], "weight")))
    columns = [column for channel in removed for column in range(channel * block, (channel + 1) * block)]

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        quiet = inputs[0].clone()
        if isinstance(layer, nn.Linear):
            quiet[..., columns] = 0
        else:
            quiet[:, columns] = 0
        return (quiet, *inputs[1:])

    return hook


def _block(reader: nn.Module, channels: int) -> int:
    """Return how many inputs of the reader one channel is: more than one after a flatten."""
    return int(_tensor(reader, "weight").shape[1]) // channels


def _columns(channel: int, block: int) -> slice:
    return slice(channel * block, (channel + 1) * block)


def _tensor(module: nn.Module, name: str) -> Tensor:
    return cast(Tensor, getattr(module, name))


def _distance(a: Tensor, b: Tensor) -> float:
    return float((a - b).abs().max())


def _row(path: ChannelPath, norm: nn.Module, gone: tuple[list[int], dict[int, int]] | None) -> dict[str, Any]:
    channels = len(_tensor(norm, "weight")) if getattr(norm, "weight", None) is not None else None
    taken = len(gone[0]) if gone else 0
    done = path.blocked and f"left alone: {path.blocked}"
    return {
        "normalizer": path.norm,
        "layer before": path.producer,
        "read by": ", ".join(path.consumers),
        "channels": channels,
        "kept": None if channels is None else channels - taken,
        "what": done or (f"{taken} channels taken away" if taken else "nothing taken away"),
    }
