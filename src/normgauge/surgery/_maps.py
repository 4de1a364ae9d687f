"""Linear maps and normalizers told by what they do to a few vectors, not by their names, and how to change them."""

import math
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.func import functional_call
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from normgauge.network import Graph, KeepDouble, Step, first_tensor, stored_affine
from normgauge.objective import untouched
from normgauge.rng import generator

_SAME = 1e-9  # relative; what is the same in float64 is far below, what is not far above
_LARGE = 1e6  # inputs of this size make eps, at most 1e-2, count less than 1e-14


@dataclass(frozen=True)
class Site:
    """Where a matrix stands: in which module, under which names, and how it is stored."""

    module: nn.Module  # that holds it
    weight: str  # name of its parameter there
    bias: str  # name of the vector added to what it makes; whether there is one is asked when it is needed
    transposed: bool = False  # stored as (in, out)
    grows: bool = True  # whether a bias may be added where there is none

    @property
    def parameter(self) -> nn.Parameter:
        return getattr(self.module, self.weight)

    @property
    def matrix(self) -> Tensor:
        """The weight as (out, in)."""
        stored = self.parameter.detach()
        return stored.T if self.transposed else stored

    @property
    def offset(self) -> Tensor | None:
        return getattr(self.module, self.bias, None) if self.bias else None

    def set(self, matrix: Tensor, offset: Tensor | None = None) -> None:
        """Write another matrix and, if given, another bias."""
        stored = self.parameter
        stored.data.copy_(matrix.T if self.transposed else matrix)
        if offset is not None:
            set_parameter(self.module, self.bias, offset, like=stored)


@dataclass(frozen=True)
class LinearMap:
    """A module that is y = M x + b over the last axis: where inputs enter, and outputs leave (attention has two M)."""

    reads: Site
    writes: Site


@dataclass(frozen=True)
class Norm:
    """A normalizer over the last axis: y = (offset + gain) n(x) + shift."""

    module: nn.Module  # asked
    gain: str  # name of its parameter, "" without one
    shift: str  # likewise
    offset: float  # 1 where the gain is stored as 1 + w
    centred: bool  # whether n takes the mean away
    equivariant: bool  # whether n(Qx) = Q n(x) for rotations Q
    eps: float  # added to the mean square
    width: int  # of the vectors
    device: torch.device  # on which it computes

    def scale(self) -> Tensor | None:
        """Return what n(x) is multiplied by; `None` for ones."""
        return self.offset + getattr(self.module, self.gain).detach() if self.gain else None

    def reset(self) -> None:
        """Make the gain one and the shift zero."""
        if self.gain:
            getattr(self.module, self.gain).data.fill_(1 - self.offset)
        if self.shift:
            getattr(self.module, self.shift).data.zero_()

    def is_plain(self) -> bool:
        """Tell whether the gain is one and the shift zero."""
        scale = self.scale()
        flat = scale is None or bool((scale == 1).all())
        return flat and (not self.shift or not bool(getattr(self.module, self.shift).any()))


def _call(module: nn.Module, inputs: Tensor, values: dict[str, Tensor] | None = None) -> Tensor | None:
    """Return what a module makes of some vectors, in float64, in eval mode; `None` where it takes no such thing."""
    try:
        with torch.no_grad(), untouched(module, "eval", 0), KeepDouble():
            result: Any = functional_call(module, values or {}, (inputs,))
    except Exception:  # noqa: BLE001 (any module may be asked, and may answer as it likes)
        return None
    result = first_tensor(result)
    return result if isinstance(result, Tensor) and result.is_floating_point() else None


def _vectors(width: int, like: Tensor | None) -> Tensor:
    vectors = torch.randn(6, width, generator=generator(0), dtype=torch.float64)
    return vectors if like is None else vectors.to(like.device)


def _close(a: Tensor | None, b: Tensor | None, within: float = _SAME) -> bool:
    if a is None or b is None or a.shape != b.shape:
        return False
    return bool((a - b).abs().max() <= within * torch.maximum(a.abs().max(), b.abs().max()))


def read_map(module: nn.Module | None, width: int) -> LinearMap | None:
    """Return the matrices of a module that maps vectors of `width` linearly, with a bias; `None` for others."""
    if module is None or any(parametrize.is_parametrized(m) for m in module.modules()):
        return None
    if isinstance(module, nn.MultiheadAttention):
        if not module._qkv_same_embed_dim or module.embed_dim != width:
            return None
        return LinearMap(Site(module, "in_proj_weight", "in_proj_bias"), Site(module.out_proj, "weight", "bias"))
    own = dict(module.named_parameters(recurse=False))
    weights = [name for name, value in own.items() if value.ndim == 2 and width in value.shape]
    vectors = [name for name, value in own.items() if value.ndim == 1]
    if len(weights) != 1 or len(vectors) > 1 or len(own) > 2 or any(module.children()):
        return None
    weight = own[weights[0]].detach()
    inputs = _vectors(width, weight)
    zero, made = _call(module, torch.zeros_like(inputs[:1])), _call(module, inputs)
    if zero is None or made is None:
        return None
    bias = vectors[0] if vectors else "bias"
    if not _close(zero, own[bias].detach()[None] if vectors else torch.zeros_like(zero), 0.0):
        return None
    for transposed in (False, True):
        matrix = weight.T if transposed else weight
        if matrix.shape[1] == width and _close(inputs @ matrix.T, made - zero):
            site = Site(module, weights[0], bias, transposed, grows=bool(vectors) or isinstance(module, nn.Linear))
            return LinearMap(site, site)
    return None


def read_table(module: nn.Module | None, width: int) -> Site | None:
    """Return where an embedding of integers keeps its vectors of `width`."""
    if not isinstance(module, nn.Embedding) or parametrize.is_parametrized(module) or module.max_norm is not None:
        return None
    plain = [name for name, _ in module.named_parameters()] == ["weight"] and module.weight.shape[1] == width
    return Site(module, "weight", "", transposed=True, grows=False) if plain else None


def read_norm(module: nn.Module | None, width: int) -> Norm | None:
    """Return what a normalizer over the last axis does, from a few calls on random vectors; `None` for others."""
    if module is None or any(module.children()) or width < 2 or parametrize.is_parametrized(module):
        return None
    own = {name: value.detach() for name, value in module.named_parameters(recurse=False)}
    if any(value.shape != (width,) for value in own.values()) or len(own) > 2 or list(module.buffers()):
        return None
    inputs = _vectors(width, next(iter(own.values()), None))
    made = _call(module, inputs)
    if made is None or made.shape != inputs.shape:
        return None
    gain, shift, normal = "", "", made
    for name, value in own.items():
        changed = _call(module, inputs, {name: value + 1.0})
        if changed is None or not bool(changed.isfinite().all()):
            return None
        if _close(changed - made, torch.ones_like(made)):
            shift = name
        else:
            gain, normal = name, changed - made
    base = own[shift] if shift else torch.zeros_like(made[0])
    if not gain:
        normal = made - base
    offset = float(((made - base) / normal - own[gain]).median()) if gain else 0.0
    if not math.isfinite(offset):
        return None
    offset = float(round(offset)) if abs(offset - round(offset)) < _SAME else offset
    if gain and not _close(made, normal * (offset + own[gain]) + base):
        return None
    unit = {gain: torch.full_like(own[gain], 1 - offset)} if gain else {}
    unit |= {shift: torch.zeros_like(own[shift])} if shift else {}

    def n(vectors: Tensor) -> Tensor:
        result = _call(module, vectors, unit)
        return torch.full_like(vectors, torch.nan) if result is None else result

    if not _close(n(_LARGE * inputs), n(2 * _LARGE * inputs), 1e-6) or _close(n(inputs), inputs):
        return None
    centred = _close(n(_LARGE * (inputs + 3)), n(_LARGE * inputs), 1e-6)
    square = torch.randn(width, width, generator=generator(1), dtype=torch.float64).to(inputs.device)
    rotation, small = torch.linalg.qr(square)[0], 1e-3 * inputs
    told = {"centred": centred, "equivariant": _close(n(small @ rotation), n(small) @ rotation), "eps": _eps(n, inputs)}
    return Norm(module, gain, shift, offset, **told, width=width, device=inputs.device)  # type: ignore[arg-type]


def _eps(n: Any, inputs: Tensor) -> float:
    """Return eps of n(x) = x / sqrt(mean x^2 + eps) for centred x, from its size at inputs about as small as eps."""
    row = (inputs[:1] - inputs[:1].mean()) / inputs[:1].std(correction=0)
    square, eps = 1e-6, 0.0
    for _ in range(3):
        size = float(n(row * square**0.5).square().mean())
        eps = square * (1 - size) / size if 0 < size < 1 else 0.0
        square = eps if eps > 0 else square
    return float(f"{eps:.12g}")


# -- BatchNorm with stored statistics, and the layers beside it --------------------------------------------------------


def affine_of(module: nn.Module, step: Step) -> tuple[Tensor, Tensor] | str:
    """Return factors and shift of a BatchNorm in eval mode, or why it is no such map; asked by calling it.

    A subclass that adds an activation, or one that normalizes by the batch, answers differently from its statistics.
    """
    if not isinstance(module, _BatchNorm):
        return "it is no BatchNorm"
    if module.running_mean is None or module.running_var is None:
        return "it has no running statistics: evaluation takes those of the batch"
    if not bool(module.running_mean.isfinite().all() and module.running_var.isfinite().all()):
        return "its running statistics are not finite"
    if not step.inputs:
        return "it reads nothing the model made"
    training, module.training = module.training, False
    try:
        with KeepDouble():
            factors, shift = stored_affine(module)
            shape = (5, len(factors), *step.inputs[0][2:])
            inputs = 3 * torch.randn(shape, generator=generator(0), dtype=torch.float64).to(factors.device)
            column = (1, -1, *(1,) * (len(shape) - 2))
            expected, given = inputs * factors.reshape(column) + shift.reshape(column), module(inputs.clone())
    finally:
        module.training = training
    return (factors, shift) if torch.allclose(given, expected, rtol=1e-9, atol=1e-9) else "its forward does more"


def layer_problem(model: nn.Module, graph: Graph, step: Step) -> str:
    """Return why a layer's weights must not be changed, "" where they may: an affine layer, called once, its own."""
    module = step.module
    if not isinstance(module, (nn.Linear, _ConvNd)):
        return f"{step.name} is neither a linear nor a convolutional layer"
    if parametrize.is_parametrized(module) or "weight" not in module._parameters:
        return f"the weight of {step.name} is computed by a parametrization or hook"
    if graph.times(step.name) > 1:
        return f"{step.name} is called several times"
    if is_tied(model, step.name):
        return f"the weight of {step.name} is tied to another layer"
    return ""


def is_tied(model: nn.Module, name: str) -> bool:
    """Tell whether a module, or one of its parameters, goes by other names too."""
    own = {id(value) for value in model.get_submodule(name).parameters()}
    return sum(id(value) in own for _, value in model.named_parameters(remove_duplicate=False)) > len(own)


def response_to_constant(layer: nn.Module, shift: Tensor) -> Tensor:
    """Return what a layer makes of a constant per input channel, away from any border and without its bias."""
    weight = layer.weight
    assert isinstance(weight, Tensor)
    groups = getattr(layer, "groups", 1)
    sums = weight.flatten(2).sum(2) if weight.ndim > 2 else weight
    blocks = sums.reshape(groups, -1, sums.shape[1])
    return torch.einsum("goi,gi->go", blocks, shift.reshape(groups, -1)).flatten()


def set_parameter(module: nn.Module, name: str, value: Tensor | None, *, like: Tensor | None = None) -> None:
    """Give a module another parameter, trainable as the old one, or `like`, was."""
    old = getattr(module, name, None)
    old = like if old is None else old
    trainable = old is None or old.requires_grad
    module.register_parameter(name, None if value is None else nn.Parameter(value.detach().clone(), trainable))
