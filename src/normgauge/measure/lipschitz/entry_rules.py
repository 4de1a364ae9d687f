"""Rules of steps on entries: functions of each, sums and products; views, slices, joins, means, pooling and padding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normgauge.measure.lipschitz import rules
from normgauge.measure.lipschitz.layer_rules import bound_written_norm
from normgauge.measure.lipschitz.rules import Call, Form, Outcome, Pending, Reach, rule_for
from normgauge.theory import lipschitz_constants as constants

_JUMP = 1e-9  # relative: what counts as rounding
_SLOPES: dict[str, tuple[float, float, float]] = {  # largest slope, largest size, size at zero
    **dict.fromkeys(("relu", "tanhshrink", "softshrink", "abs", "neg"), (1.0, math.inf, 0.0)),
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), (1.0, math.inf, 0.7)),
    **dict.fromkeys(("tanh", "softsign", "sin"), (1.0, 1.0, 0.0)),
    **dict.fromkeys(("atan", "arctan"), (1.0, 1.5708, 0.0)),
    "cos": (1.0, 1.0, 1.0),
    "relu6": (1.0, 6.0, 0.0),
    "gelu": (constants.GELU_TANH, math.inf, 0.0),  # the larger of the exact and the tanh form
    "silu": (constants.SILU, math.inf, 0.0),
    "mish": (constants.MISH, math.inf, 0.0),
    "selu": (constants.SELU, math.inf, 0.0),
    "hardswish": (constants.HARD_SWISH, math.inf, 0.0),
    "hardsigmoid": (constants.HARD_SIGMOID, 1.0, 0.5),
    "sigmoid": (constants.SIGMOID, 1.0, 0.5),
    "erf": (constants.ERF, 1.0, 0.0),
}
_POSITIVE = ("relu", "relu6", "abs", "sigmoid", "hardsigmoid")
_TYPES = (nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.SELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid)
_TYPES += (nn.LogSigmoid, nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Softshrink)  # type: ignore[assignment]
# slope of a function on all x >= m > 0, as a function of m; it falls
_FALLING: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda m: 0.5 / m.sqrt(),
    "rsqrt": lambda m: 0.5 / m.pow(1.5),
    "reciprocal": lambda m: 1 / m.square(),
    "log": lambda m: 1 / m,
    "log1p": lambda m: 1 / (1 + m),
}
_MADE = {("power", "sqrt"): "root", ("power", "rsqrt"): "inverse", ("root", "reciprocal"): "inverse"}  # parts of norms
DROPOUTS = ("dropout", "feature_dropout", "alpha_dropout")
COPIES = ("contiguous", "clone", "to", "to_copy", "type_as", "alias", "positive")
MOVES = (
    *("view", "view_as", "unsafe_view", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle", "permute", "transpose", "swapaxes", "swapdims"),
    *("movedim", "moveaxis", "t", "numpy_T", "mT", "flip", "roll", "chunk", "split", "split_with_sizes", "unbind"),
    *("tensor_split", "select", "narrow", "slice", "index", "index_select", "gather", "diagonal"),
    *("expand", "expand_as", "repeat", "tile", "broadcast_to", "repeat_interleave", "unfold", "im2col"),
    *("reflection_pad1d", "reflection_pad2d", "replication_pad1d", "replication_pad2d"),
)
_MOVERS = (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)


def _activation(call: Call, slope: float, limit: float, zero: float) -> Reach:
    before: Reach = call.input
    peak = min(slope * before.peak + zero, limit)
    rows = slope * before.rows + zero * math.sqrt(rules.width(call.value))
    outcome = before.pass_through(rules.one_gain(slope, peak, rows), call.value)
    return replace(outcome, low=0.0) if call.kind.lower() in _POSITIVE else outcome


@rule_for(*_SLOPES, *_TYPES)
def _activation_of_table(call: Call) -> Reach:
    kinds = [base.__name__.lower() for base in type(call.module).__mro__ if base in _TYPES]
    return _activation(call, *_SLOPES[kinds[0] if kinds else call.kind])


@rule_for(nn.LeakyReLU, nn.PReLU, "leaky_relu", "prelu")
def _leaky(call: Call) -> Reach:
    slope = call.option(1, "weight" if call.kind.lower() == "prelu" else "negative_slope", 0.01)
    return _activation(call, max(1.0, _size(slope)), math.inf, 0.0)


@rule_for(nn.ELU, "elu")
def _elu(call: Call) -> Reach:
    scale, inner = (call.argument(i, "", 1.0) for i in (2, 3))  # torch's operation has two more factors
    return _activation(call, abs(scale) * max(1.0, abs(call.option(1, "alpha", 1.0) * inner)), math.inf, 0.0)


@rule_for(nn.CELU, "celu")
def _celu(call: Call) -> Reach:
    alpha = call.option(1, "alpha", 1.0)
    if not alpha > 0:  # exp(x / alpha) has no largest slope
        raise call.refuse("celu has a rule for positive alpha", f"alpha {alpha}")
    return _activation(call, 1.0, math.inf, 0.0)


@rule_for(nn.Softplus, "softplus")
def _softplus(call: Call) -> Reach:
    """Slope 1, if the jump to the identity at `beta x = threshold` is rounding: torch's softplus is not continuous."""
    beta, threshold = call.option(1, "beta", 1.0), call.option(2, "threshold", 20.0)
    if not (beta and threshold > 0 and math.log1p(math.exp(-threshold)) <= _JUMP * threshold):
        rule = "softplus jumps where it becomes the identity, so it has no Lipschitz constant"
        raise call.refuse(rule, f"beta {beta}, threshold {threshold}", "Leave threshold at 20")
    return _activation(call, 1.0, math.inf, math.inf)


@rule_for("clamp", "clamp_min", "clamp_max", "clip", "hardtanh", nn.Hardtanh)
def _clamp(call: Call) -> Reach:
    if call.module is not None or call.kind == "hardtanh":
        low, high = call.option(1, "min_val", -1.0), call.option(2, "max_val", 1.0)
    else:
        low = None if call.kind == "clamp_max" else call.argument(1, "min")
        high = call.argument(1, "max") if call.kind == "clamp_max" else call.argument(2, "max")
    ends = [math.inf if end is None else _size(end) for end in (low, high)]
    outcome = _activation(call, 1.0, max(ends), math.inf)
    floor = -math.inf if low is None else float(torch.as_tensor(low).min())
    form = call.input.form
    if form is not None and form.kind == "root" and high is None and floor > 0:
        form = replace(form, floor=max(form.floor, floor))
    return replace(outcome, low=max(floor, call.input.low), form=form)


rule_for(*_FALLING)(lambda call: _positive_function(call, call.input, call.kind, call.value))


def _positive_function(call: Call, reach: Reach, kind: str, value: Tensor) -> Reach:
    """Bound a function whose slope falls on positive numbers: by the smallest entry that can be met."""
    least, floor = reach.value.amin(), max(reach.low, 0.0)
    if not bool(least > 0) and kind != "log1p":
        raise call.refuse(f"{kind} has a slope on positive numbers only", f"{float(least):g}", "Add an eps before it")
    lows = [least, (least - reach.spread).clamp_min(floor), torch.tensor(floor, dtype=torch.float64)]
    at, ball, everywhere = (_FALLING[kind](low * (1 - 1e-12)) for low in lows)
    outcome = reach.pass_through(rules.three_gains(at, ball, everywhere), value)
    made = _MADE.get((reach.form.kind, kind)) if reach.form is not None else None
    form = replace(reach.form, kind=made) if made and reach.form is not None else None
    return replace(outcome, low=-math.inf if kind == "log" else 0.0, form=form)


@rule_for("exp")
def _exponential(call: Call) -> Reach:
    reach: Reach = call.input
    top = reach.value.amax()
    gain = rules.three_gains(top.exp(), (top + reach.spread).exp(), math.exp(min(reach.peak, 700.0)))
    gain = gain if reach.peak < 700 else replace(gain, everywhere=torch.tensor(math.inf, dtype=torch.float64))
    return replace(reach.pass_through(gain, call.value), low=0.0)


@rule_for("square", "pow")
def _power(call: Call) -> Reach:
    """Bound x^p: 2, 3, 4, ... on all numbers, 1/2, -1/2 and -1 on positive ones."""
    exponent = call.argument(1, "exponent", 2)
    roots = {0.5: "sqrt", -0.5: "rsqrt", -1: "reciprocal"}
    if not isinstance(exponent, Tensor) and exponent in roots:
        return _positive_function(call, call.input, roots[exponent], call.value)
    if isinstance(exponent, Tensor) or not isinstance(call.input, Reach) or exponent not in range(1, 9):
        raise call.refuse("powers have a rule for 1/2, -1/2, -1 and whole numbers up to 8", f"exponent {exponent}")
    before, p = call.input, int(exponent)
    size = before.value.abs().amax()
    slopes = [p * x ** (p - 1) for x in (size, size + before.spread)]
    everywhere = p * before.peak ** (p - 1) if p > 1 else 1.0
    outcome = before.pass_through(rules.three_gains(slopes[0], slopes[1], everywhere, before.peak**p), call.value)
    low = 0.0 if p % 2 == 0 else -math.inf
    return replace(outcome, low=low, form=Form("square", before) if p == 2 else None)


@rule_for("add", "sub", "rsub", several=True)
def _sum(call: Call) -> Reach:
    a, b = _operands(call)
    alpha = abs(call.kwargs.get("alpha", 1.0))
    of_a, of_b = (alpha, 1.0) if call.kind == "rsub" else (1.0, alpha)  # rsub is b - alpha a
    if isinstance(a, Reach) and isinstance(b, Reach):
        mean = b.form if call.kind == "sub" and alpha == 1.0 else None
        if mean is not None and mean.kind == "mean" and mean.base is a:  # a projection
            rows = a.rows if mean.axes == (a.value.ndim - 1,) else math.inf
            outcome = a.pass_through(rules.one_gain(1.0, 2 * a.peak, rows), call.value)
            return replace(outcome, form=Form("centred", a, mean.axes))
        parts = [(x, _repeat_gain(call, x, factor)) for x, factor in ((a, of_a), (b, of_b))]
        peak = _multiply(of_a, a.peak) + _multiply(of_b, b.peak)
        rows = _multiply(of_a, a.rows) + _multiply(of_b, b.rows) if a.value.shape == b.value.shape else math.inf
        return rules.add_reaches(parts, call.value, peak, rows)
    reach, factor, other, weight = (a, of_a, b, of_b) if isinstance(a, Reach) else (b, of_b, a, of_a)
    gain = _repeat_gain(call, reach, factor)
    rows = math.inf
    if reach.value.shape == call.value.shape:
        rows = _multiply(factor, reach.rows) + weight * _length(other, call.value)
    peak = _multiply(factor, reach.peak) + weight * _size(other)
    outcome = reach.pass_through(replace(gain, peak=peak, rows=rows), call.value)
    if call.kind != "add":
        return outcome
    shift = weight * torch.as_tensor(other, dtype=torch.float64)
    outcome = replace(outcome, low=_multiply(factor, reach.low) + float(shift.min()))
    form = reach.form
    if form is not None and factor == 1 and shift.numel() == 1 and float(shift) >= 0:
        if form.kind == "power":
            return replace(outcome, form=replace(form, eps=form.eps + float(shift)))
        if form.kind == "root" and not form.floor:
            return replace(outcome, form=replace(form, outside=form.outside + float(shift)))
    return outcome


def _is_same(a: Reach, b: Reach) -> bool:
    """Tell whether two tensors are one, or are centred in the same way from one."""
    if a is b or a.form is None or b.form is None:
        return a is b
    return a.form.kind == b.form.kind == "centred" and a.form.base is b.form.base and a.form.axes == b.form.axes


@rule_for("mul", "multiply", folds=True, several=True)
def _times(call: Call) -> Reach | Pending:
    a, b = _operands(call)
    first, second = isinstance(a, (Reach, Pending)), isinstance(b, (Reach, Pending))
    if first and second:
        a, b = rules.certify(a), rules.certify(b)
        for x, other in ((a, b), (b, a)):
            if other.form is not None and other.form.kind == "inverse" and _is_same(other.form.base, x):
                return bound_written_norm(call, x, other.form)
        outcome = _product(call, a, b)
        return replace(outcome, low=0.0, form=Form("square", a)) if a is b else outcome
    operand, other = (a, b) if first else (b, a)
    if isinstance(operand, Pending):
        factors, axis = _factors(operand.value, other) or (None, 0)
        if factors is not None and call.value.shape == operand.value.shape:
            folded = operand.folded.then_factors(call.name, factors, 0 * factors, axis)
            if folded is not None:
                return Pending(call.value, folded)
    return _scale(call, rules.certify(operand), torch.as_tensor(other, dtype=torch.float64))


@rule_for("div", "divide", several=True)
def _quotient(call: Call) -> Reach:
    a, b = _operands(call)
    if call.kwargs.get("rounding_mode") is not None:
        raise call.refuse("division has a rule without rounding", f"{call.kwargs['rounding_mode']}")
    if isinstance(b, Reach):
        if isinstance(a, Reach) and b.form is not None and b.form.kind == "root" and _is_same(b.form.base, a):
            return bound_written_norm(call, a, b.form)
        inverse = _positive_function(call, b, "reciprocal", b.value.reciprocal())
        return _product(call, a, inverse) if isinstance(a, Reach) else _scale(call, inverse, torch.as_tensor(a))
    divisor = torch.as_tensor(b, dtype=torch.float64)
    if bool((divisor == 0).any()):
        raise call.refuse("division needs a divisor other than zero", "one that is")
    return _scale(call, a, 1 / divisor)


def _scale(call: Call, reach: Reach, factors: Tensor) -> Reach:
    size = _size(factors)
    gain = _repeat_gain(call, reach, size)
    rows = _multiply(size, reach.rows) if reach.value.shape == call.value.shape else math.inf
    peak = _multiply(size, reach.peak)
    outcome = reach.pass_through(replace(gain, peak=peak, rows=rows), call.value)
    if reach.low >= 0 and bool((factors >= 0).all()):
        outcome = replace(outcome, low=reach.low * float(factors.min()))
    form = reach.form
    if form is not None and form.kind == "power" and factors.numel() == 1 and float(factors) > 0:
        outcome = replace(outcome, form=replace(form, factor=form.factor * size, eps=form.eps * size))
    return outcome


def _product(call: Call, a: Reach, b: Reach) -> Reach:
    """d(a b) = a db + b da, where a tensor that is repeated collects what it is multiplied with over the repeats."""
    shape, parts = call.value.shape, []
    for moving, factor in ((a, b), (b, a)):
        own, others = (((1,) * (len(shape) - x.value.ndim) + tuple(x.value.shape)) for x in (moving, factor))
        axes = [i for i, (n, m) in enumerate(zip(own, shape, strict=True)) if n != m]
        squares = factor.value.expand(shape).square()
        blocks = (squares.sum(axes, keepdim=True) if axes else squares).amax().sqrt()
        repeats = math.sqrt(call.value.numel() / moving.value.numel())
        # where the factor itself is repeated along those axes, its movement is seen as often
        ball = blocks + math.sqrt(math.prod(shape[i] for i in axes if others[i] == 1)) * factor.spread
        parts.append((moving, rules.three_gains(blocks, ball, _multiply(factor.peak, repeats))))
    return rules.add_reaches(parts, call.value, a.peak * b.peak)


def _repeat_gain(call: Call, reach: Reach, factor: float = 1.0) -> Any:
    """Return the gain of repeating a tensor by broadcasting and multiplying by a factor."""
    return rules.one_gain(factor * math.sqrt(call.value.numel() / reach.value.numel()))


def _factors(value: Tensor, other: Any) -> tuple[Tensor, int] | None:
    """Return constants as factors per channel and their axis, if they are such."""
    if not isinstance(other, Tensor) or other.ndim == 0:
        axis = -1 if value.ndim <= 2 else 1
        return torch.full((value.shape[axis],), float(other), dtype=torch.float64), axis
    full = (1,) * (value.ndim - other.ndim) + tuple(other.shape)
    wide = [i for i, n in enumerate(full) if n != 1]
    if len(full) != value.ndim or len(wide) != 1 or other.numel() != value.shape[wide[0]] or wide[0] == 0:
        return None
    return other.reshape(-1).double(), -1 if wide[0] == value.ndim - 1 else wide[0]


def _operands(call: Call) -> tuple[Any, Any]:
    return call.argument(0, "input"), call.argument(1, "other")


def _multiply(factor: float, limit: float) -> float:
    """Return a bound times a factor, where zero wins against no bound."""
    return factor * limit if factor else 0.0


def _size(constant: Any) -> float:
    return float(constant.double().abs().max()) if isinstance(constant, Tensor) else float(abs(constant))


def _length(constant: Any, value: Tensor) -> float:
    """Return the length of the longest row of a constant that is added to `value`."""
    if isinstance(constant, Tensor) and constant.ndim and constant.shape[-1] == rules.width(value):
        return float(constant.double().norm(dim=-1).max())
    return _size(constant) * math.sqrt(rules.width(value))


@rule_for(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, *DROPOUTS, folds=True, shown=False)
def _dropout(call: Call) -> Outcome:
    if call.option(2, "training", True) and call.option(1, "p", 0.5) > 0:
        step = "Call model.eval() first, and pass training=self.training to functions"
        raise call.refuse("dropout must be in evaluation mode", "training mode", step)
    return _copy(call)


@rule_for(nn.Identity, *COPIES, folds=True, shown=False, several=True)
def _copy(call: Call) -> Outcome:
    """Return the same object where it can be: a norm written by hand is known by what its parts have in common."""
    operand = call.input
    if isinstance(operand, (Tensor, Reach)):  # a constant takes the type of something that depends on the input
        return operand
    return Pending(call.value, operand.folded)


@rule_for("getitem", shown=False, folds=True, several=True)
def _item(call: Call) -> Any:
    part = call.input[call.args[1]]
    if part is None:
        raise call.refuse("steps must stay among real numbers of 32 or 64 bits", "indices")
    return part


@rule_for(*_MOVERS, *MOVES, shown=False, several=True)
def _move(call: Call) -> Outcome:
    """Ask torch where the entries go, by moving their numbers: one that is taken k times counts sqrt(k)."""
    reach = call.input
    if isinstance(reach, Tensor):  # a constant takes the shape of something that depends on the input
        return reach
    parts = call.value if isinstance(call.value, (tuple, list)) else (call.value,)
    if parts[0].dtype != reach.value.dtype:
        raise call.refuse("a view must not read the bits as another type", str(parts[0].dtype), "Use .to()")
    numbers = torch.arange(reach.value.numel(), dtype=torch.float64).reshape(reach.value.shape)
    rest = [getattr(argument, "value", argument) for argument in call.args[1:]]
    named = {name: getattr(argument, "value", argument) for name, argument in call.kwargs.items()}
    moved = call.module(numbers) if call.module is not None else call.function(numbers, *rest, **named)
    moved = moved if isinstance(moved, (tuple, list)) else (moved,)
    outcomes = tuple(_taken(reach, place.long(), part) for place, part in zip(moved, parts, strict=True))
    if call.kind.startswith("expand") and reach.form is not None:
        outcomes = (replace(outcomes[0], form=reach.form),)
    return outcomes if isinstance(call.value, (tuple, list)) else outcomes[0]


def _taken(reach: Reach, places: Tensor, value: Tensor) -> Reach:
    if not places.numel():
        return reach.move_entries(value)
    times = int(places.flatten().bincount().max())
    by_row = places.reshape(-1, rules.width(places)).sort(-1).values
    one_row = bool((by_row // rules.width(reach.value) == by_row[:, :1] // rules.width(reach.value)).all())
    apart = times == 1 or bool((by_row[:, 1:] != by_row[:, :-1]).all())
    rows = reach.rows if one_row and apart else math.inf
    if times == 1:
        return reach.move_entries(value, rows)
    return replace(reach.pass_through(rules.one_gain(math.sqrt(times), reach.peak, rows), value), low=reach.low)


@rule_for("cat", "concat", "concatenate", "stack", "hstack", several=True)
def _concatenate(call: Call) -> Reach:
    parts = call.input
    axis = call.argument(1, "dim", 1 if call.kind == "hstack" else 0)
    reaches = [part for part in parts if isinstance(part, Reach)]
    fixed = max((float(part.abs().max()) for part in parts if isinstance(part, Tensor) and part.numel()), default=0.0)
    peak = max(fixed, *(part.peak for part in reaches))
    rows = math.inf
    if len(reaches) == len(parts):
        last = axis % call.value.ndim == call.value.ndim - 1
        rows = math.sqrt(sum(part.rows**2 for part in reaches)) if last else max(part.rows for part in reaches)
    return rules.join_reaches(reaches, call.value, peak, rows)


@rule_for("where", "masked_fill", several=True)
def _choose(call: Call) -> Outcome:
    """Take entries of one or of the other, by a mask that does not depend on the input."""
    a, b = (call.args[1], call.args[2]) if call.kind == "where" else (call.args[0], call.args[2])
    mask = call.args[0] if call.kind == "where" else call.args[1]
    parts = [part for part in (a, b) if isinstance(part, Reach)]
    if not isinstance(mask, Tensor) or any(part.value.shape != call.value.shape for part in parts):
        raise call.refuse("a mask must not depend on the input, and entries must not be repeated", "another case")
    sizes = [part.peak if isinstance(part, Reach) else float(torch.as_tensor(part).abs().max()) for part in (a, b)]
    return rules.join_reaches(parts, call.value, max(sizes), math.inf)


@rule_for("mean", "sum", "amax", "amin", "linalg_vector_norm", "logsumexp", "max", "min")
def _reduce(call: Call) -> Any:
    reach: Reach = call.input
    place = 2 if call.kind == "linalg_vector_norm" else 1
    dim = call.argument(place, "dim", call.kwargs.get("axis"))
    if isinstance(dim, Tensor):  # the larger, or smaller, of two
        raise call.refuse(f"{call.kind} has a rule for one tensor", "two", "Use torch.where, or clamp")
    axes = [dim] if isinstance(dim, int) else list(dim or range(reach.value.ndim))
    if call.kind == "linalg_vector_norm" and call.argument(1, "ord", 2) not in (2, 2.0):
        raise call.refuse("norm has a rule for p = 2 only", f"p = {call.argument(1, 'ord')}")
    count = math.prod(reach.value.shape[axis] for axis in axes) if reach.value.ndim else 1
    factor = {"mean": 1 / math.sqrt(count), "sum": math.sqrt(count)}.get(call.kind, 1.0)
    sums = {"sum": count * reach.peak, "linalg_vector_norm": math.sqrt(count) * reach.peak}
    peak = sums.get(call.kind, reach.peak) + (math.log(count) if call.kind == "logsumexp" else 0.0)
    several = isinstance(call.value, (tuple, list))  # max and min give indices too
    low = 0.0 if call.kind == "linalg_vector_norm" or (reach.low >= 0 and call.kind != "logsumexp") else -math.inf
    low = reach.low if call.kind in ("mean", "amax", "amin") else low
    outcome = reach.pass_through(rules.one_gain(factor, peak), call.value[0] if several else call.value)
    outcome = replace(outcome, low=low, form=_reduced_form(call, reach, tuple(axes), count))
    return (outcome, None) if several else outcome


def _reduced_form(call: Call, reach: Reach, axes: tuple[int, ...], count: int) -> Form | None:
    if isinstance(call.value, (tuple, list)) or call.value.ndim != reach.value.ndim:
        return None
    axes = tuple(sorted(axis % reach.value.ndim for axis in axes))
    if call.kind == "linalg_vector_norm":
        return Form("root", reach, axes, float(count))
    if call.kind == "mean" and reach.form is not None and reach.form.kind == "square":
        return Form("power", reach.form.base, axes)
    return Form("mean", reach, axes) if call.kind == "mean" else None


@rule_for(nn.Softmax, nn.LogSoftmax, "softmax", "log_softmax")
def _softmax(call: Call) -> Reach:
    axis = call.option(1, "dim")
    if axis is None:
        raise call.refuse("softmax must name its axis", f"dim {axis}", "Give dim=-1")
    if call.kind.lower().startswith("log"):
        return call.input.pass_through(
            rules.one_gain(constants.log_softmax_constant(call.value.shape[axis])), call.value
        )
    last = axis % call.value.ndim == call.value.ndim - 1
    gain = rules.one_gain(constants.SOFTMAX, 1.0, 1.0 if last else math.inf)
    return replace(call.input.pass_through(gain, call.value), low=0.0)


@rule_for(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, "max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(call: Call) -> Reach:
    axes, kernel = call.check_space(), call.option(1, "kernel_size")
    settings = (kernel, call.option(2, "stride") or kernel, call.option(4, "dilation", 1))
    sizes = zip(*(_per_axis(setting, axes) for setting in settings), strict=True)
    factor = math.prod(constants.max_pool_constant(k, s, d) for k, s, d in sizes)
    return call.input.pass_through(rules.one_gain(factor, call.input.peak), call.value)


@rule_for(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, "avg_pool1d", "avg_pool2d", "avg_pool3d")
def _average_pool(call: Call) -> Reach:
    if (divisor := call.option(6, "divisor_override")) is not None:
        raise call.refuse("average pooling has a rule without divisor_override only", f"{divisor}")
    axes, kernel = call.check_space(), call.option(1, "kernel_size")
    settings = (kernel, call.option(2, "stride") or kernel, call.option(3, "padding", 0))
    per_axis = list(zip(*(_per_axis(setting, axes) for setting in settings), strict=True))
    ends = call.option(4, "ceil_mode", False), call.option(5, "count_include_pad", True)
    return _separable(call, lambda axis, eye: functional.avg_pool1d(eye, *per_axis[axis], *ends))  # type: ignore[call-arg]


@rule_for(
    *(nn.AdaptiveAvgPool1d, nn.AdaptiveAvgPool2d, nn.AdaptiveAvgPool3d),
    *("adaptive_avg_pool1d", "adaptive_avg_pool2d", "adaptive_avg_pool3d"),
)
def _adaptive_average(call: Call) -> Reach:
    sizes = call.value.shape[2 : 2 + call.check_space()]
    return _separable(call, lambda axis, eye: functional.adaptive_avg_pool1d(eye, sizes[axis]))


@rule_for(nn.AdaptiveMaxPool1d, nn.AdaptiveMaxPool2d, nn.AdaptiveMaxPool3d)
def _adaptive_maximum(call: Call) -> Reach:
    call.check_space()
    factor = 1.0
    for n, m in zip(call.input.value.shape[2:], call.value.shape[2:], strict=True):
        starts, ends = ([-(-i * n // m) if up else i * n // m for i in range(up, m + up)] for up in (0, 1))
        factor *= math.sqrt(max(sum(a <= place < b for a, b in zip(starts, ends, strict=True)) for place in range(n)))
    return call.input.pass_through(rules.one_gain(factor, call.input.peak), call.value)


@rule_for(
    *(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d, "upsample_nearest1d", "upsample_nearest2d"),
    *("upsample_nearest3d", "upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
)
def _upsample(call: Call) -> Reach:
    run, sizes = call.module or (lambda x: call.function(x, *call.args[1:], **call.kwargs)), call.value.shape[2:]
    mode = getattr(call.module, "mode", "nearest")
    if mode not in ("nearest", "linear", "bilinear", "trilinear", "nearest-exact"):
        raise call.refuse("upsampling has a rule for nearest and linear modes", f"mode {mode!r}")

    def along(axis: int, eye: Tensor) -> Tensor:
        """Ask the layer itself, on inputs constant along the other axes: torch rounds places in ways of its own."""
        wide = eye.movedim(-1, 1).reshape(len(eye), 1, *(len(eye) if i == axis else 1 for i in range(len(sizes))))
        out = run(wide.expand(-1, -1, *call.input.value.shape[2:]))
        return out[(slice(None), slice(None), *(slice(None) if i == axis else 0 for i in range(len(sizes))))]

    return _separable(call, along)


@rule_for(
    *(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d),
    *("pad", "constant_pad_nd"),
)
def _pad(call: Call) -> Outcome:
    if call.kind == "pad" and call.argument(2, "mode", "constant") != "constant":
        return _move(call)
    value = call.option(2 if call.kind == "constant_pad_nd" else 3, "value", 0.0) or 0.0
    return call.input.pass_through(rules.one_gain(1.0, max(call.input.peak, abs(value))), call.value)


def _separable(call: Call, along: Callable[[int, Tensor], Tensor]) -> Reach:
    """Return the exact norm of a map that acts on each spatial axis by its own matrix."""
    reach: Reach = call.input
    factor, largest = 1.0, 1.0
    for axis, size in enumerate(reach.value.shape[2:]):
        matrix = along(axis, torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1)
        factor *= float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-11)
        largest *= float(matrix.abs().sum(0).max())
    return reach.pass_through(replace(rules.one_gain(factor), peak=largest * reach.peak), call.value)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * axes if len(values) == 1 else values
