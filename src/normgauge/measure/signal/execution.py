"""The layers of a model in the order in which a forward pass uses them, and what their outputs were."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normgauge.errors import InputError, explain
from normgauge.objective import Objective

Groups = Mapping[str, Sequence[str] | str]
Called = Callable[[str, nn.Module, tuple[Any, ...], Any, bool], None]


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


class _FirstUses(TorchFunctionMode):
    """Notes which tensors are read by operations that give tensors: a look at `weight.dtype` is no use."""

    def __init__(self, tensors: Mapping[str, Tensor]) -> None:
        super().__init__()
        self.names = {id(tensor): name for name, tensor in tensors.items()}
        self.first: dict[str, int] = {}
        self.counts: dict[str, int] = {}
        self.clock = 0

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        result = func(*args, **(kwargs or {}))
        if first_tensor(result) is not None:
            self.clock += 1
            for name in self._read((*args, *(kwargs or {}).values())):
                self.first.setdefault(name, self.clock)
                self.counts[name] = self.counts.get(name, 0) + 1
        return result

    def _read(self, arguments: Sequence[Any]) -> Iterator[str]:
        for argument in arguments:
            if isinstance(argument, Tensor):
                if id(argument) in self.names:
                    yield self.names[id(argument)]
            elif isinstance(argument, (tuple, list)):
                yield from self._read(argument)


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
    number, batch = next(iter(objective.batches()))
    leaves = {name: value.clone().requires_grad_() for name, value in objective.parameters.items()}
    uses = _FirstUses(leaves)

    def body(model: nn.Module) -> None:
        with uses:
            objective.terms_of(model, number, batch)

    objective.evaluate(number, body, leaves)
    members = _by_module(objective.names) if groups is None else _by_group(objective.names, groups)
    never = uses.clock + 1
    layers = [
        (
            min(uses.first.get(name, never) for name in names),
            Layer(layer, tuple(names), max(uses.counts.get(name, 0) for name in names)),
        )
        for layer, names in members.items()
    ]
    return [layer for _, layer in sorted(layers, key=lambda pair: pair[0])]


def _by_module(names: Sequence[str]) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    for name in names:
        owner = name.rpartition(".")[0].split(".parametrizations.")[0]  # a parametrized weight belongs to its layer
        members.setdefault(owner.removeprefix("parametrizations.") or "(model)", []).append(name)
    return members


def _by_group(names: Sequence[str], groups: Groups) -> dict[str, list[str]]:
    members: dict[str, list[str]] = {}
    owner: dict[str, str] = {}
    for group, patterns in groups.items():
        wanted = [patterns] if isinstance(patterns, str) else list(patterns)
        members[group] = [name for name in names if any(fnmatchcase(name, pattern) for pattern in wanted)]
        if not members[group]:
            raise InputError(
                explain(f"group {group!r}", "a group must match a variable", f"{wanted}", "Use names of the parameters")
            )
        for name in members[group]:
            if owner.setdefault(name, group) != group:
                raise InputError(
                    explain(
                        f"group {group!r}",
                        "a parameter belongs to one group",
                        f"{name} also in {owner[name]!r}",
                        "Make the patterns disjoint",
                    )
                )
    return members


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a module's output: itself, or inside a tuple, list, mapping or Hugging Face output."""
    if isinstance(tree, Tensor):
        return tree
    if isinstance(tree, Mapping):
        tree = list(tree.values())
    if isinstance(tree, (tuple, list)):
        for item in tree:
            found = first_tensor(item)
            if found is not None:
                return found
    return None


def unit_axis(module: nn.Module, tensor: Tensor) -> int:
    """Return the axis of units: channels (1) after convolutions and channel normalizers, else the last."""
    weight = getattr(module, "weight", None)
    convolves = isinstance(weight, Tensor) and weight.ndim >= 3
    channels = isinstance(module, (nn.modules.batchnorm._NormBase, nn.GroupNorm))
    return 1 if (convolves or channels) and tensor.ndim > 2 else tensor.ndim - 1


def per_unit(tensor: Tensor, axis: int) -> Tensor:
    """Return `[values, units]` in float64 without graph; a 0-d tensor is one value of one unit."""
    value = tensor.detach().to(torch.float64)
    return value.reshape(1, 1) if value.ndim == 0 else value.movedim(axis, -1).reshape(-1, value.shape[axis])


@contextmanager
def watched(
    model: nn.Module, called: Called, entering: Callable[[str, nn.Module], None] | None = None
) -> Iterator[None]:
    """Report every call of a submodule as `called(name, module, inputs, output, leaf)`, in order of completion.

    `leaf` tells that no other submodule was called inside; `entering(name, module)` is told before a call. Hooks are
    removed on exit; use it inside an evaluation that leaves no trace.
    """
    stack: list[bool] = []  # per open call: is it still a leaf?
    handles = []

    def enter(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, _: Any) -> None:
            if stack:
                stack[-1] = False
            stack.append(True)
            if entering is not None:
                entering(name, module)

        return hook

    def leave(name: str) -> Callable[..., None]:
        def hook(module: nn.Module, inputs: tuple[Any, ...], keywords: dict[str, Any], output: Any) -> None:
            called(name, module, (*inputs, *keywords.values()), output, stack.pop() if stack else True)

        return hook

    for name, module in model.named_modules():
        label = name or "(model)"
        handles.append(module.register_forward_pre_hook(enter(label)))
        handles.append(module.register_forward_hook(leave(label), with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


def run_watched(objective: Objective, called: Called) -> None:
    """Run all batches without graph, reporting every call of a submodule as `watched` does."""

    def body(model: nn.Module, number: int, batch: Any) -> None:
        with watched(model, called):
            objective.terms_of(model, number, batch)

    with torch.no_grad():
        for _ in objective.each_batch(body):
            pass
