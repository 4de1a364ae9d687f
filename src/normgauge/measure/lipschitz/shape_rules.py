"""Rules of steps that move, drop, repeat, join or average entries: views, slices, concatenation, pooling, padding."""

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normgauge.measure.lipschitz.reach import Form, Pending, Reach, join_reaches, one_gain, width
from normgauge.measure.lipschitz.rules import Call, Outcome, rule_for
from normgauge.theory import lipschitz_constants as constants

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


_MOVERS = (nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle)


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
    by_row = places.reshape(-1, width(places)).sort(-1).values
    one_row = bool((by_row // width(reach.value) == by_row[:, :1] // width(reach.value)).all())
    apart = times == 1 or bool((by_row[:, 1:] != by_row[:, :-1]).all())
    rows = reach.rows if one_row and apart else math.inf
    if times == 1:
        return reach.move_entries(value, rows)
    return replace(reach.pass_through(one_gain(math.sqrt(times), reach.peak, rows), value), low=reach.low)


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
    return join_reaches(reaches, call.value, peak, rows)


@rule_for("where", "masked_fill", several=True)
def _choose(call: Call) -> Outcome:
    """Take entries of one or of the other, by a mask that does not depend on the input."""
    a, b = (call.args[1], call.args[2]) if call.kind == "where" else (call.args[0], call.args[2])
    mask = call.args[0] if call.kind == "where" else call.args[1]
    parts = [part for part in (a, b) if isinstance(part, Reach)]
    if not isinstance(mask, Tensor) or any(part.value.shape != call.value.shape for part in parts):
        raise call.refuse("a mask must not depend on the input, and entries must not be repeated", "another case")
    sizes = [part.peak if isinstance(part, Reach) else float(torch.as_tensor(part).abs().max()) for part in (a, b)]
    return join_reaches(parts, call.value, max(sizes), math.inf)


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
    outcome = reach.pass_through(one_gain(factor, peak), call.value[0] if several else call.value)
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
        return call.input.pass_through(one_gain(constants.log_softmax_constant(call.value.shape[axis])), call.value)
    last = axis % call.value.ndim == call.value.ndim - 1
    gain = one_gain(constants.SOFTMAX, 1.0, 1.0 if last else math.inf)
    return replace(call.input.pass_through(gain, call.value), low=0.0)


@rule_for(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, "max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(call: Call) -> Reach:
    axes, kernel = call.check_space(), call.option(1, "kernel_size")
    settings = (kernel, call.option(2, "stride") or kernel, call.option(4, "dilation", 1))
    sizes = zip(*(_per_axis(setting, axes) for setting in settings), strict=True)
    factor = math.prod(constants.max_pool_constant(k, s, d) for k, s, d in sizes)
    return call.input.pass_through(one_gain(factor, call.input.peak), call.value)


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
    return call.input.pass_through(one_gain(factor, call.input.peak), call.value)


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
    return call.input.pass_through(one_gain(1.0, max(call.input.peak, abs(value))), call.value)


def _separable(call: Call, along: Callable[[int, Tensor], Tensor]) -> Reach:
    """Return the exact norm of a map that acts on each spatial axis by its own matrix."""
    reach: Reach = call.input
    factor, largest = 1.0, 1.0
    for axis, size in enumerate(reach.value.shape[2:]):
        matrix = along(axis, torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1)
        factor *= float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-11)
        largest *= float(matrix.abs().sum(0).max())
    return reach.pass_through(replace(one_gain(factor), peak=largest * reach.peak), call.value)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    values = tuple(value) if isinstance(value, Sequence) else (value,)
    return values * axes if len(values) == 1 else values
