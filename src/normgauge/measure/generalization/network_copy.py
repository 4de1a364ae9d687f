"""A copy of a model to take apart: its layers as called, normalization folded in, scale-invariant weights rescaled."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.utils import parametrize

from normgauge.errors import ModelError, explain
from normgauge.network import ModuleCall, role_of, watched
from normgauge.nn import BatchNorm

Forward = Callable[[nn.Module, Any], Any]
# exact types: a subclass may do something else in its forward
LINEAR: frozenset[type] = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})
BATCH: frozenset[type] = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNorm})
_FACTORS = (2.0, 5.0, 3.0)  # all above 1: the share of eps falls, and no product of them is 1


@dataclass(frozen=True, slots=True)
class AffineCall:
    """One call of a layer with weights.

    Args:
        name: of the module.
        module: in the copy.
        input_shape: of one sample.
        positions: how often each row of the weight is applied to one sample.
    """

    name: str
    module: nn.Module
    input_shape: tuple[int, ...]
    positions: int


@dataclass(frozen=True, slots=True)
class Seen:
    """What one forward pass shows: calls with weights, normalizers, and which normalizer follows which layer."""

    affine: tuple[AffineCall, ...]
    normalizers: tuple[str, ...]
    pairs: tuple[tuple[str, str], ...]


def evaluation_copy(model: nn.Module) -> nn.Module:
    """Return a copy in evaluation mode with weights as they are used: parametrizations are worked out.

    Raises:
        ModelError: when the model cannot be copied, or its outputs depend on the batch.
    """
    computed = {  # tensors a module keeps from its last forward, as the hooks of torch's first weight_norm do
        id(value): value.detach().clone()
        for module in model.modules()
        for value in vars(module).values()
        if isinstance(value, Tensor) and not value.is_leaf
    }
    try:
        twin = copy.deepcopy(model, dict(computed)).eval()
    except (RuntimeError, TypeError, AssertionError) as error:
        raise ModelError(
            explain("generalization", "the model must allow copy.deepcopy", str(error), "Detach tensors it keeps")
        ) from error
    for module in twin.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
        if isinstance(module, _BatchNorm) and module.running_var is None:
            raise ModelError(
                explain(
                    "generalization",
                    "a sample's output must not depend on the batch it is in",
                    f"{type(module).__name__} without running statistics",
                    "Build it with track_running_stats=True, or use ng.nn.population_statistics",
                )
            )
    for parameter in twin.parameters():
        parameter.requires_grad_(False)
    return twin


def look(model: nn.Module, forward: Forward, inputs: Tensor) -> Seen:
    """Return what one forward pass of a copy on a few inputs shows."""
    affine: list[AffineCall] = []
    normalizers: list[str] = []
    pairs: list[tuple[str, str]] = []
    kept: list[Tensor] = []  # alive while we look, so that no id is used twice
    makers: dict[int, str] = {}

    def called(call: ModuleCall) -> None:
        name, module, value, source = call.name, call.module, call.made, call.given
        if value is None or source is None:
            return
        role = role_of(module)
        if role == "normalizer":
            normalizers.append(name)
            if id(source) in makers:
                pairs.append((makers[id(source)], name))
        elif role == "affine" and isinstance(getattr(module, "weight", None), Tensor):
            rows = module.weight.shape[0]  # type: ignore[index]
            positions = max(value.numel() // max(value.shape[0], 1) // int(rows), 1)
            affine.append(AffineCall(name, module, tuple(source.shape[1:]), positions))
            makers[id(value)] = name
        if value is source and role == "activation":  # done in place: the normalizer after it sees something else
            makers.pop(id(value), None)
        kept.append(value)

    with torch.no_grad(), watched(model, called):
        forward(model, inputs)
    once = [call.name for call in affine]
    usable = tuple((layer, norm) for layer, norm in pairs if once.count(layer) == 1 and normalizers.count(norm) == 1)
    return Seen(tuple(affine), tuple(normalizers), usable)


def folded(model: nn.Module, seen: Seen) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy with every BatchNorm that follows a Linear or Conv multiplied into it, and their names."""
    twin = copy.deepcopy(model)
    done = []
    for layer_name, norm_name in seen.pairs:
        layer, norm = twin.get_submodule(layer_name), twin.get_submodule(norm_name)
        if type(norm) not in BATCH or type(layer) not in LINEAR or not isinstance(layer.weight, nn.Parameter):
            continue
        assert isinstance(norm, _BatchNorm) and isinstance(layer, (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d))
        assert norm.running_var is not None and norm.running_mean is not None
        factors = (norm.running_var.double() + norm.eps).rsqrt()
        factors = factors if norm.weight is None else factors * norm.weight.double()
        shift = 0.0 if norm.bias is None else norm.bias.double()
        bias = torch.zeros_like(factors) if layer.bias is None else layer.bias.double()
        kind = layer.weight.dtype
        weight = layer.weight.double() * factors.reshape(-1, *[1] * (layer.weight.ndim - 1))
        layer.weight = nn.Parameter(weight.to(kind), requires_grad=False)
        moved = (bias - norm.running_mean.double()) * factors + shift
        layer.bias = nn.Parameter(moved.to(kind), requires_grad=False)
        _exchange(twin, norm_name, nn.Identity())
        done.append(norm_name)
    return twin, tuple(done)


def rescaled(model: nn.Module, seen: Seen) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy with the weights before each normalizer multiplied: the function is the same, up to eps.

    Stored statistics move along: they would, had the network been trained at these weights.
    """
    twin = copy.deepcopy(model)
    done = []
    with torch.no_grad():
        for number, (layer_name, norm_name) in enumerate(seen.pairs):
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
                stored = getattr(norm, buffer, None)
                if isinstance(stored, Tensor):
                    stored.mul_(factor**power)
            done.append(layer_name)
    return twin, tuple(done)


def stirred(model: nn.Module) -> nn.Module:
    """Return a copy with other stored statistics, gains and shifts in its normalizers.

    At a fresh BatchNorm almost everything is harmless; here only what is so by structure.
    """
    twin = copy.deepcopy(model)
    with torch.no_grad():
        for module in twin.modules():
            if role_of(module) != "normalizer":
                continue
            for name, factor, shift in (
                ("running_mean", 1.0, 0.3),
                ("running_var", 1.7, 0.0),
                ("running_moment", 1.7, 0.0),
                ("weight", 1.3, 0.0),
                ("bias", 1.0, 0.2),
            ):
                value = getattr(module, name, None)
                if isinstance(value, Tensor):
                    value.mul_(factor).add_(shift)
    return twin


def bare(model: nn.Module) -> nn.Module:
    """Return a copy without its normalizers."""
    twin = copy.deepcopy(model)
    for name, module in list(twin.named_modules()):
        if name and role_of(module) == "normalizer":
            _exchange(twin, name, nn.Identity())
    return twin


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two outputs relative to the largest entry of the first."""
    scale = float(a.double().abs().max())
    return float((a.double() - b.double()).abs().max()) / scale if scale > 0 else math.nan


def _exchange(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
