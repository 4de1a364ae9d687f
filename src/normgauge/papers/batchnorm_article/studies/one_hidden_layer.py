"""S3 Decoupling, neural networks: GDNP unit by unit on one hidden layer of tanh units, against four rivals."""

import dataclasses
import math

import torch
from torch import Tensor

from normgauge.optim import gdnp_network
from normgauge.papers.batchnorm_article.studies._descents import Path, Race, descend, record_path
from normgauge.papers.batchnorm_article.studies._gdnp_data import FEATURES, two_classes
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

UNITS = 4
CHUNK = 8


@register("one-hidden-layer")
def run(spec: Spec, record: Record) -> None:
    """Train the hidden weights of sum_i theta_i tanh(w_i.x), output weights fixed, to the target loss."""
    seed, most, target = int(spec["seed"]), int(spec["steps"]), float(spec["target"])
    samples = max(int(spec["batch"]), 8 * FEATURES)
    x, y = two_classes(spec["data"], float(spec["condition"]), samples, seed)
    theta = torch.tensor([1.0, -1.0] * (UNITS // 2), dtype=torch.float64)
    race = _race(x, y, theta, seed)
    settled = descend(race, "lbfgs", target=0.0, most=min(most, int(spec["floor_steps"])))
    race = dataclasses.replace(race, floor=min(settled.losses))
    if spec["method"] == "gdnp":
        path = _gdnp(x, y, theta, race, target, most)
    else:
        path = descend(race, spec["method"], target=target, most=most)
    record_path(record, path, target, most)
    record(len(path.distances) - 1, "alignment", _alignment(settled.end, x, y, race.S))  # nearly critical
    record(len(path.distances) - 1, "settled_gradient", settled.distances[-1])


def _race(x: Tensor, y: Tensor, theta: Tensor, seed: int) -> Race:
    S = x.T @ x / len(x)
    drawn = torch.randn(UNITS, FEATURES, generator=generator(5000 + seed), dtype=torch.float64)
    start = drawn / ((drawn @ S) * drawn).sum(1, keepdim=True).sqrt()

    def slopes(w: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.tanh(x @ w.transpose(1, 2))  # [copies, samples, units]
        margin = y * (t @ theta)
        pull = -y * torch.sigmoid(-margin) / len(x)
        gradients = (pull[..., None] * (1 - t * t) * theta).transpose(1, 2) @ x
        return torch.nn.functional.softplus(-margin).mean(1), gradients

    return Race(slopes, S, float(torch.linalg.eigvalsh(S)[-1]) * float(theta @ theta) / 4, start)


def _gdnp(x: Tensor, y: Tensor, theta: Tensor, race: Race, target: float, most: int) -> Path:
    """Sweep over the units until the target; it remembers nothing but the weights, so it can be continued."""
    path, floor = Path(end=race.start), float(race.floor or 0.0)
    evaluations: list[int] = []
    while len(path.distances) <= most and path.iterations(target) is None:
        count = min(CHUNK, most - max(len(path.distances) - 1, 0))
        descent = gdnp_network(x, y, output=theta, start=path.end, sweeps=count)
        skip = 1 if path.distances else 0
        path.losses += descent.losses[skip:]
        before = evaluations[-1] if evaluations else 0
        evaluations += [before + count for count in descent.evaluations[skip:]]
        path.distances = [(loss - floor) / (path.losses[0] - floor) for loss in path.losses]
        path.end = descent.weights
        if count == 0 or len(path.distances) > most:
            break
    arrived = path.iterations(target)
    if arrived is not None:
        path.distances, path.losses = path.distances[: arrived + 1], path.losses[: arrived + 1]
    path.gradients = evaluations[len(path.distances) - 1]  # the searches of steps and lengths too
    return path


def _alignment(w: Tensor | None, x: Tensor, y: Tensor, S: Tensor) -> float:
    """Return the smallest |cos| (S metric) of a unit with S^-1 u, the line S3 puts all critical points on."""
    if w is None:
        return math.nan
    u = -(y @ x) / len(x)
    line = torch.linalg.solve(S, u)
    lengths = ((w @ S) * w).sum(1).sqrt() * (line @ u).sqrt()
    return float(((w @ u).abs() / lengths).min())
