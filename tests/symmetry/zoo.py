"""Random small networks of today's kinds, drawn by a seed: what the hunt for false and missed symmetries runs on.

Each is built twice from one seed: as people use it (eps as given) and with eps removed, for the independent checks.
"""

import math
import random
from dataclasses import dataclass
from types import MethodType
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F
from torch.nn.utils import parametrizations

from normgauge.nn import registry

SPREADS = (0.01, 0.02, 0.1, 0.3, 1.0)
KINDS = ("mlp", "attention", "conv", "recurrent", "parametrized")


@dataclass
class Subject:
    kind: str
    model: nn.Module
    inputs: torch.Tensor
    mode: str
    what: str


def set_eps(model, eps=None):
    """Give every module that shows an eps another one, and keep it from narrowing its numbers."""
    for module in model.modules():
        if isinstance(module, RMS):
            module.narrow = False
        elif type(module).__module__.startswith("transformers") and type(module).__name__.endswith(
            ("RMSNorm", "T5LayerNorm")
        ):
            module.forward = MethodType(wide_rms, module)  # Hugging Face's narrow to float32
        if not module.training and list(module.buffers(recurse=False)):
            continue  # beside stored statistics eps is one more constant
        for name, value in list(vars(module).items()):
            if eps is not None and "eps" in name and isinstance(value, float):
                setattr(module, name, eps)
            if eps is not None and name == "settings" and hasattr(value, "eps"):
                setattr(module, name, type(value)(**{**vars(value), "eps": eps}))
    return model


def wide_rms(module, x):
    eps = getattr(module, "variance_epsilon", getattr(module, "eps", None))
    gain = 1 + module.weight if "Gemma" in type(module).__name__ else module.weight
    return gain * x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + eps)


class RMS(nn.Module):
    """As in Hugging Face: in float32 whatever comes, gain w or 1 + w."""

    def __init__(self, width, eps=1e-6, one_plus=False):
        super().__init__()
        self.weight = nn.Parameter(torch.zeros(width) if one_plus else torch.ones(width))
        self.variance_epsilon, self.one_plus, self.narrow = eps, one_plus, True

    def forward(self, x):
        wide = x.float() if self.narrow else x
        wide = wide * torch.rsqrt(wide.pow(2).mean(-1, keepdim=True) + self.variance_epsilon)
        return wide.to(x.dtype) * (1 + self.weight if self.one_plus else self.weight)


class HandLayerNorm(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.g, self.b = nn.Parameter(torch.ones(width)), nn.Parameter(torch.zeros(width))
        self.eps = 1e-5

    def forward(self, x):
        centred = x - x.mean(-1, keepdim=True)
        return self.g * centred / torch.sqrt(centred.square().mean(-1, keepdim=True) + self.eps) + self.b


class Attention(nn.Module):
    def __init__(self, draw, width, heads, groups):
        super().__init__()
        self.heads, self.groups, self.size = heads, groups, width // heads
        self.fused = heads == groups and draw.random() < 0.5
        bias = draw.random() < 0.6
        if self.fused:
            self.qkv = nn.Linear(width, 3 * width, bias=bias)
        else:
            self.q = nn.Linear(width, width, bias=bias)
            self.k = nn.Linear(width, groups * self.size, bias=bias)
            self.v = nn.Linear(width, groups * self.size, bias=bias)
        self.o = nn.Linear(width, width, bias=bias)
        self.qk_norm = draw.random() < 0.25
        if self.qk_norm:
            self.qn, self.kn = RMS(self.size), RMS(self.size)
        self.rope = not self.qk_norm and draw.random() < 0.3 and self.size % 2 == 0
        self.causal = draw.random() < 0.5

    def forward(self, x):
        b, t, width = x.shape
        if self.fused:
            q, k, v = self.qkv(x).split(width, dim=-1)
        else:
            q, k, v = self.q(x), self.k(x), self.v(x)
        q, k, v = (u.view(b, t, -1, self.size).transpose(1, 2) for u in (q, k, v))
        if self.qk_norm:
            q, k = self.qn(q), self.kn(k)
        if self.rope:
            q, k = rotate(q), rotate(k)
        if self.groups < self.heads:
            k, v = (u.repeat_interleave(self.heads // self.groups, dim=1) for u in (k, v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=self.causal)
        return self.o(y.transpose(1, 2).reshape(b, t, width))


def rotate(x):
    half = x.shape[-1] // 2
    angle = torch.arange(x.shape[2], dtype=x.dtype)[:, None] / 3.0 ** torch.arange(half, dtype=x.dtype)
    cos, sin = torch.cat([angle.cos()] * 2, -1), torch.cat([angle.sin()] * 2, -1)
    return x * cos + torch.cat([-x[..., half:], x[..., :half]], -1) * sin


class Gated(nn.Module):
    def __init__(self, draw, width, inner):
        super().__init__()
        bias = draw.random() < 0.3
        self.gate, self.up = nn.Linear(width, inner, bias=bias), nn.Linear(width, inner, bias=bias)
        self.down = nn.Linear(inner, width, bias=bias)
        self.act = draw.choice([F.silu, F.gelu, F.relu])

    def forward(self, x):
        return self.down(self.act(self.gate(x)) * self.up(x))


class Plain(nn.Module):
    def __init__(self, draw, width, inner):
        super().__init__()
        self.up, self.down = nn.Linear(width, inner), nn.Linear(inner, width, bias=draw.random() < 0.7)
        self.act = draw.choice([F.gelu, F.relu, torch.tanh])

    def forward(self, x):
        return self.down(self.act(self.up(x)))


def layer_norm(draw, width):
    return draw.choice(
        [
            lambda: nn.LayerNorm(width),
            lambda: nn.LayerNorm(width, bias=False),
            lambda: nn.RMSNorm(width, eps=1e-6),
            lambda: RMS(width),
            lambda: RMS(width, one_plus=True),
            lambda: HandLayerNorm(width),
        ]
    )()


class Transformer(nn.Module):
    def __init__(self, draw):
        super().__init__()
        heads = draw.choice([1, 2, 2])
        width = heads * draw.choice([2, 3, 4] if heads > 1 else [4, 6])  # three layer-normalized numbers have one angle
        groups = 1 if heads == 2 and draw.random() < 0.3 else heads
        self.tokens = 11 if draw.random() < 0.5 else 0
        self.into = nn.Embedding(self.tokens, width) if self.tokens else nn.Linear(5, width)
        self.place = nn.Parameter(torch.randn(6, width)) if draw.random() < 0.5 else None
        self.blocks = nn.ModuleList()
        for _ in range(draw.choice([1, 1, 2])):
            inner = draw.choice([3, 5, 6])
            part = nn.Module()
            part.n1, part.n2 = layer_norm(draw, width), layer_norm(draw, width)
            part.att = Attention(draw, width, heads, groups)
            part.mlp = (Gated if draw.random() < 0.5 else Plain)(draw, width, inner)
            self.blocks.append(part)
        self.post = draw.random() < 0.25
        self.last = layer_norm(draw, width) if draw.random() < 0.8 else nn.Identity()
        self.head = nn.Linear(width, self.tokens or 3, bias=draw.random() < 0.5)
        if self.tokens and draw.random() < 0.4:
            self.head.weight = self.into.weight

    def forward(self, x):
        x = self.into(x)
        x = x if self.place is None else x + self.place[: x.shape[1]]
        for part in self.blocks:
            if self.post:
                x = part.n1(x + part.att(x))
                x = part.n2(x + part.mlp(x))
            else:
                x = x + part.att(part.n1(x))
                x = x + part.mlp(part.n2(x))
        return self.head(self.last(x))


class Residual(nn.Module):
    def __init__(self, inner):
        super().__init__()
        self.inner = inner

    def forward(self, x):
        return x + self.inner(x)


ACTIVATIONS = (nn.ReLU, nn.Tanh, nn.GELU, nn.Sigmoid, nn.Softplus, nn.Identity, nn.SiLU, nn.LeakyReLU)
# In training their output draws random numbers or counts a part of itself as constant: no function to differentiate.
EVALUATED = {n for n in registry.names() if registry.get(n).noise or registry.get(n).detached}
LAYERS = tuple(n for n in registry.names() if registry.get(n).placement != "weights")
WEIGHTS = tuple(n for n in registry.names() if registry.get(n).placement == "weights")


def norm_layer(name, width, spatial):
    return registry.get(name).layer(channels=width, spatial=spatial)


def mlp(draw):
    width, first = draw.choice([4, 6]), draw.randint(3, 5)
    layers, norms = [nn.Linear(first, width, bias=draw.random() < 0.7)], []
    for _ in range(draw.randint(1, 3)):
        norms.append(draw.choice(LAYERS))
        act, dense = draw.choice(ACTIVATIONS), nn.Linear(width, width, draw.random() < 0.7)
        inner = nn.Sequential(norm_layer(norms[-1], width, 0), act(), dense)
        layers.append(Residual(inner) if draw.random() < 0.3 and act is not nn.Identity else inner)
    layers.append(nn.Linear(width, draw.randint(2, 4)))
    return nn.Sequential(*layers), torch.randn(64, first), f"mlp {norms}"


def conv(draw):
    width, norms = draw.choice([4, 6]), []
    layers = [nn.Conv2d(2, width, 3, padding=1, bias=draw.random() < 0.6)]
    for _ in range(draw.randint(1, 2)):
        norms.append(draw.choice(LAYERS))
        groups, act = draw.choice([1, 1, 2, width]), draw.choice(ACTIVATIONS)
        inner = nn.Sequential(
            norm_layer(norms[-1], width, 2),
            act(),
            nn.Conv2d(width, width, draw.choice([1, 3]), padding="same", groups=groups, bias=draw.random() < 0.6),
        )
        layers.append(Residual(inner) if draw.random() < 0.3 and act is not nn.Identity else inner)
    end = [nn.AdaptiveAvgPool2d(1), nn.Flatten()] if draw.random() < 0.6 else [nn.AvgPool2d(2), nn.Flatten()]
    layers += [*end, nn.Linear(width * (1 if isinstance(end[0], nn.AdaptiveAvgPool2d) else 4), 3)]
    return nn.Sequential(*layers), torch.randn(24, 2, 4, 4), f"conv {norms}"


class Recurrent(nn.Module):
    def __init__(self, draw):
        super().__init__()
        width = draw.choice([3, 4])
        self.cell = draw.choice([nn.RNN, nn.LSTM, nn.GRU])(3, width, batch_first=True)
        self.norm = layer_norm(draw, width)
        self.head = nn.Linear(width, 3)

    def forward(self, x):
        return self.head(self.norm(self.cell(x)[0]))


def parametrized(draw):
    first, width, names = draw.randint(3, 5), draw.choice([4, 6]), []

    def changed(module):
        names.append(draw.choice([*WEIGHTS, "torch weight_norm"]))
        if names[-1] == "torch weight_norm":
            return parametrizations.weight_norm(module)
        return registry.get(names[-1]).parametrize(module)

    norms = [draw.choice(["none", "batch", "layer", "group", "rms"]) for _ in range(2)]
    model = nn.Sequential(
        changed(nn.Linear(first, width, bias=draw.random() < 0.7)),
        norm_layer(norms[0], width, 0),
        draw.choice(ACTIVATIONS)(),
        changed(nn.Linear(width, width)),
        norm_layer(norms[1], width, 0),
        draw.choice(ACTIVATIONS)(),
        nn.Linear(width, 3),
    )
    return model, torch.randn(64, first), f"parametrized {names} {norms}"


def subject(seed: int) -> Subject:
    """Draw a network, its inputs, its mode and the spread of its weights."""
    draw = random.Random(seed)
    torch.manual_seed(seed)
    kind = KINDS[seed % len(KINDS)]
    model: Any
    if kind == "attention":
        model = Transformer(draw)
        inputs = torch.randint(0, model.tokens, (24, 6)) if model.tokens else torch.randn(24, 6, 5)
        what = "attention"
    elif kind == "recurrent":
        model, inputs, what = Recurrent(draw), torch.randn(24, 4, 3), "recurrent"
    else:
        model, inputs, what = {"mlp": mlp, "conv": conv, "parametrized": parametrized}[kind](draw)
    spread = draw.choice(SPREADS)
    with torch.no_grad():
        for name, buffer in model.named_buffers():
            if "running" in name:  # statistics of a training that was
                buffer.copy_(torch.rand_like(buffer) + (0.3 if "mean" not in name else -0.5))
        for name, value in model.named_parameters():
            if value.ndim > 1 and "parametrizations" not in name:
                value.copy_(spread * torch.randn_like(value))
    mode = "train" if draw.random() < 0.6 and not any(repr(name) in what for name in EVALUATED) else "eval"
    return Subject(kind, model, inputs, mode, f"{what}, spread {spread}, {mode}")


def generic_point(model, seed, spread=1.0):
    """Parameters of order one (by fan-in) or another size: a symmetry of the architecture holds there as everywhere."""
    source = torch.Generator().manual_seed(seed)
    point = {}
    for name, value in ((name, value) for name, value in model.named_parameters() if value.requires_grad):
        noise = torch.randn(value.shape, generator=source, dtype=value.dtype)
        if sum(s > 1 for s in value.shape) > 1:
            point[name] = spread * noise / math.sqrt(value[0].numel())
        elif value.numel() > 1:  # gains about one, biases about zero: large ones make units that never fire or bend
            point[name] = (value.mean() > 0.5) + 0.25 * noise
        else:
            point[name] = value.detach() + 0.25 * noise
        if "original0" in name:  # the gain of weight normalization
            point[name] = point[name].abs() + 0.3
    return point
