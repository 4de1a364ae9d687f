"""Which layer writes a normalizer's channels, and which layers read them: found by tracing the model with torch.fx."""

from __future__ import annotations

import operator
from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, fx, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from normgauge.errors import ModelError, explain

# Normalizers whose statistics belong to one channel: taking a channel away leaves the others as they are.
PER_CHANNEL = (_BatchNorm, _InstanceNorm)
SHARED = (nn.GroupNorm, nn.LayerNorm, nn.RMSNorm)
_POINTWISE = (
    nn.ReLU,
    nn.ReLU6,
    nn.LeakyReLU,
    nn.ELU,
    nn.CELU,
    nn.SELU,
    nn.GELU,
    nn.SiLU,
    nn.Mish,
    nn.Tanh,
    nn.Sigmoid,
    nn.Softplus,
    nn.Hardswish,
    nn.Hardtanh,
)
_CHANNELWISE = (
    nn.Identity,
    nn.MaxPool1d,
    nn.MaxPool2d,
    nn.AvgPool1d,
    nn.AvgPool2d,
    nn.AdaptiveAvgPool1d,
    nn.AdaptiveAvgPool2d,
    nn.AdaptiveMaxPool2d,
    nn.modules.dropout._DropoutNd,
)
_POINTWISE_CALLS: tuple[Callable[..., Tensor], ...] = (
    torch.relu,
    nn.functional.relu,
    nn.functional.gelu,
    nn.functional.silu,
    torch.tanh,
    torch.sigmoid,
)


@dataclass(frozen=True)
class ChannelPath:
    """A normalizer between the layer that writes its channels and the layers that read them.

    Attributes:
        norm: name of the normalizer.
        producer: name of the layer before it, "" when the path is blocked.
        consumers: names of the layers that read the channels.
        activation: what happens to one channel's value on the way, applied to a vector of values.
        blocked: why channels cannot be taken away here; "" where they can.
    """

    norm: str
    producer: str = ""
    consumers: tuple[str, ...] = ()
    activation: Callable[[Tensor], Tensor] = torch.clone
    blocked: str = ""


class _Tracer(fx.Tracer):
    """Keeps normalizers and layers whole, wherever they are defined."""

    def is_leaf_module(self, m: nn.Module, module_qualified_name: str) -> bool:
        """Say whether the tracer stops at this module."""
        kept = (*PER_CHANNEL, *SHARED, nn.Linear, _ConvNd)
        return isinstance(m, kept) or super().is_leaf_module(m, module_qualified_name)


def channel_paths(model: nn.Module) -> list[ChannelPath]:
    """Return one path per normalizer that scales channels, those that cannot lose channels with the reason.

    Raises:
        ModelError: when torch.fx cannot trace the model.

    Examples:
        >>> layers = nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Conv2d(8, 4, 3)
        >>> channel_paths(nn.Sequential(*layers))[0].consumers
        ('3',)
    """
    try:
        graph = _Tracer().trace(model)
    except Exception as error:
        rule = "torch.fx must be able to trace the model"
        got = f"{type(error).__name__}: {error}"
        raise ModelError(explain("surgery", rule, got, "Move data-dependent control flow out of forward")) from error
    modules = dict(model.named_modules())
    return [
        _path(node, modules)
        for node in graph.nodes
        if node.op == "call_module" and isinstance(modules[node.target], (*PER_CHANNEL, *SHARED))
    ]


def _path(node: fx.Node, modules: dict[str, nn.Module]) -> ChannelPath:
    name, norm = str(node.target), modules[str(node.target)]
    if isinstance(norm, SHARED):
        return ChannelPath(name, blocked="its statistics are shared between channels")
    if getattr(norm, "weight", None) is None:
        return ChannelPath(name, blocked="it has no scale")
    source = node.all_input_nodes[0]
    if source.op != "call_module" or not _layer(modules[str(source.target)]):
        return ChannelPath(name, blocked="no linear or convolutional layer stands right before it")
    if len(source.users) > 1 or _called(source) > 1 or _called(node) > 1:
        return ChannelPath(name, blocked="the layer before it is read or called elsewhere too")
    consumers: list[str] = []
    steps: list[Callable[[Tensor], Tensor]] = []
    reason = _follow(node, modules, consumers, steps)
    if reason:
        return ChannelPath(name, str(source.target), blocked=reason)
    return ChannelPath(name, str(source.target), tuple(consumers), _composed(steps))


def _follow(
    node: fx.Node, modules: dict[str, nn.Module], consumers: list[str], steps: list[Callable[[Tensor], Tensor]]
) -> str:
    """Walk to the readers of a node's channels, collecting them and what acts on values; return why it cannot."""
    if len(node.users) > 1 and any(
        user.op != "call_module" or not _layer(modules[str(user.target)]) for user in node.users
    ):
        return "its output is used in several places"
    for user in node.users:
        module = modules.get(str(user.target)) if user.op == "call_module" else None
        if user.op == "output":
            return "its channels are outputs of the model"
        if _reads(user, modules):
            if _called(user) > 1:
                return "the layer after it is called several times"
            consumers.append(str(user.target))
        elif isinstance(module, _POINTWISE):
            steps.append(module)
            return _follow(user, modules, consumers, steps)
        elif user.op == "call_function" and user.target in _POINTWISE_CALLS:
            steps.append(user.target)
            return _follow(user, modules, consumers, steps)
        elif isinstance(module, (*_CHANNELWISE, nn.Flatten)) or _is_flatten(user):
            return _follow(user, modules, consumers, steps)
        else:
            return f"its channels meet others in {_what(user, module)}"
    return "" if consumers else "nothing reads it"


def _layer(module: nn.Module) -> bool:
    grouped = isinstance(module, _ConvNd) and (module.groups != 1 or module.transposed)
    return isinstance(module, (nn.Linear, _ConvNd)) and not grouped and not nn.utils.parametrize.is_parametrized(module)


def _reads(node: fx.Node, modules: dict[str, nn.Module]) -> bool:
    return node.op == "call_module" and _layer(modules[str(node.target)])


def _called(node: fx.Node) -> int:
    return sum(other.op == "call_module" and other.target == node.target for other in node.graph.nodes)


def _is_flatten(node: fx.Node) -> bool:
    if node.op == "call_function":
        return node.target is torch.flatten
    return node.op == "call_method" and node.target == "flatten"


def _what(node: fx.Node, module: nn.Module | None) -> str:
    if module is not None:
        return type(module).__name__
    return (
        "an addition"
        if node.target in (operator.add, torch.add)
        else str(getattr(node.target, "__name__", node.target))
    )


def _composed(steps: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    def apply(values: Tensor) -> Tensor:
        for step in steps:
            values = step(values)
        return values

    return apply
