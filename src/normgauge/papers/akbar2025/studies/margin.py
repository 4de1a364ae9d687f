"""S0 Experiment 3: margins and stability under parameter noise of a 50-20-1 network trained to zero training error."""

import math

import torch
from torch import Tensor, nn

from normgauge.papers.language import Record, Spec, fit, register
from normgauge.papers.networks import relu_network
from normgauge.rng import generator

SIZES = {"mini": 32, "full": 400}
RELATIVE = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the root mean square of each tensor's entries
ABSOLUTE = (0.05, 0.1, 0.2, 0.4)
DRAWS = 10
CHECK = 10  # steps between two looks at the training error


@register("margin")
def run(spec: Spec, record: Record) -> None:
    """Train until no training point is wrong and measure there, then train on and measure the margins again."""
    seed, steps = int(spec["seed"]), int(spec["steps"])
    training, validation, test = _data(seed)
    network = relu_network((50, 20, 1), spec["norm"], seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    size = SIZES[spec["batch"]] if spec["batch"] in SIZES else int(spec["batch"])
    measured = False

    def watch(step: int, network: nn.Module) -> None:
        nonlocal measured
        if measured or (step < steps and _accuracy(network, *training) < 1.0):
            return
        measured = True
        record(step, "steps_to_zero_error", step)
        for name, split in (("train", training), ("validation", validation), ("test", test)):
            record(step, f"{name}_accuracy", _accuracy(network, *split))
        _record_margins(record, step, network, training, "", keep=seed == 2)
        _record_noise(record, step, network, training, seed)

    def loss(outputs: Tensor, labels: Tensor) -> Tensor:
        return nn.functional.softplus(-labels * outputs[:, 0]).mean()

    looks = {"at": {*range(0, steps, CHECK), steps}, "watch": watch, "ceiling": math.inf}
    fit(spec, network, training, optimizer, batch=size, loss=loss, **looks).whole()
    record(steps, "late_test_accuracy", _accuracy(network, *test))
    _record_margins(record, steps, network, training, "late_", keep=False)


def _data(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return Gaussian inputs in 50 dimensions labelled by |a.x| > |b.x|: four ReLU units separate them, no line does.

    400 points to train on, 400 to tune on, 2000 to test.
    """
    source = generator(seed)
    ends = torch.randn(2, 50, generator=source, dtype=torch.float64)
    parts = []
    for count in (400, 400, 2000):
        inputs = torch.randn(count, 50, generator=source, dtype=torch.float64)
        far = (inputs @ ends.T).abs()
        parts.append((inputs, torch.where(far[:, 0] > far[:, 1], 1.0, -1.0).to(torch.float64)))
    return parts


def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits with stored statistics, as the trained network would be used."""
    network.eval()
    logits = network(inputs)[:, 0]
    network.train()
    return logits


def _accuracy(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((_outputs(network, inputs) * labels > 0).double().mean())


def _record_margins(
    record: Record, step: int, network: nn.Module, data: tuple[Tensor, Tensor], prefix: str, *, keep: bool
) -> None:
    """Record the mean of f(x) y and the median of f(x) y / |df/dx|, the distance to the boundary to first order."""
    inputs, labels = data[0].clone().requires_grad_(), data[1]
    raw = _outputs(network, inputs) * labels
    (slopes,) = torch.autograd.grad(raw.sum(), inputs)
    distances = raw.detach() / slopes.norm(dim=1).clamp_min(1e-12)
    record(step, f"{prefix}mean_margin", float(raw.detach().mean()))
    record(step, f"{prefix}normalized_margin", float(distances.median()))
    if keep:
        for number, (a, b) in enumerate(zip(raw.tolist(), distances.tolist(), strict=True)):
            record(step, "raw", a, layer=str(number))
            record(step, "distance", b, layer=str(number))


def _record_noise(record: Record, step: int, network: nn.Module, data: tuple[Tensor, Tensor], seed: int) -> None:
    """Record the training accuracy with Gaussian noise on the parameters, relative to each tensor and absolute."""
    parameters = list(network.parameters())
    before = [value.detach().clone() for value in parameters]
    for name, levels in (("noisy_accuracy", RELATIVE), ("absolute_noise_accuracy", ABSOLUTE)):
        source = generator(5000 + seed)
        means = []
        for level in levels:
            accuracies = []
            for _ in range(DRAWS):
                for value, old in zip(parameters, before, strict=True):
                    unit = float(old.square().mean().sqrt()) if name == "noisy_accuracy" else 1.0
                    noise = torch.randn(old.shape, generator=source, dtype=old.dtype)
                    value.data = torch.add(old, noise, alpha=level * unit)
                accuracies.append(_accuracy(network, *data))
            means.append(sum(accuracies) / len(accuracies))
            record(step, f"{name}_at", means[-1], layer=f"{level:g}")
        record(step, name, sum(means) / len(means), kind="estimate")
    for value, old in zip(parameters, before, strict=True):
        value.data = old
