"""S3 Decoupling, halfspaces: GDNP against GD, BN + GD, accelerated gradient and L-BFGS, Gaussian data and others."""

import math

import numpy
import torch
from torch import Tensor

from normgauge.optim import GaussianHalfspace, SampleHalfspace, gaussian_halfspace, gdnp, halfspace
from normgauge.papers.batchnorm_article.studies._descents import Path, Race, descend, record_path
from normgauge.papers.batchnorm_article.studies._gdnp_data import FEATURES, gaussian_moments, two_classes
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

NODES = 32
BISECTIONS = 30
CHUNK = 16


@register("halfspace")
def run(spec: Spec, record: Record) -> None:
    """Race one method on logistic regression from the best length of a random direction to the target gradient."""
    seed, most, target = int(spec["seed"]), int(spec["steps"]), float(spec["target"])
    problem = _problem(spec, seed)
    direction = torch.randn(FEATURES, generator=generator(5000 + seed), dtype=torch.float64)
    if spec["method"] == "gdnp":
        path, halvings = _gdnp(problem, direction, target, most)
        record(len(path.distances) - 1, "halvings", halvings)
    else:
        start = gdnp(problem, iterations=0, bisections=BISECTIONS, start=direction).weights
        path = descend(_race(problem, start), spec["method"], target=target, most=most)
    record_path(record, path, target, most)


def _problem(spec: Spec, seed: int) -> GaussianHalfspace | SampleHalfspace:
    if spec["data"] == "gaussian":
        return gaussian_halfspace(*gaussian_moments(float(spec["condition"]), seed))
    samples = max(int(spec["batch"]), 8 * FEATURES)
    return halfspace(*two_classes(spec["data"], float(spec["condition"]), samples, seed))


def _gdnp(problem: GaussianHalfspace | SampleHalfspace, w: Tensor, target: float, most: int) -> tuple[Path, int]:
    """Run GDNP to the target; it remembers nothing but its direction, so it can be continued from there."""
    path, halvings, first = Path(), 0, math.nan
    while len(path.distances) <= most:
        count = min(CHUNK, most - max(len(path.distances) - 1, 0))
        descent = gdnp(problem, iterations=count, bisections=BISECTIONS, start=w)
        first = descent.records[0].gradient_norm if not path.distances else first
        fresh = descent.records[1 if path.distances else 0 :]
        path.distances += [item.gradient_norm / first for item in fresh]
        path.losses += [item.loss for item in fresh]
        halvings += descent.halvings
        path.gradients += int(descent.cost.gradients)  # those of the bisections too, to the end of the chunk
        arrived = path.iterations(target)
        if arrived is not None:
            path.distances, path.losses = path.distances[: arrived + 1], path.losses[: arrived + 1]
        if arrived is not None or len(fresh) == 0 or descent.status != "ok":
            break
        w = descent.direction
    return path, halvings


def _race(problem: GaussianHalfspace | SampleHalfspace, start: Tensor) -> Race:
    u, S = problem.u, problem.S
    points, weights = (torch.from_numpy(part) for part in numpy.polynomial.hermite_e.hermegauss(NODES))

    def from_moments(w: Tensor) -> tuple[Tensor, Tensor]:
        product, mean = w @ S, w @ u
        spread = ((product * w).sum(-1) - mean.square()).clamp_min(0).sqrt()
        t = mean + spread * points
        s = torch.sigmoid(t)
        share = weights / weights.sum()
        value = torch.nn.functional.softplus(t) @ share
        slope, bend = (s @ share)[:, None, None], ((s * (1 - s)) @ share)[:, None, None]
        return value, (slope - bend * mean[..., None]) * u + bend * product

    def from_samples(w: Tensor) -> tuple[Tensor, Tensor]:
        t = w[:, 0] @ problem.z.T  # type: ignore[union-attr]
        gradients = torch.sigmoid(t) @ problem.z / t.shape[1]  # type: ignore[union-attr]
        return torch.nn.functional.softplus(t).mean(1), gradients[:, None]

    smoothness = float(torch.linalg.eigvalsh(S)[-1]) / 4
    return Race(from_moments if isinstance(problem, GaussianHalfspace) else from_samples, S, smoothness, start[None])
