"""What a module or function does to distances: the register of rules, and what they make known of each tensor.

A tensor is seen as a function of the input: slopes in three senses, size, movement. Linear layers that follow each
other are kept as one linear map, so that its own norm can be taken. What has no rule is refused by name.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError, ModelError
from normgauge.linalg import Convolution
from normgauge.measure.lipschitz.operator_norm import BracketKind, LinearMap, bracket_of
from normgauge.network import fold_channels

Outcome = Any  # a Reach, a Pending, a tuple of them, or the tensor of a step that does not depend on the input
_ROUNDING = math.log1p(1e-12)  # per step, for the float64 arithmetic of norms and statistics
_SLACK = 1e-11
Norms = dict[tuple[str, ...], tuple[float, float]]


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


@dataclass(frozen=True)
class Gain:
    """By how much one step may stretch its input; logarithms, so that depth cannot overflow."""

    at: Tensor  # at the datum
    ball: Tensor  # on the image of the ball around the datum
    everywhere: Tensor  # on all inputs
    peak: float = math.inf  # what no entry of the output exceeds in size, whatever the input
    rows: float = math.inf  # what no row (last axis) of the output exceeds in length
    reach: float = math.inf  # how far the output can move at all


def three_gains(
    at: float | Tensor, ball: float | Tensor, everywhere: float | Tensor, *limits: float, reach: float = math.inf
) -> Gain:
    """Return the gain of a step from its constants at the data, on the ball and everywhere; `limits`: peak, rows."""
    # what cannot be told (infinity times zero, a value that overflowed) is not bounded
    logs = [
        torch.nan_to_num(torch.as_tensor(value, dtype=torch.float64).log(), math.inf, math.inf, -math.inf)
        for value in (at, ball, everywhere)
    ]
    return Gain(*logs, *limits, reach=reach)  # type: ignore[arg-type, misc]


def one_gain(value: float | Tensor, peak: float = math.inf, rows: float = math.inf) -> Gain:
    """Return the gain of a step with one Lipschitz constant in all three senses."""
    return three_gains(value, value, value, peak, rows)


@dataclass(frozen=True)
class Form:
    """What a tensor is of another one, so that a norm written by hand is known when its parts meet."""

    #: "mean", "centred" (x - mean), "square", "power" (mean square), "root", "inverse" or "written" (base / root)
    kind: str
    base: Reach  # the other tensor
    axes: tuple[int, ...] = ()  # over which the mean is taken
    factor: float = 1.0  # times the mean square
    eps: float = 0.0  # added to it under the root
    outside: float = 0.0  # added to the root
    floor: float = 0.0  # the root is at least this


@dataclass(frozen=True)
class Reach:
    """A tensor of the network at one datum, seen from the input."""

    value: Tensor  # at the datum, float64
    at: Tensor  # log of a bound on the norm of the Jacobian at the datum `[1]`
    ball: Tensor  # log of a Lipschitz constant on the ball around the datum `[1]`
    everywhere: Tensor  # log of a Lipschitz constant on all inputs
    spread: Tensor  # how far the value may move while the input stays in the ball `[1]`; 0 without a ball
    peak: float = math.inf  # bound on the size of an entry over all inputs
    rows: float = math.inf  # bound on the length of a row (last axis) over all inputs
    low: float = -math.inf  # what no entry is below, whatever the input
    form: Form | None = field(default=None, repr=False)  # what it is of another tensor, as a part of a norm

    @classmethod
    def of_inputs(cls, inputs: Tensor, radius: float) -> Reach:
        """Return the input itself: slope 1, moving by the radius."""
        zeros = torch.zeros(1, dtype=torch.float64)
        return cls(inputs, zeros, zeros, torch.zeros((), dtype=torch.float64), torch.full_like(zeros, radius))

    @classmethod
    def of_constant(cls, value: Tensor) -> Reach:
        """Return a tensor that does not move."""
        nothing = torch.full((1,), -math.inf, dtype=torch.float64)
        peak, rows = float(value.abs().max()), float(value.double().norm(dim=-1).max())
        return cls(value.double(), nothing, nothing, nothing[0], torch.zeros_like(nothing), peak=peak, rows=rows)

    def pass_through(self, gain: Gain, value: Tensor) -> Reach:
        """Return the output of a step with a gain."""
        spread = torch.where(self.spread == 0, self.spread, self.spread * gain.ball.exp())
        spread = torch.where(torch.isneginf(gain.ball), torch.zeros_like(spread), spread)
        logs = [_chain(*pair) for pair in zip(self.logs, (gain.at, gain.ball, gain.everywhere), strict=True)]
        rows = min(gain.rows, gain.peak * math.sqrt(width(value)))
        spread = spread.clamp_max(gain.reach) * (1 + 1e-12)
        return Reach(value, logs[0], logs[1], logs[2], spread, peak=min(gain.peak, rows), rows=rows)

    @property
    def logs(self) -> tuple[Tensor, Tensor, Tensor]:
        """The constants in all three senses."""
        return self.at, self.ball, self.everywhere

    def move_entries(self, value: Tensor, rows: float = math.inf) -> Reach:
        """Return the numbers after a step that only moves or drops entries; lengths of rows are lost if not given."""
        return replace(self, value=value, rows=min(rows, self.peak * math.sqrt(width(value))), form=None)

    def drop_value(self) -> Reach:
        """Return the numbers without the tensor."""
        return replace(self, value=self.value.new_empty(0), form=None)


def width(value: Tensor) -> int:
    """Return the number of entries of a row, the last axis."""
    return value.shape[-1] if value.ndim else 1


def _chain(first: Tensor, second: Tensor) -> Tensor:
    """Return the log of a product of constants; a constant of zero wins against an infinite one."""
    total = first + second + _ROUNDING
    nothing = torch.isneginf(first) | torch.isneginf(second)
    return torch.where(nothing, torch.full_like(total, -math.inf), total)


def add_reaches(
    parts: list[tuple[Reach, Gain]], value: Tensor, peak: float = math.inf, rows: float = math.inf
) -> Reach:
    """Return a sum of steps: constants and movements add up."""
    moved = [reach.pass_through(gain, value) for reach, gain in parts]
    (*logs, spread) = (*moved[0].logs, moved[0].spread)
    for other in moved[1:]:
        logs = [torch.logaddexp(*pair) for pair in zip(logs, other.logs, strict=True)]
        spread = spread + other.spread
    rows = min(rows, peak * math.sqrt(width(value)))
    return Reach(value, logs[0], logs[1], logs[2], spread, peak=min(peak, rows), rows=rows)


def join_reaches(parts: list[Reach], value: Tensor, peak: float, rows: float) -> Reach:
    """Return parts laid side by side: squares of constants and of movements add up."""
    logs = [
        torch.stack(side).mul(2).logsumexp(0) / 2 + _ROUNDING for side in zip(*(p.logs for p in parts), strict=True)
    ]
    spread = torch.stack([part.spread for part in parts]).square().sum(0).sqrt() * (1 + 1e-12)
    rows = min(rows, peak * math.sqrt(width(value)))
    return Reach(value, logs[0], logs[1], logs[2], spread, peak=peak, rows=rows)


@dataclass(frozen=True)
class Folded:
    """One linear map from `base` to here: a diagonal per channel, a matrix on the last axis, or a convolution."""

    base: Reach  # the tensor before it
    key: tuple[str, ...]  # the layers it is made of, under which its norm is remembered
    norms: Norms = field(repr=False)  # lower and upper bounds of norms found so far, shared by all maps of one network
    weight: Tensor  # factors per channel, matrix, or kernel, in float64
    offset: Tensor | None = None  # what a matrix adds; `None` for the others
    layer: nn.Module | None = None  # the convolution whose geometry the kernel has; `None` for a diagonal and a matrix
    size: tuple[int, ...] = ()  # spatial size of the convolution's input
    axis: int = 1  # of the channels, for a diagonal

    def norm(self) -> float:
        """Return a certified upper bound of the norm."""
        return self._bracket("certified")[1]

    def likely_norm(self) -> float:
        """Return an estimate of the norm, widened as the bound was where this map went on to be folded; for display."""
        if ("certified", *self.key) in self.norms:
            return self.norm()
        later = [key for key in self.norms if key[0] == "certified" and key[1 : len(self.key) + 1] == self.key]
        low, high = self.norms[later[0]] if later else (1.0, 1.0)
        return self._bracket("estimate")[0] * (high / low if low > 0 else 1.0)

    def _bracket(self, kind: BracketKind) -> tuple[float, float]:
        key = (kind, *self.key)
        if key in self.norms:
            return self.norms[key]
        if self.weight.ndim == 1:
            lower = upper = float(self.weight.abs().max())
        else:
            operator = (
                Convolution(self.weight.unsqueeze(-1), (1,))
                if self.layer is None
                else Convolution.of(self.layer, self.size, self.weight)
            )
            map_ = LinearMap("layer", operator.input_shape, self.weight, operator, torch.float32)
            bracket = bracket_of(map_, kind, steps=None, delta=1e-10)
            lower, upper = bracket.lower, bracket.upper
        self.norms[key] = lower, upper * (1 + _SLACK)
        return self.norms[key]

    def _then(self, name: str, weight: Tensor, offset: Tensor | None = None, **more: Any) -> Folded:
        return replace(self, key=(*self.key, name), weight=weight, offset=offset, **more)

    def then_factors(self, name: str, factors: Tensor, shift: Tensor | None, axis: int) -> Folded | None:
        """Return the map followed by factors per channel; `None` where they act on another axis."""
        own = self.axis if self.weight.ndim == 1 else -1 if self.layer is None else 1
        if axis != own or not _is_in_range(self.weight, factors):
            return None
        if self.weight.ndim == 1:
            return self._then(name, self.weight * factors)
        if self.layer is not None:
            return self._then(name, fold_channels(self.layer, self.weight, factors, after=True))
        offset = None if self.offset is None or shift is None else self.offset * factors + shift
        return self._then(name, self.weight * factors[:, None], offset)

    def then_matrix(self, name: str, matrix: Tensor, offset: Tensor | None) -> Folded | None:
        """Return the map followed by a matrix on the last axis."""
        apart = self.layer is not None or (self.weight.ndim == 1 and self.axis != -1)
        if apart or not _is_in_range(self.weight, matrix):
            return None
        if self.weight.ndim == 1:  # its own offset is not known
            return self._then(name, matrix * self.weight)
        total = None if self.offset is None or offset is None else matrix @ self.offset + offset
        return self._then(name, matrix @ self.weight, total)

    def then_convolution(self, name: str, layer: nn.Module, weight: Tensor, size: tuple[int, ...]) -> Folded | None:
        """Return the map followed by a convolution: factors per input channel enter its kernel."""
        if self.weight.ndim != 1 or self.axis != 1 or not _is_in_range(self.weight, weight):
            return None
        return self._then(name, fold_channels(layer, weight, self.weight, after=False), layer=layer, size=size)


@dataclass(frozen=True)
class Pending:
    """The output of a linear map whose norm is taken only when something not linear follows."""

    value: Tensor  # at the data
    folded: Folded  # the map

    @cached_property
    def certified(self) -> Reach:
        """The reach of the output, by a certified norm."""
        return self._reach(self.folded.norm())

    def estimated_reach(self) -> Reach:
        """Return the reach by the certified norm if it was taken, else by an estimate; for display only."""
        return self._reach(self.folded.likely_norm())

    def _reach(self, norm: float) -> Reach:
        folded, base = self.folded, self.folded.base
        rows = peak = math.inf
        if folded.offset is not None and math.isfinite(base.rows):
            rows = norm * base.rows + float(folded.offset.norm())
            peak = float(folded.weight.norm(dim=1).max()) * base.rows + float(folded.offset.abs().max())
        return base.pass_through(one_gain(norm, peak, rows), self.value)

    def drop_value(self) -> Pending:
        """Return the numbers without the tensor."""
        return Pending(self.value.new_empty(0), self.folded)


def certify(operand: Any) -> Any:
    """Return what is known of a tensor, the norm of a linear map before it taken; anything else as it is."""
    return operand.certified if isinstance(operand, Pending) else operand


def _is_in_range(first: Tensor, second: Tensor) -> bool:
    """Tell whether a product stays where float64 keeps its digits; else norms are taken apart and their logs add up."""
    sizes = float(first.abs().max()), float(second.abs().max())
    return 0.0 in sizes or 1e-140 < sizes[0] * sizes[1] < 1e140
