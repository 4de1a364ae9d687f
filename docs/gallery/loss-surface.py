"""A slice of the loss: filter-normalized random directions, certified."""

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load

torch.manual_seed(0)
inputs, labels = load("digits").train
inputs, labels = inputs[:256].flatten(1), labels[:256]
model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
for _ in range(40):
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
objective = ng.Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
result = ng.loss_surface(objective, points=21)
