"""S0 Fig. 5.1: the loss over a two-dimensional weight, a basin without BN and a flat valley along every ray with it."""

import math

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

RADII = torch.logspace(-1, 1, 41, dtype=torch.float64)  # two decades of norms
ANGLES = torch.linspace(0, 2 * math.pi, 361, dtype=torch.float64)[:-1]
ALIGNED = 5.0  # degrees
FLAT = 0.01  # of the gap between the loss of w = 0 and the lowest
SPAN = 4.0
DRAWN = 3  # the seed whose surface is drawn, the first that is judged


@register("valley")
def run(spec: Spec, record: Record) -> None:
    """Map the loss in polar coordinates and on a square grid, then descend from 90 degrees off the best direction."""
    inputs, labels = _noisy_labels(int(spec["seed"]), int(spec["samples"]), float(spec["stretch"]))
    norm = spec["norm"]
    polar = _loss(inputs @ _unit(ANGLES).T, labels, norm, RADII)
    best_radius, best_angle = divmod(int(polar.argmin()), len(ANGLES))
    spread = polar.var(unbiased=False)
    record(0, "radial_share", float(polar.var(0, unbiased=False).mean() / spread))
    low = float(polar.min() + FLAT * (math.log(2) - polar.min()))
    flat = polar[:, best_angle] <= low
    record(0, "valley_decades", _run_length(flat, best_radius) * 2 / (len(RADII) - 1))
    if int(spec["seed"]) == DRAWN:
        _record_grid(record, inputs, labels, norm, int(spec["points"]))
    _descend(spec, record, inputs, labels, float(ANGLES[best_angle]), low)


def _descend(spec: Spec, record: Record, inputs: Tensor, labels: Tensor, best: float, low: float) -> None:
    weight = _unit(torch.tensor([best + math.pi / 2], dtype=torch.float64))[0].requires_grad_()
    start, length, steps = weight.detach().clone(), 0.0, int(spec["steps"])
    aligned = arrived = steps  # the budget where it never gets there
    stride = max(1, steps // 60)
    for step in range(steps + 1):
        now = weight.detach()
        off = abs(math.degrees(math.remainder(float(torch.atan2(now[1], now[0])) - best, 2 * math.pi)))
        aligned = min(aligned, step) if off <= ALIGNED else aligned
        if step % stride == 0 or step == steps:
            for name, value in (("x", now[0]), ("y", now[1]), ("off", off)):
                record(step, name, float(value))
        if step == steps:
            break
        loss = _loss((inputs @ weight)[:, None], labels, spec["norm"], torch.ones(1, dtype=torch.float64)).sum()
        arrived = min(arrived, step) if float(loss.detach()) <= low else arrived
        (slope,) = torch.autograd.grad(loss, weight)
        with torch.no_grad():
            weight -= float(spec["lr"]) * slope
        length += float(spec["lr"]) * float(slope.norm())
        if not bool(torch.isfinite(weight.detach()).all()):
            raise NonFiniteError(f"valley: the weights were not finite at step {step + 1}")
    record(steps, "steps_to_align", aligned)
    record(steps, "steps_to_lowest", arrived)
    record(steps, "detour", length / max(float((weight.detach() - start).norm()), 1e-12))


def _noisy_labels(seed: int, samples: int, stretch: float) -> tuple[Tensor, Tensor]:
    """Return stretched Gaussian points and labels of a random half-plane, a tenth of them wrong.

    Wrong labels give the plain loss a minimum at a finite norm; the stretch makes it badly conditioned.
    """
    source = generator(seed)
    turn = float(2 * math.pi * torch.rand((), generator=source, dtype=torch.float64))
    frame = torch.tensor([[math.cos(turn), -math.sin(turn)], [math.sin(turn), math.cos(turn)]], dtype=torch.float64)
    raw = torch.randn(samples, 2, generator=source, dtype=torch.float64)
    inputs = (raw * torch.tensor([stretch, 1.0], dtype=torch.float64)) @ frame.T
    direction = frame @ torch.tensor([0.6, 0.8], dtype=torch.float64)
    flips = torch.rand(samples, generator=source, dtype=torch.float64) < 0.1
    right = torch.where(inputs @ direction > 0, 1.0, -1.0).to(torch.float64)
    return inputs, torch.where(flips, -right, right)


def _loss(scores: Tensor, labels: Tensor, norm: str, radii: Tensor) -> Tensor:
    """Return the logistic loss per radius (rows) and score column, for scores of unit weights."""
    scaled = radii[:, None, None] * scores
    if norm == "batch":
        centred = scaled - scaled.mean(1, keepdim=True)
        scaled = centred / (centred.square().mean(1, keepdim=True) + 1e-5).sqrt()
    return torch.nn.functional.softplus(-labels[:, None] * scaled).mean(1)


def _unit(angles: Tensor) -> Tensor:
    return torch.stack([angles.cos(), angles.sin()], dim=1)


def _run_length(flags: Tensor, place: int) -> int:
    """Return how many steps the stretch of true flags around a place is long."""
    low = high = place
    while low > 0 and bool(flags[low - 1]):
        low -= 1
    while high < len(flags) - 1 and bool(flags[high + 1]):
        high += 1
    return high - low


def _record_grid(record: Record, inputs: Tensor, labels: Tensor, norm: str, points: int) -> None:
    """Store the loss on a square of weights around 0: what the figure draws."""
    axis = torch.linspace(-SPAN, SPAN, points, dtype=torch.float64)
    weights = torch.cartesian_prod(axis, axis)
    losses = _loss(inputs @ weights.T, labels, norm, torch.ones(1, dtype=torch.float64))[0]
    for (x, y), value in zip(weights.tolist(), losses.tolist(), strict=True):
        record(0, "surface", value, layer=f"{x:.4g} {y:.4g}")
