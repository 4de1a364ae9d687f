"""Rules of steps that act entry by entry, and of sums and products of tensors."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.measure.lipschitz.folded import Pending
from normgauge.measure.lipschitz.reach import Gain, Reach, add_reaches, constant_gain, three_gains, width
from normgauge.measure.lipschitz.rules import Call, rule_for
from normgauge.theory import lipschitz_constants as constants

_JUMP = 1e-9  # relative: what counts as rounding
_SLOPES: dict[str, tuple[float, float, float]] = {  # largest slope, largest size, size at zero
    **dict.fromkeys(("relu", "tanhshrink", "softshrink", "abs", "neg", "positive"), (1.0, math.inf, 0.0)),
    **dict.fromkeys(("logsigmoid", "log_sigmoid"), (1.0, math.inf, 0.7)),
    **dict.fromkeys(("clamp", "clip"), (1.0, math.inf, math.inf)),
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
_TYPES = (
    *(nn.ReLU, nn.ReLU6, nn.GELU, nn.SiLU, nn.Mish, nn.SELU, nn.Hardswish, nn.Hardsigmoid, nn.Sigmoid, nn.LogSigmoid),
    *(nn.Tanh, nn.Tanhshrink, nn.Softsign, nn.Softshrink),
)


def _activation(call: Call, slope: float, limit: float, zero: float) -> Reach:
    before: Reach = call.input
    peak = min(slope * before.peak + zero, limit)
    rows = slope * before.rows + zero * math.sqrt(width(call.value))
    return before.pass_through(constant_gain(slope, peak, rows), call.value)


@rule_for(*_SLOPES, *_TYPES)
def _activation_of_table(call: Call) -> Reach:
    kinds = [base.__name__.lower() for base in type(call.module).__mro__ if base in _TYPES]
    return _activation(call, *_SLOPES[kinds[0] if kinds else call.kind])


@rule_for(nn.Hardtanh)
def _hardtanh(call: Call) -> Reach:
    limit = max(abs(call.module.min_val), abs(call.module.max_val))
    return _activation(call, 1.0, limit, limit)


@rule_for(nn.LeakyReLU, "leaky_relu")
def _leaky(call: Call) -> Reach:
    return _activation(call, max(1.0, abs(call.option(1, "negative_slope", 0.01))), math.inf, 0.0)


@rule_for(nn.ELU, "elu")
def _elu(call: Call) -> Reach:
    return _activation(call, max(1.0, abs(call.option(1, "alpha", 1.0))), math.inf, 0.0)


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
        raise call.refuse(
            "softplus jumps where it becomes the identity, so it has no Lipschitz constant",
            f"beta {beta}, threshold {threshold}",
            "Leave threshold at 20",
        )
    return _activation(call, 1.0, math.inf, math.inf)


@rule_for(nn.PReLU)
def _prelu(call: Call) -> Reach:
    return _activation(call, max(1.0, float(call.module.weight.abs().max())), math.inf, 0.0)


@rule_for("square", "pow")
def _square(call: Call) -> Reach:
    exponent = call.argument(1, "exponent", 2)
    if isinstance(exponent, Tensor) or exponent != 2:
        raise call.refuse("powers have a rule for the square only", f"exponent {exponent}")
    before: Reach = call.input
    size = _largest(before.value)
    gain = three_gains(2 * size, 2 * (size + before.spread), 2 * before.peak, before.peak * before.peak)
    return before.pass_through(gain, call.value)


SUMS = ("add", "iadd", "sub", "isub", "__add__", "__radd__", "__rsub__", "rsub")


@rule_for(*SUMS, several=True)
def _sum(call: Call) -> Reach:
    a, b = _operands(call)
    alpha = abs(call.kwargs.get("alpha", 1.0))
    of_a, of_b = (alpha, 1.0) if call.kind == "rsub" else (1.0, alpha)  # rsub is b - alpha a
    if isinstance(a, Reach) and isinstance(b, Reach):
        same = a.value.shape == b.value.shape
        return add_reaches(
            [(a, _repeat_gain(call, a, of_a)), (b, _repeat_gain(call, b, of_b))],
            call.value,
            _multiply(of_a, a.peak) + _multiply(of_b, b.peak),
            _multiply(of_a, a.rows) + _multiply(of_b, b.rows) if same else math.inf,
        )
    reach, factor, other, weight = (a, of_a, b, of_b) if isinstance(a, Reach) else (b, of_b, a, of_a)
    gain = _repeat_gain(call, reach, factor)
    rows = math.inf
    if reach.value.shape == call.value.shape:
        rows = _multiply(factor, reach.rows) + weight * _length(other, call.value)
    peak = _multiply(factor, reach.peak) + weight * _size(other)
    return reach.pass_through(Gain(gain.at, gain.ball, gain.everywhere, peak, rows), call.value)


@rule_for("mul", "imul", "multiply", "__mul__", "__rmul__", folds=True, several=True)
def _times(call: Call) -> Reach | Pending:
    a, b = _operands(call)
    first, second = isinstance(a, (Reach, Pending)), isinstance(b, (Reach, Pending))
    if first and second:
        return _product(call, _certify(a), _certify(b))
    operand, other = (a, b) if first else (b, a)
    if isinstance(operand, Pending):
        factors = _factors(operand.value, other)
        folded = (
            None if factors is None else operand.folded.then_factors(call.name, factors[0], 0 * factors[0], factors[1])
        )
        if folded is not None and call.value.shape == operand.value.shape:
            return Pending(call.value, folded)
    return _scale(call, _certify(operand), _size(other))


@rule_for("truediv", "itruediv", "div", "divide", "__truediv__", several=True)
def _quotient(call: Call) -> Reach:
    a, b = _operands(call)
    if isinstance(b, Reach) or not isinstance(a, Reach):
        raise call.refuse("no rule for dividing by something that depends on the input", "such a division")
    smallest = float(b.double().abs().min()) if isinstance(b, Tensor) else float(abs(b))
    if call.kwargs.get("rounding_mode") is not None or smallest == 0:
        raise call.refuse("division needs a divisor other than zero, without rounding", f"divisor {smallest:g}")
    return _scale(call, a, 1 / smallest)


def _scale(call: Call, reach: Reach, size: float) -> Reach:
    gain = _repeat_gain(call, reach, size)
    rows = _multiply(size, reach.rows) if reach.value.shape == call.value.shape else math.inf
    peak = _multiply(size, reach.peak)
    return reach.pass_through(Gain(gain.at, gain.ball, gain.everywhere, peak, rows), call.value)


def _product(call: Call, a: Reach, b: Reach) -> Reach:
    """d(a b) = a db + b da, where a tensor that is repeated collects what it is multiplied with over the repeats."""
    _check_axes(call, a)
    _check_axes(call, b)
    return add_reaches([(a, _product_gain(call, a, b)), (b, _product_gain(call, b, a))], call.value, a.peak * b.peak)


def _product_gain(call: Call, moving: Reach, factor: Reach) -> Gain:
    shape = call.value.shape
    axes = [i for i, (n, m) in enumerate(zip(moving.value.shape, shape, strict=True)) if n != m]
    squares = factor.value.expand(shape).square()
    blocks = (squares.sum(axes, keepdim=True) if axes else squares).flatten(1).amax(1).sqrt()
    repeats = math.sqrt(call.value.numel() / moving.value.numel())
    # where the factor itself is repeated along those axes, its movement is seen as often
    factor_repeats = math.sqrt(math.prod(shape[i] for i in axes if factor.value.shape[i] == 1))
    return three_gains(blocks, blocks + factor_repeats * factor.spread, factor.peak * repeats if factor.peak else 0.0)


def _repeat_gain(call: Call, reach: Reach, factor: float = 1.0) -> Gain:
    """Return the gain of repeating a tensor by broadcasting and multiplying by a factor."""
    _check_axes(call, reach)
    return constant_gain(factor * math.sqrt(call.value.numel() / reach.value.numel()))


def _check_axes(call: Call, reach: Reach) -> None:
    if reach.value.ndim != call.value.ndim:
        raise call.refuse(
            "tensors that depend on the input must have all axes of the result, the batch first",
            f"shapes {tuple(reach.value.shape)} and {tuple(call.value.shape)}",
            "Insert the missing axes with unsqueeze",
        )


def _factors(value: Tensor, other: Any) -> tuple[Tensor, int] | None:
    """Return constants as factors per channel and their axis, if they are such."""
    if not isinstance(other, Tensor) or other.ndim == 0:
        axis = -1 if value.ndim == 2 else 1
        return torch.full((value.shape[axis],), float(other), dtype=torch.float64), axis
    full = (1,) * (value.ndim - other.ndim) + tuple(other.shape)
    wide = [i for i, n in enumerate(full) if n != 1]
    if len(wide) != 1 or other.numel() != value.shape[wide[0]] or wide[0] == 0:
        return None
    return other.reshape(-1).double(), -1 if wide[0] == value.ndim - 1 else wide[0]


def _operands(call: Call) -> tuple[Any, Any]:
    if len(call.args) > 2:  # torch's old add(x, alpha, y)
        raise call.refuse("sums and products have a rule for two operands", f"{len(call.args)}", "Name alpha=")
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


def _largest(value: Tensor) -> Tensor:
    return value.abs().flatten(1).amax(1)


def _certify(operand: Reach | Pending) -> Reach:
    return operand.certified if isinstance(operand, Pending) else operand
