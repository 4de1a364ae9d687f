"""A network read as a chain of linear maps and Lipschitz nonlinearities, with the norms margin bounds ask for."""

import math
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import NormgaugeError
from normgauge.measure.generalization.network_copy import BATCH, LINEAR
from normgauge.measure.lipschitz.operator_norm import operator_norm
from normgauge.network import Network, Step, activation_name, folded_affine, stored_affine
from normgauge.nn import ChannelLayerNorm, GroupNorm, LayerNorm, RMSNorm

_BY_SAMPLE = {nn.LayerNorm, nn.GroupNorm, nn.RMSNorm, LayerNorm, GroupNorm, RMSNorm, ChannelLayerNorm}
_BY_SAMPLE |= {nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d}
_NEUTRAL = (nn.Identity, nn.Flatten, nn.Unflatten, nn.Dropout, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout)
# Lipschitz constants of activations that are 0 at 0, rounded up; those in _HOMOGENEOUS also commute with factors > 0
_SLOPES = {"relu": 1.0, "tanh": 1.0, "gelu": 1.13, "silu": 1.1, "mish": 1.09, "hardtanh": 1.0, "softsign": 1.0}
_SLOPES |= {"relu6": 1.0, "hardswish": 1.5, "tanhshrink": 1.0, "leakyrelu": 1.0, "elu": 1.0}
_HOMOGENEOUS = ("relu", "leakyrelu")
_RESHAPES = ("flatten", "reshape", "view", "contiguous", "squeeze")
_FUNCTIONS = ("relu", "tanh", "gelu", "silu")


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
        graph = Network(model, inputs).record()
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


def _extend(chain: Chain, step: Step, input_shape: tuple[int, ...], output_shape: tuple[int, ...]) -> None:
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
    kind = activation_name(module)
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
    plain = folded_affine(None, module.running_var, None, None, module.eps)[0]
    printed = float(plain.norm()) * (1.0 if module.weight is None else float(module.weight.detach().abs().max()))
    return _diagonal(name, *stored_affine(module), output_shape, euclidean=printed)


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
