"""Does the ground move? how a layer's gradient changes because earlier layers moved."""

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load

torch.manual_seed(0)
inputs, labels = load("digits").train
inputs, labels = inputs[:256].flatten(1), labels[:256]
model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
objective = ng.Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
result = ng.covariate_shift(objective, 0.1)
