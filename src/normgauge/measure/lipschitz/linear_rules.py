"""Rules of linear layers, folded into each other where they meet, and of normalizers that are affine in evaluation."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge import nn as normalizers
from normgauge.measure.lipschitz.folded import Folded, Pending
from normgauge.measure.lipschitz.reach import Reach, add_reaches, constant_gain, three_gains
from normgauge.measure.lipschitz.rules import Call, rule_for
from normgauge.network import folded_affine, stored_affine

_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_PER_CHANNEL = (
    normalizers.BatchRenorm,
    normalizers.FrozenBatchNorm,
    normalizers.GhostBatchNorm,
    normalizers.LpBatchNorm,
    normalizers.NoisyBatchNorm,
    normalizers.SyncedBatchNorm,
)


@rule_for(nn.Linear, "linear", folds=True)
def _linear(call: Call) -> Pending:
    weight, bias = call.option(1, "weight"), call.option(2, "bias")
    if not isinstance(weight, Tensor) or not (bias is None or isinstance(bias, Tensor)):
        raise call.refuse("weights must not depend on the input", "a weight that does")
    return _through_matrix(call, call.input, weight, bias)


def _through_matrix(call: Call, operand: Any, weight: Tensor, bias: Tensor | None) -> Pending:
    matrix = _check_finite(call, weight)
    if matrix.ndim != 2:
        raise call.refuse(
            "weights must be [outputs, inputs]", f"shape {tuple(matrix.shape)}", "Add the axis of outputs"
        )
    offset = torch.zeros(len(matrix), dtype=torch.float64) if bias is None else bias.detach().double()
    folded = operand.folded.then_matrix(call.name, matrix, offset) if isinstance(operand, Pending) else None
    if folded is None:
        folded = Folded(_base(operand), (call.name,), call.norms, matrix, offset)
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
    type_ = _CONVOLUTIONS[weight.ndim - 3]
    layer = type_(
        weight.shape[1] * groups,
        weight.shape[0],
        tuple(weight.shape[2:]),  # type: ignore[arg-type]
        call.argument(3, "stride", 1),
        call.argument(4, "padding", 0),
        call.argument(5, "dilation", 1),
        groups=groups,
        bias=False,
        device="meta",
    )
    return _through_convolution(call, call.input, layer, weight)


def _through_convolution(call: Call, operand: Any, layer: nn.Module, weight: Tensor) -> Pending:
    kernel = _check_finite(call, weight)
    call.check_space()
    size = tuple(operand.value.shape[2:])
    name = f"{call.name} on {size}"  # a layer that is called twice may see two sizes, and has two norms
    folded = operand.folded.then_convolution(name, layer, kernel, size) if isinstance(operand, Pending) else None
    if folded is None:
        folded = Folded(base=_base(operand), key=(name,), norms=call.norms, weight=kernel, layer=layer, size=size)
    return Pending(call.value, folded)


@rule_for(
    _BatchNorm, nn.BatchNorm1d, nn.BatchNorm2d, nn.BatchNorm3d, nn.SyncBatchNorm, normalizers.BatchNorm, folds=True,
    normalizer=True,
)  # fmt: skip
def _batch_norm(call: Call) -> Pending:
    return _per_channel(call, *stored_affine(call.module))


@rule_for(*_PER_CHANNEL, folds=True, normalizer=True)
def _stored_statistics(call: Call) -> Pending:
    """Affine per channel in evaluation: two points say which map it is."""
    layer = call.module
    if layer.training and not isinstance(layer, normalizers.FrozenBatchNorm):
        raise call.refuse("statistics of the batch make samples see each other", "training mode", "Call model.eval()")
    zero = torch.zeros(1, layer.num_features, dtype=torch.float64)
    shift = layer(zero)[0]
    return _per_channel(call, layer(zero + 1)[0] - shift, shift)


@rule_for(normalizers.StatNorm, folds=True, normalizer=True)
def _stat_norm(call: Call) -> Pending:
    if call.module.axes != "batch":
        raise call.refuse("StatNorm has a rule for statistics of the batch only", f"axes={call.module.axes!r}")
    return _stored_statistics(call)


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
    return _base(call.input, certified=True).pass_through(constant_gain(_spectral(matrix)), call.value)


def _per_channel(call: Call, factors: Tensor, shift: Tensor) -> Pending:
    operand = call.input
    if not bool(torch.isfinite(factors).all()):
        raise call.refuse("its factors must be finite", "inf or nan", "Look at the stored variance")
    axis = -1 if call.value.ndim == 2 else 1
    folded = operand.folded.then_factors(call.name, factors, shift, axis) if isinstance(operand, Pending) else None
    if folded is None:
        folded = Folded(_base(operand, certified=True), (call.name,), call.norms, factors, axis=axis)
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
        return operand.pass_through(constant_gain(float(other.double().norm())), call.value)
    if not isinstance(other, Tensor) or operand.value.ndim != call.value.ndim:
        raise call.refuse("a product must keep the axes", f"shape {tuple(call.value.shape)}", "Use a 2-d constant")
    if operand is a and other.ndim == 2:
        return Pending(
            call.value, Folded(operand.drop_value(), (call.name,), call.norms, _check_finite(call, other.T), None)
        )
    matrices = math.prod(call.value.shape[:-2]) // math.prod(operand.value.shape[:-2])  # that one operand meets
    return operand.pass_through(constant_gain(math.sqrt(matrices) * _spectral(other.double())), call.value)


def _bilinear(call: Call, a: Reach, b: Reach) -> Reach:
    """d(A B) = dA B + A dB, in spectral norms: at the data, with the movement on the ball, or by lengths of rows."""
    if min(a.value.ndim, b.value.ndim) < 2 or a.value.shape[:-2] != b.value.shape[:-2]:
        raise call.refuse("products of two tensors need equal leading axes", f"{tuple(a.value.shape)}")
    sizes = [torch.linalg.matrix_norm(x.value, 2).amax() * (1 + 1e-11) for x in (a, b)]
    limits = [x.rows * x.value.shape[-2] ** 0.5 for x in (a, b)]
    gains = [three_gains(size, size + x.spread, limit) for size, x, limit in zip(sizes, (a, b), limits, strict=True)]
    return add_reaches([(a, gains[1]), (b, gains[0])], call.value, rows=a.rows * limits[1])


def _base(operand: Any, *, certified: bool = True) -> Reach:
    reach = operand.certified if isinstance(operand, Pending) and certified else operand
    assert isinstance(reach, Reach)  # for the type checker
    return reach.drop_value()


def _spectral(matrix: Tensor) -> float:
    return float(torch.linalg.matrix_norm(matrix, 2).max()) * (1 + 1e-11)


def _check_finite(call: Call, weight: Tensor) -> Tensor:
    if weight.is_complex() or not bool(torch.isfinite(weight).all()):
        raise call.refuse("weights must be real and finite", "complex, inf or nan", "Look at the step that made them")
    return weight.detach().double()
