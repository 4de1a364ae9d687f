"""Normalizers that are y = factors x + shift per channel with stored statistics, and the layers beside them."""

from __future__ import annotations

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.utils import parametrize

from normgauge.network import Graph, KeepDouble, Step, stored_affine
from normgauge.rng import generator


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
    model_of = getattr(module, name, None)
    model_of = like if model_of is None else model_of
    trainable = model_of is None or model_of.requires_grad
    module.register_parameter(name, None if value is None else nn.Parameter(value.detach().clone(), trainable))
