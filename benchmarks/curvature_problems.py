"""Two problems for timing curvature tools: a wide MLP and a ResNet-18 for 32x32 images, both a few steps trained."""

import itertools

import torch
from torch import nn


class Block(nn.Module):
    """Two 3x3 convolutions with BatchNorm and a shortcut."""

    def __init__(self, inside, outside, stride):
        """Make a block from `inside` to `outside` channels."""
        super().__init__()
        self.first = nn.Conv2d(inside, outside, 3, stride, 1, bias=False)
        self.norm1 = nn.BatchNorm2d(outside)
        self.second = nn.Conv2d(outside, outside, 3, 1, 1, bias=False)
        self.norm2 = nn.BatchNorm2d(outside)
        self.shortcut = nn.Sequential()
        if stride != 1 or inside != outside:
            self.shortcut = nn.Sequential(nn.Conv2d(inside, outside, 1, stride, bias=False), nn.BatchNorm2d(outside))

    def forward(self, x):
        """Return relu(x' + f(x))."""
        out = self.norm2(self.second(torch.relu(self.norm1(self.first(x)))))
        return torch.relu(out + self.shortcut(x))


def resnet18():
    """Return the usual ResNet-18 for 32x32 images (11.2 million parameters)."""
    layers, inside = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
    for outside, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        layers += [Block(inside, outside, stride), Block(outside, outside, 1)]
        inside = outside
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def mlp():
    """Return the 3072-512-512-512-10 ReLU network (2.1 million parameters)."""
    sizes, layers = (3072, 512, 512, 512), []
    for inside, outside in itertools.pairwise(sizes):
        layers += [nn.Linear(inside, outside), nn.ReLU()]
    return nn.Sequential(*layers, nn.Linear(512, 10))


def problem(name):
    """Return (model in eval mode, loss, inputs, targets) after a few SGD steps on random data."""
    torch.manual_seed(0)
    if name in ("mlp", "mlp-early"):
        model, x, steps = mlp(), torch.randn(128, 3072), 15
    else:
        model, x, steps = resnet18(), torch.randn(8, 3, 32, 32), 4
    y = torch.randint(0, 10, (len(x),))
    # "early": hardly trained, with many close eigenvalues; the others have a few that stand out
    settings = {"lr": 0.05} if name == "mlp-early" else {"lr": 0.1, "momentum": 0.9}
    optimizer = torch.optim.SGD(model.parameters(), **settings)
    for _ in range(steps):
        optimizer.zero_grad()
        nn.functional.cross_entropy(model(x), y).backward()
        optimizer.step()
    optimizer.zero_grad()
    return model.eval(), nn.CrossEntropyLoss(), x, y
