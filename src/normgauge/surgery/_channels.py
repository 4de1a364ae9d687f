"""Which layer writes a normalizer's channels, which layers read them, and what stands in the way of taking some out."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from typing import Any, cast

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.conv import _ConvNd
from torch.nn.modules.instancenorm import _InstanceNorm

from normgauge.errors import ModelError
from normgauge.network import Graph, Network, Step

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
_POINTWISE_CALLS = ("relu", "gelu", "silu", "tanh", "sigmoid")


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


def channel_paths(model: nn.Module, example: Any) -> list[ChannelPath]:
    """Return one path per normalizer that scales channels, those that cannot lose channels with the reason.

    Args:
        model: any module.
        example: a tensor, tuple or mapping of inputs.

    Raises:
        ModelError: when the way through the model depends on the values of its inputs.

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
    consumers: list[str] = []
    steps: list[Callable[[Tensor], Tensor]] = []
    reason = _follow(step, graph, consumers, steps)
    if reason:
        return ChannelPath(step.name, source.name, blocked=reason)
    return ChannelPath(step.name, source.name, tuple(consumers), _compose(steps))


def _follow(step: Step, graph: Graph, consumers: list[str], steps: list[Callable[[Tensor], Tensor]]) -> str:
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
            steps.append(partial(_apply_step, reader))
            return _follow(reader, graph, consumers, steps)
        elif isinstance(reader.module, (*_CHANNELWISE, nn.Flatten)) or (reader.module is None and kind == "flatten"):
            return _follow(reader, graph, consumers, steps)
        else:
            return f"its channels meet others in {'an addition' if kind == 'add' else reader.kind}"
    return "" if consumers else "nothing reads it"


def _apply_step(step: Step, values: Tensor) -> Tensor:
    """Return what a pointwise step makes of other values."""
    return cast(Tensor, step.function(values.clone(), *step.args[1:], **step.kwargs))


def _is_layer(module: nn.Module | None) -> bool:
    grouped = isinstance(module, _ConvNd) and (module.groups != 1 or module.transposed)
    return isinstance(module, (nn.Linear, _ConvNd)) and not grouped and not nn.utils.parametrize.is_parametrized(module)


def _compose(steps: list[Callable[[Tensor], Tensor]]) -> Callable[[Tensor], Tensor]:
    def apply(values: Tensor) -> Tensor:
        for step in steps:
            values = step(values)
        return values

    return apply
