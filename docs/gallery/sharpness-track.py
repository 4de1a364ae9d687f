"""The edge of stability: sharpness over its threshold, while training."""

import torch
from torch import nn

import normgauge as ng
from normgauge.lab.data import load

torch.manual_seed(0)
inputs, labels = load("digits").train
inputs, labels = inputs[:256].flatten(1), labels[:256]
model = nn.Sequential(nn.Linear(64, 48), nn.BatchNorm1d(48), nn.ReLU(), nn.Linear(48, 10))
objective = ng.Objective(model, nn.functional.cross_entropy, (inputs, labels), mode="train")
optimizer = torch.optim.SGD(model.parameters(), lr=0.2)
track = ng.sharpness_track(objective, optimizer)
for step in range(61):
    if step % 10 == 0:
        track.measure(step)
    optimizer.zero_grad()
    nn.functional.cross_entropy(model(inputs), labels).backward()
    optimizer.step()
result = track
