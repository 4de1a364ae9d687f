"""Every rule against the function it bounds: dense Jacobians, secants, movements and sizes over random arguments."""
# ruff: noqa: B008, B023, SIM905 (a case is drawn when it is built: defaults are its random arguments)

import random
import sys

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import CertificateError, ModelError
from normgauge.measure.lipschitz import enclosure, rules
from normgauge.measure.lipschitz import lipschitz as _all_rules  # noqa: F401 (registers them)
from normgauge.measure.lipschitz.enclosure import enclose_jacobian
from normgauge.measure.lipschitz.trace import Domain, Walk, private_copy
from normgauge.network.exports import operation_name
from reference.lipschitz import slope_at

DRAWS = 3


class Applied(nn.Module):
    """A function of a tensor as a model, after an optional layer that bounds its input."""

    def __init__(self, function, bounded=None):
        super().__init__()
        self.function, self.bounded = function, bounded

    def forward(self, x):
        return self.function(x if self.bounded is None else self.bounded * torch.tanh(x))


class Called(nn.Module):
    """A layer that is called in a way of its own."""

    def __init__(self, layer, call):
        super().__init__()
        self.layer, self.call = layer, call

    def forward(self, x):
        return self.call(self.layer, x)


def entrywise(name, *arguments, **named):
    """Case of a function that is found in torch or torch.nn.functional."""
    function = getattr(torch, name, None) or getattr(F, name)
    return lambda _: (lambda x: function(x, *arguments, **named), (5,))


def method(name, *arguments, shape=(3, 4)):
    return lambda _: (lambda x: getattr(x, name)(*arguments), shape)


def operation(name, *arguments, shape):
    """Case of an operation of torch's that is called as such."""
    packet = getattr(torch.ops.aten, name, None) or getattr(torch.ops.aten, f"_{name}")
    return lambda _: (lambda x: packet(x, *arguments), shape)


def randn(*shape):
    return torch.randn(shape, dtype=torch.float64)


def after_training(layer):
    """A normalizer as it is in evaluation, with statistics of its own."""
    layer = layer.double()
    for name, buffer in layer.named_buffers():
        if buffer.is_floating_point():
            buffer.copy_(torch.rand_like(buffer) + 0.1 if "var" in name or "scale" in name else buffer)
    for parameter in layer.parameters():
        nn.init.normal_(parameter)
    return layer.eval()


def pool_arguments(r, ceil=True):
    kernel = r.randint(1, 3)
    more = {"ceil_mode": r.random() < 0.5} if ceil else {}
    return {"kernel_size": kernel, "stride": r.randint(1, 4), "padding": r.randint(0, kernel // 2), **more}


def convolution_arguments(r):
    return {
        "stride": r.randint(1, 2),
        "padding": r.randint(0, 2),
        "dilation": r.randint(1, 2),
        "groups": r.choice([1, 2]),
    }


def space(dims, size=4):
    return (2, *[size] * dims)


MODULES = {
    **{name: (lambda t: lambda _: (t(), (5,)))(getattr(nn, name)) for name in (
        "ReLU ReLU6 SiLU Mish SELU Hardswish Hardsigmoid Sigmoid LogSigmoid Tanh Tanhshrink Softsign Identity "
        "Dropout AlphaDropout"
    ).split()},
    **{f"Dropout{d}d": (lambda d: lambda _: (getattr(nn, f"Dropout{d}d")(), space(d)))(d) for d in (1, 2, 3)},
    "GELU": lambda r: (nn.GELU(r.choice(["none", "tanh"])), (5,)),
    "CELU": lambda r: (nn.CELU(10 ** r.uniform(-2, 1)), (5,)),
    "ELU": lambda r: (nn.ELU(r.uniform(-3, 3)), (5,)),
    "LeakyReLU": lambda r: (nn.LeakyReLU(r.uniform(-3, 3)), (5,)),
    "Hardtanh": lambda r: (nn.Hardtanh(-r.uniform(0, 3), r.uniform(0, 2)), (5,)),
    "Softshrink": lambda r: (nn.Softshrink(r.uniform(0, 2)), (5,)),
    "Softplus": lambda r: (nn.Softplus(r.choice([-2.0, 0.1, 1.0, 5.0]), r.uniform(19, 30)), (5,)),
    "PReLU": lambda r: (after_training(nn.PReLU(5)), (5, 2)),
    "Softmax": lambda r: (nn.Softmax(r.choice([1, 2])), (3, 4)),
    "LogSoftmax": lambda r: (nn.LogSoftmax(r.choice([1, 2])), (3, 4)),
    "Flatten": lambda r: (nn.Flatten(r.choice([1, 2])), (3, 2, 2)),
    "Unflatten": lambda r: (nn.Unflatten(1, (2, 3)), (6,)),
    "PixelShuffle": lambda r: (nn.PixelShuffle(2), (4, 2, 3)),
    "PixelUnshuffle": lambda r: (nn.PixelUnshuffle(2), (2, 2, 4)),
    "ChannelShuffle": lambda r: (nn.ChannelShuffle(2), (4, 2, 2)),
    **{f"MaxPool{d}d": (lambda d: lambda r: (
        getattr(nn, f"MaxPool{d}d")(**pool_arguments(r), dilation=r.randint(1, 2)), space(d, 5)))(d)
        for d in (1, 2, 3)},
    **{f"AvgPool{d}d": (lambda d: lambda r: (
        getattr(nn, f"AvgPool{d}d")(**pool_arguments(r), count_include_pad=r.random() < 0.5), space(d)))(d)
        for d in (1, 2, 3)},
    **{f"Adaptive{kind}Pool{d}d": (lambda kind, d: lambda r: (
        getattr(nn, f"Adaptive{kind}Pool{d}d")(r.randint(1, 6)), space(d)))(kind, d)
        for kind in ("Avg", "Max") for d in (1, 2, 3)},
    "Upsample": lambda r: (
        nn.Upsample(scale_factor=r.uniform(0.5, 2.5), mode=r.choice(["nearest", "linear", "nearest-exact"])), (2, 5)),
    "UpsamplingNearest2d": lambda r: (nn.UpsamplingNearest2d(scale_factor=r.uniform(0.6, 2.5)), (1, 3, 4)),
    "UpsamplingBilinear2d": lambda r: (nn.UpsamplingBilinear2d(size=(r.randint(1, 6), 3)), (1, 3, 4)),
    **{f"{kind}Pad{d}d": (lambda kind, d: lambda r: (
        getattr(nn, f"{kind}Pad{d}d")(r.randint(0, 2), *([r.uniform(-3, 3)] if kind == "Constant" else [])), space(d)))(
        kind, d) for kind in ("Zero", "Constant") for d in (1, 2, 3)},
    "Linear": lambda r: (nn.Linear(5, 3), r.choice([(5,), (4, 5)])),
    **{f"Conv{d}d": (lambda d: lambda r: (
        getattr(nn, f"Conv{d}d")(2, 4, 2, **convolution_arguments(r)), space(d)))(d) for d in (1, 2, 3)},
    **{f"ConvTranspose{d}d": (lambda d: lambda r: (
        getattr(nn, f"ConvTranspose{d}d")(2, 4, 2, stride=r.randint(1, 2), padding=r.randint(0, 1)), space(d, 3)))(d)
        for d in (1, 2, 3)},
    **{f"BatchNorm{d}d": (lambda d: lambda _: (after_training(getattr(nn, f"BatchNorm{d}d")(2)), space(d)))(d)
        for d in (1, 2, 3)},
    "SyncBatchNorm": lambda _: (after_training(nn.SyncBatchNorm(2)), (2, 3)),
    "_BatchNorm": lambda _: (after_training(nn.BatchNorm1d(2)), (2,)),
    **{name: (lambda name: lambda _: (after_training(getattr(ng.nn, name)(4)), (4,)))(name) for name in (
        "BatchNorm BatchRenorm FrozenBatchNorm LpBatchNorm NoisyBatchNorm SyncedBatchNorm StatNorm "
        "WhiteningNorm").split()},
    "GhostBatchNorm": lambda _: (after_training(ng.nn.GhostBatchNorm(4, ghost_size=2)), (4, 3)),
    "LayerNorm": lambda r: (after_training(nn.LayerNorm(r.choice([(4,), (3, 4)]), eps=1e-2)), (3, 4)),
    "RMSNorm": lambda r: (after_training(nn.RMSNorm(r.choice([(4,), (3, 4)]), eps=1e-2)), (3, 4)),
    "GroupNorm": lambda r: (after_training(nn.GroupNorm(r.choice([1, 2]), 4, eps=1e-2)), r.choice([(4,), (4, 3)])),
    "ChannelLayerNorm": lambda _: (after_training(ng.nn.ChannelLayerNorm(4, eps=1e-2)), (4, 3)),
    "ChannelRMSNorm": lambda _: (after_training(ng.nn.ChannelRMSNorm(4, eps=1e-2)), (4, 3)),
    **{f"InstanceNorm{d}d": (lambda d: lambda r: (
        after_training(getattr(nn, f"InstanceNorm{d}d")(2, affine=r.random() < 0.5, eps=1e-2)), space(d, 3)))(d)
        for d in (1, 2, 3)},
    "InstanceNorm": lambda _: (after_training(ng.nn.InstanceNorm(2, eps=1e-2)), (2, 3)),
}  # fmt: skip

FUNCTIONS = {
    **{name: entrywise(name) for name in (
        "relu relu6 gelu silu mish selu celu hardswish hardsigmoid sigmoid logsigmoid tanh tanhshrink softsign "
        "softshrink softplus abs neg positive sin cos atan arctan erf square elu"
    ).split()},
    "log_sigmoid": entrywise("logsigmoid"),
    "leaky_relu": lambda r: (lambda x, s=r.uniform(-3, 3): F.leaky_relu(x, s), (5,)),
    "celu": lambda r: (lambda x, a=r.uniform(0.1, 3): F.celu(x, a), (5,)),
    "elu": lambda r: (lambda x, a=r.uniform(-3, 3): F.elu(x, a), (5,)),
    "softplus": lambda r: (lambda x, b=r.uniform(0.1, 5): F.softplus(x, b), (5,)),
    "softshrink": lambda r: (lambda x, b=r.uniform(0, 2): F.softshrink(x, b), (5,)),
    "clamp": lambda r: (lambda x, a=r.uniform(-2, 0), b=r.uniform(0, 2): x.clamp(a, b), (5,)),
    "clip": lambda r: (lambda x, a=r.uniform(-2, 2): torch.clip(x, min=a), (5,)),
    "pow": lambda _: (lambda x: x**2, (5,)),
    "add": lambda r: (lambda x, a=r.uniform(-3, 3), c=randn(4): torch.add(x[:, :1], x + c, alpha=a), (3, 4)),
    "iadd": lambda _: (lambda x: (x * 1.0).__iadd__(x), (5,)),
    "sub": lambda r: (lambda x, a=r.uniform(-3, 3), c=randn(5): torch.sub(c, x, alpha=a), (5,)),
    "isub": lambda _: (lambda x: (x * 1.0).__isub__(3 * x), (5,)),
    "__add__": lambda _: (lambda x, c=randn(3, 4): x + c, (3, 4)),
    "__radd__": lambda _: (lambda x: 2.5 + x, (5,)),
    "__rsub__": lambda _: (lambda x: 2.5 - x, (5,)),
    "rsub": lambda r: (lambda x, a=r.uniform(-5, 5), c=randn(5), k=r.choice([0, 1]): torch.rsub(
        x, c + k * x, alpha=a), (5,)),
    "mul": lambda r: (lambda x, c=r.choice([randn(4), randn(3, 1), randn(3, 4)]): x * c * x[:, :, :1], (3, 4)),
    "imul": lambda _: (lambda x, c=randn(5): (x * 1.0).__imul__(c), (5,)),
    "multiply": lambda _: (lambda x, c=randn(5): torch.multiply(c, x), (5,)),
    "__mul__": lambda _: (lambda x, c=randn(3, 1): x * c, (3, 4)),
    "__rmul__": lambda r: (lambda x, c=r.uniform(-3, 3): c * x, (5,)),
    "truediv": lambda _: (lambda x, c=randn(5): x / c, (5,)),
    "itruediv": lambda _: (lambda x, c=randn(5): (x * 1.0).__itruediv__(c), (5,)),
    "div": lambda _: (lambda x, c=randn(4): torch.div(x[:, :1], c), (1, 4)),
    "divide": lambda r: (lambda x, c=r.uniform(-3, -0.1): torch.divide(x, c), (5,)),
    "__truediv__": lambda _: (lambda x, c=randn(3, 1): x / c, (3, 4)),
    **{name: method(name) for name in ("contiguous", "clone", "float", "double", "t")},
    "t": lambda _: (lambda x: x.t().t() * 2, (5,)),
    "to": method("to", torch.float64),
    "type": method("type", torch.float64),
    "type_as": lambda _: (lambda x, c=randn(4): x.type_as(c) + c.type_as(x), (3, 4)),
    "view": lambda _: (lambda x: x.view(len(x), 2, 6), (3, 4)),
    "view_as": lambda _: (lambda x: x.view_as(x.flatten(1)), (3, 4)),
    "reshape": lambda _: (lambda x: x.reshape(len(x), 6, 2), (3, 4)),
    "flatten": method("flatten", 1),
    "unflatten": method("unflatten", 2, (2, 2)),
    "ravel": lambda _: (lambda x: x.sum(1).ravel(), (3,)),
    "squeeze": lambda _: (lambda x: x.squeeze(1), (1, 4)),
    "unsqueeze": method("unsqueeze", 2),
    "pixel_shuffle": lambda _: (lambda x: F.pixel_shuffle(x, 2), (4, 2, 2)),
    "pixel_unshuffle": lambda _: (lambda x: F.pixel_unshuffle(x, 2), (1, 4, 2)),
    "channel_shuffle": lambda _: (lambda x: F.channel_shuffle(x, 2), (4, 2, 2)),
    "permute": method("permute", 0, 2, 1),
    "transpose": method("transpose", 1, 2),
    "swapaxes": method("swapaxes", 1, 2),
    "swapdims": method("swapdims", 1, 2),
    "movedim": method("movedim", 1, 2),
    "moveaxis": method("moveaxis", 2, 1),
    "flip": lambda r: (lambda x, a=r.choice([1, 2]): x.flip(a), (3, 4)),
    "roll": lambda r: (lambda x, a=r.choice([1, 2]): x.roll(1, a), (3, 4)),
    "chunk": lambda r: (lambda x, a=r.choice([1, 2]): x.chunk(2, a)[0], (3, 4)),
    "split": lambda r: (lambda x, a=r.choice([1, 2]): x.split(2, a)[1], (3, 4)),
    "unbind": lambda r: (lambda x, a=r.choice([1, 2]): x.unbind(a)[1], (4, 4)),
    "tensor_split": lambda r: (lambda x, a=r.choice([1, 2]): x.tensor_split(3, a)[2], (3, 4)),
    "getitem": lambda r: (lambda x, i=r.choice([(slice(None), slice(None), 0), (slice(None), 1),
                                                (slice(None), None, ..., 1), (..., slice(1, 3), None)]): x[i], (4, 4)),
    "__getitem__": lambda _: (lambda x: x[:, :, -1], (4, 4)),
    "select": lambda r: (lambda x, a=r.choice([1, 2]): x.select(a, 0), (4, 4)),
    "narrow": lambda r: (lambda x, a=r.choice([1, 2]): x.narrow(a, 1, 2), (4, 4)),
    **{name: (lambda name: lambda r: (lambda x, c=randn(1, 2, 4): getattr(torch, name)(
        [x, 3 * x, c.expand(len(x), 2, 4)], 1), (3, 4)))(name) for name in ("cat", "concat", "concatenate")},
    "stack": lambda r: (lambda x, a=r.choice([1, 2, 3]): torch.stack([x, x * x], a), (3, 4)),
    "hstack": lambda _: (lambda x: torch.hstack([x, 2 * x]), (3, 4)),
    "expand": lambda _: (lambda x: x.expand(-1, 3, 4), (1, 4)),
    "expand_as": lambda _: (lambda x, c=randn(1): x[:, :1].expand_as(x) + c.expand_as(x), (3, 4)),
    "repeat": method("repeat", 1, 2, 3),
    "tile": method("tile", (1, 2, 3)),
    "broadcast_to": lambda _: (lambda x: torch.broadcast_to(x, (len(x), 3, 4)), (1, 4)),
    "repeat_interleave": lambda r: (
        lambda x, n=r.choice([2, torch.randint(4, (4,)) + torch.tensor([0, 1, 0, 0])]): x.repeat_interleave(n, dim=2),
        (3, 4)),
    **{name: (lambda name: lambda r: (
        lambda x, a=r.choice([1, 2, (1, 2)]), k=r.random() < 0.5: getattr(torch, name)(x, dim=a, keepdim=k), (3, 4)))(
        name) for name in ("mean", "sum", "amax", "amin", "norm", "logsumexp")},
    "softmax": lambda r: (lambda x, a=r.choice([1, 2]): x.softmax(a), (3, 4)),
    "log_softmax": lambda r: (lambda x, a=r.choice([1, 2]): x.log_softmax(a), (3, 4)),
    **{f"max_pool{d}d": (lambda d: lambda r: (lambda x, a=pool_arguments(r): getattr(F, f"max_pool{d}d")(x, **a),
        space(d)))(d) for d in (1, 2, 3)},
    **{f"avg_pool{d}d": (lambda d: lambda r: (
        lambda x, a=pool_arguments(r): getattr(F, f"avg_pool{d}d")(x, **a), space(d)))(d)
        for d in (1, 2, 3)},
    **{f"adaptive_avg_pool{d}d": (lambda d: lambda r: (
        lambda x, n=r.randint(1, 5): getattr(F, f"adaptive_avg_pool{d}d")(x, n), space(d)))(d) for d in (1, 2, 3)},
    "pad": lambda r: (lambda x, n=r.randint(-1, 2), c=r.uniform(-3, 3): F.pad(x, (n, 1, 0, n), value=c), (3, 4)),
    **{name: (lambda name: lambda _: (lambda x: getattr(F, name)(x, 0.5, training=False), space(2)))(name)
        for name in ("dropout", "dropout2d", "alpha_dropout")},
    "dropout1d": lambda _: (lambda x: F.dropout1d(x, training=False), space(1)),
    "dropout3d": lambda _: (lambda x: F.dropout3d(x, training=False), space(3)),
    "linear": lambda _: (lambda x, w=randn(3, 5), b=randn(3): F.linear(x, w, b), (5,)),
    **{f"conv{d}d": (lambda d: lambda r: (
        lambda x, a={**convolution_arguments(r), "groups": 1}, w=randn(3, 2, *[2] * d): getattr(F, f"conv{d}d")(
            x, w, **a),
        space(d)))(d) for d in (1, 2, 3)},
    "batch_norm": lambda _: (
        lambda x, m=randn(3), v=torch.rand(3).double() + 0.1, w=randn(3): F.batch_norm(x, m, v, w), (3, 2)),
    "matmul": lambda r: r.choice([
        (lambda x, w=randn(4, 5): x @ w, (3, 4)), (lambda x, w=randn(2, 3): w @ x, (3, 4)),
        (lambda x, w=randn(3, 4, 5): x @ w, (1, 2, 4)), (lambda x, w=randn(3, 5, 2): w @ x, (1, 2, 4)),
        (lambda x, w=randn(4, 4): (x @ w) @ x.transpose(1, 2), (3, 4))]),
    "bmm": lambda _: (lambda x: torch.bmm(x, torch.tanh(x)), (3, 3)),
    "scaled_dot_product_attention": lambda r: (
        lambda x, s=r.choice([None, 0.0, -1.0, 0.3]), c=r.random() < 0.5: F.scaled_dot_product_attention(
            x, 2 * x, x[..., :2], scale=s, is_causal=c), (3, 4)),
    **{name: operation(name, *arguments, shape=shape) for name, shape, arguments in (
        ("alias", (5,), ()), ("mT", (3, 4), ()), ("clamp_max", (5,), (0.3,)),
        ("clamp_min", (5,), (-0.2,)), ("hardtanh", (5,), (-0.5, 0.7)), ("constant_pad_nd", (3,), ([1, 2], 0.5)),
        ("diagonal", (3, 3), (0, 1, 2)), ("exp", (5,), ()), ("slice", (5,), (1, 1, 4, 2)), ("unfold", (6,), (1, 3, 2)),
        ("im2col", (2, 4, 4), ([2, 2], [1, 1], [0, 0], [1, 1])),
        ("reflection_pad1d", (2, 4), ([2, 1],)), ("replication_pad1d", (2, 4), ([2, 1],)),
        ("reflection_pad2d", (2, 4, 4), ([1, 1, 1, 0],)), ("replication_pad2d", (2, 4, 4), ([1, 2, 0, 1],)),
        ("upsample_nearest1d", (2, 3), ([5],)), ("upsample_nearest2d", (2, 3, 3), ([5, 4],)),
        ("upsample_nearest3d", (1, 2, 3, 2), ([3, 4, 3],)), ("upsample_linear1d", (2, 3), ([5], False)),
        ("upsample_bilinear2d", (2, 3, 3), ([5, 4], True)), ("upsample_trilinear3d", (1, 2, 3, 2), ([3, 4, 3], False)),
        ("to_copy", (5,), ()), ("feature_dropout", (2, 3), (0.5, False)),
        ("index_select", (5,), (1, torch.tensor([0, 3, 3]))),
    )},
    "numpy_T": lambda _: (lambda x: torch.ops.aten.numpy_T(torch.ops.aten.numpy_T(x)), (5,)),
    "split_with_sizes": lambda _: (lambda x: torch.ops.aten.split_with_sizes(x, [2, 3], 1)[1], (5,)),
    "unsafe_view": lambda _: (lambda x: torch.ops.aten._unsafe_view(x, [len(x), 12]), (3, 4)),
    "gather": lambda _: (lambda x, i=torch.tensor([[[0, 2], [1, 1]]]): x.gather(1, i.expand(len(x), 2, 2)), (3, 2)),
    "index": lambda _: (lambda x, i=torch.tensor([0, 2, 2, 1]): x[:, i], (3, 2)),
    "where": lambda _: (lambda x, m=torch.tensor([True, False, True]): torch.where(m, x, 2 * x), (3,)),
    "masked_fill": lambda _: (lambda x, m=torch.tensor([True, False, True]): x.masked_fill(m, 0.5), (3,)),
    "addmm": lambda _: (lambda x, w=randn(5, 3), b=randn(3): torch.addmm(b, x, w), (5,)),
    "mm": lambda _: (lambda x, w=randn(5, 3): torch.mm(x, w), (5,)),
    "max": lambda r: (lambda x, a=r.choice([1, 2]): x.max(a)[0], (3, 4)),
    "min": lambda r: (lambda x, a=r.choice([1, 2]): x.min(a).values, (3, 4)),
    "linalg_vector_norm": lambda r: (lambda x, a=r.choice([1, 2]): torch.linalg.vector_norm(x, dim=a), (3, 4)),
    "prelu": lambda _: (lambda x, w=randn(5): F.prelu(x, w), (5,)),
    **{name: (lambda name: lambda r: (
        lambda x, e=10 ** r.uniform(-3, 0): getattr(torch, name)(x.square().mean(-1, keepdim=True) + e), (3, 4)))(name)
        for name in ("sqrt", "rsqrt", "reciprocal", "log", "log1p")},
    "native_batch_norm_legit_no_training": lambda _: (
        lambda x, m=randn(3), v=torch.rand(3).double() + 0.1, w=randn(3):
            torch.ops.aten._native_batch_norm_legit_no_training(x, w, m, m, v, 0.1, 1e-5)[0], (3, 2)),
    "layer_norm": lambda _: (lambda x, w=randn(4), b=randn(4): F.layer_norm(x, (4,), w, b, 1e-2), (3, 4)),
    "rms_norm": lambda _: (lambda x, w=randn(4): F.rms_norm(x, (4,), w, 1e-2), (3, 4)),
    "group_norm": lambda r: (lambda x, n=r.choice([1, 2]), w=randn(4): F.group_norm(x, n, w, None, 1e-2), (4, 3)),
    "normalize": lambda r: (
        lambda x, e=r.choice([1e-12, 0.5]), a=r.choice([1, 2]): F.normalize(x, dim=a, eps=e), (3, 4)),
}  # fmt: skip

CASES = {**{f"{name} module": build for name, build in MODULES.items()}, **FUNCTIONS}


def built(name, seed):
    """Return one random model of a case, bounded before it in two of three draws, and data of its own scale."""
    torch.manual_seed(seed)
    chance = random.Random(f"{name} {seed}")
    function, shape = CASES[name](chance)
    bounded = chance.choice([None, 0.1, 3.0])
    model = Applied(function, bounded).eval().double()
    return model, 10 ** chance.uniform(-2, 1) * randn(3, *shape), 10 ** chance.uniform(-3, 0.5)


def lengths(x):
    return x.reshape(len(x), -1).norm(dim=1)


def secants(model, a, b):
    return lengths(model(a) - model(b)) / lengths(a - b).clamp_min(1e-300)


def inside(data, radius):
    step = torch.randn_like(data)
    size = radius * torch.rand(len(data), dtype=data.dtype) / lengths(step)
    return step * size.view(-1, *[1] * (data.ndim - 1))


@pytest.mark.parametrize("name", CASES)
@pytest.mark.parametrize("seed", range(DRAWS))
@torch.no_grad()
def test_no_rule_is_below_what_is_measured(name, seed):
    model, data, radius = built(name, seed)
    rounding = 1 + (1e-2 if name == "float" else 1e-9)
    walk = Walk(private_copy(model), Domain(data))
    near = [walk.run(walk.values(datum), radius) for datum in range(len(data))]
    at, ball, spread = (torch.cat([getattr(reach, name) for reach in near]) for name in ("at", "ball", "spread"))
    everywhere, peak, rows = near[0].everywhere, near[0].peak, near[0].rows
    enclosed = torch.tensor([enclose_jacobian(walk, walk.values(i), radius)[0] for i in range(len(data))])
    ball = torch.minimum(ball, enclosed.log())
    with torch.enable_grad():
        slopes = torch.tensor([slope_at(model, x) for x in data], dtype=torch.float64)
    assert bool((slopes <= at.exp() * rounding).all())
    for _ in range(20):
        near = [data + inside(data, radius) for _ in range(2)]
        assert bool((secants(model, *near) <= ball.exp() * rounding + (rounding - 1)).all())
        assert bool((lengths(model(near[0]) - model(data)) <= spread * rounding + (rounding - 1)).all())
        far = [data + inside(data, 30.0), data + inside(data, 0.1)]
        for pair in ([far[0], data], [far[0], far[1]], [far[0], far[0] + inside(data, 1e-3)]):
            assert bool((secants(model, *pair) <= everywhere.exp() * rounding + (rounding - 1)).all())
        out = model(far[0])
        assert float(out.abs().max()) <= peak * rounding
        if out.ndim > 1:
            assert float(out.norm(dim=-1).max()) <= rows * rounding


EXACT = """AvgPool1d AvgPool2d AvgPool3d AdaptiveAvgPool1d AdaptiveAvgPool2d AdaptiveAvgPool3d Upsample
UpsamplingNearest2d UpsamplingBilinear2d Linear Conv1d Conv2d ConvTranspose1d BatchNorm1d StatNorm WhiteningNorm Flatten
PixelShuffle Identity""".split()


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("seed", range(DRAWS))
def test_linear_rules_equal_the_dense_norm(name, seed):
    torch.manual_seed(seed)
    layer, shape = MODULES[name](random.Random(seed))
    layer, data = layer.double().eval(), randn(2, *shape)
    truth = slope_at(layer, data[0])
    assert ng.lipschitz(layer, data, climbs=0).upper == pytest.approx(truth, rel=1e-6)


def test_every_rule_has_a_case():
    own = [kind for kind in rules._MODULES if kind.__module__.startswith(("torch.", "normgauge."))]
    own = [kind for kind in own if hasattr(sys.modules[kind.__module__], kind.__name__)]  # no class of a docstring
    missing = {kind.__name__ for kind in own}
    missing -= set(MODULES)
    missing |= set(rules._FUNCTIONS) - set(FUNCTIONS)
    assert not missing
    run = set()
    for name in CASES:  # and a case must run it
        model, data, _ = built(name, 0)
        walk = Walk(private_copy(model), Domain(data))
        run |= {operation.kind.strip("_") for operation in walk.operations}
        run |= {operation_name(node).strip("_") for node in walk.program.nodes}
    assert set(rules._FUNCTIONS) - run <= NOT_EXPORTED
    assert set(enclosure._RULES) - run <= NOT_EXPORTED | {"cumsum", "tril", "triu", "written"}


# torch writes these in others, or leaves them out, when it exports
NOT_EXPORTED = set("contiguous softsign tanhshrink logsigmoid getitem".split())


def jumping(x):
    return F.softplus(x, threshold=0.5)


REFUSED = {
    "a jump": (nn.Softplus(threshold=0.5), (5,), "jumps"),
    "a jump in a function": (jumping, (5,), "jumps"),
    "an exponential": (nn.CELU(-0.5), (5,), "positive alpha"),
    "a staircase": (lambda x: x.to(torch.int32) * 1.0 + x, (5,), "32 or 64 bits"),
    "a coarse grid": (lambda x: x.to(torch.bfloat16).to(x.dtype), (5,), "round to 16 bits"),
    "bits": (lambda x: x.view(torch.float32), (6,), "bits"),
    "a pool without its batch": (nn.MaxPool2d(3, 1), (5, 5), "2 axes of space"),
    "a mean pool without its batch": (nn.AvgPool2d(3, 1), (5, 5), "2 axes of space"),
    "a subclass without its batch": (type("Mine", (nn.AdaptiveAvgPool2d,), {})(2), (5, 5), "2 axes of space"),
    "instances without their batch": (nn.InstanceNorm2d(2), (5, 5), "2 axes of space"),
    "a vector of weights": (lambda x, w=randn(5): F.linear(x, w.to(x))[:, None], (5,), r"\[outputs, inputs\]"),
    "samples repeated": (
        lambda x: x.repeat_interleave(torch.tensor([2, 0] + [1] * (len(x) - 2)), dim=0), (5,), "samples must not"),
    "another size": (
        Called(nn.ConvTranspose1d(2, 2, 3, 2), lambda layer, x: layer(x, output_size=(10,))), (2, 4), "output_size"),
    "a power by entry": (lambda x: x.pow(torch.full((5,), 2.0)), (5,), "whole numbers"),
    "a fixed number of samples": (lambda x: x + torch.ones(3, 5).to(x), (5,), "any number of samples"),
    "indices of maxima": (lambda x: x.max(1)[1] * x[:, 0], (2, 6), "32 or 64 bits"),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
def test_what_a_rule_does_not_cover_is_refused(name):
    function, shape, words = REFUSED[name]
    with pytest.raises(ModelError, match=words):
        ng.lipschitz(function if isinstance(function, nn.Module) else Applied(function), torch.randn(3, *shape))


class Understated(nn.Module):
    def forward(self, x):
        return 5 * x


def test_a_slope_above_the_bound_is_no_bracket():
    ng.register_lipschitz_rule(Understated, lambda call: 1.0)
    try:
        with pytest.raises(CertificateError, match=r"'1' \(Understated\)"):
            ng.lipschitz(nn.Sequential(nn.Linear(3, 3), Understated()), torch.randn(2, 3))
    finally:
        rules._MODULES.pop(Understated)
