"""Rules of layers: linear ones, folded where they meet, normalizers and attention.

Normalizers are affine in evaluation, or use the statistics of the sample itself and have three constants each.
Attention is bounded near the data and on a ball, and globally only after a normalizer.
"""

import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge import nn as normalizers
from normgauge.measure.lipschitz import rules
from normgauge.measure.lipschitz.rules import Call, Folded, Form, Pending, Reach, rule_for
from normgauge.network import folded_affine, stored_affine
from normgauge.theory.lipschitz_constants import attention_slopes, normalized_slope

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PER_CHANNEL = (
    *(normalizers.BatchRenorm, normalizers.FrozenBatchNorm, normalizers.GhostBatchNorm, normalizers.LpBatchNorm),
    *(normalizers.NoisyBatchNorm, normalizers.SyncedBatchNorm, normalizers.StatNorm),
)
_BATCH = (nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, normalizers.BatchNorm)
_EPS64 = torch.finfo(torch.float64).eps


@rule_for(nn.Linear, "linear", folds=True)
def _linear(call: Call) -> Pending:
    weight, bias = call.option(1, "weight"), call.option(2, "bias")
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        raise call.refuse("weights must not depend on the input", "a weight that does")
    return _through_matrix(call, call.input, weight, bias)


def _through_matrix(call: Call, operand: Any, weight: Tensor, bias: Tensor | None) -> Pending:
    matrix = _check_finite(call, weight)
    if matrix.ndim != 2:
        got = f"shape {tuple(matrix.shape)}"
        raise call.refuse("weights must be [outputs, inputs]", got, "Add the axis of outputs")
    offset = torch.zeros(len(matrix), dtype=torch.float64) if bias is None else bias.detach().double()
    folded = operand.folded.then_matrix(call.name, matrix, offset) if isinstance(operand, Pending) else None
    if folded is None:
        folded = Folded(rules.certify(operand).drop_value(), (call.name,), call.norms, matrix, offset)
    return Pending(call.value, folded)


@rule_for(*_CONVOLUTIONS, folds=True)
def _convolution(call: Call) -> Pending:
    if call.module.transposed and call.module(call.input.value).shape != call.value.shape:
        raise call.refuse("a transposed convolution has a rule without output_size", "one", "Use output_padding")
    return _through_convolution(call, call.input, call.module, call.module.weight)


@rule_for("conv1d", "conv2d", "conv3d", folds=True)
def _convolution_of_function(call: Call) -> Pending:
    weight = call.argument(1, "weight")
    if not isinstance(weight, Tensor):
        raise call.refuse("weights must not depend on the input", "a weight that does")
    groups = call.argument(6, "groups", 1)
    sizes = (weight.shape[1] * groups, weight.shape[0], tuple(weight.shape[2:]))
    geometry = [call.argument(place, name, 1) for place, name in ((3, "stride"), (5, "dilation"))]
    options = {"padding": call.argument(4, "padding", 0), "groups": groups, "bias": False, "device": "meta"}
    make: Any = _CONVOLUTIONS[weight.ndim - 3]
    layer = make(*sizes, geometry[0], dilation=geometry[1], **options)
    return _through_convolution(call, call.input, layer, weight)


def _through_convolution(call: Call, operand: Any, layer: nn.Module, weight: Tensor) -> Pending:
    kernel = _check_finite(call, weight)
    call.check_space()
    size = tuple(operand.value.shape[2:])
    name = f"{call.name} on {size}"  # a layer that is called twice may see two sizes, and has two norms
    folded = operand.folded.then_convolution(name, layer, kernel, size) if isinstance(operand, Pending) else None
    if folded is None:
        folded = Folded(rules.certify(operand).drop_value(), (name,), call.norms, kernel, layer=layer, size=size)
    return Pending(call.value, folded)


rule_for(_BatchNorm, *_BATCH, folds=True, normalizer=True)(lambda call: _per_channel(call, *stored_affine(call.module)))


@rule_for(*_PER_CHANNEL, folds=True, normalizer=True)
def _stored_statistics(call: Call) -> Pending:
    """Affine per channel in evaluation: two points say which map it is."""
    layer = call.module
    if getattr(layer, "axes", "batch") != "batch":
        raise call.refuse("StatNorm has a rule for statistics of the batch only", f"axes={layer.axes!r}")
    if layer.training and not isinstance(layer, normalizers.FrozenBatchNorm):
        raise call.refuse("statistics of the batch make samples see each other", "training mode", "Call model.eval()")
    zero = torch.zeros(1, layer.num_features, dtype=torch.float64)
    shift = layer(zero)[0]
    return _per_channel(call, layer(zero + 1)[0] - shift, shift)


@rule_for(normalizers.WhiteningNorm, folds=True, normalizer=True)
def _whitening(call: Call) -> Pending | Reach:
    layer = call.module
    if layer.training:
        raise call.refuse("statistics of the batch make samples see each other", "training mode", "Call model.eval()")
    eye = torch.eye(layer.num_features, dtype=torch.float64)
    shift = layer(torch.zeros_like(eye)[:1])[0]
    matrix = (layer(eye) - shift).T
    if call.value.ndim == 2:
        return _through_matrix(call, call.input, matrix, shift)
    return rules.certify(call.input).pass_through(rules.one_gain(_spectral(matrix)), call.value)


def _per_channel(call: Call, factors: Tensor, shift: Tensor) -> Pending:
    operand = call.input
    if not bool(torch.isfinite(factors).all()):
        raise call.refuse("its factors must be finite", "inf or nan", "Look at the stored variance")
    axis = -1 if call.value.ndim == 2 else 1
    folded = operand.folded.then_factors(call.name, factors, shift, axis) if isinstance(operand, Pending) else None
    if folded is None:
        folded = Folded(rules.certify(operand).drop_value(), (call.name,), call.norms, factors, axis=axis)
    return Pending(call.value, folded)


@rule_for("batch_norm", folds=True, normalizer=True)
def _batch_norm_function(call: Call) -> Pending:
    gain, bias, mean, variance = call.args[1:5]
    if call.argument(5, "training", False) or not isinstance(variance, Tensor):
        raise call.refuse("BatchNorm must use stored statistics", "training=True", "Call model.eval() first")
    return _per_channel(call, *folded_affine(mean, variance, gain, bias, call.argument(7, "eps", 1e-5)))


@rule_for("native_batch_norm_legit_no_training", folds=True, normalizer=True)
def _batch_norm_without_training(call: Call) -> tuple[Pending, None, None]:
    gain, bias, mean, variance = call.args[1:5]
    inner = replace(call, value=call.value[0])
    return _per_channel(inner, *folded_affine(mean, variance, gain, bias, call.args[6])), None, None


@rule_for("addmm", folds=True, several=True)
def _addmm(call: Call) -> Pending:
    bias, operand, weight = call.args[:3]
    if not isinstance(weight, Tensor) or not isinstance(bias, Tensor) or {*call.kwargs.values()} - {1}:
        raise call.refuse("weights must not depend on the input, nor be scaled", "addmm of another kind")
    return _through_matrix(call, operand, weight.T, bias.expand(weight.shape[1]))


@rule_for("matmul", "bmm", "mm", several=True)
def _matmul(call: Call) -> Reach | Pending:
    a, b = call.argument(0, "input"), call.argument(1, "other", call.kwargs.get("mat2"))
    if isinstance(a, Reach) and isinstance(b, Reach):
        return _bilinear(call, a, b)
    operand, other = (a, b) if isinstance(a, Reach) else (b, a)
    if isinstance(other, Tensor) and other.ndim == 1:
        return operand.pass_through(rules.one_gain(float(other.double().norm())), call.value)
    if not isinstance(other, Tensor) or operand.value.ndim != call.value.ndim:
        raise call.refuse("a product must keep the axes", f"shape {tuple(call.value.shape)}", "Use a 2-d constant")
    if operand is a and other.ndim == 2:
        matrix = _check_finite(call, other.T)
        return Pending(call.value, Folded(operand.drop_value(), (call.name,), call.norms, matrix, None))
    matrices = math.prod(call.value.shape[:-2]) // math.prod(operand.value.shape[:-2])  # that one operand meets
    return operand.pass_through(rules.one_gain(math.sqrt(matrices) * _spectral(other.double())), call.value)


def _bilinear(call: Call, a: Reach, b: Reach) -> Reach:
    """d(A B) = dA B + A dB, in spectral norms: at the data, with the movement on the ball, or by lengths of rows."""
    if min(a.value.ndim, b.value.ndim) < 2 or a.value.shape[:-2] != b.value.shape[:-2]:
        raise call.refuse("products of two tensors need equal leading axes", f"{tuple(a.value.shape)}")
    sizes = [torch.linalg.matrix_norm(x.value, 2).amax() * (1 + 1e-11) for x in (a, b)]
    limits = [x.rows * x.value.shape[-2] ** 0.5 for x in (a, b)]
    gains = [
        rules.three_gains(size, size + x.spread, limit) for size, x, limit in zip(sizes, (a, b), limits, strict=True)
    ]
    return rules.add_reaches([(a, gains[1]), (b, gains[0])], call.value, rows=a.rows * limits[1])


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2).max()) * (1 + 1e-11)


def _check_finite(call: Call, weight: Tensor) -> Tensor:
    if weight.is_complex() or not bool(torch.isfinite(weight).all()):
        raise call.refuse("weights must be real and finite", "complex, inf or nan", "Look at the step that made them")
    return weight.detach().double()


# -- attention ---------------------------------------------------------------------------------------------------------


class _Sizes(NamedTuple):
    """Largest query, keys and values as they spread around each row's mean, and the largest column sum of P."""

    queries: Tensor
    keys: Tensor
    values: Tensor
    share: Tensor

    def slopes(self, scale: float) -> tuple[Tensor, ...]:
        return attention_slopes(scale, self.keys, self.values, self.queries, self.share)


@rule_for("scaled_dot_product_attention", several=True)
def _attention(call: Call) -> Reach:
    query, key, value = call.argument(0, "query"), call.argument(1, "key"), call.argument(2, "value")
    if call.argument(4, "dropout_p", 0.0):
        raise call.refuse("attention must be in evaluation mode", "dropout", "Call model.eval()")
    if isinstance(call.argument(3, "attn_mask"), Reach):
        raise call.refuse("the mask must not depend on the input", "one that does")
    query, key, value = (part if isinstance(part, Reach) else Reach.of_constant(part) for part in (query, key, value))
    key, value = (_for_each_head(call, part, query.value.shape[:-2]) for part in (key, value))
    scale = call.kwargs.get("scale")
    scale = 1 / math.sqrt(query.value.shape[-1]) if scale is None else scale
    mask = logit_mask(call, (query.value.shape[-2], key.value.shape[-2]))
    return _bound_attention(query, key, value, float(scale), mask, call.value)


def _for_each_head(call: Call, part: Reach, heads: torch.Size) -> Reach:
    """Return keys or values that groups of heads share, repeated for each of them."""
    own = part.value.shape[:-2]
    if own == heads:
        return part
    wide = part.value
    if call.kwargs.get("enable_gqa"):
        wide = wide.repeat_interleave(heads[-1] // own[-1], dim=-3)
    wide = wide.expand(*heads, *wide.shape[-2:])
    return part.pass_through(rules.one_gain(math.sqrt(wide.numel() / part.value.numel()), part.peak, part.rows), wide)


def logit_mask(call: Call, shape: Sequence[int]) -> Tensor:
    """Return what attention adds to logits: 0 where a key is seen, minus infinity where it is hidden."""
    mask, zeros = call.argument(3, "attn_mask"), torch.zeros(*shape, dtype=torch.float64)
    if call.argument(5, "is_causal", False):
        return zeros.fill_(-math.inf).triu(1)
    if mask is None or mask.dtype != torch.bool:
        return zeros if mask is None else mask.double()
    return torch.zeros(mask.shape, dtype=torch.float64).masked_fill(~mask, -math.inf)


def _bound_attention(query: Reach, key: Reach, value: Reach, scale: float, mask: Tensor, output: Tensor) -> Reach:
    weights = (scale * query.value @ key.value.transpose(-1, -2) + mask).softmax(-1)
    # the largest over heads, since each head has its own block of the Jacobian
    parts = [query.value.norm(dim=-1), _deviation(weights, key.value), _deviation(weights, value.value)]
    at, scale = _Sizes(*(torch.nan_to_num(part).amax() for part in (*parts, weights.sum(-2)))), abs(scale)
    ball = _sizes_on_ball(at, query, key, value, scale)
    everywhere = _Sizes(
        *(torch.tensor(float(x)).double() for x in (query.rows, key.rows, value.rows, query.value.shape[-2]))
    )
    slopes = zip(at.slopes(scale), ball.slopes(scale), everywhere.slopes(scale), strict=True)
    gains = [rules.three_gains(*three) for three in slopes]
    reaches = list(zip((query, key, value), gains, strict=True))
    return rules.add_reaches(reaches, output, value.peak, value.rows)  # an output is a mean of values


def _deviation(weights: Tensor, points: Tensor) -> Tensor:
    """Return the root of the top eigenvalue of the covariance of `points` under each row of weights."""
    norms = []
    for row in range(weights.shape[-2]):  # one row at a time: all at once would be queries x keys x features
        w = weights[..., row, :, None]
        centred = w.sqrt() * (points - (w * points).sum(-2, keepdim=True))
        norms.append(torch.linalg.matrix_norm(centred, 2))
    return torch.stack(norms, -1) * (1 + 1e-11)


def _sizes_on_ball(at: _Sizes, query: Reach, key: Reach, value: Reach, scale: float) -> _Sizes:
    """Move the sizes by what the ball allows.

    Logits move by at most `delta`, so weights change by a factor of at most exp(2 delta). A covariance is at most the
    second moment around any centre: around the mean at the datum it is exp(2 delta) (deviation + spread)^2 at most,
    and around zero the squared length of the longest point.
    """
    queries, keys, values = (x.value.norm(dim=-1).amax() + x.spread for x in (query, key, value))
    growth = (scale * (queries * key.spread + keys * query.spread)).exp()
    keys = torch.minimum(growth * (at.keys + key.spread), keys)
    values = torch.minimum(growth * (at.values + value.spread), values)
    share = (growth.square() * at.share).clamp_max(float(query.value.shape[-2]))
    return _Sizes(queries, keys, values, share)


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
    gain = rules.three_gains(at, ball, everywhere, top * math.sqrt(size) + shift, rows, reach=2 * top * total)
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


rule_for(normalizers.ChannelRMSNorm, normalizer=True)(
    lambda call: _bound_groups(call, 1, call.module.weight, None, call.module.eps, centred=False)
)


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
    gain = rules.three_gains(slope(0.0), slope(reach.spread), everywhere, top, rows, reach=movement)
    return replace(reach.pass_through(gain, call.value), form=replace(form, kind="written", base=reach))
