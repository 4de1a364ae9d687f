"""S0 sec. 9.1, 9.5: where BN is said to fail: a recurrent network, and the two networks of a GAN."""

import math

import torch
from torch import Tensor, nn

from normgauge.errors import NonFiniteError
from normgauge.lab import data as datasets
from normgauge.lab.models import Normalized
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.nn import init
from normgauge.papers.language import Record, Spec, record_accuracies, register
from normgauge.rng import generator

#: Where normalizers stand in a GAN: of the generator, of the discriminator.
PLACES = {"none": ("none", "none"), "in the discriminator": ("none", "batch")}
MODES, RADIUS, SPREAD = 8, 2.0, 0.1


class Recurrent(nn.Module):
    """h' = tanh(norm(W h + U x)) over `length` slices of an image; BN's stored statistics serve all slices or each."""

    def __init__(self, inputs: int, length: int, width: int, classes: int, norm: str) -> None:
        super().__init__()
        self.length, self.width, self.each = length, width, norm == "batch per step"
        self.cell = nn.Linear(inputs // length + width, width)
        kinds: dict[str, type[nn.Module]] = {"none": nn.Identity, "layer": nn.LayerNorm}
        self.norms = nn.ModuleList(kinds.get(norm, nn.BatchNorm1d)(width) for _ in range(length if self.each else 1))
        self.head = nn.Linear(width, classes)

    def forward(self, images: Tensor) -> Tensor:
        """Return the scores after the last slice."""
        state = images.new_zeros(len(images), self.width)
        for step, part in enumerate(images.flatten(1).chunk(self.length, 1)):
            norm = self.norms[step if self.each else 0]
            state = torch.tanh(norm(self.cell(torch.cat([part, state], 1))))
        return self.head(state)


@register("failures")
def run(spec: Spec, record: Record) -> None:
    """Train one of the two tasks: the knob `part` says which."""
    (_recurrent if spec["part"] == "recurrent" else _adversarial)(spec, record)


def _recurrent(spec: Spec, record: Record) -> None:
    digits = datasets.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = Recurrent(math.prod(digits.shape), int(spec["length"]), 32, digits.classes, spec["norm"])
    init.glorot(network, seed=seed)
    optimizer = torch.optim.Adam(network.parameters(), lr=float(spec["lr"]))
    train(network, digits, optimizer, steps=steps, batch=64, seed=seed, clip=1.0).whole()
    record_accuracies(record, steps, network, digits, "validation", "test")
    record(steps, "score", evaluate(network, digits, "validation").accuracy)


def _adversarial(spec: Spec, record: Record) -> None:
    seed, steps, batch = int(spec["seed"]), int(spec["steps"]), 128
    source = generator(seed)
    places, rate = zip((2, 1), PLACES[spec["place"]], strict=True), float(spec["lr"])
    made, judging = (_mlp(outputs, norm, seed + 1000 * outputs) for outputs, norm in places)
    optimizers = [torch.optim.Adam(net.parameters(), lr=rate, betas=(0.5, 0.999)) for net in (made, judging)]
    softplus = nn.functional.softplus
    for _ in range(steps):
        fake = made(torch.randn(batch, 2, generator=source))
        loss = softplus(-judging(_ring(batch, source))).mean() + softplus(judging(fake.detach())).mean()
        optimizers[1].zero_grad()
        loss.backward()
        optimizers[1].step()
        loss = softplus(-judging(made(torch.randn(batch, 2, generator=source)))).mean()
        optimizers[0].zero_grad()
        loss.backward()
        optimizers[0].step()
    if not bool(torch.isfinite(loss)):
        raise NonFiniteError(f"failures: the generator's loss is not finite after {steps} steps")
    made.eval()
    with torch.no_grad():
        sample = made(torch.randn(1000, 2, generator=source))
    real = _ring(1000, source)
    distance = float(2 * _apart(sample, real) - _apart(sample, sample) - _apart(real, real))
    record(steps, "distance", max(distance, 1e-6))
    record(steps, "score", -distance)
    near = torch.cdist(sample, _centres()).min(1)
    record(steps, "modes", len(set(near.indices[near.values < 3 * SPREAD].tolist())))


def _mlp(outputs: int, norm: str, seed: int, width: int = 32) -> nn.Sequential:
    hidden = [Normalized(nn.Linear(fan_in, width), norm, 0) for fan_in in (2, width)]
    network = nn.Sequential(hidden[0], nn.ReLU(), hidden[1], nn.ReLU(), nn.Linear(width, outputs))
    init.glorot(network, seed=seed)
    for layer in hidden:
        layer.wrap_weights()
    return network


def _centres() -> Tensor:
    angles = torch.arange(MODES) * (2 * math.pi / MODES)
    return RADIUS * torch.stack([angles.cos(), angles.sin()], 1)


def _ring(count: int, source: torch.Generator) -> Tensor:
    """Return points of eight Gaussians on a ring."""
    chosen = _centres()[torch.randint(MODES, (count,), generator=source)]
    return chosen + SPREAD * torch.randn(count, 2, generator=source)


def _apart(a: Tensor, b: Tensor) -> Tensor:
    return torch.cdist(a, b).mean()
