"""Does the signal survive? norms of activations and gradients through 12 layers without a normalizer."""

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load

torch.manual_seed(0)
inputs, labels = load("digits").train
inputs, labels = inputs[:256].flatten(1), labels[:256]
layers, width = [], 64
for _ in range(12):
    layers += [nn.Linear(width, 48), nn.ReLU()]
    width = 48
model = nn.Sequential(*layers, nn.Linear(48, 10))
objective = ng.Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
result = ng.signal_propagation(objective)
