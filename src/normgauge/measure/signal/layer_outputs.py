"""The layers of a model in the order in which a forward pass uses them, and what their outputs were."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from math import inf
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.network import ModuleCall, Network, convolves, owner_of, watched
from normgauge.objective import Objective

Groups = Mapping[str, Sequence[str] | str]


@dataclass(frozen=True, slots=True)
class Layer:
    """Parameters that count as one layer.

    Args:
        name: the module that owns them, or the user's name of the group.
        parameters: their names.
        uses: operations that read one of them in the first batch's forward pass; 0 where none does.
    """

    name: str
    parameters: tuple[str, ...]
    uses: int


def execution_order(objective: Objective, groups: Groups | None = None) -> list[Layer]:
    """Return the layers in the order of first use; layers that are never used come last.

    The order is that of the operations that read the parameters, not of registration, and does not need a module's
    `forward` to be called: attention reads the weights of its output projection by itself. Parameters read by one
    and the same operation keep their order of registration.

    Cost: one forward pass over the first batch.

    Args:
        objective: whose variables make the layers.
        groups: layer name -> globs or names of parameters, for layers other than single modules.

    Raises:
        InputError: when a group matches no variable or a variable is in two groups.
    """
    uses = Network.of(objective).uses
    members = _group_by_module(objective.names) if groups is None else _group_by_pattern(objective.names, groups)
    layers = [Layer(layer, tuple(names), max(len(uses[name]) for name in names)) for layer, names in members.items()]
    return sorted(
        layers, key=lambda layer: min((uses[name][0] for name in layer.parameters if uses[name]), default=inf)
    )


def _group_by_module(names: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for name in names:
        members.setdefault(owner_of(name) or "(model)", []).append(name)
    return members


def _group_by_pattern(names: Sequence[str], groups: Groups) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, patterns in groups.items():
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        members[group] = [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]
        if not members[group]:
            rule = "a group must match a variable"
            raise InputError(f"group {group!r}", rule, f"{wanted}", "Use names of the parameters")
        for name in members[group]:
            if owner.setdefault(name, group) != group:
                rule, got = "a parameter belongs to one group", f"{name} also in {owner[name]!r}"
                raise InputError(f"group {group!r}", rule, got, "Make the patterns disjoint")
    return members


def unit_axis(module: nn.Module, tensor: Tensor) -> int:
    """Return the axis of units: channels (1) after convolutions and channel normalizers, else the last."""
    channels = isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
    return 1 if (convolves(module) or channels) and tensor.ndim > 2 else tensor.ndim - 1


def per_unit(tensor: Tensor, axis: int) -> Tensor:
    """Return `[values, units]` in float64 without graph; a 0-d tensor is one value of one unit."""
    value = tensor.detach().to(torch.float64)
    return value.reshape(1, 1) if value.ndim == 0 else value.movedim(axis, -1).reshape(-1, value.shape[axis])


def run_watched(objective: Objective, called: Callable[[ModuleCall], None]) -> None:
    """Run all batches without graph, reporting every call of a submodule as `watched` does."""

    def body(model: nn.Module, number: int, batch: Any) -> None:
        with watched(model, called):
            objective.terms_of(model, number, batch)

    with torch.no_grad():
        for _ in objective.each_batch(body):
            pass
