"""Rules of steps that move, drop, repeat, join or average entries: views, slices, concatenation, pooling, padding."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional

from normgauge.measure.lipschitz.folded import Pending
from normgauge.measure.lipschitz.reach import Reach, constant_gain, join_reaches
from normgauge.measure.lipschitz.rules import Call, Outcome, rule_for
from normgauge.theory import lipschitz_constants as constants

DROPOUTS = ("dropout", "dropout1d", "dropout2d", "dropout3d", "alpha_dropout")
COPIES = ("contiguous", "clone", "to", "float", "double", "type", "type_as")
VIEWS = (
    *("view", "view_as", "reshape", "flatten", "unflatten", "ravel", "squeeze", "unsqueeze"),
    *("pixel_shuffle", "pixel_unshuffle", "channel_shuffle"),
)
PERMUTATIONS = ("permute", "transpose", "swapaxes", "swapdims", "movedim", "moveaxis", "t")


@rule_for(nn.Dropout, nn.Dropout1d, nn.Dropout2d, nn.Dropout3d, nn.AlphaDropout, *DROPOUTS, folds=True, shown=False)
def _dropout(call: Call) -> Outcome:
    if call.option(2, "training", True) and call.option(1, "p", 0.5) > 0:
        step = "Call model.eval() first, and pass training=self.training to functions"
        raise call.refuse("dropout must be in evaluation mode", "training mode", step)
    return _copy(call)


@rule_for(nn.Identity, *COPIES, folds=True, shown=False, several=True)
def _copy(call: Call) -> Outcome:
    operand = call.input
    if isinstance(operand, Tensor):  # a constant takes the type of something that depends on the input
        return operand
    if isinstance(operand, Pending):
        return Pending(call.value, operand.folded)
    return operand.move_entries(call.value, operand.rows)


@rule_for(
    *(nn.Flatten, nn.Unflatten, nn.PixelShuffle, nn.PixelUnshuffle, nn.ChannelShuffle),
    *VIEWS,
    shown=False,
    several=True,
)
def _reshape(call: Call) -> Outcome:
    """A view keeps the order of entries, so the batch stays the batch as long as the first axis keeps its size."""
    reach = call.input
    if isinstance(reach, Tensor):  # a constant takes the shape of something that depends on the input
        return reach
    if call.value.dtype != reach.value.dtype:
        raise call.refuse("a view must not read the bits as another type", str(call.value.dtype), "Use .to()")
    before, after = reach.value.shape[-1], call.value.shape[-1]
    pieces = call.value.ndim > 1 and before % after == 0  # each piece of a row is no longer than the row
    return reach.move_entries(call.value, reach.rows if before == after or pieces else None)


@rule_for(*PERMUTATIONS, shown=False, moves=True)
def _permute(call: Call) -> Reach:
    """Ask torch where the axes went: a small tensor with all sizes different is moved the same way."""
    reach: Reach = call.input
    marked = torch.empty(tuple(range(2, reach.value.ndim + 2)))
    order = [n - 2 for n in getattr(marked, call.kind)(*call.args[1:], **call.kwargs).shape]
    kept = order[-1] == reach.value.ndim - 1
    return reach.move_entries(call.value, reach.rows if kept else None, order.index(reach.batch))


@rule_for("flip", "roll", shown=False)
def _flip(call: Call) -> Reach:
    place, name = (2, "dims") if call.kind == "roll" else (1, "dims")
    axes = _integers((call.args[place:] or call.kwargs.get(name),))
    if not axes or any(axis % call.value.ndim == 0 for axis in axes):
        raise call.refuse("samples must not be exchanged", f"dims {axes or None}", "Name the other axes")
    return call.input.move_entries(call.value, call.input.rows)


@rule_for("chunk", "split", "unbind", "tensor_split", shown=False, moves=True)
def _pieces(call: Call) -> tuple[Reach, ...]:
    reach: Reach = call.input
    axis = call.argument(1, "dim", 0) if call.kind == "unbind" else call.argument(2, "dim", 0)
    batch = _batch_after(call, reach, axis, dropped=call.kind == "unbind")
    last = call.kind != "unbind" or axis % reach.value.ndim != reach.value.ndim - 1
    return tuple(reach.move_entries(piece, reach.rows if last else None, batch) for piece in call.value)


def _batch_after(call: Call, reach: Reach, axis: int, *, dropped: bool) -> int:
    axis %= reach.value.ndim
    if axis == reach.batch:
        raise call.refuse("the batch must not be split", f"dim {axis}", "Split another axis")
    return reach.batch - 1 if dropped and axis < reach.batch else reach.batch


@rule_for("getitem", "__getitem__", "select", "narrow", shown=False, moves=True, several=True)
def _item(call: Call) -> Any:
    operand, index = call.input, call.argument(1, "dim")
    if isinstance(operand, tuple):
        return operand[index]
    if call.kind in ("select", "narrow"):
        batch = _batch_after(call, operand, index, dropped=call.kind == "select")
        last = call.kind == "narrow" or index % operand.value.ndim != operand.value.ndim - 1
        return operand.move_entries(call.value, operand.rows if last else None, batch)
    parts = list(index) if isinstance(index, tuple) else [index]
    if not all(
        part is None or part is Ellipsis or (isinstance(part, (int, slice)) and not isinstance(part, bool))
        for part in parts
    ):
        raise call.refuse("only slices and numbers index", f"{index!r}", "Write x[:, ...]")
    if Ellipsis in parts:
        place, used = parts.index(Ellipsis), sum(part is not None and part is not Ellipsis for part in parts)
        parts[place : place + 1] = [slice(None)] * (operand.value.ndim - used)
    parts += [slice(None)] * (operand.value.ndim - sum(part is not None for part in parts))
    batch, axis, new = -1, 0, 0
    for part in parts:
        if part is None:
            new += 1
            continue
        if axis == operand.batch and part == slice(None):
            batch = new
        axis, new = axis + 1, new + isinstance(part, slice)
    if batch < 0:
        raise call.refuse("the batch must stay whole", f"{index!r}", "Write x[:, ...]")
    # what is left of a row, or one of its entries, is no longer than the row; a column may be
    last = [part for part in parts if part is not None][-1]
    return operand.move_entries(call.value, operand.rows if isinstance(last, slice) else None, batch)


@rule_for("cat", "concat", "concatenate", "stack", "hstack", several=True)
def _concatenate(call: Call) -> Reach:
    parts = call.input
    axis = call.argument(1, "dim", 1 if call.kind == "hstack" else 0)
    if axis % call.value.ndim == 0:
        raise call.refuse("samples must not be joined", f"dim {axis}", "Join another axis")
    reaches = [part for part in parts if isinstance(part, Reach)]
    fixed = max((float(part.abs().max()) for part in parts if isinstance(part, Tensor)), default=0.0)
    peak = max(fixed, *(part.peak for part in reaches))
    rows = math.inf
    if len(reaches) == len(parts):
        last = axis % call.value.ndim == call.value.ndim - 1
        rows = math.sqrt(sum(part.rows**2 for part in reaches)) if last else max(part.rows for part in reaches)
    return join_reaches(reaches, call.value, peak, rows)


@rule_for("expand", "expand_as", "repeat", "tile", "broadcast_to", several=True)
def _repeat(call: Call) -> Outcome:
    reach = call.input
    if isinstance(reach, Tensor):  # a constant takes the shape of something that depends on the input
        return reach
    return _repeated(call, call.value.numel() / reach.value.numel())


@rule_for("repeat_interleave")
def _repeat_interleave(call: Call) -> Reach:
    """Entries are repeated each its own number of times: the largest one counts."""
    repeats, axis = call.argument(1, "repeats"), call.argument(2, "dim")
    if axis is None or axis % call.value.ndim == 0:
        raise call.refuse("samples must not be repeated", f"dim {axis}", "Name another axis")
    return _repeated(call, float(torch.as_tensor(repeats).max()))


def _repeated(call: Call, times: float) -> Reach:
    if call.input.value.ndim != call.value.ndim:
        raise call.refuse("repeating must keep the axes", f"shape {tuple(call.value.shape)}", "Use unsqueeze first")
    return call.input.pass_through(constant_gain(math.sqrt(times), call.input.peak), call.value)


@rule_for("mean", "sum", "amax", "amin", "norm", "logsumexp")
def _reduce(call: Call) -> Reach:
    reach: Reach = call.input
    place = 2 if call.kind == "norm" else 1
    axes = _integers((call.argument(place, "dim", call.kwargs.get("axis")),))
    if not axes or any(axis % reach.value.ndim == 0 for axis in axes):
        raise call.refuse("a reduction must name its axes and spare the batch", f"dim {axes or None}", "Give dim=")
    if call.kind == "norm" and call.argument(1, "p", 2) not in (2, 2.0, "fro", None):
        raise call.refuse("norm has a rule for p = 2 only", f"p = {call.argument(1, 'p')}")
    count = math.prod(reach.value.shape[axis] for axis in axes)
    factor = {"mean": 1 / math.sqrt(count), "sum": math.sqrt(count)}.get(call.kind, 1.0)
    peak = {"sum": count * reach.peak, "norm": math.sqrt(count) * reach.peak}.get(call.kind, reach.peak)
    if call.kind == "logsumexp":
        peak = reach.peak + math.log(count)
    return reach.pass_through(constant_gain(factor, peak), call.value)


@rule_for(nn.Softmax, "softmax")
def _softmax(call: Call) -> Reach:
    axis = call.option(1, "dim")
    if axis is None or axis % call.value.ndim == 0:
        raise call.refuse("softmax must name its axis and spare the batch", f"dim {axis}", "Give dim=-1")
    last = axis % call.value.ndim == call.value.ndim - 1
    return call.input.pass_through(constant_gain(constants.SOFTMAX, 1.0, 1.0 if last else math.inf), call.value)


@rule_for(nn.LogSoftmax, "log_softmax")
def _log_softmax(call: Call) -> Reach:
    axis = call.option(1, "dim")
    if axis is None or axis % call.value.ndim == 0:
        raise call.refuse("log_softmax must name its axis and spare the batch", f"dim {axis}", "Give dim=-1")
    return call.input.pass_through(constant_gain(constants.log_softmax_constant(call.value.shape[axis])), call.value)


@rule_for(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d, "max_pool1d", "max_pool2d", "max_pool3d")
def _max_pool(call: Call) -> Reach:
    axes, kernel = call.check_space(), call.option(1, "kernel_size")
    settings = (kernel, call.option(2, "stride") or kernel, call.option(4, "dilation", 1))
    sizes = zip(*(_per_axis(setting, axes) for setting in settings), strict=True)
    factor = math.prod(constants.max_pool_constant(k, s, d) for k, s, d in sizes)
    return call.input.pass_through(constant_gain(factor, call.input.peak), call.value)


@rule_for(nn.AvgPool1d, nn.AvgPool2d, nn.AvgPool3d, "avg_pool1d", "avg_pool2d", "avg_pool3d")
def _average_pool(call: Call) -> Reach:
    if call.option(6, "divisor_override") is not None:
        got = f"{call.option(6, 'divisor_override')}"
        raise call.refuse("average pooling has a rule without divisor_override only", got)
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
        windows = torch.zeros(n, dtype=torch.long)
        for i in range(m):
            windows[i * n // m : -(-(i + 1) * n // m)] += 1
        factor *= math.sqrt(int(windows.max()))
    return call.input.pass_through(constant_gain(factor, call.input.peak), call.value)


@rule_for(nn.Upsample, nn.UpsamplingNearest2d, nn.UpsamplingBilinear2d)
def _upsample(call: Call) -> Reach:
    layer, sizes = call.module, call.value.shape[2:]
    mode = {"bilinear": "linear", "trilinear": "linear"}.get(layer.mode, layer.mode)
    if mode not in ("nearest", "linear", "nearest-exact"):
        raise call.refuse("upsampling has a rule for nearest and linear modes", f"mode {layer.mode!r}")

    def along(axis: int, eye: Tensor) -> Tensor:
        """Ask the layer itself, on inputs constant along the other axes: torch rounds places in ways of its own."""
        wide = eye.movedim(-1, 1).reshape(len(eye), 1, *(len(eye) if i == axis else 1 for i in range(len(sizes))))
        out = layer(wide.expand(-1, -1, *call.input.value.shape[2:]))
        return out[(slice(None), slice(None), *(slice(None) if i == axis else 0 for i in range(len(sizes))))]

    return _separable(call, along)


@rule_for(nn.ZeroPad1d, nn.ZeroPad2d, nn.ZeroPad3d, nn.ConstantPad1d, nn.ConstantPad2d, nn.ConstantPad3d, "pad")
def _pad(call: Call) -> Reach:
    if call.argument(2, "mode", "constant") != "constant":
        raise call.refuse("pad has a rule for constants only", f"mode {call.argument(2, 'mode')!r}")
    pad = call.argument(1, "pad") if call.module is None else call.module.padding
    if len(_integers((pad,))) >= 2 * call.value.ndim:
        raise call.refuse("the batch must not be padded", f"pad {pad}")
    value = call.option(3, "value", 0.0) or 0.0
    return call.input.pass_through(constant_gain(1.0, max(call.input.peak, abs(value))), call.value)


def _separable(call: Call, along: Callable[[int, Tensor], Tensor]) -> Reach:
    """Return the exact norm of a map that acts on each spatial axis by its own matrix."""
    reach: Reach = call.input
    factor, largest = 1.0, 1.0
    for axis, size in enumerate(reach.value.shape[2:]):
        matrix = along(axis, torch.eye(size, dtype=torch.float64).unsqueeze(1)).squeeze(1)
        factor *= float(torch.linalg.matrix_norm(matrix, 2)) * (1 + 1e-11)
        largest *= float(matrix.abs().sum(0).max())
    return reach.pass_through(replace(constant_gain(factor), peak=largest * reach.peak), call.value)


def _per_axis(value: Any, axes: int) -> tuple[int, ...]:
    return tuple(value) if isinstance(value, Sequence) else (value,) * axes


def _integers(tree: Any) -> list[int]:
    if isinstance(tree, bool):
        return []
    if isinstance(tree, int):
        return [tree]
    return [number for item in tree for number in _integers(item)] if isinstance(tree, (tuple, list)) else []
