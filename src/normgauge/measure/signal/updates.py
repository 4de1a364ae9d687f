"""Where one step of training would move the parameters, without moving them."""

import copy
from collections.abc import Mapping
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.objective import Objective

Update = float | torch.optim.Optimizer | Mapping[str, Tensor]


def apply_update(objective: Objective, update: Update, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return the parameters after `update`: a learning rate (one SGD step), an optimizer's step, or new values.

    Raises:
        InputError: for an update of another kind, or an optimizer that holds none of the variables.
    """
    if isinstance(update, torch.optim.Optimizer):
        return _step_copy(objective, update, gradient)
    if isinstance(update, Mapping):
        return {name: value.clone() for name, value in objective.at(update).parameters.items()}
    if isinstance(update, (int, float)) and not isinstance(update, bool):
        return {name: value - update * gradient[name] for name, value in objective.parameters.items()}
    rule = "it is a learning rate, a torch optimizer or a dict of new parameters"
    raise InputError("update", rule, type(update).__name__, "Pass for example 0.1, or the optimizer you train with")


def copy_optimizer(objective: Objective, optimizer: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    """Return a copy of an optimizer, state included, and the copies of the model's parameters that it owns, by name.

    Raises:
        InputError: for an optimizer that holds none of the variables.
    """
    values = objective.parameters
    copies: dict[str, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for name, parameter in objective.model.named_parameters():
        if id(parameter) not in memo:
            value = values[name] if name in values else parameter.detach()
            memo[id(parameter)] = copies[name] = nn.Parameter(value.clone(), parameter.requires_grad)
    # copy.deepcopy(optimizer) would lose the attributes that subclasses keep beside state and groups
    twin = object.__new__(type(optimizer))
    twin.__dict__.update(copy.deepcopy(_attributes_without_hooks(optimizer), memo))
    owned = {id(parameter) for group in twin.param_groups for parameter in group["params"]}
    if not any(id(copies[name]) in owned for name in values if name in copies):
        rule, step = (
            "the optimizer must hold parameters of the objective's model",
            "Pass the one made from this very model",
        )
        raise InputError(f"update by {type(optimizer).__name__}", rule, "none of them", step)
    return twin, copies


def _step_copy(objective: Objective, optimizer: Any, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Step a copy of the optimizer, state included, that owns copies of the parameters."""

    def copy_with_gradient() -> tuple[Any, dict[str, nn.Parameter]]:
        twin, copies = copy_optimizer(objective, optimizer)
        for name, parameter in copies.items():
            parameter.grad = gradient[name].clone() if name in gradient else None
        return twin, copies

    # the class's step, not the instance's: a learning rate scheduler replaces the latter by one bound to the original
    twin, copies = copy_with_gradient()
    try:
        type(optimizer).step(twin)
    except TypeError:
        twin, copies = copy_with_gradient()
        type(optimizer).step(twin, _closure(objective, copies))
    return {name: copies[name].detach() for name in objective.names}


def _attributes_without_hooks(optimizer: Any) -> dict[str, Any]:
    """Return the optimizer's attributes without the user's step hooks, which may act on the outside."""
    attributes = {name: value for name, value in vars(optimizer).items() if name != "step"}
    return {name: type(value)() if name.endswith("_hooks") else value for name, value in attributes.items()}


def _closure(objective: Objective, copies: Mapping[str, nn.Parameter]) -> Any:
    """Return the closure that optimizers like LBFGS call to evaluate loss and gradient again."""

    def closure() -> Tensor:
        loss, slope = objective.at({name: copies[name].detach() for name in objective.names}).loss_and_gradient()
        for name, value in slope.items():
            copies[name].grad = value
        return loss

    return closure
