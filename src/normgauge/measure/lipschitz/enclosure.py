"""The Jacobian on a ball, entry by entry between two numbers: interval arithmetic and the mean value theorem.

Every tensor y(x) of the network is kept with an enclosure M -+ R of its Jacobian that holds on the whole ball of
radius r around the datum. By the mean value theorem an entry moves by at most r (||M_i|| + ||R_i||), which bounds the
slopes of the next step, and so on. Where no activation changes its pattern on the ball R is 0 and M the Jacobian.
Beside R the norm of the deviation J - M is bounded as a whole: J' = T J with T = T0 + D has J' - T0 M = T (J - M) + D M,
so it is at most ||T|| times the one before plus ||D M||; absolute values of weights do not enter there.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from normgauge.errors import ModelError
from normgauge.measure.lipschitz.reach import Form
from normgauge.measure.lipschitz.rules import Call
from normgauge.measure.lipschitz.shape_rules import COPIES, DROPOUTS, MOVES
from normgauge.measure.lipschitz.trace import Walk, line_of
from normgauge.network.exports import operation_name
from normgauge.objective import tensors
from normgauge.theory.lipschitz_constants import SOFTMAX

LIMIT = 10_000_000  # entries of one Jacobian
TOTAL = 300_000_000  # over all data
_NEAR_KINK = 1e-10
_ROUND = 1 + 1e-12
_WIDE = 400  # sides beyond which a norm on the way is bounded by sums
_MATRIX = 2_000_000  # entries up to which a linear map is written out for its norm


@dataclass(frozen=True)
class Enclosed:
    """A tensor on the ball.

    Attributes:
        centre: at the datum.
        low: what its entries are not below.
        high: what they do not exceed.
        mid: middle of its Jacobian, the columns on the last axis.
        rad: how far entries of the Jacobian may be from the middle.
        off: bound on the norm of the Jacobian minus its middle.
    """

    centre: Tensor
    low: Tensor
    high: Tensor
    mid: Tensor
    rad: Tensor
    off: float = math.inf


@dataclass(frozen=True)
class Step(Call):
    """One operation on enclosures: arguments that move are `Enclosed`."""

    radius: float = 0.0

    def enclose(
        self,
        mid: Tensor,
        rad: Tensor,
        value: Tensor | None = None,
        limits: tuple[Tensor | None, Tensor | None] = (None, None),
        off: float = math.inf,
    ) -> Enclosed:
        """Return a tensor by its Jacobian and, if known, by other limits of its entries."""
        centre = self.value if value is None else value
        off = off * _ROUND if off == off else math.inf
        movement = self.radius * (mid.norm(dim=-1) + rad.norm(dim=-1).clamp_max(off)) * _ROUND
        lows, highs = centre - movement, centre + movement
        lows = lows if limits[0] is None else torch.fmax(lows, limits[0])
        highs = highs if limits[1] is None else torch.fmin(highs, limits[1])
        # rounding must not leave the centre outside
        return Enclosed(centre, torch.minimum(lows, centre), torch.maximum(highs, centre), mid, rad, off)

    def through(
        self, x: Enclosed, linear: Callable[[Tensor], Any], absolute: Callable[[Tensor], Any] | None = None
    ) -> Any:
        """Return a linear map of a tensor, given the map and the one with absolute entries."""
        mids = _each_column(linear, x.mid)
        rads = _each_column(absolute or linear, x.rad)
        off = 0.0
        if x.off:
            if self.name not in self.norms:
                self.norms[self.name] = _gain(linear, absolute or linear, x.centre)
            off = self.norms[self.name] * x.off
        if isinstance(mids, (tuple, list)):
            return tuple(self.enclose(m, r, v, off=off) for m, r, v in zip(mids, rads, self.value, strict=True))
        limits = (None, None) if absolute else (linear(x.low), linear(x.high))  # it keeps the order
        return self.enclose(mids, rads, None, limits, off)


def _gain(linear: Callable[[Tensor], Any], absolute: Callable[[Tensor], Any], like: Tensor) -> float:
    """Return a bound of the norm of a linear map: of its matrix where that is small, else by sums of rows and columns."""
    with torch.enable_grad():
        ones = torch.ones_like(like).requires_grad_()
        sums = torch.cat([part.flatten() for part in tensors(absolute(ones))])
        (columns,) = torch.autograd.grad(sums.sum(), ones)
    bound = math.sqrt(float(sums.amax()) * float(columns.amax())) * _ROUND if sums.numel() else 0.0
    if linear is absolute or len(sums) * like.numel() > _MATRIX:
        return bound
    eye = torch.eye(like.numel(), dtype=torch.float64).reshape(*like.shape, like.numel())
    return min(bound, _norm(_each_column(linear, eye).reshape(-1, like.numel())))


Rule = Callable[[Step], Any]
_RULES: dict[str, Rule] = {}


def _encloses(*names: str) -> Callable[[Rule], Rule]:
    def keep(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return keep


def _each_column(function: Callable[[Tensor], Any], columns: Tensor) -> Any:
    return torch.func.vmap(function, in_dims=-1, out_dims=-1)(columns)


@torch.no_grad()
def enclose_jacobian(walk: Walk, values: dict[fx.Node, Any], radius: float) -> tuple[float, str]:
    """Return a bound of the Jacobian's norm on the ball around a datum; infinite, with the reason, where none is had.

    The norm of what lies in M -+ R is at most ||M|| + ||R||.
    """
    source, moving = walk.source, walk.program.dependent([walk.source])
    inputs = values[source].numel()
    largest = max((t.numel() for node in moving for t in tensors(values[node])), default=0) * inputs
    if largest > LIMIT or largest * walk.domain.samples > TOTAL:
        return math.inf, f"a Jacobian of {largest:.2g} entries at {walk.domain.samples} data"
    eye = torch.eye(inputs, dtype=torch.float64).reshape(*values[source].shape, inputs)
    start = Step("", "", None, (), {}, values[source], {}, radius=radius)
    known: dict[fx.Node, Any] = {source: start.enclose(eye, torch.zeros_like(eye), off=0.0)}
    gains: dict[Any, Any] = walk.norms  # of linear maps, by the name of the node; the same at all data
    left = Counter(parent for node in walk.program.nodes for parent in node.all_input_nodes)
    for node in walk.program.nodes:
        reading = [parent for parent in node.all_input_nodes if parent in known]
        used = node.users or node in walk.program.outputs
        if used and node is not source and reading and next(tensors(values[node]), None) is not None:
            kind = operation_name(node).strip("_")
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda p: known.get(p, values[p]))
            where = line_of(node.meta.get("stack_trace"))
            step = Step(node.name, kind, None, tuple(args), kwargs, values[node], gains, node.target, where, radius)
            try:
                form = walk.written.get(node)
                written = None if form is None else _written_norm(step, known[form[0]], form[1])
                known[node] = _RULES[kind](step) if written is None else written
            except (KeyError, ModelError, RuntimeError):
                return math.inf, f"no enclosure of {kind}{where}"
        for parent in node.all_input_nodes:
            left[parent] -= 1
            if not left[parent] and parent not in walk.program.outputs:
                known.pop(parent, None)
    output = known.get(walk.program.outputs[0])
    if output is None:
        return math.inf, "an output that depends on shapes alone"
    bound = _norm(output.mid.reshape(-1, inputs)) + min(output.off, _size(output.rad))
    return (bound, "") if math.isfinite(bound) else (math.inf, "slopes without limit on the ball")


def _norm(matrix: Tensor) -> float:
    size = float(matrix.abs().amax()) if matrix.numel() else 0.0
    if size == 0 or not math.isfinite(size):
        return 0.0 if size == 0 else math.inf
    matrix = matrix / size
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return size * math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1]))) * (1 + 1e-11)


def _size(columns: Tensor) -> float:
    """Return a bound of the norm of a Jacobian, or of any with entries of at most this size if none is negative."""
    matrix = columns.reshape(-1, columns.shape[-1])
    if min(matrix.shape) <= _WIDE:
        return _norm(matrix)
    sizes = matrix.abs()
    return min(float(matrix.norm()), math.sqrt(float(sizes.sum(0).amax() * sizes.sum(1).amax()))) * _ROUND


def _plain(argument: Any) -> Any:
    return argument.centre if isinstance(argument, Enclosed) else argument


def _double(constant: Any) -> Tensor:
    return torch.as_tensor(constant, dtype=torch.float64)


def _fixed(step: Step, *arguments: Any) -> None:
    if any(isinstance(argument, Enclosed) for argument in arguments):
        raise step.refuse("these must not depend on the input", "some that do")


# -- maps that are linear with entries that are not negative ----------------------------------------------------------


@_encloses(*COPIES, *DROPOUTS)
def _copy(step: Step) -> Any:
    return step.args[0]


@_encloses("getitem")
def _item(step: Step) -> Any:
    return step.args[0][step.args[1]]


@_encloses(
    *MOVES,
    *("mean", "sum", "cumsum", "tril", "triu", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d"),
    *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
)
def _nonnegative(step: Step) -> Any:
    if not isinstance(step.args[0], Enclosed):
        return step.value
    rest = [_plain(argument) for argument in step.args[1:]]
    named = {name: _plain(argument) for name, argument in step.kwargs.items()}
    return step.through(step.args[0], lambda t: step.function(t, *rest, **named))


@_encloses("pad", "constant_pad_nd")
def _pad(step: Step) -> Any:
    place = 2 if step.kind == "constant_pad_nd" else 3
    return step.through(step.args[0], lambda t: step.function(t, *step.args[1:place]))


@_encloses("cat", "stack", "hstack", "concat", "concatenate")
def _join(step: Step) -> Any:
    parts = step.args[0]
    width = next(part.mid.shape[-1] for part in parts if isinstance(part, Enclosed))
    zeros = [None if isinstance(part, Enclosed) else torch.zeros(*part.shape, width) for part in parts]
    sides = [
        [getattr(part, name) if zero is None else zero.double() for part, zero in zip(parts, zeros, strict=True)]
        for name in ("mid", "rad")
    ]
    joined = [
        torch.func.vmap(lambda *t: step.function(list(t), *step.args[1:], **step.kwargs), -1, -1)(*side)
        for side in sides
    ]
    off = math.hypot(*(part.off for part in parts if isinstance(part, Enclosed)))
    return step.enclose(joined[0], joined[1], off=off)


@_encloses("where", "masked_fill")
def _choose(step: Step) -> Any:
    a, b = (step.args[1], step.args[2]) if step.kind == "where" else (step.args[2], step.args[0])
    mask = step.args[0] if step.kind == "where" else step.args[1]
    _fixed(step, mask)
    width = next(part.mid.shape[-1] for part in (a, b) if isinstance(part, Enclosed))
    zero = torch.zeros(width, dtype=torch.float64)
    sides = [
        torch.where(mask[..., None], *(getattr(p, name) if isinstance(p, Enclosed) else zero for p in (a, b)))
        for name in ("mid", "rad")
    ]
    repeats = [step.value.numel() / p.centre.numel() for p in (a, b) if isinstance(p, Enclosed)]
    off = math.hypot(*(p.off for p in (a, b) if isinstance(p, Enclosed))) * math.sqrt(max(repeats))
    return step.enclose(*(side.expand(*step.value.shape, width) for side in sides), off=off)


# -- linear maps with constant weights --------------------------------------------------------------------------------


def _weighted(step: Step, x: Enclosed, weight: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Enclosed:
    _fixed(step, weight)
    return step.through(x, lambda t: function(t, weight), lambda t: function(t, weight.abs()))


@_encloses("linear")
def _linear(step: Step) -> Any:
    return _weighted(step, step.args[0], step.args[1], functional.linear)


@_encloses("addmm")
def _addmm(step: Step) -> Any:
    _fixed(step, step.args[0])
    return _weighted(step, step.args[1], step.args[2], torch.matmul)


@_encloses("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(step: Step) -> Any:
    rest = step.args[3:]
    return _weighted(step, step.args[0], step.args[1], lambda t, w: step.function(t, w, None, *rest, **step.kwargs))


@_encloses("batch_norm", "native_batch_norm_legit_no_training")
def _batch_norm(step: Step) -> Any:
    x, gain, _, _, variance = step.args[:5]
    several = isinstance(step.value, (tuple, list))
    factors = (variance + step.args[6 if several else 7]).rsqrt() * (1.0 if gain is None else gain)
    factors = factors.reshape(-1, *[1] * (x.centre.ndim - 2), 1)
    value = step.value[0] if several else step.value
    outcome = step.enclose(x.mid * factors, x.rad * factors.abs(), value, off=x.off * float(factors.abs().amax()))
    return (outcome, None, None) if several else outcome


@_encloses("neg")
def _negative(step: Step) -> Any:
    return step.enclose(-step.args[0].mid, step.args[0].rad, off=step.args[0].off)


@_encloses("add", "sub", "rsub")
def _sum(step: Step) -> Any:
    a, b = step.args[:2]
    alpha = float(step.kwargs.get("alpha", 1.0))
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[step.kind]
    parts = [(x, sign) for x, sign in zip((a, b), signs, strict=True) if isinstance(x, Enclosed)]
    mids = [_line_up(x.mid, step.value) * sign for x, sign in parts]
    rads = [_line_up(x.rad, step.value) * abs(sign) for x, sign in parts]
    shape = (*step.value.shape, mids[0].shape[-1])
    off = sum(x.off * abs(sign) * math.sqrt(step.value.numel() / x.centre.numel()) for x, sign in parts)
    ends = [_ends(x, sign) for x, sign in zip((a, b), signs, strict=True)]
    limits = (ends[0][0] + ends[1][0], ends[0][1] + ends[1][1])
    return step.enclose(sum(mids[1:], mids[0]).expand(shape), sum(rads[1:], rads[0]).expand(shape), None, limits, off)


def _ends(x: Any, factor: float | Tensor) -> tuple[Tensor, Tensor]:
    """Return the limits of a tensor times a constant."""
    low, high = ((x.low, x.high) if isinstance(x, Enclosed) else (_double(x), _double(x)))
    return torch.minimum(factor * low, factor * high), torch.maximum(factor * low, factor * high)


def _line_up(columns: Tensor, value: Tensor) -> Tensor:
    """Give a Jacobian the axes of a value with more of them."""
    return columns.reshape(*[1] * (value.ndim + 1 - columns.ndim), *columns.shape)


# -- products ---------------------------------------------------------------------------------------------------------


def _bilinear(
    step: Step,
    a: Enclosed,
    b: Enclosed,
    multiply: Callable[[Tensor, Tensor], Tensor],
    gain: Callable[[Tensor, Tensor], float],
) -> Enclosed:
    """d(A B) = dA B + A dB, all four between limits; `gain` bounds the norm of a product with what lies in m -+ w."""
    middles = [(x.low + x.high) / 2 for x in (a, b)]
    widths = [(x.high - x.low) / 2 for x in (a, b)]
    sizes = [middle.abs() + width for middle, width in zip(middles, widths, strict=True)]

    def of_a(columns: Tensor, factor: Tensor) -> Tensor:
        return _each_column(lambda t: multiply(t, factor), columns)

    def of_b(columns: Tensor, factor: Tensor) -> Tensor:
        return _each_column(lambda t: multiply(factor, t), columns)

    mid = of_a(a.mid, middles[1]) + of_b(b.mid, middles[0])
    own = of_a(a.mid.abs(), widths[1]) + of_b(b.mid.abs(), widths[0])
    rad = own + of_a(a.rad, sizes[1]) + of_b(b.rad, sizes[0])
    value = multiply(a.centre, b.centre)
    off = _size(own)
    for x, other in ((a, 1), (b, 0)):
        repeats = math.prod(value.shape) / max(1, x.centre.numel()) if multiply is torch.mul else 1.0
        off += x.off * gain(middles[other], widths[other]) * math.sqrt(max(1.0, repeats)) if x.off else 0.0
    return step.enclose(mid, rad, value, off=off)


def _largest_entry(middle: Tensor, width: Tensor) -> float:
    return float((middle.abs() + width).amax())


def _largest_matrix(middle: Tensor, width: Tensor) -> float:
    """Return the norm of a product with matrices, each of them met by matrices of its own."""
    if middle.ndim < 2:
        return math.inf
    return sum(float(torch.linalg.matrix_norm(part, 2).amax()) for part in (middle, width)) * (1 + 1e-11)


@_encloses("mul", "multiply", "div", "divide")
def _times(step: Step) -> Any:
    a, b = step.args[:2]
    if step.kind not in ("mul", "multiply"):
        if step.kwargs.get("rounding_mode") is not None:
            raise step.refuse("no rounding", "some")
        b = _entrywise(step, b, torch.reciprocal, (), positive=True) if isinstance(b, Enclosed) else 1 / _double(b)
    if isinstance(a, Enclosed) and isinstance(b, Enclosed):
        return _bilinear(step, a, b, torch.mul, _largest_entry)
    x, factor = (a, _double(b)) if isinstance(a, Enclosed) else (b, _double(a))
    shape = (*step.value.shape, x.mid.shape[-1])
    mids, rads = (_line_up(columns, step.value) for columns in (x.mid, x.rad))
    off = x.off * float(factor.abs().amax()) * math.sqrt(step.value.numel() / x.centre.numel()) if x.off else 0.0
    mids, rads = (mids * factor[..., None]).expand(shape), (rads * factor.abs()[..., None]).expand(shape)
    return step.enclose(mids, rads, None, _ends(x, factor), off)


@_encloses("matmul", "bmm", "mm")
def _matmul(step: Step) -> Any:
    a, b = step.args[:2]
    if isinstance(a, Enclosed) and isinstance(b, Enclosed):
        same = a.centre.shape[:-2] == b.centre.shape[:-2]
        return _bilinear(step, a, b, torch.matmul, _largest_matrix if same else lambda *_: math.inf)
    if isinstance(a, Enclosed):
        return _weighted(step, a, b, torch.matmul)
    return _weighted(step, b, a, lambda t, w: torch.matmul(w, t))


# -- functions of one entry -------------------------------------------------------------------------------------------

_ZERO = (0.0,)
# Where the slope is largest, smallest or jumps; in between it rises or falls.
_TURNS: dict[str, Callable[[Step], tuple[float, ...]]] = {
    **dict.fromkeys(("relu", "leaky_relu", "prelu", "abs", "tanh", "sigmoid", "erf", "atan"), lambda _: _ZERO),
    **dict.fromkeys(("elu", "selu", "celu", "square"), lambda _: _ZERO),
    **dict.fromkeys(("exp", "log_sigmoid"), lambda _: ()),
    **dict.fromkeys(("hardswish", "hardsigmoid"), lambda _: (-3.0, 3.0)),
    "relu6": lambda _: (0.0, 6.0),
    "gelu": lambda step: (
        (-1.4185040087908, 1.4185040087908)
        if step.kwargs.get("approximate", "none") == "tanh"
        else (-math.sqrt(2.0), math.sqrt(2.0))
    ),
    "silu": lambda _: (-2.39935728052, 2.39935728052),
    "mish": lambda _: (-2.2563763963608, 1.4905711794854),
    "softplus": lambda step: (float(step.argument(2, "threshold", 20.0)) / float(step.argument(1, "beta", 1.0)),),
    "softshrink": lambda step: (-float(step.argument(1, "lambd", 0.5)), float(step.argument(1, "lambd", 0.5))),
    "hardtanh": lambda step: (float(step.argument(1, "", -1.0)), float(step.argument(2, "", 1.0))),
    "clamp": lambda step: tuple(float(x) for x in (*step.args[1:], *step.kwargs.values()) if x is not None),
}
_TURNS |= dict.fromkeys(("clamp_min", "clamp_max", "clip"), _TURNS["clamp"])


@_encloses(*_TURNS)
def _activation(step: Step) -> Any:
    _fixed(step, *step.args[1:], *step.kwargs.values())
    return _entrywise(step, step.args[0], lambda x: step.function(x, *step.args[1:], **step.kwargs), _TURNS[step.kind](step))


@_encloses("sqrt", "rsqrt", "log", "reciprocal", "pow", "log1p")
def _positive(step: Step) -> Any:
    exponent = step.args[1] if step.kind == "pow" else 0.5
    _fixed(step, exponent)
    positive = not (float(exponent).is_integer() and float(exponent) >= 1)
    outcome = _entrywise(step, step.args[0], lambda x: step.function(x, *step.args[1:]), _ZERO, positive=positive)
    even = step.kind == "pow" and float(exponent) % 2 == 0
    return replace(outcome, low=outcome.low.clamp_min(0.0)) if even else outcome


@_encloses("sin", "cos")
def _wave(step: Step) -> Any:
    x: Enclosed = step.args[0]
    first, last = (x.low / (math.pi / 2)).floor(), (x.high / (math.pi / 2)).ceil()
    turns = [((first + i) * (math.pi / 2)).clamp(x.low, x.high) for i in range(4)]
    slope = torch.cos if step.kind == "sin" else lambda t: -torch.sin(t)
    slopes = torch.stack([slope(point) for point in (x.low, x.high, *turns)])
    whole = last - first > 4
    low, high = torch.where(whole, -1.0, slopes.amin(0)), torch.where(whole, 1.0, slopes.amax(0))
    return _by_slope(step, x, low, high, step.value)


def _entrywise(
    step: Step, x: Enclosed, function: Callable[[Tensor], Tensor], turns: tuple[float, ...], *, positive: bool = False
) -> Enclosed:
    if positive and not bool((x.low > 0).all()):
        raise step.refuse("only positive numbers have a slope", "others on the ball")
    points = [x.low, x.high]
    for turn in turns:
        met = (x.low <= turn + _NEAR_KINK) & (x.high >= turn - _NEAR_KINK)
        points += [torch.where(met, turn + side, x.low) for side in (-_NEAR_KINK, _NEAR_KINK) if not positive]
    with torch.enable_grad():
        leaf = torch.stack(points).requires_grad_()
        (slopes,) = torch.autograd.grad(function(leaf).sum(), leaf)
    return _by_slope(step, x, slopes.amin(0), slopes.amax(0), function(x.centre))


def _by_slope(step: Step, x: Enclosed, low: Tensor, high: Tensor, value: Tensor) -> Enclosed:
    middle, width = ((high + low) / 2)[..., None], ((high - low) / 2)[..., None]
    mid = middle * x.mid
    rad = middle.abs() * x.rad + width * (x.mid.abs() + x.rad)
    ends = torch.stack([slope * (end - x.centre) for slope in (low, high) for end in (x.low, x.high)])
    # a diagonal of unknown numbers of at most these widths stretches no more than the widths themselves
    off = _size(width * x.mid) + (float((middle.abs() + width).amax()) * x.off if x.off else 0.0)
    return step.enclose(mid, rad, value, (value + ends.amin(0), value + ends.amax(0)), off)


# -- softmax, attention, norms, maxima --------------------------------------------------------------------------------


@_encloses("softmax", "log_softmax", "logsumexp")
def _softmax(step: Step) -> Any:
    x = step.args[0]
    axis = step.args[1][0] if isinstance(step.args[1], (list, tuple)) else step.args[1]
    axis %= x.centre.ndim
    parts = [t.movedim(axis, -1) for t in (x.centre, x.low, x.high)]
    columns = [t.movedim(axis, -2) for t in (x.mid, x.rad)]
    p, inner, width = _weigh(step, Enclosed(*parts, *columns, x.off))
    if step.kind == "softmax":
        mid, rad = (t.movedim(-2, axis) for t in (p.mid, p.rad))
        return step.enclose(mid, rad, None, (p.low.movedim(-1, axis), p.high.movedim(-1, axis)), p.off)
    if step.kind == "log_softmax":
        return step.enclose(inner.movedim(-2, axis), width.movedim(-2, axis))
    mid, rad = (columns[0] - inner)[..., 0, :], (columns[1] + width)[..., 0, :]  # the same for all entries
    keep = len(step.args) > 2 and step.args[2]
    return step.enclose(*((t.unsqueeze(axis) if keep else t) for t in (mid, rad)))


def _weigh(step: Step, x: Enclosed) -> tuple[Enclosed, Tensor, Tensor]:
    """Return softmax along the last axis, d p_i = p_i (dx_i - sum_j p_j dx_j), and the bracket as middle and width."""
    middle = x.centre.softmax(-1)
    high, low = torch.maximum(_share(x.high, x.low), middle), torch.minimum(_share(x.low, x.high), middle)
    p, spread = ((high + low) / 2)[..., None], ((high - low) / 2)[..., None]
    # the weights sum to 1, so that any column can be taken off all of them
    inner = x.mid - (p * x.mid).sum(-2, keepdim=True) / p.sum(-2, keepdim=True)
    own = (spread * inner.abs()).sum(-2, keepdim=True) + (p * inner).sum(-2, keepdim=True).abs()
    width = x.rad + own + ((p + spread) * x.rad).sum(-2, keepdim=True)
    deviation = (p + spread) * own + spread * inner.abs()
    off = _size(deviation) + SOFTMAX * x.off
    return (
        step.enclose(p * inner, (p + spread) * width + spread * inner.abs(), middle, (low, high), off),
        inner,
        width,
    )


def _share(own: Tensor, others: Tensor) -> Tensor:
    """Return exp(own_i) / (exp(own_i) + sum of exp(others_j) over j != i)."""
    gaps = others[..., None, :] - own[..., :, None]
    gaps = torch.where(torch.eye(own.shape[-1], dtype=torch.bool), 0.0, gaps)
    shares = 1 / gaps.exp().sum(-1)
    return torch.where(torch.isneginf(own), 0.0, torch.nan_to_num(shares, 0.0)).clamp(0.0, 1.0)


@_encloses("scaled_dot_product_attention")
def _attention(step: Step) -> Any:
    q, k, v = (step.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    mask, causal = step.argument(3, "attn_mask"), bool(step.argument(5, "is_causal", False))
    if not all(isinstance(x, Enclosed) for x in (q, k, v)) or step.argument(4, "dropout_p", 0.0):
        raise step.refuse("queries, keys and values must depend on the input", "another case")
    _fixed(step, mask)
    if step.kwargs.get("enable_gqa"):
        times = q.centre.shape[-3] // k.centre.shape[-3]
        k, v = (_repeated(x, times) for x in (k, v))
    scale = step.kwargs.get("scale")
    scale = 1 / math.sqrt(q.centre.shape[-1]) if scale is None else float(scale)
    if scale < 0:  # products of absolute values would become negative
        raise step.refuse("a scale is not negative", str(scale))
    logits = _bilinear(
        step, q, k, lambda a, b: scale * a @ b.transpose(-1, -2), lambda m, w: scale * _largest_matrix(m, w)
    )
    shift: Any = 0.0
    if causal:
        shift = torch.full(logits.centre.shape[-2:], -math.inf, dtype=torch.float64).triu(1)
    elif mask is not None:
        shift = torch.zeros(mask.shape).double().masked_fill(~mask, -math.inf) if mask.dtype == torch.bool else mask
    ends = (logits.centre + shift, logits.low + shift, logits.high + shift)
    weights, _, _ = _weigh(step, Enclosed(*ends, logits.mid, logits.rad, logits.off))
    return _bilinear(step, weights, v, torch.matmul, _largest_matrix)


def _repeated(x: Enclosed, times: int) -> Enclosed:
    axis = x.centre.ndim - 3
    parts = (t.repeat_interleave(times, axis) for t in (x.centre, x.low, x.high, x.mid, x.rad))
    return Enclosed(*parts, x.off * math.sqrt(times))


@_encloses("layer_norm", "rms_norm", "group_norm")
def _normalizer(step: Step) -> Any:
    x = step.args[0]
    if step.kind == "group_norm":
        groups, gain, bias, eps = (*step.args[1:], *(None, None, 1e-5)[len(step.args) - 2 :])[:4]
        blocks: tuple[int, ...] = (len(x.centre), groups, -1)
        shape = (1, -1, *[1] * (x.centre.ndim - 2))
    else:
        axes = len(step.args[1])
        gain = step.argument(2, "weight")
        bias = step.argument(3, "bias") if step.kind == "layer_norm" else None
        eps = step.argument(4, "eps", 1e-5) if step.kind == "layer_norm" else step.argument(3, "eps")
        eps = torch.finfo(torch.float64).eps if eps is None else eps
        blocks, shape = (*x.centre.shape[:-axes], -1), tuple(step.args[1])
    _fixed(step, gain, bias)
    width = x.mid.shape[-1]
    flat = Enclosed(
        *(t.reshape(blocks) for t in (x.centre, x.low, x.high)),
        *(t.reshape(*blocks, width) for t in (x.mid, x.rad)),
        x.off,
    )
    y = _standardize(step, flat, float(eps), centred=step.kind != "rms_norm")
    factors = torch.ones(1, dtype=torch.float64) if gain is None else gain.double().reshape(shape)
    shift = 0.0 if bias is None else bias.double().reshape(shape)
    own = step.value.shape
    ends = [end.reshape(own) * factors + shift for end in (y.low, y.high)]
    return step.enclose(
        y.mid.reshape(*own, width) * factors[..., None],
        y.rad.reshape(*own, width) * factors.abs()[..., None],
        None,
        (torch.minimum(*ends), torch.maximum(*ends)),
        y.off * float(factors.abs().amax()),
    )


def _standardize(step: Step, x: Enclosed, eps: float, *, centred: bool) -> Enclosed:
    """Return y = c / sqrt(mean(c^2) + eps) along the last axis: dy = s (dc - y mean(y dc)), s = 1 / sqrt(...)."""
    c = x
    if centred:
        centre = x.centre - x.centre.mean(-1, keepdim=True)
        mean = x.mid.mean(-2, keepdim=True)
        c = step.enclose(x.mid - mean, x.rad + x.rad.mean(-2, keepdim=True), centre, off=x.off)
    size = c.centre.shape[-1]
    power = c.centre.square().mean(-1)
    ends = torch.stack([c.low, c.high]).abs()
    smallest = torch.where((c.low < 0) & (c.high > 0), 0.0, ends.amin(0))
    # the root mean square moves by at most the movement of the block / sqrt(size)
    movement = torch.maximum(c.high - c.centre, c.centre - c.low).norm(dim=-1)
    if min(c.mid.shape[-2:]) <= _WIDE:
        movement = movement.clamp_max(step.radius * (torch.linalg.matrix_norm(c.mid, 2) + c.off) * (1 + 1e-11))
    movement = movement / math.sqrt(size)
    root = power.sqrt()
    low = torch.maximum(smallest.square().mean(-1), (root - movement).clamp_min(0.0).square())
    high = torch.minimum(ends.amax(0).square().mean(-1), (root + movement).square())
    slope_mid = 2 * (c.centre[..., None] * c.mid).mean(-2)
    reach = (ends.amax(0) - c.centre.abs()).clamp_min(0.0) + (c.high - c.low) / 2
    slope_rad = 2 * ((c.centre.abs() + reach)[..., None] * c.rad + reach[..., None] * c.mid.abs()).mean(-2)
    by_slope = step.radius * (slope_mid.norm(dim=-1) + slope_rad.norm(dim=-1)) * _ROUND
    low, high = torch.maximum(low, power - by_slope), torch.minimum(high, power + by_slope)
    low, high = torch.minimum(low, power).clamp_min(0.0), torch.maximum(high, power)
    if not bool((low + eps > 0).all()):
        raise step.refuse("a block must not become constant without eps", "one that may")
    inverse = [(end + eps).rsqrt()[..., None] for end in (high, low)]
    value = c.centre * (power + eps).rsqrt()[..., None]
    products = torch.stack([end * factor for end in (c.low, c.high) for factor in inverse])
    limit = math.sqrt(size)
    y = Enclosed(value, products.amin(0).clamp(-limit, limit), products.amax(0).clamp(-limit, limit), c.mid, c.rad)
    s, s_width = ((inverse[0] + inverse[1]) / 2)[..., None], ((inverse[1] - inverse[0]) / 2)[..., None]
    t_mid = (value[..., None] * c.mid).mean(-2, keepdim=True)
    inner = c.mid - value[..., None] * t_mid
    small = min(c.mid.shape[-2:]) <= _WIDE
    norms = [torch.linalg.matrix_norm(t, 2) if small else t.norm(dim=(-2, -1)) for t in (c.mid, inner)]
    for number in range(3):  # the limits of y are tightened by its own Jacobian
        width = torch.maximum(y.high - value, value - y.low)
        t_rad = (value.abs()[..., None] * c.rad + width[..., None] * (c.mid.abs() + c.rad)).mean(-2, keepdim=True)
        spread = c.rad + value.abs()[..., None] * t_rad + width[..., None] * (t_mid.abs() + t_rad)
        # y moves by d as a block: y y^T changes by d y^T + y d^T + d d^T
        d = width.norm(dim=-1)
        if number:
            own = torch.linalg.matrix_norm(y.mid, 2) if small else y.mid.norm(dim=(-2, -1))
            d = d.clamp_max(step.radius * (own + y.off) * (1 + 1e-11))
        turned = d * t_mid.norm(dim=(-2, -1)) + d * (value.norm(dim=-1) + d) * norms[0] / size
        moved = (inverse[1][..., 0] * turned + s_width[..., 0, 0] * norms[1]).norm()
        off = float(moved) * (1 + 1e-11) + (float(inverse[1].amax()) * c.off if c.off else 0.0)
        y = step.enclose(s * inner, s * spread + s_width * (inner.abs() + spread), value, (y.low, y.high), off)
    return y


def _written_norm(step: Step, x: Enclosed, form: Form) -> Enclosed | None:
    """Return x / sqrt(factor mean(x^2) + eps) as a normalizer, where nothing else is added to the divisor."""
    if form.outside or form.floor:
        return None
    order = [*(i for i in range(x.centre.ndim) if i not in form.axes), *form.axes]
    count = math.prod(x.centre.shape[axis] for axis in form.axes)
    back = [order.index(i) for i in range(x.centre.ndim)]
    moved = [t.permute(order).reshape(-1, count) for t in (x.centre, x.low, x.high)]
    width = x.mid.shape[-1]
    columns = [t.permute(*order, x.centre.ndim).reshape(-1, count, width) for t in (x.mid, x.rad)]
    y = _standardize(step, Enclosed(*moved, *columns, x.off), form.eps / form.factor, centred=False)
    scale, shape = 1 / math.sqrt(form.factor), [x.centre.shape[i] for i in order]
    ends = [scale * t.reshape(shape).permute(back) for t in (y.low, y.high)]
    mid, rad = (scale * t.reshape(*shape, width).permute(*back, x.centre.ndim) for t in (y.mid, y.rad))
    return step.enclose(mid, rad, None, (ends[0], ends[1]), scale * y.off)


@_encloses("linalg_vector_norm")
def _length(step: Step) -> Any:
    x, order, axes = step.args[0], step.argument(1, "ord", 2), step.argument(2, "dim")
    if order not in (2, 2.0):
        raise step.refuse("only the Euclidean length", str(order))
    axes = tuple(range(x.centre.ndim)) if axes is None else tuple(axis % x.centre.ndim for axis in axes)
    value = x.centre.norm(dim=axes, keepdim=True)
    movement = torch.maximum(x.high - x.centre, x.centre - x.low).norm(dim=axes, keepdim=True)
    low, high = (value - movement).clamp_min(0.0), value + movement
    # d|x| = u dx with u = x / |x|, no entry of which exceeds 1
    ends = torch.stack([end / length.clamp_min(1e-300) for end in (x.low, x.high) for length in (low, high)])
    u = [ends.amin(0).clamp(-1.0, 1.0), ends.amax(0).clamp(-1.0, 1.0)]
    middle, width = ((u[0] + u[1]) / 2)[..., None], ((u[1] - u[0]) / 2)[..., None]
    mid = (middle * x.mid).sum(axes, keepdim=True)
    rad = (middle.abs() * x.rad + width * (x.mid.abs() + x.rad)).sum(axes, keepdim=True)
    parts = [low, high]
    if not step.argument(3, "keepdim", False):
        parts = [part.reshape(step.value.shape) for part in parts]
        mid, rad = (part.reshape(*step.value.shape, -1) for part in (mid, rad))
    off = _size((width * x.mid.abs()).sum(axes)) + x.off
    return step.enclose(mid, rad, None, (parts[0], parts[1]), off)


def _largest(step: Step, x: Enclosed, axis: int, value: Tensor, times: float = 1.0) -> Enclosed:
    """Return the maximum along one axis: its slope is that of one of the entries that can be largest."""
    best = x.low.amax(axis, keepdim=True)
    possible = (x.high >= best)[..., None]

    def ends(rad: Tensor) -> tuple[Tensor, Tensor]:
        top = torch.where(possible, x.mid + rad, -math.inf).amax(axis)
        return top, torch.where(possible, x.mid - rad, math.inf).amin(axis)

    top, bottom = ends(torch.zeros_like(x.rad))
    mid, (high, low) = (top + bottom) / 2, ends(x.rad)
    off = _size((top - bottom) / 2) + (x.off * times if x.off else 0.0)
    limits = (x.low.amax(axis), x.high.amax(axis))
    return step.enclose(mid, torch.maximum(high - mid, mid - low), value, limits, off)


@_encloses("amax", "max", "amin", "min")
def _extreme(step: Step) -> Any:
    x, axes = step.args[0], step.argument(1, "dim")
    several = isinstance(step.value, (tuple, list))
    axes = list(range(x.centre.ndim)) if axes is None else [axes] if isinstance(axes, int) else list(axes)
    _fixed(step, *axes)
    if "min" in step.kind:
        x = Enclosed(-x.centre, -x.high, -x.low, -x.mid, x.rad)
    for axis in sorted((axis % x.centre.ndim for axis in axes), reverse=True):
        x = _largest(step, x, axis, x.centre.amax(axis))
    value = step.value[0] if several else step.value
    sign = -1.0 if "min" in step.kind else 1.0
    shape = (*value.shape, x.mid.shape[-1])
    outcome = step.enclose((sign * x.mid).reshape(shape), x.rad.reshape(shape), value, off=x.off)
    return (outcome, None) if several else outcome


@_encloses("max_pool1d", "max_pool2d")
def _max_pool(step: Step) -> Any:
    x, axes = step.args[0], 1 if step.kind == "max_pool1d" else 2

    def pairs(place: int, default: Any) -> tuple[int, int]:
        values = list(step.args[place]) if len(step.args) > place and step.args[place] else list(default)
        values = values * axes if len(values) == 1 else values
        return (1 if place != 3 else 0, values[0]) if axes == 1 else (values[0], values[1])

    size = x.centre.shape[-2:] if axes == 2 else (1, x.centre.shape[-1])
    numbers = torch.arange(1, size[0] * size[1] + 1, dtype=torch.float64).reshape(1, 1, *size)
    kernel = pairs(1, ())
    windows = functional.unfold(numbers, kernel, pairs(4, (1,)), pairs(3, (0,)), pairs(2, step.args[1]))[0].long() - 1
    if windows.shape[1] != math.prod(step.value.shape[2:]):
        raise step.refuse("windows must lie inside", "ceil_mode")
    flat = x.centre.flatten(2), x.low.flatten(2), x.high.flatten(2), x.mid.flatten(2, -2), x.rad.flatten(2, -2)
    centre, low, high, mid, rad = (t[:, :, windows.clamp_min(0)] for t in flat)
    outside = windows < 0
    low, high = low.masked_fill(outside, -math.inf), high.masked_fill(outside, -math.inf)
    times = math.sqrt(int(windows[windows >= 0].flatten().bincount().max()))  # windows an entry stands in
    pooled = _largest(step, Enclosed(centre, low, high, mid, rad, x.off), 2, step.value.flatten(2), times)
    own = step.value.shape
    mid, rad = (t.reshape(*own, x.mid.shape[-1]) for t in (pooled.mid, pooled.rad))
    return step.enclose(mid, rad, None, (pooled.low.reshape(own), pooled.high.reshape(own)), pooled.off)
