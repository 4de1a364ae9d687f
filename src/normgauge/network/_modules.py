"""What kind of layer a module is, where a graph stops looking inside, and copies of a model to take apart."""

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import ModelError
from normgauge.threads import MEASURING

_NAMES = {
    *("relu", "relu6", "gelu", "silu", "elu", "selu", "leaky_relu", "softplus", "mish", "hardtanh", "hardswish"),
    *("tanh", "sigmoid", "erf", "hardsigmoid", "softsign"),
    *("gelutanh", "newgelu", "quickgelu", "siluactivation", "geluactivation"),
}


def role_of(module: nn.Module) -> str:
    """Return "affine", "normalizer", "activation", "recurrent" or "" by what the module owns and is called."""
    kind = type(module).__name__.lower()
    if isinstance(module, nn.RNNBase):
        return "recurrent"
    if isinstance(module, nn.modules.batchnorm._NormBase) or ("norm" in kind and not any(module.children())):
        return "normalizer"
    if activation_name(module):
        return "activation"
    return "affine" if _maps_linearly(module) else ""


def _maps_linearly(module: nn.Module) -> bool:
    """Tell whether a module has a weight that mixes units: a gain stored as (1, 1, 1, n) does not."""
    weight = _weight(module)
    if not isinstance(weight, Tensor) or weight.ndim < 2 or isinstance(module, (nn.Embedding, nn.EmbeddingBag)):
        return False
    built_in = isinstance(module, (nn.Linear, nn.modules.conv._ConvNd))
    return built_in or weight.ndim == 2 or weight.numel() > max(weight.shape)


def activation_name(module: nn.Module) -> str:
    """Return the activation a module applies, from its class, or an empty string."""
    kind = type(module).__name__.lower()
    if isinstance(module, nn.modules.activation.MultiheadAttention):
        return ""
    if type(module).__module__ == "torch.nn.modules.activation":
        return kind
    return kind if kind in _NAMES or kind.endswith("activation") else ""


def convolves(module: nn.Module) -> bool:
    weight = _weight(module)
    return isinstance(weight, Tensor) and weight.ndim >= 3


def _weight(module: nn.Module) -> Any:
    """Return the weight; of a parametrized one its largest original, since spectral_norm iterates when it is read."""
    if not parametrize.is_parametrized(module, "weight"):
        return getattr(module, "weight", None)
    inside = module.get_submodule("parametrizations.weight")
    return max((*inside.parameters(), *inside.buffers()), key=Tensor.numel)


def is_leaf(module: nn.Module) -> bool:
    """Tell whether a module counts as one step: it has no children but parametrizations, or reads their weights itself.

    Examples:
        >>> is_leaf(nn.Linear(1, 1)), is_leaf(nn.Sequential(nn.ReLU())), is_leaf(nn.MultiheadAttention(2, 1))
        (True, False, True)
    """
    children = [name for name, _ in module.named_children() if name != "parametrizations"]
    return not children or isinstance(module, nn.MultiheadAttention)


def owner_of(parameter: str) -> str:
    """Return the module a parameter belongs to, "" for the model; parametrizations count to the module they change.

    Examples:
        >>> owner_of("head.bias"), owner_of("head.parametrizations.weight.original0"), owner_of("bias")
        ('head', 'head', '')
    """
    parts = parameter.split(".")
    return ".".join(parts[: parts.index("parametrizations") if "parametrizations" in parts else -1])


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy: ties and parametrizations as they are, generators in their state, kept tensors detached.

    Examples:
        >>> net = nn.Linear(1, 1)
        >>> net.source, net.kept = torch.Generator().manual_seed(0), net(torch.ones(1, 1))
        >>> copy_model(net).kept.requires_grad
        False
    """
    # tensors a module keeps from its last forward have a graph, generators have no deep copy
    memo = {id(value): _detach(value) for module in model.modules() for value in _kept_objects(vars(module))}
    try:
        with MEASURING:  # another thread's evaluation has other tensors in their place
            twin = copy.deepcopy(model, memo)
    except (RuntimeError, TypeError, AssertionError) as error:
        rule, step = "the model must allow copy.deepcopy", "Detach tensors it keeps"
        raise ModelError(type(model).__name__, rule, str(error), step) from error
    for module in twin.modules():
        if parametrize.is_parametrized(module):  # a class of its own: removing a parametrization changes the class
            own = type(module)
            module.__class__ = type(own.__name__, own.__bases__, dict(vars(own)))
    return twin


def _kept_objects(tree: Any) -> Iterator[Any]:
    if isinstance(tree, torch.Generator) or (isinstance(tree, Tensor) and not tree.is_leaf):
        yield tree
    elif isinstance(tree, (tuple, list, Mapping)):
        for item in tree.values() if isinstance(tree, Mapping) else tree:
            yield from _kept_objects(item)


def _detach(value: Any) -> Any:
    return value.clone_state() if isinstance(value, torch.Generator) else value.detach().clone()


def fix_parametrizations(model: nn.Module) -> nn.Module:
    """Replace, in place, what parametrizations compute by the values they give now; return the model."""
    for module in model.modules():
        if parametrize.is_parametrized(module):
            for name in list(module.parametrizations):  # type: ignore[arg-type]
                parametrize.remove_parametrizations(module, name, leave_parametrized=True)
    return model


def exchange(model: nn.Module, name: str, new: nn.Module) -> None:
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
