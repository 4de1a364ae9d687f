"""A Lipschitz bracket: lower and upper bound, layer by layer."""

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load

torch.manual_seed(0)
inputs, labels = load("digits").train
inputs, labels = inputs[:256].flatten(1), labels[:256]
model = nn.Sequential(nn.Linear(64, 32), nn.ReLU(), nn.Linear(32, 32), nn.ReLU(), nn.Linear(32, 10)).eval()
result = ng.lipschitz(model, inputs[:32])
