"""S3 Decoupling, least squares: GDNP against gradient descent, BN + GD, accelerated gradient and L-BFGS."""

import math

import torch
from torch import Tensor

from normgauge.optim import gdnp, least_squares
from normgauge.papers.batchnorm_article.studies._descents import Path, Race, descend, record_path
from normgauge.papers.batchnorm_article.studies._gdnp_data import FEATURES, regression
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator
from normgauge.theory.rayleigh import best_length


@register("least-squares")
def run(spec: Spec, record: Record) -> None:
    """Race one method from the best length of a random direction to the target gradient."""
    seed, most, target = int(spec["seed"]), int(spec["steps"]), float(spec["target"])
    samples = max(int(spec["batch"]), 4 * FEATURES)
    problem = least_squares(*regression(spec["data"], float(spec["condition"]), samples, seed))
    direction = torch.randn(FEATURES, generator=generator(5000 + seed), dtype=torch.float64)
    length = best_length(direction, problem.u, problem.S)
    start = length * direction / (direction @ problem.S @ direction).sqrt()
    if spec["method"] == "gdnp":
        enough = math.ceil(math.log(target) / math.log1p(-1 / float(spec["condition"]))) + 1  # by its own bound
        descent = gdnp(problem, iterations=min(most, enough), start=direction)
        norms = [item.gradient_norm / descent.records[0].gradient_norm for item in descent.records]
        path = Path(norms, [item.loss for item in descent.records], gradients=len(norms) - 1)
        arrived = path.iterations(target)
        if arrived is not None:
            path.distances, path.losses, path.gradients = norms[: arrived + 1], path.losses[: arrived + 1], arrived
        kept = [item for item in descent.records[: len(path.distances)] if item.rho_gap > 1e-12 * abs(item.rho)]
        slack = min((math.log10(item.rho_bound / item.rho_gap) for item in kept[1:]), default=0.0)
        record(len(path.distances) - 1, "bound_slack", slack)
    else:
        path = descend(_race(problem.u, problem.S, problem.constant, start), spec["method"], target=target, most=most)
    record_path(record, path, target, most)
    promised = _promised_rate(spec["method"], float(spec["condition"]))
    record(len(path.distances) - 1, "promised_rate", promised, status="skipped")


def _race(u: Tensor, S: Tensor, constant: float, start: Tensor) -> Race:
    def slopes(w: Tensor) -> tuple[Tensor, Tensor]:
        product = w @ S
        losses = constant + 2 * (w @ u).sum(-1) + (product * w).sum((-1, -2))
        return losses, 2 * u + 2 * product

    return Race(slopes, S, 2 * float(torch.linalg.eigvalsh(S)[-1]), start[None])


def _promised_rate(method: str, condition: float) -> float:
    """Return the factor per iteration that theory promises: GDNP's, GD's at its best fixed step."""
    if method == "gdnp":
        return 1 - 1 / condition
    return (condition - 1) / (condition + 1) if method == "gd" else math.nan
