"""Lipschitz brackets of five kinds of networks, as the documentation shows them.

Four are trained for 300 steps on the 8x8 digits of scikit-learn; the CIFAR ResNet-18 has random weights and the
statistics of random inputs. Run as `python benchmarks/lipschitz_networks.py`; writes
`benchmarks/results/lipschitz_networks.json`. One thread.
"""

import json
import time
from pathlib import Path

import torch
from operator_norm import resnet18
from sklearn.datasets import load_digits
from torch import nn

import normgauge as ng
from normgauge.lab import models

RESULTS = Path(__file__).parent / "results" / "lipschitz_networks.json"
SHAPE, CLASSES, DATA = (1, 8, 8), 10, 64


def group_normalized():
    """A ConvNet with GroupNorm after weight-standardized convolutions."""
    layers, channels = [], 1
    for width in (16, 32, 32):
        conv = ng.nn.weight_standardization(nn.Conv2d(channels, width, 3, padding=1))
        layers += [conv, nn.GroupNorm(4, width), nn.ReLU()]
        channels = width
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(channels, CLASSES))


class Rows(nn.Module):
    """A pre-LN transformer that reads an image row by row."""

    def __init__(self, blocks=2, width=32):
        super().__init__()
        self.embed, self.place = nn.Linear(8, width), nn.Parameter(0.02 * torch.randn(1, 8, width))
        layer = nn.TransformerEncoderLayer(width, 4, 2 * width, 0.0, "gelu", batch_first=True, norm_first=True)
        self.blocks = nn.TransformerEncoder(layer, blocks, nn.LayerNorm(width), enable_nested_tensor=False)
        self.head = nn.Linear(width, CLASSES)

    def forward(self, x):
        """Return the logits."""
        return self.head(self.blocks(self.embed(x.squeeze(1)) + self.place).mean(dim=1))


NETWORKS = {
    "MLP": lambda: models.build("mlp", "none", SHAPE, CLASSES, seed=0),
    "VGG with BatchNorm": lambda: models.build("vgg", "batch", SHAPE, CLASSES, seed=0),
    "ConvNet, GroupNorm and weight standardization": group_normalized,
    "two pre-LN transformer blocks": Rows,
}


def digits():
    """Return standardized 8x8 digits and labels."""
    bunch = load_digits()
    images = torch.tensor(bunch.images, dtype=torch.float32).unsqueeze(1)
    return (images - images.mean()) / images.std(), torch.tensor(bunch.target)


def trained(net, images, labels, steps=300):
    """Train by Adam on random batches of 128 and return the network in evaluation mode."""
    optimizer = torch.optim.Adam(net.parameters(), 1e-3)
    generator = torch.Generator().manual_seed(0)
    for _ in range(steps):
        pick = torch.randint(0, len(labels), (128,), generator=generator)
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(images[pick]), labels[pick]).backward()
        optimizer.step()
    return net.eval()


def row(net, data, radius):
    """Return the numbers of one network: on all inputs, and on balls."""
    start = time.perf_counter()
    free = ng.lipschitz(net, data)
    seconds = time.perf_counter() - start
    ball = ng.lipschitz(net, data, radius=radius)
    return {
        "radius": radius,
        "lower": free.lower,
        "lower_on_ball": ball.lower,
        "log10_at_data": free.log10_at_data,
        "log10_on_ball": ball.log10_upper,
        "log10_global": free.log10_upper,
        "normalizers_log10_at_data": sum(layer.log10_at_data for layer in free.layers if layer.normalizer),
        "normalizers_log10_global": free.normalizers_log10,
        "seconds": seconds,
    }


def main():
    """Measure all networks and write the numbers."""
    torch.set_num_threads(1)
    images, labels = digits()
    results = {}
    for name, build in NETWORKS.items():
        torch.manual_seed(0)
        net = trained(build(), images, labels)
        results[name] = row(net, images[:DATA], 0.1)
        with torch.no_grad():
            results[name]["accuracy"] = float((net(images).argmax(1) == labels).float().mean())
        print(name, json.dumps(results[name]), flush=True)
    torch.manual_seed(0)
    net, inputs = resnet18(), torch.randn(16, 3, 32, 32)
    with torch.no_grad():
        for _ in range(20):
            net(inputs)
    results["ResNet-18, random weights"] = row(net.eval(), inputs[:4], 0.1)
    print("ResNet-18", json.dumps(results["ResNet-18, random weights"]))
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
