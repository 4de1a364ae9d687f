"""Time of Lipschitz brackets against what they stand beside, and their numbers against other tools.

Run as `python benchmarks/lipschitz.py [--repeats N] [--peers]`; writes `benchmarks/results/lipschitz.json`. One thread.
`--peers` runs only the table against other tools, each skipped with a reason where it is not installed.
"""

import argparse
import itertools
import json
import math
import platform
from pathlib import Path

import torch
from operator_norm import against_power, all_convolutions, interleaved, power_iterations, resnet18
from torch import nn

import normgauge as ng
from normgauge.linalg import Convolution
from normgauge.measure.lipschitz.lipschitz import jacobian_norms
from normgauge.measure.lipschitz.trace import private_copy

RESULTS = Path(__file__).parent / "results" / "lipschitz.json"


def lower_bound(repeats):
    """Compare the exact Jacobian norms of 10 logits at 128 points with one gradient of the loss in the weights."""
    net = resnet18().eval()
    frozen = private_copy(net)
    x, y = torch.randn(128, 3, 32, 32), torch.randint(0, 10, (128,))

    def gradient():
        net.zero_grad()
        nn.functional.cross_entropy(net(x), y).backward()

    return interleaved(lambda: jacobian_norms(frozen, x), gradient, repeats) | {"target": 12.0}


def wide_batch_norm():
    """A net whose BatchNorm has a gain of 50: a tool that leaves it out is wrong by a factor of 50."""
    net = nn.Sequential(nn.Linear(8, 16), nn.BatchNorm1d(16), nn.ReLU(), nn.Linear(16, 4))
    nn.init.constant_(net[1].weight, 50.0)
    return net, torch.randn(32, 8)


class Residual(nn.Module):
    """An MLP with a skip connection."""

    def __init__(self):
        super().__init__()
        self.inner = nn.Sequential(nn.Linear(8, 32), nn.ReLU(), nn.Linear(32, 8))
        self.last = nn.Linear(8, 4)

    def forward(self, x):
        """Return the last layer of x + f(x)."""
        return self.last(x + self.inner(x))


def convolutional():
    """Three convolutions with BatchNorm and a linear layer."""
    layers = []
    for a, b in ((3, 16), (16, 16), (16, 32)):
        layers += [nn.Conv2d(a, b, 3, padding=1), nn.BatchNorm2d(b), nn.ReLU()]
    return nn.Sequential(*layers, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(32, 10)), torch.randn(16, 3, 16, 16)


def plain():
    """A ReLU network of four layers."""
    sizes = (8, 32, 32, 32, 4)
    layers = []
    for a, b in itertools.pairwise(sizes):
        layers += [nn.Linear(a, b), nn.ReLU()]
    return nn.Sequential(*layers[:-1]), torch.randn(32, 8)


NETS = {
    "MLP": plain,
    "BatchNorm with gain 50": wide_batch_norm,
    "residual MLP": lambda: (Residual(), torch.randn(32, 8)),
    "convolutions and BatchNorm": convolutional,
}


def linear_parts(net, x):
    """Return every linear layer with the spatial size of its input."""
    found = []
    handles = [
        part.register_forward_pre_hook(lambda layer, inputs: found.append((layer, tuple(inputs[0].shape[2:]))))
        for part in net.modules()
        if isinstance(part, (nn.Linear, nn.Conv2d))
    ]
    net(x[:1])
    for handle in handles:
        handle.remove()
    return found


def reshaped_product(net, x):
    """Product of the norms torch's spectral_norm uses, BatchNorm left out."""
    return math.prod(
        float(torch.linalg.matrix_norm(layer.weight.flatten(1).detach(), 2)) for layer, _ in linear_parts(net, x)
    )


def power_product(net, x):
    """Product of 10 power iterations on each layer as an operator, BatchNorm left out."""
    parts = linear_parts(net, x)
    return math.prod(power_iterations(Convolution.of(layer, size), 10) for layer, size in parts)


def eclipse(net, x):
    """Bound of eclipse-nn (PyPI), for Linear layers and activations."""
    from eclipse_nn.LipConstEstimator import LipConstEstimator

    return float(LipConstEstimator(model=net).estimate(method="ECLipsE_Fast"))


def torchlip(net, x):
    """Largest Jacobian norm found by deel-torchlip (PyPI)."""
    from deel.torchlip.utils import evaluate_lip_const

    value = evaluate_lip_const(net, x)
    return float(value[0] if isinstance(value, tuple) else value)


TOOLS = {
    "torch's reshaped norms, product": reshaped_product,
    "10 power iterations, product": power_product,
    "eclipse-nn": eclipse,
    "deel-torchlip evaluate_lip_const": torchlip,
}


def against_tools():
    """Tabulate, for each net, our bracket and what other tools say; `sound` tells whether it can be an upper bound."""
    table = {}
    for name, build in NETS.items():
        torch.manual_seed(0)
        net, x = build()
        net.eval()
        bracket = ng.lipschitz(net, x)
        row = {"lower": bracket.lower, "upper": bracket.upper}
        for tool, measure in TOOLS.items():
            try:
                row[tool] = measure(net, x)
            except Exception as error:  # noqa: BLE001 (another project's failure is a result of the table)
                row[tool] = f"{type(error).__name__}: {str(error).splitlines()[0][:90] if str(error) else ''}"
        table[name] = row
        print(name, json.dumps(row, indent=2))
    return table


def main():
    """Run all, or the table alone, and write the results."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--repeats", type=int, default=15)
    parser.add_argument("--peers", action="store_true")
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    results = json.loads(RESULTS.read_text(encoding="utf-8")) if RESULTS.exists() else {}
    results["machine"] = {
        "torch": torch.__version__,
        "python": platform.python_version(),
        "processor": platform.machine(),
    }
    if arguments.peers:
        results["against_other_tools"] = against_tools()
    else:
        few = max(1, arguments.repeats // 5)
        results["bracket_64x64x3x3_on_32x32_over_200_power_iterations"] = against_power(arguments.repeats)
        results["20_convolutions_of_resnet18_over_training_step_of_128"] = all_convolutions(few)
        results["jacobians_of_10_logits_at_128_points_over_one_gradient"] = lower_bound(few)
    for name, result in results.items():
        if "ratio" in result:
            verdict = "ok" if result["ratio"] <= result["target"] else "MISSED"
            print(f"{name}: {result['ratio']:.3f} (target {result['target']}) {verdict}")
    RESULTS.parent.mkdir(exist_ok=True)
    RESULTS.write_text(json.dumps(results, indent=2) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
