"""Rules of normalizers that use the statistics of the sample itself: three different constants each."""

import math
from dataclasses import replace

import torch
from torch import Tensor, nn

from normgauge import nn as normalizers
from normgauge.measure.lipschitz.reach import Form, Reach, three_gains
from normgauge.measure.lipschitz.rules import Call, rule_for
from normgauge.theory.lipschitz_constants import normalized_slope

_EPS64 = torch.finfo(torch.float64).eps


def _bound_normalizer(
    call: Call, blocks: Tensor, gains: Tensor | None, offset: Tensor | None, eps: float, *, centred: bool, last: bool
) -> Reach:
    """Return the bounds of `gain (x - mean) / sqrt(var + eps) + offset` on blocks, `[N, blocks, entries]`.

    `gains` broadcast against the blocks; `last`: a block is a row, so that lengths of rows are bounded.
    """
    reach: Reach = call.input
    size = blocks.shape[-1]
    means = blocks.mean(-1) if centred else torch.zeros_like(blocks[..., 0])
    deviation = (blocks - means[..., None]).square().mean(-1).sqrt()
    # cancellation in x - mean may have made a deviation too large; what is left is a lower bound
    deviation = (deviation - 8 * _EPS64 * (means.abs() + deviation)).clamp_min(0.0)
    factors = torch.ones(()) if gains is None else gains.abs()
    largest = factors.expand(blocks.shape[-2:]).amax(-1) if factors.ndim else factors
    at = (largest * normalized_slope(deviation, torch.zeros(()), size, eps)).amax(-1)
    ball = (largest * normalized_slope(deviation, reach.spread[:, None], size, eps)).amax(-1)
    top = float(factors.max())
    everywhere = top / math.sqrt(eps) if eps > 0 else math.inf
    shift = 0.0 if offset is None else float(offset.abs().max())
    rows = top * math.sqrt(size) + (0.0 if offset is None else float(offset.double().norm())) if last else math.inf
    total = math.sqrt(blocks.shape[1] * size)
    gain = three_gains(at, ball, everywhere, top * math.sqrt(size) + shift, rows, reach=2 * top * total)
    return reach.pass_through(gain, call.value)


def _trailing(call: Call, axes: int, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool) -> Reach:
    value: Tensor = call.input.value
    blocks = value.reshape(1, -1, math.prod(value.shape[-axes:]))
    gains = None if weight is None else weight.detach().double().reshape(1, -1)
    return _bound_normalizer(call, blocks, gains, bias, eps, centred=centred, last=axes == 1)


@rule_for(nn.LayerNorm, normalizers.LayerNorm, "layer_norm", normalizer=True)
def _layer_norm(call: Call) -> Reach:
    shape, weight, bias = call.option(1, "normalized_shape"), call.option(2, "weight"), call.option(3, "bias")
    return _trailing(call, len(shape), weight, bias, call.option(4, "eps", 1e-5), centred=True)


@rule_for(nn.RMSNorm, normalizers.RMSNorm, "rms_norm", normalizer=True)
def _rms_norm(call: Call) -> Reach:
    shape, weight, eps = call.option(1, "normalized_shape"), call.option(2, "weight"), call.option(3, "eps")
    return _trailing(call, len(shape), weight, None, _EPS64 if eps is None else eps, centred=False)


def _bound_groups(
    call: Call, groups: int, weight: Tensor | None, bias: Tensor | None, eps: float, *, centred: bool = True
) -> Reach:
    value: Tensor = call.input.value
    blocks = value.reshape(1, len(value) * groups, -1)
    gains = None
    if weight is not None:
        places = value[0, 0].numel()
        gains = weight.detach().double().reshape(groups, -1).repeat_interleave(places, dim=1).repeat(len(value), 1)
    return _bound_normalizer(call, blocks, gains, bias, eps, centred=centred, last=value.ndim == 2 and groups == 1)


@rule_for(nn.GroupNorm, normalizers.GroupNorm, normalizers.ChannelLayerNorm, "group_norm", normalizer=True)
def _group_norm(call: Call) -> Reach:
    groups, weight, bias = call.option(1, "num_groups"), call.option(2, "weight"), call.option(3, "bias")
    return _bound_groups(call, groups, weight, bias, call.option(4, "eps", 1e-5))


@rule_for(normalizers.ChannelRMSNorm, normalizer=True)
def _channel_rms(call: Call) -> Reach:
    return _bound_groups(call, 1, call.module.weight, None, call.module.eps, centred=False)


@rule_for(nn.InstanceNorm1d, nn.InstanceNorm2d, nn.InstanceNorm3d, normalizers.InstanceNorm, normalizer=True)
def _instance_norm(call: Call) -> Reach:
    layer = call.module
    if layer.track_running_stats and not layer.training:
        raise call.refuse("InstanceNorm has a rule without running statistics", "track_running_stats=True")
    if not isinstance(layer, normalizers.InstanceNorm):
        call.check_space()
    return _bound_groups(call, call.value.shape[1], layer.weight, layer.bias, layer.eps)


def bound_written_norm(call: Call, reach: Reach, form: Form) -> Reach:
    """Bound x / max(sqrt(factor mean(x^2) + eps) + outside, floor) over some axes: slope at most 1 / that divisor."""
    axes = [axis % reach.value.ndim for axis in form.axes]
    kept = [axis for axis in range(reach.value.ndim) if axis not in axes]
    size = math.prod(reach.value.shape[axis] for axis in axes)
    sizes = reach.value.permute(*kept, *axes).reshape(-1, size).square().mean(-1).sqrt() * (1 - 8 * _EPS64)

    def slope(spread: float | Tensor) -> Tensor:
        left = (sizes - spread / math.sqrt(size)).clamp_min(0.0)
        return (1 / ((form.factor * left.square() + form.eps).sqrt() + form.outside).clamp_min(form.floor)).amax()

    least = max(math.sqrt(form.eps) + form.outside, form.floor)
    top = math.sqrt(size / form.factor)  # no entry and no block is longer
    rows = top if axes == [reach.value.ndim - 1] else math.inf
    movement = 2 * top * math.sqrt(len(sizes))
    everywhere = 1 / least if least else math.inf
    gain = three_gains(slope(0.0), slope(reach.spread), everywhere, top, rows, reach=movement)
    return replace(reach.pass_through(gain, call.value), form=replace(form, kind="written", base=reach))
