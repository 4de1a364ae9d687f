"""How deep may it be? gradients explode through BatchNorm: predicted and measured."""

import torch
from torch import nn

import normgauge as ng

torch.manual_seed(0)
layers = []
for _ in range(12):
    layers += [nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU()]
model = nn.Sequential(*layers, nn.Linear(64, 10))
result = ng.trainable_depth(model, torch.randn(64, 64))
