"""The register of rules: what a module or function does to distances. What has no rule is refused by name."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError, ModelError
from normgauge.measure.lipschitz.folded import Norms, Pending
from normgauge.measure.lipschitz.reach import Reach, three_gains

Outcome = Any  # a Reach, a Pending, a tuple of them, or the tensor of a step that does not depend on the input


@dataclass(frozen=True)
class Call:
    """One step of a network, as a rule sees it.

    Attributes:
        name: of the layer, for messages and tables.
        kind: type of the module or name of the function.
        module: the module called; `None` for functions and methods.
        args: arguments; tensors that depend on the input come as `Reach`, all others as they are (those of modules:
            what the module reads and is not its own).
        kwargs: the same by name.
        value: the output at the data.
        norms: norms of linear maps found so far.
        function: torch's operation, or the user's function.
        where: the line of the model.
    """

    name: str
    kind: str
    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    value: Any
    norms: Norms = field(repr=False)
    function: Any = None
    where: str = ""

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
            raise self.refuse(
                f"its input must be [batch, channels] and {axes} axes of space",
                f"shape {tuple(self.input.value.shape)}",
                "Add the missing axis",
            )
        return axes

    def dependent_arguments(self) -> list[Any]:
        """Return all arguments that depend on the network's input, also inside tuples and lists."""
        arguments: list[Any] = []

        def walk(tree: Any) -> None:
            if isinstance(tree, (Reach, Pending)):
                arguments.append(tree)
            elif isinstance(tree, (tuple, list)):
                for item in tree:
                    walk(item)

        walk((*self.args, *self.kwargs.values()))
        return arguments

    def refuse(self, rule: str, got: str, next_step: str = "") -> ModelError:
        """Return the error for a step that a rule cannot bound."""
        step = next_step or "Rewrite the step, or register a rule with ng.register_lipschitz_rule"
        return ModelError(f"lipschitz of {self.name!r}", rule, f"{got}{self.where}", step)


@dataclass(frozen=True)
class Rule:
    """How one kind of step is bounded.

    Attributes:
        bound: `Call -> Reach` (or a tuple of them).
        folds: it takes linear maps whose norm has not been taken yet.
        normalizer: it counts as a normalizer in tables.
        shown: it has a line in tables; steps that only move entries have none.
        several: it looks at more than one argument that depends on the input; others are given the first one only.
    """

    bound: Callable[[Call], Outcome]
    folds: bool = False
    normalizer: bool = False
    shown: bool = True
    several: bool = False


_MODULES: dict[type, Rule] = {}
_FUNCTIONS: dict[str, Rule] = {}
_CALLABLES: dict[Callable[..., Any], Rule] = {}


def rule_for(*targets: type | str, **flags: bool) -> Callable[[Callable[[Call], Outcome]], Callable[[Call], Outcome]]:
    """Register the built-in rule of module types and of torch functions and methods, these by name."""

    def keep(bound: Callable[[Call], Outcome]) -> Callable[[Call], Outcome]:
        for target in targets:
            if isinstance(target, str):
                _FUNCTIONS[target] = Rule(bound, **flags)
            else:
                _MODULES[target] = Rule(bound, **flags)
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


def rule_of_function(function: Callable[..., Any], name: str) -> Rule | None:
    """Return the rule of a user's function, or of torch's operation of that name."""
    return _CALLABLES.get(function) or _FUNCTIONS.get(name.strip("_"))


def wrapped_functions() -> tuple[Callable[..., Any], ...]:
    """Return the user's functions that have a rule: tracing must not look inside them."""
    return tuple(_CALLABLES)


def register_lipschitz_rule(
    target: type[nn.Module] | Callable[..., Any], rule: Callable[[Call], Any], *, normalizer: bool = False
) -> None:
    """Tell `lipschitz` what a module type or function of yours does to distances.

    The rule gets the step as a `Call`: `.module`, `.args` and `.kwargs` (constants), `.input.value` (its input at the
    datum, a batch of one, float64), `.input.spread` (how far that input may move while the network's input stays in
    the ball, `[1]`; 0 without a radius). It returns a Lipschitz constant in the Euclidean norm per sample, or three:
    at the datum, on the ball around it, everywhere; each a number or a tensor `[1]`, the last one number.

    Args:
        target: a subclass of `torch.nn.Module` (subclasses of it count as long as they keep its `forward`), or a
            plain function that the model's `forward` calls by a global name.
        rule: `rule(call) -> constant or (at_data, on_ball, everywhere)`.
        normalizer: whether tables count it as a normalizer.

    Raises:
        InputError: when the target has a rule already or is no module type and no function.

    Examples:
        >>> class Double(torch.nn.Module):
        ...     def forward(self, x):
        ...         return 2 * x
        >>> register_lipschitz_rule(Double, lambda call: 2.0)
        >>> from normgauge.measure.lipschitz.lipschitz import lipschitz
        >>> round(lipschitz(Double(), torch.ones(1, 3)).upper, 6)
        2.0
    """
    is_module = isinstance(target, type) and issubclass(target, nn.Module)
    if (not is_module and (isinstance(target, type) or not callable(target))) or not callable(rule):
        raise InputError(
            "register_lipschitz_rule",
            "a rule is a function, registered for a module type or a function",
            f"{target!r} and {rule!r}",
            "Pass the class, not an instance",
        )
    if target in _MODULES or target in _CALLABLES:
        raise InputError(
            "register_lipschitz_rule", "one rule per target", f"{target!r}, which has one", "Subclass it, or wrap it"
        )
    checked_rule = Rule(lambda call: _bound_by_user(call, rule), normalizer=normalizer)
    if is_module:
        _MODULES[target] = checked_rule  # type: ignore[index]
    else:
        _CALLABLES[target] = checked_rule


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
        raise call.refuse(
            "constants are not negative", repr(answer), "Return Lipschitz constants, inf where there is none"
        )
    return reaches[0].pass_through(three_gains(tensors[0], tensors[1], tensors[2]), call.value)
