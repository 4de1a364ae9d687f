"""Random small networks: widths, activations, normalizations, biases, residuals and heads drawn by a seed."""

import random

import torch
from torch import nn

ACTIVATIONS = (
    nn.ReLU,
    nn.Tanh,
    nn.GELU,
    nn.Sigmoid,
    nn.Softplus,
    nn.Identity,
    nn.Hardtanh,
    nn.ReLU6,
    nn.SiLU,
    nn.Softsign,
)


class Clip(nn.Module):
    def forward(self, x):
        return x.clamp(-1.0, 1.5)


class Soft(nn.Module):
    def forward(self, x):
        return x.softmax(1)


class Block(nn.Module):
    def __init__(self, inner, skip):
        super().__init__()
        self.inner, self.skip = inner, skip

    def forward(self, x):
        return x + self.inner(x) if self.skip else self.inner(x)


def random_net(seed):
    draw = random.Random(seed)
    width, layers = draw.randint(3, 7), []
    first = draw.randint(3, 6)
    layers.append(nn.Linear(first, width, bias=draw.random() < 0.7))
    for _ in range(draw.randint(1, 4)):
        norm = draw.choice(
            [
                nn.Identity,
                lambda d: nn.BatchNorm1d(d, eps=10.0 ** -draw.randint(3, 12)),
                lambda d: nn.LayerNorm(d, eps=10.0 ** -draw.randint(3, 12), elementwise_affine=draw.random() < 0.6),
                lambda d: nn.RMSNorm(d, eps=10.0 ** -draw.randint(3, 12)),
            ]
        )
        act = draw.choice([*ACTIVATIONS, Clip, Soft])
        inner = nn.Sequential(norm(width), act(), nn.Linear(width, width, bias=draw.random() < 0.7))
        layers.append(Block(inner, skip=draw.random() < 0.4))
    layers.append(nn.Linear(width, draw.randint(2, 4)))
    torch.manual_seed(seed)
    net = nn.Sequential(*layers)
    with torch.no_grad():
        for parameter in net.parameters():
            if parameter.ndim > 0 and draw.random() < 0.5:
                parameter.copy_(torch.randn_like(parameter) * draw.choice([0.1, 0.5, 1.0, 3.0]))
    return net, draw.choice([0.3, 1.0, 4.0]) * torch.randn(draw.randint(24, 48), first)
