"""Naive twins of the Lipschitz bracket: dense Jacobians one sample at a time, secants, and small nets of every kind."""

import math

import torch
from torch import nn
from torch.nn import functional

import normgauge as ng


def slope_at(model, x):
    """Norm of the dense Jacobian at one sample."""
    jacobian = torch.autograd.functional.jacobian(lambda z: model(z[None]).flatten(), x)
    return float(torch.linalg.matrix_norm(jacobian.reshape(-1, x.numel()), 2))


def steepest_near(model, inputs, radius, generator, draws=3):
    """Largest dense Jacobian norm and secant slope at random points of the balls around the inputs."""
    best = 0.0
    for x in inputs:
        for _ in range(draws):
            step = torch.randn(x.shape, generator=generator)
            point = x + step * (radius * float(torch.rand((), generator=generator)) / float(step.norm()))
            best = max(best, slope_at(model, point))
            secant = (model(point[None]) - model(x[None])).norm() / (point - x).norm()
            best = max(best, float(secant.detach()))
    return best


class Residual(nn.Module):
    def __init__(self, body, skip=None):
        super().__init__()
        self.body, self.skip = body, skip or nn.Identity()

    def forward(self, x):
        return torch.relu(self.body(x) + self.skip(x))


class Concatenated(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.parts = nn.ModuleList(parts)

    def forward(self, x):
        return torch.cat([x, *(part(x) for part in self.parts)], dim=1)


class Gated(nn.Module):
    """Squeeze and excitation: a product of two tensors, one of them repeated over space."""

    def __init__(self, channels):
        super().__init__()
        self.squeeze = nn.Linear(channels, channels)

    def forward(self, x):
        gate = torch.sigmoid(self.squeeze(x.mean(dim=(2, 3))))
        return x * gate.unsqueeze(-1).unsqueeze(-1)


class PlainAttention(nn.Module):
    """Attention by matrix products, with causal mask, and by torch's function."""

    def __init__(self, width, fused):
        super().__init__()
        self.qkv, self.out, self.fused = nn.Linear(width, 3 * width), nn.Linear(width, width), fused

    def forward(self, x):
        q, k, v = self.qkv(x).chunk(3, dim=-1)
        if self.fused:
            return self.out(functional.scaled_dot_product_attention(q, k, v, is_causal=True))
        weights = (q @ k.transpose(1, 2) / math.sqrt(q.shape[-1])).softmax(dim=-1)
        return self.out(weights @ v)


class PreNorm(nn.Module):
    """x + f(norm(x)) twice: attention and a small MLP."""

    def __init__(self, width, norm, attention):
        super().__init__()
        self.norm1, self.norm2, self.attention = norm(width), norm(width), attention
        self.mlp = nn.Sequential(nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width))

    def forward(self, x):
        x = x + self.attention(self.norm1(x))
        return x + self.mlp(self.norm2(x))


def _mlp():
    return nn.Sequential(nn.Linear(6, 9), nn.Tanh(), nn.Linear(9, 8), nn.SiLU(), nn.Linear(8, 3)), (6,)


def _mlp_normalized():
    layers = [nn.Linear(6, 9), nn.BatchNorm1d(9), nn.ReLU(), nn.Linear(9, 8), nn.LayerNorm(8), nn.LeakyReLU(1.3)]
    return nn.Sequential(*layers, nn.Linear(8, 8), nn.RMSNorm(8, eps=1e-3), nn.ELU(), nn.Linear(8, 3)), (6,)


def _vgg():
    layers = [nn.Conv2d(2, 4, 3, padding=1), nn.BatchNorm2d(4), nn.ReLU(), nn.MaxPool2d(3, 2, 1)]
    layers += [nn.Conv2d(4, 5, 3, 2, 1), nn.BatchNorm2d(5), nn.Mish(), nn.AvgPool2d(2, 1)]
    return nn.Sequential(*layers, nn.Flatten(), nn.Dropout(0.3), nn.LazyLinear(3)), (2, 7, 7)


def _resnet():
    def body(a, b, stride):
        return nn.Sequential(
            nn.Conv2d(a, b, 3, stride, 1, bias=False), nn.BatchNorm2d(b), nn.ReLU(inplace=True),
            nn.Conv2d(b, b, 3, 1, 1, bias=False), nn.BatchNorm2d(b),
        )  # fmt: skip

    down = nn.Sequential(nn.Conv2d(4, 6, 1, 2, bias=False), nn.BatchNorm2d(6))
    blocks = [Residual(body(4, 4, 1)), Residual(body(4, 6, 2), down)]
    return nn.Sequential(
        nn.Conv2d(2, 4, 3, padding=1), *blocks, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(6, 3)
    ), (2, 6, 6)


def _standardized():
    conv = ng.nn.weight_standardization
    layers = [conv(nn.Conv2d(2, 4, 3, padding=1)), nn.GroupNorm(2, 4), nn.ReLU(), conv(nn.Conv2d(4, 6, 3, 2))]
    return nn.Sequential(
        *layers, ng.nn.GroupNorm(3, 6), nn.GELU(), nn.AdaptiveMaxPool2d(2), nn.Flatten(), nn.Linear(24, 3)
    ), (2, 7, 7)


def _preln():
    attention = nn.MultiheadAttention(6, 2, batch_first=True)

    class Heads(nn.Module):
        def __init__(self):
            super().__init__()
            self.inner = attention

        def forward(self, x):
            return self.inner(x, x, x, need_weights=False)[0]

    return nn.Sequential(PreNorm(6, nn.LayerNorm, Heads()), nn.LayerNorm(6)), (4, 6)


def _encoder(norm_first):
    layer = nn.TransformerEncoderLayer(6, 2, 8, batch_first=True, norm_first=norm_first, activation="gelu")
    return nn.TransformerEncoder(layer, 2, enable_nested_tensor=False), (3, 6)


def _attention(fused):
    return nn.Sequential(PreNorm(5, nn.RMSNorm, PlainAttention(5, fused)), nn.Flatten(), nn.Linear(20, 3)), (4, 5)


def _dense():
    layers = [Concatenated(nn.Conv2d(2, 3, 3, padding=1), nn.Conv2d(2, 2, 1)), nn.InstanceNorm2d(7, affine=True)]
    return nn.Sequential(*layers, nn.ReLU(), Gated(7), nn.Conv2d(7, 3, 3, groups=1), nn.Flatten(2)), (2, 5, 5)


def _upsampled():
    layers = [nn.Conv1d(2, 4, 3, dilation=2, padding=2), ng.nn.ChannelLayerNorm(4), nn.Softplus()]
    layers += [nn.ConvTranspose1d(4, 3, 3, 2, 1), nn.Upsample(scale_factor=2), ng.nn.ChannelRMSNorm(3)]
    return nn.Sequential(*layers, nn.Hardswish(), nn.AvgPool1d(3, 2, 1), nn.Flatten(), nn.Softmax(dim=1)), (2, 6)


def _weight_normalized():
    first, second = ng.nn.weight_norm(nn.Linear(6, 8)), ng.nn.spectral_norm(nn.Linear(8, 8))
    third = nn.utils.parametrizations.weight_norm(nn.Linear(8, 4))
    return nn.Sequential(first, nn.SELU(), second, nn.Sigmoid(), third, nn.LogSoftmax(dim=1)), (6,)


def _registry():
    names = ("batch_renorm", "frozen_batch", "ghost_batch", "lp_batch", "noisy_batch", "whitening", "batch")
    known = [name for name in names if name in ng.nn.registry.names()]
    parts = []
    for name in known:
        parts += [nn.Linear(6, 6), ng.nn.registry.get(name).layer(6, 0), nn.ReLU()]
    return nn.Sequential(*parts), (6,)


KINDS = {
    "mlp": _mlp,
    "normalized mlp": _mlp_normalized,
    "vgg": _vgg,
    "resnet": _resnet,
    "group norm and weight standardization": _standardized,
    "pre-LN block": _preln,
    "pre-LN encoder": lambda: _encoder(True),
    "post-LN encoder": lambda: _encoder(False),
    "attention by products": lambda: _attention(False),
    "attention by function": lambda: _attention(True),
    "concatenation and gating": _dense,
    "transposed and upsampled": _upsampled,
    "normalized weights": _weight_normalized,
    "batch family": _registry,
}


def random_net(kind, seed):
    """A net of a kind with random weights, gains, statistics and input scale; evaluation mode. Returns net and data."""
    generator = torch.Generator().manual_seed(seed)
    net, shape = KINDS[kind]()
    data = torch.randn(3, *shape, generator=generator) * 10 ** float(torch.rand((), generator=generator) * 2 - 1)
    net.eval()(data)
    with torch.no_grad():
        for name, parameter in net.named_parameters():
            spread = 1.0 if parameter.ndim == 1 else (2.0 / parameter[0].numel()) ** 0.5
            noise = torch.randn(parameter.shape, generator=generator)
            parameter.copy_(noise * spread if "original0" not in name else noise.abs() + 0.1)
        for name, buffer in net.named_buffers():
            if name.endswith(("running_var", "running_moment")):
                buffer.copy_(torch.rand(buffer.shape, generator=generator) * 2 + 0.05)
            elif name.endswith("running_mean"):
                buffer.copy_(torch.randn(buffer.shape, generator=generator))
    return net, data
