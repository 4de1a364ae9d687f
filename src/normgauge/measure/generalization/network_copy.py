"""A copy of a model to take apart: its layers as called, normalization folded in, scale-invariant weights rescaled."""

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge import network
from normgauge.errors import ModelError
from normgauge.network import copy_model, exchange, fold_channels, role_of, stored_affine
from normgauge.nn import BatchNorm

Forward = Callable[[nn.Module, Any], Any]
# exact types: a subclass may do something else in its forward
LINEAR: frozenset[type] = frozenset({nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d})
BATCH: frozenset[type] = frozenset({nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, BatchNorm})
_FACTORS = (2.0, 5.0, 3.0)  # all above 1: the share of eps falls, and no product of them is 1


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
    twin = network.fix_parametrizations(copy_model(model).eval()).requires_grad_(False)
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
    graph = reader.record(lambda module: network.is_leaf(module) or role_of(module) in roles)
    affine: dict[int, AffineCall] = {}
    pairs: list[tuple[str, str]] = []
    normalizers: list[str] = []
    for step in graph.steps:
        role = role_of(step.module) if step.module is not None and step.inputs and step.outputs else ""
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
    twin = copy_model(model)
    done = []
    for layer_name, norm_name in calls.pairs:
        layer, norm = cast(nn.Linear, twin.get_submodule(layer_name)), cast(_BatchNorm, twin.get_submodule(norm_name))
        if type(norm) not in BATCH or type(layer) not in LINEAR or not isinstance(layer.weight, nn.Parameter):
            continue
        factors, shift = stored_affine(norm)
        kind = layer.weight.dtype
        weight = fold_channels(layer, layer.weight.double(), factors, after=True)
        layer.weight = nn.Parameter(weight.to(kind), requires_grad=False)
        moved = shift if layer.bias is None else layer.bias.double() * factors + shift
        layer.bias = nn.Parameter(moved.to(kind), requires_grad=False)
        exchange(twin, norm_name, nn.Identity())
        done.append(norm_name)
    return twin, tuple(done)


def rescale_weights(model: nn.Module, calls: LayerCalls) -> tuple[nn.Module, tuple[str, ...]]:
    """Return a copy with the weights before each normalizer multiplied: the function is the same, up to eps.

    Stored statistics move along: they would, had the network been trained at these weights.
    """
    twin = copy_model(model)
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
                stored = getattr(norm, buffer, None)
                if isinstance(stored, Tensor):
                    stored.mul_(factor**power)
            done.append(layer_name)
    return twin, tuple(done)


def perturb_normalizers(model: nn.Module) -> nn.Module:
    """Return a copy with other stored statistics, gains and shifts in its normalizers.

    At a fresh BatchNorm almost everything is harmless; here only what is so by structure.
    """
    twin = copy_model(model)
    with torch.no_grad():
        for module in twin.modules():
            if role_of(module) != "normalizer":
                continue
            moves = {"running_mean": (1.0, 0.3), "running_var": (1.7, 0.0), "running_moment": (1.7, 0.0)}
            for name, (factor, shift) in {**moves, "weight": (1.3, 0.0), "bias": (1.0, 0.2)}.items():
                value = getattr(module, name, None)
                if isinstance(value, Tensor):
                    value.mul_(factor).add_(shift)
    return twin


def strip_normalizers(model: nn.Module) -> nn.Module:
    """Return a copy without its normalizers."""
    twin = copy_model(model)
    for name, module in list(twin.named_modules()):
        if name and role_of(module) == "normalizer":
            exchange(twin, name, nn.Identity())
    return twin


def difference(a: Tensor, b: Tensor) -> float:
    """Return the largest difference of two outputs relative to the largest entry of the first."""
    scale = float(a.double().abs().max())
    return float((a.double() - b.double()).abs().max()) / scale if scale > 0 else math.nan
