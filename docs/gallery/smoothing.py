"""What BatchNorm takes away: the shares of the gradient removed by mean and scale."""

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load

torch.manual_seed(0)
inputs, labels = load("digits").train
inputs, labels = inputs[:256].flatten(1), labels[:256]
model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
objective = ng.Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
result = ng.smoothing(objective)
