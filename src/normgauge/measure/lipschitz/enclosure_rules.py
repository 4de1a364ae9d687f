"""Enclosures of steps that are not linear: functions of one entry, softmax, attention, norms and maxima."""

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from normgauge.measure.lipschitz import enclosure
from normgauge.measure.lipschitz.bands import Band, chord, product_band, square_band
from normgauge.measure.lipschitz.enclosure import ROUND, WIDE, Enclosed, Step, bilinear, encloses, fixed, norm_bound
from normgauge.measure.lipschitz.layer_rules import logit_mask
from normgauge.theory.lipschitz_constants import SOFTMAX

_ZERO = (0.0,)
# Where the slope is largest, smallest or jumps; in between it rises or falls.
_TURNS: dict[str, Callable[[Step], tuple[float, ...]]] = {
    **dict.fromkeys(("relu", "leaky_relu", "prelu", "abs", "tanh", "sigmoid", "erf", "atan"), lambda _: _ZERO),
    **dict.fromkeys(("elu", "selu", "celu", "square"), lambda _: _ZERO),
    **dict.fromkeys(("exp", "log_sigmoid"), lambda _: ()),
    **dict.fromkeys(("hardswish", "hardsigmoid"), lambda _: (-3.0, 3.0)),
    "relu6": lambda _: (0.0, 6.0),
    "gelu": lambda step: _both(1.4185040087908 if step.kwargs.get("approximate", "none") == "tanh" else math.sqrt(2.0)),
    "silu": lambda _: _both(2.39935728052),
    "mish": lambda _: (-2.2563763963608, 1.4905711794854),
    "softplus": lambda step: (float(step.argument(2, "threshold", 20.0)) / float(step.argument(1, "beta", 1.0)),),
    "softshrink": lambda step: _both(float(step.argument(1, "lambd", 0.5))),
    "hardtanh": lambda step: (float(step.argument(1, "", -1.0)), float(step.argument(2, "", 1.0))),
    "clamp": lambda step: tuple(float(x) for x in (*step.args[1:], *step.kwargs.values()) if x is not None),
}
_TURNS |= dict.fromkeys(("clamp_min", "clamp_max", "clip"), _TURNS["clamp"])


def _both(turn: float) -> tuple[float, float]:
    return -turn, turn


@encloses(*_TURNS)
def _activation(step: Step) -> Any:
    fixed(step, *step.args[1:], *step.kwargs.values())
    function, turns = lambda x: step.function(x, *step.args[1:], **step.kwargs), _TURNS[step.kind](step)
    return enclosure.entrywise(step, step.args[0], function, turns)


@encloses("sqrt", "rsqrt", "log", "reciprocal", "pow", "log1p")
def _positive(step: Step) -> Any:
    exponent = step.args[1] if step.kind == "pow" else 0.5
    fixed(step, exponent)
    positive = not (float(exponent).is_integer() and float(exponent) >= 1)
    outcome = enclosure.entrywise(
        step, step.args[0], lambda x: step.function(x, *step.args[1:]), _ZERO, positive=positive
    )
    even = step.kind == "pow" and float(exponent) % 2 == 0
    return replace(outcome, low=outcome.low.clamp_min(0.0)) if even else outcome


# -- softmax, attention, norms, maxima --------------------------------------------------------------------------------


@encloses("softmax", "log_softmax", "logsumexp")
def _softmax(step: Step) -> Any:
    x = step.args[0]
    axis = step.args[1][0] if isinstance(step.args[1], (list, tuple)) else step.args[1]
    axis %= x.centre.ndim
    moved = x.map(lambda t: t.movedim(axis, -1), lambda t: t.movedim(axis, -2))
    p, inner, width = _weigh(step, moved)
    if step.kind == "softmax":
        p = p.map(lambda t: t.movedim(-1, axis), lambda t: t.movedim(-2, axis))
        return replace(p, centre=step.value)
    if step.kind == "log_softmax":
        return step.enclose(inner.movedim(-2, axis), width.movedim(-2, axis))
    mid, rad = (moved.mid - inner)[..., 0, :], (moved.rad + width)[..., 0, :]  # the same for all entries
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
    rad, off = (p + spread) * width + spread * inner.abs(), norm_bound(deviation) + SOFTMAX * x.off
    outcome = step.enclose(p * inner, rad, middle, (low, high), off)
    if x.paths is None:
        return step.track(outcome, None), inner, width
    largest, unit = p + spread, p / p.sum(-2, keepdim=True)
    reach = (largest.norm(dim=-2) * spread.norm(dim=-2) + spread.amax(-2)) * (
        1 + math.sqrt(p.shape[-2]) * unit.norm(dim=-2)
    )
    fresh = norm_bound(deviation) + (float(reach.amax()) * x.off if x.off else 0.0)
    paths = p * (x.paths - (unit * x.paths).sum(-2, keepdim=True))
    return step.track(outcome, paths, torch.full_like(middle, fresh * ROUND)), inner, width


def _share(own: Tensor, others: Tensor) -> Tensor:
    """Return exp(own_i) / (exp(own_i) + sum of exp(others_j) over j != i)."""
    gaps = others[..., None, :] - own[..., :, None]
    gaps = torch.where(torch.eye(own.shape[-1], dtype=torch.bool), 0.0, gaps)
    shares = 1 / gaps.exp().sum(-1)
    return torch.where(torch.isneginf(own), 0.0, torch.nan_to_num(shares, 0.0)).clamp(0.0, 1.0)


@encloses("scaled_dot_product_attention")
def _attention(step: Step) -> Any:
    q, k, v = (step.argument(i, name) for i, name in enumerate(("query", "key", "value")))
    fixed(step, step.argument(3, "attn_mask"))
    if step.argument(4, "dropout_p", 0.0):
        raise step.refuse("evaluation mode", "dropout")
    columns = next(x.mid.shape[-1] for x in (q, k, v) if isinstance(x, Enclosed))
    q, k, v = (x if isinstance(x, Enclosed) else enclosure.constant(x, columns) for x in (q, k, v))
    if step.kwargs.get("enable_gqa"):
        times, axis = q.centre.shape[-3] // k.centre.shape[-3], k.centre.ndim - 3
        k, v = (x.map(*[lambda t: t.repeat_interleave(times, axis)] * 2) for x in (k, v))
        k, v = (replace(x, off=x.off * math.sqrt(times)) for x in (k, v))
    scale = step.kwargs.get("scale")
    scale = 1 / math.sqrt(q.centre.shape[-1]) if scale is None else float(scale)
    if scale < 0:  # products of absolute values would become negative
        raise step.refuse("a scale is not negative", str(scale))
    logits = bilinear(
        step, q, k, lambda a, b: scale * a @ b.transpose(-1, -2), lambda m, w: scale * enclosure.largest_matrix(m, w)
    )
    shift = logit_mask(step, logits.centre.shape[-2:])
    weights, _, _ = _weigh(step, logits.map(lambda t: t + shift, lambda t: t))
    return bilinear(step, weights, v, torch.matmul, enclosure.largest_matrix)


@encloses("layer_norm", "rms_norm", "group_norm")
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
    fixed(step, gain, bias)
    width = x.mid.shape[-1]
    flat = x.map(lambda t: t.reshape(blocks), lambda t: t.reshape(*blocks, t.shape[-1]))
    y = _standardize(step, flat, float(eps), centred=step.kind != "rms_norm")
    factors = torch.ones(1, dtype=torch.float64) if gain is None else gain.double().reshape(shape)
    shift = 0.0 if bias is None else bias.double().reshape(shape)
    own = step.value.shape
    low, high, base, err = (t.reshape(own) for t in (y.low, y.high, y.band.base, y.band.err))
    ends = [end * factors + shift for end in (low, high)]
    limits, off = (torch.minimum(*ends), torch.maximum(*ends)), y.off * float(factors.abs().amax())
    mid, slope = (t.reshape(*own, width) * factors[..., None] for t in (y.mid, y.band.slope))
    band = Band(base * factors + shift, slope, err * factors.abs())
    outcome = step.enclose(mid, y.rad.reshape(*own, width) * factors.abs()[..., None], None, limits, off, band)
    paths = None if y.paths is None else y.paths.reshape(*own, y.paths.shape[-1]) * factors[..., None]
    return step.track(outcome, paths)


def _standardize(step: Step, x: Enclosed, eps: float, *, centred: bool, floor: float = 0.0) -> Enclosed:
    """Return y = c / sqrt(mean(c^2) + eps) along the last axis: dy = s (dc - y mean(y dc)), s = 1 / sqrt(...)."""
    c = x
    if centred:
        centre = x.centre - x.centre.mean(-1, keepdim=True)
        mean = x.mid.mean(-2, keepdim=True)
        band = x.band.centred()
        c = step.enclose(x.mid - mean, x.rad + x.rad.mean(-2, keepdim=True), centre, off=x.off, band=band)
        c = c if x.paths is None else step.track(c, x.paths - x.paths.mean(-2, keepdim=True))
    size = c.centre.shape[-1]
    power = c.centre.square().mean(-1)
    ends = torch.stack([c.low, c.high]).abs()
    smallest = torch.where((c.low < 0) & (c.high > 0), 0.0, ends.amin(0))
    # the root mean square moves by at most the movement of the block / sqrt(size)
    movement = torch.maximum(c.high - c.centre, c.centre - c.low).norm(dim=-1)
    if min(c.mid.shape[-2:]) <= WIDE:
        movement = movement.clamp_max(step.radius * (torch.linalg.matrix_norm(c.mid, 2) + c.off) * (1 + 1e-11))
    movement = movement / math.sqrt(size)
    root = power.sqrt()
    low = torch.maximum(smallest.square().mean(-1), (root - movement).clamp_min(0.0).square())
    high = torch.minimum(ends.amax(0).square().mean(-1), (root + movement).square())
    slope_mid = 2 * (c.centre[..., None] * c.mid).mean(-2)
    reach = (ends.amax(0) - c.centre.abs()).clamp_min(0.0) + (c.high - c.low) / 2
    slope_rad = 2 * ((c.centre.abs() + reach)[..., None] * c.rad + reach[..., None] * c.mid.abs()).mean(-2)
    by_slope = step.radius * (slope_mid.norm(dim=-1) + slope_rad.norm(dim=-1)) * ROUND
    low, high = torch.maximum(low, power - by_slope), torch.minimum(high, power + by_slope)
    mean_square = square_band(c.band, step.radius, WIDE)
    lower, upper = mean_square.limits(step.radius)
    low, high = torch.fmax(low, lower), torch.fmin(high, upper)
    low, high = torch.minimum(low, power).clamp_min(0.0), torch.maximum(high, power)
    if not bool((low + eps > floor).all()):
        raise step.refuse("a block must not become constant without eps, nor as small as its floor", "one that may")
    inverse = [(end + eps).rsqrt()[..., None] for end in (high, low)]
    value = c.centre * (power + eps).rsqrt()[..., None]
    products = torch.stack([end * factor for end in (c.low, c.high) for factor in inverse])
    limit = math.sqrt(size)
    y_low, y_high = products.amin(0).clamp(-limit, limit), products.amax(0).clamp(-limit, limit)
    points = torch.stack([low, high]) + eps
    root_band = chord(mean_square, (low, high), -0.5 * points.pow(-1.5), points.rsqrt()).unsqueeze()
    slope = root_band.slope * c.band.base[..., None] + root_band.base[..., None] * c.band.slope
    band = product_band(root_band, c.band, slope, torch.mul, step.radius)
    lower, upper = band.limits(step.radius)
    y_low, y_high = torch.fmax(y_low, torch.fmin(lower, value)), torch.fmin(y_high, torch.fmax(upper, value))
    s, s_width = ((inverse[0] + inverse[1]) / 2)[..., None], ((inverse[1] - inverse[0]) / 2)[..., None]
    t_mid = (value[..., None] * c.mid).mean(-2, keepdim=True)
    inner = c.mid - value[..., None] * t_mid
    small = min(c.mid.shape[-2:]) <= WIDE
    norms = [torch.linalg.matrix_norm(t, 2) if small else t.norm(dim=(-2, -1)) for t in (c.mid, inner)]
    y = c
    for number in range(3):  # the limits of y are tightened by its own Jacobian
        width = torch.maximum(y_high - value, value - y_low)
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
        rad = s * spread + s_width * (inner.abs() + spread)
        y = step.enclose(s * inner, rad, value, (y_low, y_high), off, band)
        y_low, y_high = y.low, y.high
    if c.paths is None:
        return y
    turn = (s_width[..., 0, 0] + inverse[1][..., 0] * d * (2 * value.norm(dim=-1) + d) / size).amax()
    fresh = float(moved) * (1 + 1e-11) + (float(turn) * c.off if c.off else 0.0)
    tracked = s * (c.paths - value[..., None] * (value[..., None] * c.paths).mean(-2, keepdim=True))
    return step.track(y, tracked, torch.full_like(value, fresh * ROUND))


@encloses("written")
def _written_norm(step: Step) -> Any:
    """Return x / sqrt(factor mean(x^2) + eps), put together from its parts; the root above its floor, if it has one."""
    x, form = step.args
    order = [*(i for i in range(x.centre.ndim) if i not in form.axes), *form.axes]
    count, last = math.prod(x.centre.shape[axis] for axis in form.axes), x.centre.ndim
    back, shape = [order.index(i) for i in range(last)], [x.centre.shape[i] for i in order]
    flat = x.map(
        lambda t: t.permute(order).reshape(-1, count), lambda t: t.permute(*order, last).reshape(-1, count, t.shape[-1])
    )
    floor, scale = form.floor**2 / form.factor, 1 / math.sqrt(form.factor)
    y = _standardize(step, flat, form.eps / form.factor, centred=False, floor=floor)
    y = y.map(
        lambda t: scale * t.reshape(shape).permute(back),
        lambda t: scale * t.reshape(*shape, t.shape[-1]).permute(*back, last),
    )
    return replace(y, centre=step.value, off=scale * y.off)


@encloses("linalg_vector_norm")
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
    low, high = (part.reshape(step.value.shape) for part in (low, high))
    mid, rad = (part.reshape(*step.value.shape, -1) for part in (mid, rad))
    off = norm_bound((width * x.mid.abs()).sum(axes)) + x.off
    return step.enclose(mid, rad, None, (low, high), off)


def _largest(step: Step, x: Enclosed, axis: int, value: Tensor, times: float = 1.0) -> Enclosed:
    """Return the maximum along one axis: its slope is that of one of the entries that can be largest."""
    best = x.low.amax(axis, keepdim=True)
    possible = (x.high >= best)[..., None]

    def ends(rad: Tensor) -> tuple[Tensor, Tensor]:
        top = torch.where(possible, x.mid + rad, -math.inf).amax(axis)
        return top, torch.where(possible, x.mid - rad, math.inf).amin(axis)

    top, bottom = ends(torch.zeros_like(x.rad))
    mid, (high, low) = (top + bottom) / 2, ends(x.rad)
    off = norm_bound((top - bottom) / 2) + (x.off * times if x.off else 0.0)
    limits = (x.low.amax(axis), x.high.amax(axis))
    return step.enclose(mid, torch.maximum(high - mid, mid - low), value, limits, off)


@encloses("amax", "max", "amin", "min")
def _extreme(step: Step) -> Any:
    x, axes = step.args[0], step.argument(1, "dim")
    several = isinstance(step.value, (tuple, list))
    axes = list(range(x.centre.ndim)) if axes is None else [axes] if isinstance(axes, int) else list(axes)
    fixed(step, *axes)
    if "min" in step.kind:
        x = Enclosed(-x.centre, -x.high, -x.low, -x.mid, x.rad, x.band)  # whose band is not read
    for axis in sorted((axis % x.centre.ndim for axis in axes), reverse=True):
        x = _largest(step, x, axis, x.centre.amax(axis))
    value = step.value[0] if several else step.value
    sign = -1.0 if "min" in step.kind else 1.0
    shape = (*value.shape, x.mid.shape[-1])
    outcome = step.enclose((sign * x.mid).reshape(shape), x.rad.reshape(shape), value, off=x.off)
    return (outcome, None) if several else outcome


@encloses("max_pool1d", "max_pool2d")
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
    places, outside, own = windows.clamp_min(0), windows < 0, step.value.shape
    seen = x.map(
        lambda t: t.flatten(2)[:, :, places].masked_fill(outside, -math.inf), lambda t: t.flatten(2, -2)[:, :, places]
    )
    times = math.sqrt(int(windows[windows >= 0].flatten().bincount().max()))  # windows an entry stands in
    pooled = _largest(step, seen, 2, step.value.flatten(2), times)
    mid, rad = (t.reshape(*own, x.mid.shape[-1]) for t in (pooled.mid, pooled.rad))
    return step.enclose(mid, rad, None, (pooled.low.reshape(own), pooled.high.reshape(own)), pooled.off)
