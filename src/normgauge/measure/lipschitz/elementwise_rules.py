"""Rules of steps that act entry by entry, and of sums and products of tensors."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.measure.lipschitz.normalizer_rules import bound_written_norm
from normgauge.measure.lipschitz.reach import Form, Pending, Reach, add_reaches, certify, one_gain, three_gains, width
from normgauge.measure.lipschitz.rules import Call, rule_for
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


def _activation(call: Call, slope: float, limit: float, zero: float) -> Reach:
    before: Reach = call.input
    peak = min(slope * before.peak + zero, limit)
    rows = slope * before.rows + zero * math.sqrt(width(call.value))
    outcome = before.pass_through(one_gain(slope, peak, rows), call.value)
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


# slope of a function on all x >= m > 0, as a function of m; it falls
_FALLING: dict[str, Callable[[Tensor], Tensor]] = {
    "sqrt": lambda m: 0.5 / m.sqrt(),
    "rsqrt": lambda m: 0.5 / m.pow(1.5),
    "reciprocal": lambda m: 1 / m.square(),
    "log": lambda m: 1 / m,
    "log1p": lambda m: 1 / (1 + m),
}
_MADE = {("power", "sqrt"): "root", ("power", "rsqrt"): "inverse", ("root", "reciprocal"): "inverse"}  # parts of norms


rule_for(*_FALLING)(lambda call: _positive_function(call, call.input, call.kind, call.value))


def _positive_function(call: Call, reach: Reach, kind: str, value: Tensor) -> Reach:
    """Bound a function whose slope falls on positive numbers: by the smallest entry that can be met."""
    least, floor = reach.value.amin(), max(reach.low, 0.0)
    if not bool(least > 0) and kind != "log1p":
        raise call.refuse(f"{kind} has a slope on positive numbers only", f"{float(least):g}", "Add an eps before it")
    lows = [least, (least - reach.spread).clamp_min(floor), torch.tensor(floor, dtype=torch.float64)]
    at, ball, everywhere = (_FALLING[kind](low * (1 - 1e-12)) for low in lows)
    outcome = reach.pass_through(three_gains(at, ball, everywhere), value)
    made = _MADE.get((reach.form.kind, kind)) if reach.form is not None else None
    form = replace(reach.form, kind=made) if made and reach.form is not None else None
    return replace(outcome, low=-math.inf if kind == "log" else 0.0, form=form)


@rule_for("exp")
def _exponential(call: Call) -> Reach:
    reach: Reach = call.input
    top = reach.value.amax()
    gain = three_gains(top.exp(), (top + reach.spread).exp(), math.exp(min(reach.peak, 700.0)))
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
    outcome = before.pass_through(three_gains(slopes[0], slopes[1], everywhere, before.peak**p), call.value)
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
            outcome = a.pass_through(one_gain(1.0, 2 * a.peak, rows), call.value)
            return replace(outcome, form=Form("centred", a, mean.axes))
        parts = [(x, _repeat_gain(call, x, factor)) for x, factor in ((a, of_a), (b, of_b))]
        peak = _multiply(of_a, a.peak) + _multiply(of_b, b.peak)
        rows = _multiply(of_a, a.rows) + _multiply(of_b, b.rows) if a.value.shape == b.value.shape else math.inf
        return add_reaches(parts, call.value, peak, rows)
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
        a, b = certify(a), certify(b)
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
    return _scale(call, certify(operand), torch.as_tensor(other, dtype=torch.float64))


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
        parts.append((moving, three_gains(blocks, ball, _multiply(factor.peak, repeats))))
    return add_reaches(parts, call.value, a.peak * b.peak)


def _repeat_gain(call: Call, reach: Reach, factor: float = 1.0) -> Any:
    """Return the gain of repeating a tensor by broadcasting and multiplying by a factor."""
    return one_gain(factor * math.sqrt(call.value.numel() / reach.value.numel()))


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
    if isinstance(constant, Tensor) and constant.ndim and constant.shape[-1] == width(value):
        return float(constant.double().norm(dim=-1).max())
    return _size(constant) * math.sqrt(width(value))
