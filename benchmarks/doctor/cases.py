"""What a case is, and small networks to make sick."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import nn
from torch.nn import functional as F

CASES: dict[str, Case] = {}


@dataclass(frozen=True)
class Case:
    """A fault: `make(True)` gives the sick arguments of `checkup`, `make(False)` those of its repaired twin."""

    name: str
    cause: str
    make: Callable[[bool], dict[str, Any]]
    historical: str = ""


def fault(cause: str, historical: str = ""):
    """Register a function of `sick` as a case."""

    def register(make):
        CASES[make.__name__] = Case(make.__name__, cause, make, historical)
        return make

    return register


def images(n=32, size=8, seed=0, classes=4):
    """Return images with class-dependent means, and labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return torch.randn(n, 3, size, size, generator=g) + 0.3 * y.view(-1, 1, 1, 1), y


def vectors(n=64, width=12, seed=0, classes=4):
    """Return vectors and labels."""
    g = torch.Generator().manual_seed(seed)
    y = torch.randint(0, classes, (n,), generator=g)
    return torch.randn(n, width, generator=g) + 0.5 * y.view(-1, 1), y


def sequences(n=16, length=10, width=16, seed=0, classes=4):
    """Return sequences of vectors and labels."""
    g = torch.Generator().manual_seed(seed)
    return torch.randn(n, length, width, generator=g), torch.randint(0, classes, (n,), generator=g)


def conv_net(norm=nn.BatchNorm2d, width=16, bias=False, **kw):
    """Return conv, norm, relu twice, and a head."""
    torch.manual_seed(0)
    return nn.Sequential(
        nn.Conv2d(3, width, 3, padding=1, bias=bias), norm(width, **kw), nn.ReLU(),
        nn.Conv2d(width, width, 3, padding=1, bias=bias), norm(width, **kw), nn.ReLU(),
        nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 4),
    )  # fmt: skip


def mlp(width=16, inputs=12, norm=nn.BatchNorm1d, depth=2, bias=False, **kw):
    """Return linear, norm, relu, `depth` times, and a head."""
    torch.manual_seed(0)
    layers, last = [], inputs
    for _ in range(depth):
        layers += [nn.Linear(last, width, bias=bias), norm(width, **kw), nn.ReLU()]
        last = width
    return nn.Sequential(*layers, nn.Linear(last, 4))


class Block(nn.Module):
    """A transformer block: norms before (pre) or behind the additions."""

    def __init__(self, width=16, pre=True, norm=nn.LayerNorm, scale=1.0):
        super().__init__()
        self.norm1, self.norm2, self.pre, self.scale = norm(width), norm(width), pre, scale
        self.attn = nn.MultiheadAttention(width, 2, batch_first=True)
        self.fc1, self.fc2 = nn.Linear(width, 2 * width), nn.Linear(2 * width, width)

    def mix(self, x):
        """Attend."""
        return self.attn(x, x, x, need_weights=False)[0]

    def forward(self, x):
        """Attention and MLP, each with a skip."""
        if self.pre:
            x = x + self.scale * self.mix(self.norm1(x))
            return x + self.scale * self.fc2(F.gelu(self.fc1(self.norm2(x))))
        x = self.norm1(x + self.mix(x))
        return self.norm2(x + self.fc2(F.gelu(self.fc1(x))))


class Former(nn.Module):
    """A small transformer encoder with a head."""

    def __init__(self, depth=3, width=16, pre=True, final=True, norm=nn.LayerNorm, scale=1.0):
        torch.manual_seed(0)
        super().__init__()
        self.blocks = nn.ModuleList(Block(width, pre, norm, scale) for _ in range(depth))
        self.final = norm(width) if final else nn.Identity()
        self.head = nn.Linear(width, 4)

    def forward(self, x):
        """Blocks, norm, mean over positions, head."""
        for block in self.blocks:
            x = block(x)
        return self.head(self.final(x).mean(1))


class RMS(nn.Module):
    """A hand-written RMSNorm: gain stored as w or as 1 + w, computed in float32 or not."""

    def __init__(self, width, eps=1e-6, plus_one=False, upcast=True, start=None):
        super().__init__()
        first = start if start is not None else 0.0 if plus_one else 1.0
        self.weight = nn.Parameter(torch.full((width,), first))
        self.eps, self.plus_one, self.upcast = eps, plus_one, upcast

    def forward(self, x):
        """Divide by the root mean square of the last axis."""
        y = x.float() if self.upcast else x
        y = y * torch.rsqrt(y.pow(2).mean(-1, keepdim=True) + self.eps)
        return (y * (self.weight + 1 if self.plus_one else self.weight)).to(x.dtype)


def groups(model, decay=0.05):
    """Return parameter groups: matrices decay, vectors do not."""
    many = [p for p in model.parameters() if p.requires_grad and p.ndim > 1]
    few = [p for p in model.parameters() if p.requires_grad and p.ndim <= 1]
    return [{"params": many, "weight_decay": decay}, {"params": few, "weight_decay": 0.0}]


def train(model, batch, steps=40, lr=0.02, optimizer=None, loss=None):
    """Train for some steps and return the model."""
    torch.manual_seed(1)
    model.train()
    optimizer = optimizer or torch.optim.SGD(groups(model), lr=lr, momentum=0.9)
    score = loss or (lambda m, b: F.cross_entropy(m(b[0]), b[1]))
    for _ in range(steps):
        optimizer.zero_grad()
        score(model, batch).backward()
        optimizer.step()
    return model
