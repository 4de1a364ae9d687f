"""S0 Experiment 1: the path of a two-dimensional weight vector with and without batch normalization."""

import math

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

STARTS = {"small": 0.3, "unit": 1.0, "large": 3.0}


@register("trajectories")
def run(spec: Spec, record: Record) -> None:
    """Descend the logistic loss of w.x (or its batch-normalized value) from 90 degrees off the separating direction."""
    inputs, labels, separating = _separable(int(spec["seed"]), int(spec["samples"]))
    start = STARTS[spec["start"]] * torch.stack([-separating[1], separating[0]])
    weight = start.clone().requires_grad_()
    change, growth, first, rises, before = 0.0, 0.0, float(start.norm()), 0.0, 90.0
    stride = max(1, int(spec["steps"]) // 60)
    for step in range(int(spec["steps"]) + 1):
        if step % stride == 0 or step == spec["steps"]:
            point = weight.detach()
            for name, value in (("x", point[0]), ("y", point[1]), ("relative_norm", point.norm())):
                record(step, name, float(value) / first)
            record(step, "angle", _angle(point, separating))
        if step == spec["steps"]:
            break
        (gradient,) = torch.autograd.grad(_loss(inputs @ weight, labels, spec["norm"]), weight)
        with torch.no_grad():
            weight -= float(spec["lr"]) * gradient
        growth += float(spec["lr"]) ** 2 * float(gradient.square().sum())
        change = max(change, abs(float(weight.detach().norm()) / first - 1))
        now = _angle(weight.detach(), separating)
        rises, before = rises + max(0.0, now - before), now
        if not math.isfinite(change):
            raise NonFiniteError(f"trajectories: the weights were not finite at step {step + 1}")
    record(int(spec["steps"]), "norm_change", change)
    record(int(spec["steps"]), "angle_rise", rises)  # degrees in all that the angle went the wrong way
    law = abs(math.sqrt(first**2 + growth) / float(weight.detach().norm()) - 1)
    record(int(spec["steps"]), "law_error", law)  # |w_t|^2 = |w_0|^2 + eta^2 sum |g|^2 holds with BN alone


def _separable(seed: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return points on both sides of a random line through 0, at least 0.3 away from it."""
    source = generator(seed)
    angle = 2 * math.pi * torch.rand((), generator=source, dtype=torch.float64)
    separating = torch.stack([angle.cos(), angle.sin()])
    inputs = torch.randn(samples, 2, generator=source, dtype=torch.float64)
    labels = torch.where(inputs @ separating > 0, 1.0, -1.0).to(torch.float64)
    return inputs + 0.3 * labels[:, None] * separating, labels, separating


def _loss(scores: Tensor, labels: Tensor, norm: str) -> Tensor:
    if norm == "batch":
        scores = (scores - scores.mean()) / (scores.var(unbiased=False) + 1e-12).sqrt()
    return torch.nn.functional.softplus(-labels * scores).mean()


def _angle(weight: Tensor, separating: Tensor) -> float:
    return math.degrees(math.acos(max(-1.0, min(1.0, float(weight @ separating / weight.norm())))))
