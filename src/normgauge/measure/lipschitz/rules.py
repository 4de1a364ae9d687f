"""The register of rules: what a module or function does to distances. What has no rule is refused by name."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError, ModelError
from normgauge.measure.lipschitz.reach import Norms, Pending, Reach, three_gains

Outcome = Any  # a Reach, a Pending, a tuple of them, or the tensor of a step that does not depend on the input


@dataclass(frozen=True)
class Call:
    """One step of a network, as a rule sees it."""

    name: str  # of the layer, for messages and tables
    kind: str  # type of the module or name of the function
    module: Any  # the module called; `None` for functions and methods
    #: tensors that depend on the input come as `Reach`, all others as they are; of modules what they read that is not
    #: their own
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]  # the same by name
    value: Any  # the output at the data
    norms: Norms = field(repr=False)  # norms of linear maps found so far
    function: Any = None  # torch's operation
    where: str = ""  # the line of the model

    def argument(self, place: int, name: str, default: Any = None) -> Any:
        """Return an argument given by place or by name."""
        return self.args[place] if len(self.args) > place else self.kwargs.get(name, default)

    def option(self, place: int, name: str, default: Any = None) -> Any:
        """Return a setting of the module, or the argument of the function."""
        return self.argument(place, name, default) if self.module is None else getattr(self.module, name, default)

    @property
    def input(self) -> Any:
        """The first argument."""
        return self.args[0] if self.args else next(iter(self.kwargs.values()))

    def check_space(self) -> int:
        """Return the number of axes of space that torch's class or function names, as in MaxPool2d."""
        names = [self.kind] if self.module is None else [base.__name__ for base in type(self.module).__mro__]
        axes = next(int(name[-2]) for name in names if name[-2:] in ("1d", "2d", "3d"))
        if self.input.value.ndim != axes + 2:
            rule = f"its input must be [batch, channels] and {axes} axes of space"
            raise self.refuse(rule, f"shape {tuple(self.input.value.shape)}", "Add the missing axis")
        return axes

    def dependent_arguments(self) -> list[Any]:
        """Return all arguments that depend on the network's input, also inside of a tuple or list."""
        given = [*self.args, *self.kwargs.values()]
        leaves = [leaf for part in given for leaf in (part if isinstance(part, (tuple, list)) else (part,))]
        return [leaf for leaf in leaves if isinstance(leaf, (Reach, Pending))]

    def refuse(self, rule: str, got: str, next_step: str = "") -> ModelError:
        """Return the error for a step that a rule cannot bound."""
        step = next_step or "Rewrite the step, or register a rule with ng.register_lipschitz_rule"
        return ModelError(f"lipschitz of {self.name!r}", rule, f"{got}{self.where}", step)


@dataclass(frozen=True)
class Rule:
    """How one kind of step is bounded."""

    bound: Callable[[Call], Outcome]  # `Call -> Reach` (or a tuple of them)
    folds: bool = False  # it takes linear maps whose norm has not been taken yet
    normalizer: bool = False  # it counts as a normalizer in tables
    shown: bool = True  # it has a line in tables; steps that only move entries have none
    several: bool = False  # it looks at more than one argument that depends on the input, not at the first alone


_MODULES: dict[type, Rule] = {}
_FUNCTIONS: dict[str, Rule] = {}


def rule_for(*targets: type | str, **flags: bool) -> Callable[[Callable[[Call], Outcome]], Callable[[Call], Outcome]]:
    """Register the built-in rule of module types and of torch functions and methods, these by name."""

    def keep(bound: Callable[[Call], Outcome]) -> Callable[[Call], Outcome]:
        for target in targets:
            (_FUNCTIONS if isinstance(target, str) else _MODULES)[target] = Rule(bound, **flags)  # type: ignore[index]
        return bound

    return keep


def rule_of_module(module: nn.Module) -> Rule | None:
    """Return the rule of a module: of its type, or of a base type whose forward it has not changed."""
    type_ = parametrize.type_before_parametrizations(module)
    if "forward" in vars(module):  # replaced on this one object: its class says nothing about it
        return None
    for base in type_.__mro__:
        rule = _MODULES.get(base)
        if rule is not None:
            same = all(getattr(type_, name, None) is getattr(base, name, None) for name in ("forward", "_conv_forward"))
            return rule if same else None
    return None


def rule_of_function(name: str) -> Rule | None:
    """Return the rule of torch's operation of that name."""
    return _FUNCTIONS.get(name.strip("_"))


def register_lipschitz_rule(target: type[nn.Module], rule: Callable[[Call], Any], *, normalizer: bool = False) -> None:
    """Tell `lipschitz` what a module type of yours does to distances.

    The rule gets the step as a `Call`: `.module`, `.args` and `.kwargs` (constants), `.input.value` (its input at the
    datum, a batch of one, float64), `.input.spread` (how far that input may move while the network's input stays in
    the ball, `[1]`; 0 without a radius). It returns a Lipschitz constant in the Euclidean norm per sample, or three:
    at the datum, on the ball around it, everywhere; each a number or a tensor `[1]`, the last one number.

    Args:
        target: a subclass of `torch.nn.Module`; subclasses of it count as long as they keep its `forward`.
        rule: `rule(call) -> constant or (at_data, on_ball, everywhere)`.
        normalizer: whether tables count it as a normalizer.

    Examples:
        >>> class Double(torch.nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
        >>> register_lipschitz_rule(Double, lambda call: 2.0)
        >>> from normgauge.measure.lipschitz.lipschitz import lipschitz
        >>> round(lipschitz(Double(), torch.ones(1, 3)).upper, 6)
        2.0
    """
    name, is_module = "register_lipschitz_rule", isinstance(target, type) and issubclass(target, nn.Module)
    if not is_module or not callable(rule):
        got = f"{target!r} and {rule!r}"
        raise InputError(name, "a rule is a function, registered for a module type", got, "Pass the class of a module")
    if target in _MODULES:
        raise InputError(name, "one rule per target", f"{target!r}, which has one", "Subclass it, or wrap it")
    _MODULES[target] = Rule(lambda call: _bound_by_user(call, rule), normalizer=normalizer)


def _bound_by_user(call: Call, rule: Callable[[Call], Any]) -> Reach:
    reaches = call.dependent_arguments()
    if len(reaches) != 1 or not isinstance(call.value, Tensor):
        raise call.refuse("a registered rule is for steps with one input and one output", f"{len(reaches)} inputs")
    answer = rule(call)
    constants = list(answer) if isinstance(answer, Sequence) else [answer] * 3
    if len(constants) != 3:
        raise call.refuse("a rule returns one constant or three", repr(answer), "Return (at_data, on_ball, everywhere)")
    tensors = [torch.as_tensor(value, dtype=torch.float64) for value in constants]
    if any(bool((t < 0).any()) or bool(t.isnan().any()) for t in tensors) or tensors[2].ndim:
        raise call.refuse("constants are not negative", repr(answer), "Return Lipschitz constants, inf for none")
    return reaches[0].pass_through(three_gains(tensors[0], tensors[1], tensors[2]), call.value)
