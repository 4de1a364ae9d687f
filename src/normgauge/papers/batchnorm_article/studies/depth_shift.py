"""S3 Internal covariate shift: how a small move of the first layer arrives at the deep ones, through training."""

import copy
import math
from statistics import fmean

import torch
from torch import Tensor, nn

from normgauge.lab import data as datasets
from normgauge.lab.models import Normalized
from normgauge.nn import init
from normgauge.papers.language import Record, Spec, fit, register

ACTIVATIONS = {"relu": nn.ReLU, "tanh": nn.Tanh}
SMALL = 1e-3  # of the first layer's weights


@register("depth-shift")
def run(spec: Spec, record: Record) -> None:
    """Train, and at spaced steps move the first layer a little down its gradient and follow the change with depth."""
    digits = datasets.load(spec["data"])
    seed, steps, depth, width = (int(spec[name]) for name in ("seed", "steps", "depth", "width"))
    fans = [math.prod(digits.shape), *[width] * (depth - 1)]
    layers = [Normalized(nn.Linear(fan_in, width), spec["norm"], 0) for fan_in in fans]
    parts = [module for layer in layers for module in (layer, ACTIVATIONS[spec["activation"]]())]
    network = nn.Sequential(nn.Flatten(), *parts, nn.Linear(width, digits.classes))
    gain = {"relu": math.sqrt(2.0), "tanh": 1.0}[spec["activation"]]
    init.he(network, gain=gain, seed=seed)
    inputs, targets = digits.train[0][: int(spec["measured"])], digits.train[1][: int(spec["measured"])]
    growths: list[float] = []

    def watch(step: int, network: nn.Module) -> None:
        twin = copy.deepcopy(network).double().train()
        before, loss = _moments(twin, inputs.double(), targets)
        weight = twin.get_parameter("1.layer.weight")
        (slope,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight.sub_(SMALL * weight.norm() / slope.norm() * slope)
        after, _ = _moments(twin, inputs.double(), targets)
        shifts = [math.log10(_distance(*pair)) for pair in zip(before, after, strict=True)]
        for layer, value in enumerate(shifts):
            record(step, "log10_shift", value, layer=str(layer + 1))
        growths.append((shifts[-1] - shifts[0]) / (depth - 1))
        record(step, "log10_growth_now", growths[-1])

    at = {round(steps * k / 5) for k in range(6)}
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    done = fit(spec, network, digits, optimizer, batch=64, at=at, watch=watch).whole()
    record(0, "log10_growth_start", growths[0])
    record(steps, "log10_growth", fmean(growths[1:]))
    record(steps, "train_loss", fmean(done.losses[-10:]))


def _moments(network: nn.Module, inputs: Tensor, targets: Tensor) -> tuple[list[tuple[Tensor, Tensor]], Tensor]:
    """Return mean and deviation per unit of every activation (what the next layer takes in), and the loss."""
    moments, values = [], inputs
    for module in network.children():
        values = module(values)
        if isinstance(module, tuple(ACTIVATIONS.values())):
            moments.append((values.detach().mean(0), values.detach().std(0, unbiased=False)))
    return moments, nn.functional.cross_entropy(values, targets)


def _distance(before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor]) -> float:
    """Return the shift of a layer's distribution: root mean square over units of both moments, over the deviation."""
    moved = sum(((a - b).square().mean() for a, b in zip(after, before, strict=True)), torch.zeros(()))
    return float((moved / before[1].square().mean()).sqrt())
