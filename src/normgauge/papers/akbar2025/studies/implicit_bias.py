"""S0 sec. 6.1, 7.2: towards which separating direction descent goes, with BN and weight decay or without."""

import math
from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.papers.language import Record, Spec, register
from normgauge.rng import generator

EPS = 1e-12
SMALLEST_LOSS = 1e-250


@register("implicit-bias")
def run(spec: Spec, record: Record) -> None:
    """Descend the logistic loss of w.x + b, or of gamma BN(w.x) + beta, and follow the direction of w."""
    seed, steps, rate = int(spec["seed"]), int(spec["steps"]), float(spec["lr"])
    inputs, labels = _separable(seed, int(spec["samples"]), int(spec["dimension"]))
    widest = max_margin(inputs, labels)
    whitening = torch.linalg.cholesky(torch.cov(inputs.T, correction=0))
    even = torch.linalg.solve(whitening.T, max_margin(torch.linalg.solve(whitening, inputs.T).T, labels))
    source = generator(3000 + seed)
    weight = torch.randn(inputs.shape[1], generator=source, dtype=torch.float64) / math.sqrt(inputs.shape[1])
    gain, bias = torch.ones((), dtype=torch.float64), torch.zeros((), dtype=torch.float64)
    decay = float(spec["strength"]) if spec["decay"] else 0.0
    schedule = {round(10 ** (k / 8)) for k in range(60)} | {0}
    for step in range(steps):
        if step in schedule:
            record(step, "angle", degrees(_sign(gain) * weight, widest))
            record(step, "whitened_angle", degrees(_sign(gain) * weight, even))
        values = (weight, gain, bias) if spec["norm"] == "batch" else (weight, bias)
        # divided by the loss, descent reaches in thousands of steps where it would be after exponentially many
        loss = _loss(values, inputs, labels)
        if loss < SMALLEST_LOSS:
            break
        slopes = [slope / loss for slope in loss_gradients(values, inputs, labels)]
        weight, *rest = ((1 - rate * decay) * v - rate * s for v, s in zip(values, slopes, strict=True))
        gain, bias = rest if spec["norm"] == "batch" else (gain, rest[0])
        if not bool(torch.isfinite(weight).all()):
            raise NonFiniteError(f"implicit-bias: the weights were not finite at step {step + 1}")
    weight, gain = _sign(gain) * weight, gain.abs()
    record(steps, "angle", degrees(weight, widest))
    record(steps, "whitened_angle", degrees(weight, even))
    scores = labels * (inputs @ weight + _offset(weight, gain, bias, inputs, spec["norm"]))
    record(steps, "margin_share", float(scores.min() / weight.norm()) / _margin(widest, inputs, labels))
    record(steps, "angle_between_targets", degrees(even, widest))


def loss_gradients(values: Sequence[Tensor], inputs: Tensor, labels: Tensor) -> list[Tensor]:
    """Return the gradient of mean softplus(-y f) with f = w.x + b for (w, b), gamma BN(w.x) + beta for all three.

    Written out because a run is thousands of steps on a few numbers, where autograd is most of the time.
    """
    scores = inputs @ values[0]
    if len(values) == 2:
        pull = -labels * torch.sigmoid(-labels * (scores + values[1])) / len(labels)
        return [inputs.T @ pull, pull.sum()]
    centred = scores - scores.mean()
    spread = (centred.square().mean() + EPS).sqrt()
    unit = centred / spread
    pull = -labels * torch.sigmoid(-labels * (values[1] * unit + values[2])) / len(labels)
    back = values[1] / spread * (pull - pull.mean() - unit * (pull * unit).mean())
    return [inputs.T @ back, pull @ unit, pull.sum()]


def _sign(gain: Tensor) -> Tensor:
    """Return the sign with which the weight decides: a negative gain turns the direction round."""
    return torch.where(gain < 0, -1.0, 1.0)


def _loss(values: Sequence[Tensor], inputs: Tensor, labels: Tensor) -> float:
    scores = inputs @ values[0]
    if len(values) == 3:
        centred = scores - scores.mean()
        scores = values[1] * centred / (centred.square().mean() + EPS).sqrt()
    return float(torch.nn.functional.softplus(-labels * (scores + values[-1])).mean())


def _offset(weight: Tensor, gain: Tensor, bias: Tensor, inputs: Tensor, norm: str) -> Tensor:
    """Return b such that the decision is the sign of w.x + b: the normalized score's, in units of w.x."""
    if norm == "none":
        return bias
    scores = inputs @ weight
    return bias * scores.std(unbiased=False) / gain - scores.mean()


def _separable(seed: int, samples: int, dimension: int) -> tuple[Tensor, Tensor]:
    """Return two classes separated by a gap, stretched so that the widest gap and the whitened one differ."""
    source = generator(seed)
    direction = torch.randn(dimension, generator=source, dtype=torch.float64)
    direction /= direction.norm()
    scales = torch.linspace(0.5, 2.0, dimension, dtype=torch.float64)
    inputs = torch.randn(samples, dimension, generator=source, dtype=torch.float64) * scales
    labels = torch.where(inputs @ direction > 0, 1.0, -1.0).to(torch.float64)
    return inputs + 0.5 * labels[:, None] * direction, labels


def max_margin(inputs: Tensor, labels: Tensor) -> Tensor:
    """Return the w of smallest norm with y (w.x + b) >= 1 on all points: the hard-margin support vector machine.

    Solved in the dual by non-negative least squares: min |w|^2 subject to A u >= 1 with u = (w, b) is the least
    distance problem, whose solution is read off the residual of NNLS (Lawson and Hanson); b gets a weight so small
    that it does not count.
    """
    from scipy.optimize import nnls

    free = 1e-4
    rows = torch.cat([inputs, torch.full((len(labels), 1), 1 / free, dtype=torch.float64)], 1) * labels[:, None]
    matrix = np.vstack([rows.T.numpy(), np.ones(len(labels))])
    target = np.zeros(matrix.shape[0])
    target[-1] = 1.0
    dual, _ = nnls(matrix, target, maxiter=100 * len(labels))
    residual = matrix @ dual - target
    return torch.as_tensor(-residual[:-2] / residual[-1])


def _margin(weight: Tensor, inputs: Tensor, labels: Tensor) -> float:
    """Return the margin of a direction with its best offset."""
    scores = inputs @ weight / weight.norm()
    return float(scores[labels > 0].min() - scores[labels < 0].max()) / 2


def degrees(a: Tensor, b: Tensor) -> float:
    """Return the angle between two vectors in degrees."""
    cosine = float(a @ b / (a.norm() * b.norm()))
    return math.degrees(math.acos(max(-1.0, min(1.0, cosine))))
