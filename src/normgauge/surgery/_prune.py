"""`prune_norms`: take away channels that a normalizer's scale says do little, or that have a twin, and prove it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.conv import _ConvNd

from normgauge.errors import InputError, unknown_name
from normgauge.network import copy_model
from normgauge.objective import call_model
from normgauge.results import instrument
from normgauge.rng import generator
from normgauge.surgery._channels import PER_CHANNEL, SHARED, ChannelPath, channel_paths
from normgauge.surgery._operate import narrow, relative_difference, run, widened
from normgauge.surgery._surgery import Surgery

By = Literal["gamma", "similar", "random", "correlation"]
_WAYS = ("gamma", "similar", "random", "correlation")
Twin = tuple[int, float, float]  # which channel stands in, times what, plus what


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
    * `correlation`: of pairs whose values a, b on the example predict each other best, one is replaced by its
      regression on the other, a = s b + o: s times its outgoing weights are added to its twin's, o times them to the
      bias (o = 0 where a border is padded). At a correlation rho that errs by sd(a) sqrt(1 - rho^2) in root mean
      square, times the norm of the outgoing weights: `bound` sums these. Claim S4-sim says why equal scales do not do.

    Kind: exact for what is said above: the smaller model equals, on the example, the full one with those channels set
    to zero and the readers changed (`proof`, in eval mode, in float64). `change` is what pruning did to the outputs.
    Cost: three forward passes, four by correlation.

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
        raise InputError("prune_norms", "share lies in 0 <= share < 1", str(share), "Give 0.5 for half")
    paths = channel_paths(model, example)
    open_paths = [path for path in paths if not path.blocked]
    modules = dict(model.named_modules())
    inputs = widened(example)
    full, small = copy_model(model).double(), copy_model(model).double()
    before = None if by != "correlation" else _activations(small, open_paths, inputs)
    gone = _select(open_paths, dict(small.named_modules()), by, share, generator(seed), before)
    for path in open_paths:
        removed, twins, _ = gone[path.norm]
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
    versions = (copy_model(model).double(), full, small)
    unpruned, masked, after = (run(version, inputs, call_model, "eval") for version in versions)
    for hook in hooks:
        hook.remove()
    narrow(small, model)
    rows = tuple(_row(path, modules[path.norm], gone.get(path.norm)) for path in paths)
    sizes = [sum(p.numel() for p in m.parameters()) for m in (model, small)]
    proof, change = relative_difference(masked, after), relative_difference(unpruned, after)
    return Surgery(
        model=small.train(model.training),
        rows=rows,
        proof=proof,
        change=change,
        original=model,
        note=f"parameters {sizes[0]} -> {sizes[1]}",
        operation="prune_norms",
        refused=[(path.norm, path.blocked) for path in paths if path.blocked],
        proofs=({"mode": "eval", "precision": "float64", "inputs": "example", "difference": change},),
        exact=False,
        mode="eval",
    )


def _activations(model: nn.Module, paths: list[ChannelPath], inputs: Any) -> dict[str, Tensor]:
    """Return what the first reader of each normalizer reads, as (channels, values)."""
    values: dict[str, Tensor] = {}
    modules = dict(model.named_modules())

    def hook_of(path: ChannelPath) -> Any:
        channels = len(_tensor(modules[path.norm], "weight"))

        def hook(module: nn.Module, args: tuple[Tensor, ...]) -> None:
            read = args[0].flatten(0, -2) if isinstance(module, nn.Linear) else args[0]
            block = _block(module, channels)
            values[path.norm] = read.reshape(len(read), channels, block, -1).transpose(0, 1).flatten(1)

        return hook

    handles = [modules[path.consumers[0]].register_forward_pre_hook(hook_of(path)) for path in paths]
    try:
        run(model, inputs, call_model, "eval")
    finally:
        for handle in handles:
            handle.remove()
    return values


def _regressions(path: ChannelPath, modules: Mapping[str, nn.Module], values: Tensor) -> list[Any]:
    """Return (bound, name, channel, twin, slope, intercept) for all pairs of a layer's channels."""
    readers = [modules[name] for name in path.consumers]
    padded = any(isinstance(r, _ConvNd) and (r.padding == "same" or any(p not in (0, "valid") for p in r.padding))
                 for r in readers)  # fmt: skip
    mean = torch.zeros_like(values[:, :1]) if padded else values.mean(1, keepdim=True)
    second = (values - mean) @ (values - mean).T / values.shape[1]
    power = second.diagonal()
    slope = second / power.clamp_min(1e-300)  # of row c on column t
    residual = (power[:, None] - slope * second).clamp_min(0.0).sqrt()
    intercept = mean - slope * mean.T
    outgoing = torch.zeros_like(power)
    for reader in readers:
        weight = _tensor(reader, "weight").detach()
        outgoing += weight.reshape(weight.shape[0], len(power), -1).square().sum((0, 2))
    bound = residual * outgoing.sqrt()[:, None]
    pairs = ((c, t) for c in range(len(power)) for t in range(len(power)) if c != t)
    return [(float(bound[c, t]), path.norm, c, t, float(slope[c, t]), float(intercept[c, t])) for c, t in pairs]


def _select(
    paths: list[ChannelPath],
    modules: Mapping[str, nn.Module],
    by: str,
    share: float,
    source: torch.Generator,
    values: Mapping[str, Tensor] | None = None,
) -> dict[str, tuple[list[int], dict[int, Twin], float]]:
    """Return, per normalizer, the channels that go, the twin of each where there is one, and the sum of the bounds."""
    affine = {
        path.norm: [_tensor(modules[path.norm], name).detach().double() for name in ("weight", "bias")]
        for path in paths
    }
    total = sum(len(gamma) for gamma, _ in affine.values())
    wanted = round(share * total)
    ranked: list[Any] = []
    for path in paths:
        name, (gamma, beta) = path.norm, affine[path.norm]
        if values is not None:
            ranked += _regressions(path, modules, values[name])
        elif by == "similar":
            ranked += _pairs(name, gamma, beta)
        else:
            scores = gamma.abs() if by == "gamma" else torch.rand(len(gamma), generator=source, dtype=torch.float64)
            ranked += [(float(score), name, channel, -1, 0.0, 0.0) for channel, score in enumerate(scores)]
    chosen: dict[str, tuple[list[int], dict[int, int]]] = {name: ([], {}) for name in affine}
    fits = {(name, c, t): (slope, intercept, bound) for bound, name, c, t, slope, intercept in ranked}
    count = 0
    for _, name, channel, twin, *_ in sorted(ranked):
        removed, twins = chosen[name]
        if count == wanted:
            break
        if channel in removed or twin in removed or len(removed) + 1 == len(affine[name][0]):
            continue
        removed.append(channel)
        if twin >= 0:
            twins[channel] = twin
        count += 1
    result: dict[str, tuple[list[int], dict[int, Twin], float]] = {}
    for name, (removed, twins) in chosen.items():
        for channel in removed:  # a twin may have gone later: follow to the one that stays
            while twins.get(channel) in removed:
                twins[channel] = twins[twins[channel]]
        last = {c: fits.get((name, c, t), (1.0, 0.0, 0.0)) for c, t in twins.items()}
        bound = sum(fit[2] for fit in last.values()) if values is not None else 0.0
        result[name] = (removed, {c: (t, *last[c][:2]) for c, t in twins.items()}, bound)
    return result


def _pairs(name: str, gamma: Tensor, beta: Tensor) -> list[Any]:
    """Return all pairs of a layer by distance in (gamma, beta); the one with the smaller |gamma| goes."""
    points = torch.stack([gamma, beta], 1)
    distances = torch.cdist(points, points)
    pairs = []
    for i in range(len(gamma)):
        for j in range(i + 1, len(gamma)):
            goes, stays = (i, j) if abs(gamma[i]) <= abs(gamma[j]) else (j, i)
            pairs.append((float(distances[i, j]), name, goes, stays, 1.0, 0.0))
    return pairs


@torch.no_grad()
def _compensate(
    modules: Mapping[str, nn.Module], path: ChannelPath, removed: list[int], twins: dict[int, Twin]
) -> None:
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
            twin, slope, constant = twins.get(channel, (-1, 0.0, constants[channel]))
            if twin >= 0:
                weight[:, _columns(twin, block)] += slope * weight[:, here]
            shift += constant * weight[:, here].flatten(1).sum(1)
        if removed and (not twins or bool(shift.any())):
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


def _row(path: ChannelPath, norm: nn.Module, gone: tuple[list[int], dict[int, Twin], float] | None) -> dict[str, Any]:
    channels = len(_tensor(norm, "weight")) if getattr(norm, "weight", None) is not None else None
    taken = len(gone[0]) if gone else 0
    done = path.blocked and f"left alone: {path.blocked}"
    return {
        "normalizer": path.norm,
        "layer before": path.producer,
        "read by": ", ".join(path.consumers),
        "channels": channels,
        "kept": None if channels is None else channels - taken,
        "bound": gone[2] if gone and gone[2] else None,
        "what": done or (f"{taken} channels taken away" if taken else "nothing taken away"),
    }
