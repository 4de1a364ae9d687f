"""What kind of layer a module is: affine, normalizer, activation, recurrent; and where a graph stops looking inside."""

from __future__ import annotations

from typing import Any

from torch import Tensor, nn
from torch.nn.utils import parametrize

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
    """Tell whether a module's weight has axes of space."""
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
