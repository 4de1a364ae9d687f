"""Copies of a model to take apart, which share nothing with it."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import ModelError
from normgauge.threads import MEASURING


def copy_model(model: nn.Module) -> nn.Module:
    """Return a deep copy: ties and parametrizations as they are, generators in their state, kept tensors detached.

    Raises:
        ModelError: when something the model stores cannot be copied.

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
        raise ModelError(
            type(model).__name__, "the model must allow copy.deepcopy", str(error), "Detach tensors it keeps"
        ) from error
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
    """Put another module in a submodule's place."""
    parent, _, child = name.rpartition(".")
    setattr(model.get_submodule(parent), child, new)
