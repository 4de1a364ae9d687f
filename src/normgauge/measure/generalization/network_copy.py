"""A copy of a model to take apart: its layers as called, folded, rescaled, or read as a chain of maps with norms."""

import math
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge import network
from normgauge.errors import ModelError, NormgaugeError
from normgauge.measure.lipschitz.operator_norm import operator_norm
from normgauge.nn import BatchNorm, ChannelLayerNorm, GroupNorm, LayerNorm, RMSNorm

Forward = Callable[[nn.Module, Any], Any]
# exact types: a subclass may do something else in its forward
LINEAR: frozenset[type] = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})
BATCH: frozenset[type] = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNorm})
_FACTORS = (2.0, 5.0, 3.0)  # all above 1: the share of eps falls, and no product of them is 1
_BY_SAMPLE = {nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, LayerNorm, GroupNorm, RMSNorm, ChannelLayerNorm}
_BY_SAMPLE |= {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}
_NEUTRAL = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Lipschitz constants of activations that are 0 at 0, rounded up; those in _HOMOGENEOUS also commute with factors > 0
_SLOPES = {"relu": 1.0, "tanh": 1.0, "gelu": 1.13, "silu": 1.1, "mish": 1.09, "hardtanh": 1.0, "softsign": 1.0}
_SLOPES |= {"relu6": 1.0, "hardswish": 1.5, "tanhshrink": 1.0, "leakyrelu": 1.0, "elu": 1.0}
_HOMOGENEOUS = ("relu", "leakyrelu")
_RESHAPES = ("flatten", "reshape", "view", "contiguous", "squeeze")
_FUNCTIONS = ("relu", "tanh", "gelu", "silu")


@dataclass(frozen=True, slots=True)
class AffineCall:
    """One call of a layer with weights."""

    name: str  # of the module
    module: nn.Module  # in the copy
    input_shape: tuple[int, ...]  # of one sample
    positions: int  # how often each row of the weight is applied to one sample


@dataclass(frozen=True, slots=True)
class LayerCalls:
    """What one forward pass shows: calls with weights, normalizers, and which normalizer follows which layer."""

    affine: tuple[AffineCall, ...]
    normalizers: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def evaluation_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode with weights as they are used: parametrizations are worked out."""
    twin = network.fix_parametrizations(network.copy_model(model).eval()).requires_grad_(False)
    for module in twin.modules():
        if isinstance(module, _BatchNorm) and module.running_var is None:
            rule = "a sample's output must not depend on the batch it is in"
            got = f"{type(module).__name__} without running statistics"
            step = "Build it with track_running_stats=True, or use ng.nn.population_statistics"
            raise ModelError("generalization", rule, got, step)
    return twin


def look(model: nn.Module, forward: Forward, inputs: Tensor) -> LayerCalls:
    """Return what one forward pass of a copy on a few inputs shows."""
    roles = ("affine", "normalizer")
    reader = network.Network(model, inputs, forward=forward)
    graph = reader.record(lambda module: network.is_leaf(module) or network.role_of(module) in roles)
    affine: dict[int, AffineCall] = {}
    pairs: list[tuple[str, str]] = []
    normalizers: list[str] = []
    for step in graph.steps:
        role = network.role_of(step.module) if step.module is not None and step.inputs and step.outputs else ""
        if role == "normalizer":
            normalizers.append(step.name)
            pairs += [(affine[source].name, step.name) for source in step.reads[:1] if source in affine]
        elif role == "affine":
            output_shape, rows = step.outputs[0], int(step.module.weight.shape[0])  # type: ignore[union-attr,index]
            positions = max(math.prod(output_shape) // max(output_shape[0], 1) // rows, 1)
            affine[step.number] = AffineCall(step.name, step.module, step.inputs[0][1:], positions)  # type: ignore[arg-type]
    once = [call.name for call in affine.values()]
    usable = tuple((layer, norm) for layer, norm in pairs if once.count(layer) == 1 and normalizers.count(norm) == 1)
    return LayerCalls(tuple(affine.values()), tuple(normalizers), usable)


def fold_normalizers(model: nn.Module, calls: LayerCalls) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy with every BatchNorm that follows a Linear or Conv multiplied into it, and their names."""
    twin = network.copy_model(model)
    done = []
    for layer_name, norm_name in calls.pairs:
        layer, norm = cast(nn.Linear, twin.get_submodule(layer_name)), cast(_BatchNorm, twin.get_submodule(norm_name))
        if type(norm) not in BATCH or type(layer) not in LINEAR or not isinstance(layer.weight, nn.Parameter):
            continue
        factors, shift = network.stored_affine(norm)
        kind = layer.weight.dtype
        weight = network.fold_channels(layer, layer.weight.double(), factors, after=True)
        layer.weight = nn.Parameter(weight.to(kind), requires_grad=False)
        moved = shift if layer.bias is None else layer.bias.double() * factors + shift
        layer.bias = nn.Parameter(moved.to(kind), requires_grad=False)
        network.exchange(twin, norm_name, nn.Identity())
        done.append(norm_name)
    return twin, tuple(done)


def rescale_weights(model: nn.Module, calls: LayerCalls) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy with the weights before each normalizer multiplied: the function is the same, up to eps.

    Stored statistics move along: they would, had the network been trained at these weights.
    """
    twin = network.copy_model(model)
    done = []
    with torch.no_grad():
        for number, (layer_name, norm_name) in enumerate(calls.pairs):
            layer, norm = twin.get_submodule(layer_name), twin.get_submodule(norm_name)
            factor = _FACTORS[number % len(_FACTORS)]
            if layer_name in done or not isinstance(layer.weight, nn.Parameter):
                continue
            layer.weight.mul_(factor)
            if isinstance(getattr(layer, "bias", None), Tensor):
                layer.bias.mul_(factor)  # type: ignore[operator]
            moment = getattr(norm, "p", 2.0)  # our batch normalizers keep the mean of |x|^p
            powers = {"running_mean": 1.0, "running_var": 2.0, "running_moment": 1.0 if math.isinf(moment) else moment}
            for buffer, power in powers.items():
                if isinstance(stored := getattr(norm, buffer, None), Tensor):
                    stored.mul_(factor**power)
            done.append(layer_name)
    return twin, tuple(done)


def perturb_normalizers(model: nn.Module) -> nn.Module:
    """Return a copy with other stored statistics, gains and shifts in its normalizers.

    At a fresh BatchNorm almost everything is harmless; here only what is so by structure.
    """
    twin = network.copy_model(model)
    moves = {"running_mean": (1.0, 0.3), "running_var": (1.7, 0.0), "running_moment": (1.7, 0.0)}
    moves |= {"weight": (1.3, 0.0), "bias": (1.0, 0.2)}
    with torch.no_grad():
        for module in (module for module in twin.modules() if network.role_of(module) == "normalizer"):
            for name, (factor, shift) in moves.items():
                if isinstance(value := getattr(module, name, None), Tensor):
                    value.mul_(factor).add_(shift)
    return twin


def strip_normalizers(model: nn.Module) -> nn.Module:
    """Return a copy without its normalizers."""
    twin = network.copy_model(model)
    for name, module in list(twin.named_modules()):
        if name and network.role_of(module) == "normalizer":
            network.exchange(twin, name, nn.Identity())
    return twin


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two outputs relative to the largest entry of the first."""
    scale = float(a.double().abs().max())
    return float((a.double() - b.double()).abs().max()) / scale if scale > 0 else math.nan


class NotAChain(NormgaugeError):
    """The network is not a chain these bounds know; the message is the reason, as a clause."""


@dataclass
class Link:
    """One linear map, and the nonlinearities after it."""

    name: str  # of the module
    spectral: float  # bound of the operator norm
    rows: Tensor  # norms of the rows of the weight (for a diagonal map, its entries), float64
    bias: Tensor | None  # per row, or `None`
    positions: int  # how often each row occurs in the operator
    inputs: int  # units it reads, per sample
    outputs: int  # units it writes, per sample
    slope: float = 1.0  # product of the Lipschitz constants of the nonlinearities after it
    homogeneous: bool = True  # whether these commute with positive factors, element by element
    euclidean: float = math.nan  # of a BatchNorm, max|gain| times the norm of 1/sigma, S2's constant for it

    @property
    def long_rows(self) -> Tensor:
        """Norms of the rows with the bias as a further column."""
        return self.rows if self.bias is None else torch.hypot(self.rows, self.bias)

    @property
    def two_one(self) -> float:
        """Sum of the row norms of the operator, its bias as a further column."""
        return self.positions * float(self.long_rows.sum())

    def spectral_with_bias(self, last: bool) -> float:
        """Bound of the norm with the bias as a further column and, below the last layer, a row that keeps the 1."""
        offset = 0.0 if self.bias is None else math.sqrt(self.positions) * float(self.bias.norm())
        matrix = torch.tensor([[self.spectral, offset], [0.0, 0.0 if last else 1.0]], dtype=torch.float64)
        return float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-12)

    def frobenius_with_bias(self, last: bool) -> float:
        """Frobenius norm of the same matrix; of the last layer its largest row."""
        if last:
            return float(self.long_rows.max())
        extra = 0.0 if self.bias is None else 1.0
        return math.sqrt(self.positions * float(self.long_rows.square().sum()) + extra)


@dataclass
class Chain:
    """Linear maps in order, and the product of the slopes before the first."""

    links: list[Link] = field(default_factory=list)
    before: float = 1.0

    @property
    def slope(self) -> float:
        """Bound of the network's Lipschitz constant: the product of all factors."""
        return self.before * math.prod(link.spectral * link.slope for link in self.links)

    @property
    def printed_slope(self) -> float:
        """The product S2 Corollary 22 prints: weights' norms times sigma^-K, sigma the smallest of K BatchNorms."""
        norms = [link.euclidean for link in self.links if not math.isnan(link.euclidean)]
        others = math.prod(link.spectral for link in self.links if math.isnan(link.euclidean))
        bends = math.prod(link.slope for link in self.links)
        return self.before * others * bends * max(norms, default=1.0) ** len(norms)

    @property
    def biased(self) -> bool:
        """Whether any map has a bias."""
        return any(link.bias is not None for link in self.links)

    @property
    def homogeneous(self) -> bool:
        """Whether all nonlinearities are positively homogeneous, element by element."""
        return all(link.homogeneous for link in self.links)

    @property
    def width(self) -> int:
        """The largest number of units of a layer or input."""
        return max(max(link.inputs, link.outputs) for link in self.links)


def chain_of(model: nn.Module, inputs: Tensor) -> Chain:
    """Return a copy in evaluation mode as a chain.

    Cost: one forward pass, one operator norm per linear map.
    """
    try:
        graph = network.Network(model, inputs).record()
    except Exception as error:  # whatever a user's forward does, it is then no chain we can read
        raise NotAChain(f"it cannot be traced ({type(error).__name__}: {error})"[:160]) from error
    if graph.steered:
        raise NotAChain(f"it cannot be traced (its way depends on values: {graph.steered[0]})")
    chain = Chain()
    before, shape = -1, tuple(inputs.shape)
    for step in graph.steps:
        if not graph.readers(step.number) and step.number not in graph.outputs:
            continue  # it gave back what it took, or nobody asks for it
        if step.reads != (before,):
            raise NotAChain(f"its layers do not form one chain (at {step.name})")
        _extend(chain, step, shape, step.outputs[0])
        before, shape = step.number, step.outputs[0]
    if not chain.links:
        raise NotAChain("it has no linear layer")
    return chain


def _extend(chain: Chain, step: network.Step, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
    name, module, kind = step.name, step.module, step.kind.rstrip("_")
    if module is None:
        if kind in _FUNCTIONS:
            return _bend(chain, _SLOPES[kind], kind in _HOMOGENEOUS)
        if kind in _RESHAPES:
            return None
        raise NotAChain(f"it applies {kind}, which is not known here")
    if type(module) in LINEAR:
        return chain.links.append(_link(name, module, input_shape, output_shape))
    if type(module) in BATCH:
        return chain.links.append(_stored(name, module, output_shape))
    if type(module) in _BY_SAMPLE and not getattr(module, "track_running_stats", False):
        return _normalize(chain, name, module, output_shape)
    kind = network.activation_name(module)
    if kind in _SLOPES:
        slope = max(_SLOPES[kind], abs(getattr(module, "negative_slope", 0.0)), abs(getattr(module, "alpha", 0.0)))
        return _bend(chain, slope, kind in _HOMOGENEOUS)
    if isinstance(module, _NEUTRAL):
        return None
    return _bend(chain, _pool_slope(name, module, input_shape, output_shape), homogeneous=False)


def _bend(chain: Chain, slope: float, homogeneous: bool) -> None:
    if chain.links:
        chain.links[-1].slope *= slope
        chain.links[-1].homogeneous &= homogeneous
    else:
        chain.before *= slope


def _link(name: str, module: Any, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> Link:
    weight = module.weight.detach().double().reshape(module.weight.shape[0], -1)
    bias = None if module.bias is None else module.bias.detach().double()
    bound = operator_norm(module, None if isinstance(module, nn.Linear) else input_shape[1:]).upper
    units = math.prod(output_shape[1:])
    positions, inputs = units // len(weight), math.prod(input_shape[1:])
    return Link(name, bound, weight.norm(dim=1), bias, positions=positions, inputs=inputs, outputs=units)


def _diagonal(name: str, factors: Tensor, bias: Tensor | None, output_shape: tuple[int, ...], **more: float) -> Link:
    units = math.prod(output_shape[1:])
    sizes: Any = {"positions": max(units // len(factors), 1), "inputs": units, "outputs": units, **more}
    return Link(name, float(factors.abs().max()), factors.abs(), bias, **sizes)


def _stored(name: str, module: Any, output_shape: tuple[int, ...]) -> Link:
    plain = network.folded_affine(None, module.running_var, None, None, module.eps)[0]
    printed = float(plain.norm()) * (1.0 if module.weight is None else float(module.weight.detach().abs().max()))
    return _diagonal(name, *network.stored_affine(module), output_shape, euclidean=printed)


def _normalize(chain: Chain, name: str, module: Any, output_shape: tuple[int, ...]) -> None:
    """Add a normalizer by sample: steep at constant inputs (1/sqrt(eps)), then its gain and shift as a linear map."""
    eps = getattr(module, "eps", None)
    eps = torch.finfo(torch.float32).eps if eps is None else float(eps)
    if not eps > 0:
        raise NotAChain(f"{name} has eps = 0 and no Lipschitz constant")
    _bend(chain, eps**-0.5, homogeneous=False)
    gain, shift = getattr(module, "weight", None), getattr(module, "bias", None)
    if isinstance(gain, Tensor):
        bias = shift.detach().double().flatten() if isinstance(shift, Tensor) else None
        chain.links.append(_diagonal(name, gain.detach().double().flatten(), bias, output_shape))


def _pool_slope(name: str, module: Any, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> float:
    """Return the constant of a pooling layer: 1 where windows do not overlap, else the root of how often they do."""
    kind = type(module).__name__.lower()
    divided = all(a % b == 0 for a, b in zip(input_shape[2:], output_shape[2:], strict=False))
    if kind.startswith("adaptiveavgpool") and divided:
        return 1.0
    if not kind.startswith(("maxpool", "avgpool")):
        raise NotAChain(f"{name} ({type(module).__name__}) is not known here")
    axes = int(kind[-2])
    sizes, strides = (
        (value,) * axes if isinstance(value, int) else tuple(value) for value in (module.kernel_size, module.stride)
    )
    spread = getattr(module, "dilation", 1) != 1  # then windows share more inputs than their strides tell
    return math.sqrt(math.prod(k if spread else math.ceil(k / s) for k, s in zip(sizes, strides, strict=True)))
