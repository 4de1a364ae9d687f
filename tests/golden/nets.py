"""Tiny float64 networks and data whose numbers come from numpy's frozen `RandomState`, not from torch's streams."""

import numpy as np
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng


def numbers(*shape, seed=0):
    """Normal numbers that no version of numpy or torch changes."""
    return torch.from_numpy(np.random.RandomState(seed).standard_normal(shape))


def filled(model, seed=0):
    """Give a model float64 weights, gains near one, small biases and stored statistics that are not standard."""
    model = model.double()
    with torch.no_grad():
        for number, (name, tensor) in enumerate([*model.named_parameters(), *model.named_buffers()]):
            if not tensor.is_floating_point():
                continue
            draw = numbers(*tensor.shape, seed=1000 * seed + number)
            if name.endswith("running_var"):
                tensor.copy_((0.3 * draw).exp())
            elif tensor.dim() > 1:
                tensor.copy_(draw / tensor[0].numel() ** 0.5)
            else:
                tensor.copy_(0.2 * draw + name.endswith("weight"))
    return model


def mlp():
    return filled(nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)))


def without_bias():
    return filled(nn.Sequential(nn.Linear(4, 6, bias=False), nn.BatchNorm1d(6), nn.ReLU(), nn.Linear(6, 3)), seed=3)


def deep():
    layers = [layer for _ in range(4) for layer in (nn.Linear(5, 5), nn.BatchNorm1d(5), nn.Tanh())]
    return filled(nn.Sequential(*layers, nn.Linear(5, 3)), seed=4)


def conv():
    parts = nn.Conv2d(2, 3, 3, padding=1), nn.BatchNorm2d(3), nn.ReLU(), nn.Conv2d(3, 2, 3, stride=2)
    return filled(nn.Sequential(*parts, nn.Flatten(), nn.Linear(8, 3)), seed=1)


class Block(nn.Module):
    """A pre-norm transformer block with a head."""

    def __init__(self):
        super().__init__()
        self.before_attention, self.before_mlp = nn.LayerNorm(4), nn.LayerNorm(4)
        self.attention = nn.MultiheadAttention(4, 2, batch_first=True)
        self.mlp = nn.Sequential(nn.Linear(4, 6), nn.GELU(), nn.Linear(6, 4))
        self.head = nn.Linear(4, 3)

    def forward(self, x):
        h = self.before_attention(x)
        x = x + self.attention(h, h, h, need_weights=False)[0]
        return self.head((x + self.mlp(self.before_mlp(x))).mean(1))


def block():
    return filled(Block(), seed=2)


SHAPES = {mlp: (4,), deep: (5,), conv: (2, 5, 5), block: (3, 4)}


def labels(samples):
    return torch.arange(samples) * 7 % 5 % 3


def batch(make, samples=12, seed=50):
    return numbers(samples, *SHAPES[make], seed=seed), labels(samples)


def objective(make, mode="train", samples=12):
    return ng.Objective(make(), F.cross_entropy, batch(make, samples), mode=mode)
