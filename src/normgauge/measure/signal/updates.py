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
    """Return the parameters after `update`: a learning rate (one SGD step), an optimizer's step, or new values."""
    if isinstance(update, torch.optim.Optimizer):
        return _step_copy(objective, update, gradient)
    if isinstance(update, Mapping):
        return {name: value.clone() for name, value in objective.at(update).parameters.items()}
    if isinstance(update, (int, float)) and not isinstance(update, bool):
        return {name: value - update * gradient[name] for name, value in objective.parameters.items()}
    rule = "it is a learning rate, a torch optimizer or a dict of new parameters"
    raise InputError("update", rule, type(update).__name__, "Pass for example 0.1, or the optimizer you train with")


def copy_optimizer(objective: Objective, optimizer: Any) -> tuple[Any, dict[str, nn.Parameter]]:
    """Return a copy of an optimizer, state included, and the copies of the model's parameters that it owns, by name."""
    values = objective.parameters
    copies: dict[str, nn.Parameter] = {}
    memo: dict[int, Any] = {}
    for name, parameter in objective.model.named_parameters():
        if id(parameter) not in memo:
            value = values[name] if name in values else parameter.detach()
            memo[id(parameter)] = copies[name] = nn.Parameter(value.clone(), parameter.requires_grad)
    # copy.deepcopy(optimizer) would lose the attributes that subclasses keep beside state and groups
    twin = object.__new__(type(optimizer))
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    # without the user's step hooks, which may act on the outside
    own = {name: type(value)() if name.endswith("_hooks") else value for name, value in own.items()}
    twin.__dict__.update(copy.deepcopy(own, memo))
    owned = {id(parameter) for group in twin.param_groups for parameter in group["params"]}
    if not any(id(copies[name]) in owned for name in values if name in copies):
        rule, name = "the optimizer must hold parameters of the objective's model", type(optimizer).__name__
        raise InputError(f"update by {name}", rule, "none of them", "Pass the one made from this very model")
    return twin, copies


def groups_by_name(objective: Objective, optimizer: Any) -> dict[str, dict[str, Any]]:
    """Return the options of every variable that the optimizer moves, by name."""
    given = getattr(optimizer, "param_groups", ())
    owners = {id(parameter): group for group in given for parameter in group["params"]}
    named = dict(objective.model.named_parameters())
    groups = {name: owners[id(named[name])] for name in objective.names if id(named[name]) in owners}
    if not groups:
        rule = "it is a torch.optim.Optimizer that holds parameters of the objective's model"
        step = "Make it from the same model; moving or copying a model makes new parameters"
        raise InputError("optimizer", rule, f"{type(optimizer).__name__} of {len(owners)} others", step)
    return groups


def _step_copy(objective: Objective, optimizer: Any, gradient: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Step a copy of the optimizer, state included, that owns copies of the parameters."""

    def copy_with_gradient() -> tuple[Any, dict[str, nn.Parameter]]:
        twin, copies = copy_optimizer(objective, optimizer)
        for name, parameter in copies.items():
            parameter.grad = gradient[name].clone() if name in gradient else None
        return twin, copies

    def closure() -> Tensor:  # by which optimizers like LBFGS evaluate loss and gradient again
        loss, slope = objective.at({name: copies[name].detach() for name in objective.names}).loss_and_gradient()
        for name, value in slope.items():
            copies[name].grad = value
        return loss

    # the class's step, not the instance's: a learning rate scheduler replaces the latter by one bound to the original
    twin, copies = copy_with_gradient()
    try:
        type(optimizer).step(twin)
    except TypeError:
        twin, copies = copy_with_gradient()
        type(optimizer).step(twin, closure)
    return {name: copies[name].detach() for name in objective.names}
