"""`prune_norms`: take away channels that a normalizer's scale says do little, or that have a twin, and prove it."""

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any, Literal, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from normgauge.errors import InputError, ModelError, unknown_name
from normgauge.network import Graph, Network, Step, copy_model, double
from normgauge.objective import call_model
from normgauge.results import instrument
from normgauge.rng import generator
from normgauge.surgery._operate import hooked, narrow, relative_difference, run
from normgauge.surgery._surgery import Surgery

By = Literal["gamma", "similar", "random", "correlation"]
_WAYS = ("gamma", "similar", "random", "correlation")
Twin = tuple[int, float, float]  # which channel stands in, times what, plus what
Gone = tuple[list[int], dict[int, Twin], float]  # channels that go, the twin of each if any, the sum of the bounds
Modules = Mapping[str, nn.Module]
# Normalizers whose statistics belong to one channel: taking a channel away leaves the others as they are.
PER_CHANNEL = (_BatchNorm, _InstanceNorm)
SHARED = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_POINTWISE = (
    *(nn.ReLU, nn.ReLU6, nn.LeakyReLU, nn.ELU, nn.CELU, nn.SELU, nn.GELU, nn.SiLU, nn.Mish),
    *(nn.Tanh, nn.Sigmoid, nn.Softplus, nn.Hardswish, nn.Hardtanh),
)
_CHANNELWISE = (
    *(nn.Identity, nn.Flatten, nn.MaxPool1d, nn.MaxPool2d, nn.AvgPool1d, nn.AvgPool2d, nn.AdaptiveAvgPool1d),
    *(nn.AdaptiveAvgPool2d, nn.AdaptiveMaxPool2d, nn.modules.dropout._DropoutNd),
)
_POINTWISE_CALLS = ("relu", "gelu", "silu", "tanh", "sigmoid")


@dataclass(frozen=True)
class ChannelPath:
    """A normalizer between the layer that writes its channels and the layers that read them."""

    norm: str  # name of the normalizer
    producer: str = ""  # name of the layer before it, "" when the path is blocked
    consumers: tuple[str, ...] = ()  # names of the layers that read the channels
    activation: Callable[[Tensor], Tensor] = torch.clone  # what happens to a channel's value on the way
    blocked: str = ""  # why channels cannot be taken away here; "" where they can


def channel_paths(model: nn.Module, example: Any) -> list[ChannelPath]:
    """Return one path per normalizer that scales channels, those that cannot lose channels with the reason.

    Examples:
        >>> layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        >>> channel_paths(nn.Sequential(*layers), torch.ones(1, 3, 8, 8))[0].consumers
        ('3',)
    """
    graph = Network(model, example).graph
    if graph.steered:
        rule = "a trace of one input must hold for all"
        raise ModelError("surgery", rule, graph.why, "Move data-dependent control flow out of forward")
    return [_path(step, graph) for step in graph.steps if isinstance(step.module, (*PER_CHANNEL, *SHARED))]


def _path(step: Step, graph: Graph) -> ChannelPath:
    if isinstance(step.module, SHARED):
        return ChannelPath(step.name, blocked="its statistics are shared between channels")
    if getattr(step.module, "weight", None) is None:
        return ChannelPath(step.name, blocked="it has no scale")
    source = graph.steps[step.reads[0]] if step.reads[0] >= 0 else step
    if not _is_layer(source.module):
        return ChannelPath(step.name, blocked="no linear or convolutional layer stands right before it")
    if len(graph.readers(source.number)) > 1 or graph.times(source.name) > 1 or graph.times(step.name) > 1:
        return ChannelPath(step.name, blocked="the layer before it is read or called elsewhere too")
    consumers, steps = list[str](), list[Step]()
    reason = _follow(step, graph, consumers, steps)
    if reason:
        return ChannelPath(step.name, source.name, blocked=reason)
    return ChannelPath(step.name, source.name, tuple(consumers), partial(_activate, steps))


def _follow(step: Step, graph: Graph, consumers: list[str], steps: list[Step]) -> str:
    """Walk to the readers of a step's channels, collecting them and what acts on values; return why it cannot."""
    readers = graph.readers(step.number)
    if step.number in graph.outputs:
        return "its channels are outputs of the model"
    if len(readers) > 1 and not all(_is_layer(reader.module) for reader in readers):
        return "its output is used in several places"
    for reader in readers:
        kind = reader.kind.rstrip("_")
        if _is_layer(reader.module):
            if graph.times(reader.name) > 1:
                return "the layer after it is called several times"
            consumers.append(reader.name)
        elif isinstance(reader.module, _POINTWISE) or (reader.module is None and kind in _POINTWISE_CALLS):
            steps.append(reader)
            return _follow(reader, graph, consumers, steps)
        elif isinstance(reader.module, _CHANNELWISE) or (reader.module is None and kind == "flatten"):
            return _follow(reader, graph, consumers, steps)
        else:
            return f"its channels meet others in {'an addition' if kind == 'add' else reader.kind}"
    return "" if consumers else "nothing reads it"


def _activate(steps: list[Step], values: Tensor) -> Tensor:
    """Return what pointwise steps make of other values."""
    for step in steps:
        values = cast(Tensor, step.function(values.clone(), *step.args[1:], **step.kwargs))
    return values


def _is_layer(module: nn.Module | None) -> bool:
    grouped = isinstance(module, _ConvNd) and (module.groups != 1 or module.transposed)
    return isinstance(module, (nn.Linear, _ConvNd)) and not grouped and not nn.utils.parametrize.is_parametrized(module)


def scale_l1(model: nn.Module) -> Tensor:
    """Return the sum of |gamma| over all normalizers: the penalty of network slimming, to be added to a loss.

    References: liu2017.
    """
    norms = [module for module in model.modules() if isinstance(module, (*PER_CHANNEL, *SHARED))]
    scales = [norm.weight.abs().sum() for norm in norms if norm.weight is not None]
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

    Deviations: S4 sec. 2.2 says units with similar gamma and beta have similar outputs, hence can be removed. Equal
        gamma and beta say that outputs have equal mean and variance, not that they are equal: the directions of the
        weights differ. The study `pruning` measures what that costs.

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
    modules = {name or "(model)": module for name, module in model.named_modules()}
    inputs = double(example)
    full, small = copy_model(model).double(), copy_model(model).double()
    before = None if by != "correlation" else _activations(small, open_paths, inputs)
    gone = _select(open_paths, dict(small.named_modules()), by, share, generator(seed), before)
    for path in open_paths:
        removed, twins, _ = gone[path.norm]
        for either in (full, small):
            _compensate(dict(either.named_modules()), path, removed, twins)
    for path in open_paths:
        _shrink(dict(small.named_modules()), path, gone[path.norm][0])
    silent = [(full.get_submodule(name), path) for path in open_paths for name in path.consumers]
    hooks = (layer.register_forward_pre_hook(_silence(path, gone[path.norm][0], modules)) for layer, path in silent)
    with hooked(hooks):
        versions = (copy_model(model).double(), full, small)
        unpruned, masked, after = (run(version, inputs, call_model, "eval") for version in versions)
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

    def note(path: ChannelPath, module: nn.Module, args: tuple[Tensor, ...]) -> None:
        channels = len(_tensor(model.get_submodule(path.norm), "weight"))
        read = args[0].flatten(0, -2) if isinstance(module, nn.Linear) else args[0]
        read = read.reshape(len(read), channels, _block(module, channels), -1)
        values[path.norm] = read.transpose(0, 1).flatten(1)

    readers = ((model.get_submodule(path.consumers[0]), path) for path in paths)
    with hooked(reader.register_forward_pre_hook(partial(note, path)) for reader, path in readers):
        run(model, inputs, call_model, "eval")
    return values


def _regressions(path: ChannelPath, modules: Modules, values: Tensor) -> list[Any]:
    """Return (bound, name, channel, twin, slope, intercept) for all pairs of a layer's channels."""
    readers = [modules[name] for name in path.consumers]
    paddings = [reader.padding for reader in readers if isinstance(reader, _ConvNd)]
    padded = any(padding == "same" or any(p not in (0, "valid") for p in padding) for padding in paddings)
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
    paths: list[ChannelPath], modules: Modules, by: str, share: float, source: torch.Generator, values: Any
) -> dict[str, Gone]:
    """Return, per normalizer, the channels that go, the twin of each where there is one, and the sum of the bounds."""
    norms = {path.norm: modules[path.norm] for path in paths}
    affine = {n: [_tensor(m, name).detach().double() for name in ("weight", "bias")] for n, m in norms.items()}
    wanted = round(share * sum(len(gamma) for gamma, _ in affine.values()))
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
    result: dict[str, Gone] = {}
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
    distances, sizes = torch.cdist(points, points), gamma.abs().tolist()
    pairs = ((i, j) if sizes[i] <= sizes[j] else (j, i) for i in range(len(gamma)) for j in range(i + 1, len(gamma)))
    return [(float(distances[goes, stays]), name, goes, stays, 1.0, 0.0) for goes, stays in pairs]


@torch.no_grad()
def _compensate(modules: Modules, path: ChannelPath, removed: list[int], twins: dict[int, Twin]) -> None:
    """Put what stands in for the removed channels into the readers: a constant into the bias, or the twin's weights."""
    constants = path.activation(_tensor(modules[path.norm], "bias").detach())
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
def _shrink(modules: Modules, path: ChannelPath, removed: list[int]) -> None:
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


def _silence(path: ChannelPath, removed: list[int], modules: Modules) -> Any:
    """Return a hook that sets the removed channels of a reader's input to zero."""
    channels = len(_tensor(modules[path.norm], "weight"))

    def hook(module: nn.Module, inputs: tuple[Tensor, ...]) -> tuple[Tensor, ...]:
        quiet = inputs[0].clone().movedim(-1 if isinstance(module, nn.Linear) else 1, 0)
        for channel in removed:
            quiet[_columns(channel, _block(module, channels))] = 0
        return (quiet.movedim(0, -1 if isinstance(module, nn.Linear) else 1), *inputs[1:])

    return hook


def _block(reader: nn.Module, channels: int) -> int:
    """Return how many inputs of the reader one channel is: more than one after a flatten."""
    return int(_tensor(reader, "weight").shape[1]) // channels


def _columns(channel: int, block: int) -> slice:
    return slice(channel * block, (channel + 1) * block)


def _tensor(module: nn.Module, name: str) -> Tensor:
    return cast(Tensor, getattr(module, name))


def _row(path: ChannelPath, norm: nn.Module, gone: Gone | None) -> dict[str, Any]:
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
