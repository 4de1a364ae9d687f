"""Time of `operator_norm` and of weight standardization against what they replace or ride on.

Medians of interleaved ratios in one process: run as `python benchmarks/operator_norm.py [--repeats N]`; writes
`benchmarks/results/operator_norm.json`. One thread for the norms, two for the convolution step.
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path

import torch
from torch import nn

import normgauge as ng
from normgauge.linalg import Convolution

RESULTS = Path(__file__).parent / "results" / "operator_norm.json"


def seconds(function):
    """Return how long one call takes."""
    start = time.perf_counter()
    function()
    return time.perf_counter() - start


def interleaved(ours, theirs, repeats):
    """Median of ours / theirs over rounds in which both run, after one round of warming up."""
    ours(), theirs()
    rounds = [(seconds(ours), seconds(theirs)) for _ in range(repeats)]
    return {
        "ratio": statistics.median(a / b for a, b in rounds),
        "ours_ms": 1e3 * statistics.median(a for a, _ in rounds),
        "theirs_ms": 1e3 * statistics.median(b for _, b in rounds),
        "rounds": repeats,
    }


def power_iterations(operator, count):
    """Return the norm after `count` power iterations, as spectral normalization does them."""
    vector = torch.randn(operator.shape[1], generator=torch.Generator().manual_seed(0))
    for _ in range(count):
        vector = operator.adjoint(operator.matvec(vector))
        vector = vector / vector.norm()
    return float(operator.matvec(vector).norm())


def against_power(repeats):
    """Compare a certified bracket with 200 power iterations on the same operator."""
    layer = nn.Conv2d(64, 64, 3, padding=1, bias=False)
    ng.nn.init.he(layer)
    operator = Convolution.of(layer, (32, 32))
    result = interleaved(
        lambda: ng.operator_norm(layer, (64, 32, 32)), lambda: power_iterations(operator, 200), repeats
    )
    bracket = ng.operator_norm(layer, (64, 32, 32))
    return result | {
        "lower": bracket.lower,
        "upper": bracket.upper,
        "power_200": power_iterations(operator, 200),
        "target": 0.7,
    }


def resnet18():
    """The CIFAR ResNet-18, as a list of (layer, input size) and as a network."""

    class Block(nn.Module):
        def __init__(self, inputs, outputs, stride):
            super().__init__()
            self.conv1 = nn.Conv2d(inputs, outputs, 3, stride, 1, bias=False)
            self.bn1 = nn.BatchNorm2d(outputs)
            self.conv2 = nn.Conv2d(outputs, outputs, 3, 1, 1, bias=False)
            self.bn2 = nn.BatchNorm2d(outputs)
            same = inputs == outputs and stride == 1
            self.shortcut = nn.Identity() if same else nn.Conv2d(inputs, outputs, 1, stride, bias=False)

        def forward(self, x):
            y = self.bn2(self.conv2(torch.relu(self.bn1(self.conv1(x)))))
            return torch.relu(y + self.shortcut(x))

    parts, width = [nn.Conv2d(3, 64, 3, 1, 1, bias=False), nn.BatchNorm2d(64), nn.ReLU()], 64
    for outputs, stride in ((64, 1), (128, 2), (256, 2), (512, 2)):
        parts += [Block(width, outputs, stride), Block(outputs, outputs, 1)]
        width = outputs
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(512, 10))


def all_convolutions(repeats):
    """Compare the brackets of all convolutions of a ResNet-18 with one of its training steps."""
    net = resnet18()
    sizes = {}
    convolutions = [part for part in net.modules() if isinstance(part, nn.Conv2d)]
    handles = [
        part.register_forward_pre_hook(lambda layer, x: sizes.__setitem__(layer, tuple(x[0].shape[1:])))
        for part in convolutions
    ]
    net(torch.randn(2, 3, 32, 32))
    for handle in handles:
        handle.remove()
    x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))
    optimizer = torch.optim.SGD(net.parameters(), lr=0.01)

    def step():
        optimizer.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()
        optimizer.step()

    def norms():
        for layer in convolutions:
            ng.operator_norm(layer, sizes[layer])

    return interleaved(norms, step, repeats) | {"layers": len(convolutions), "target": 15.0}


def standardized_step(repeats):
    """Compare a convolution step with and without weight standardization."""
    torch.set_num_threads(2)
    x = torch.randn(128, 64, 32, 32)
    plain = nn.Conv2d(64, 64, 3, padding=1)
    standardized = ng.nn.weight_standardization(nn.Conv2d(64, 64, 3, padding=1))

    def step(layer):
        layer(x).sum().backward()
        layer.zero_grad()

    result = interleaved(lambda: step(standardized), lambda: step(plain), repeats)
    torch.set_num_threads(1)
    return result | {"target": 1.3}


def main():
    """Run all and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = {
        "machine": {"torch": torch.__version__, "python": platform.python_version(), "processor": platform.machine()},
        "bracket_64x64x3x3_on_32x32_over_200_power_iterations": against_power(arguments.repeats),
        "weight_standardization_over_plain_convolution_step": standardized_step(arguments.repeats),
        "20_convolutions_of_resnet18_over_training_step_of_128": all_convolutions(max(1, arguments.repeats // 5)),
    }
    for name, result in results.items():
        if "ratio" in result:
            verdict = "ok" if result["ratio"] <= result["target"] else "MISSED"
            print(f"{name}: {result['ratio']:.3f} (target {result['target']}) {verdict}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
