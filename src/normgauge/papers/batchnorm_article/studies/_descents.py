"""Five ways down the same loss, raced to the same gradient: GD, BN + GD, accelerated gradient, L-BFGS, GDNP.

Step sizes are no handicap: every method that has one runs with a whole grid of them at once (a batch of copies), and
the copy that arrives first speaks for it. Gradients are measured in the norm of `S^-1`, the one GDNP is analysed in.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property

import numpy
import torch
from torch import Tensor

from normgauge.papers.language import Record

# Steps tried, as multiples of one over the smoothness: curvature at the minimum may be far below its bound.
MULTIPLES = tuple(2.0**k for k in (-1, 0, 0.5, 0.8, 0.9, 0.95, 1, 1.5, 2, 3, 4, 5, 6, 7, 8))
POINTS = 60  # of a curve that are kept
Slopes = Callable[[Tensor], tuple[Tensor, Tensor]]


@dataclass(frozen=True)
class Race:
    """A loss of weights `[units, features]` and where everyone starts."""

    slopes: Slopes  # weights `[copies, units, features]` -> losses `[copies]` and gradients of the same shape
    S: Tensor  # second moment of the inputs
    smoothness: float  # a Lipschitz constant of the gradient, the unit of steps
    start: Tensor  # `[units, features]`
    # a loss to measure the distance from, where gradients mislead (units that saturate have none)
    floor: float | None = None

    def distances(self, losses: Tensor, gradients: Tensor) -> Tensor:
        """Return per copy how far it is: the gradient norm, or the loss above the floor; inf where not finite."""
        far = self.sizes(gradients) if self.floor is None else losses - self.floor
        return torch.where(far.isfinite(), far, torch.inf)

    def sizes(self, gradients: Tensor) -> Tensor:
        """Return per copy the largest `|gradient|` of a unit in the norm of `S^-1`."""
        return ((gradients @ self._inverse) * gradients).sum(-1).clamp_min(0).sqrt().amax(-1)

    @cached_property
    def _inverse(self) -> Tensor:
        return torch.linalg.inv(self.S)


@dataclass
class Path:
    """What one method did: distances relative to the first and losses by iteration, its step, its gradients."""

    distances: list[float] = field(default_factory=list)
    losses: list[float] = field(default_factory=list)
    step: float = math.nan
    gradients: int = 0
    end: Tensor | None = None

    def iterations(self, target: float) -> int | None:
        """Return the first iteration whose relative distance is at most `target`."""
        return next((number for number, far in enumerate(self.distances) if far <= target), None)

    def rate(self) -> float:
        """Return the factor per iteration over the second half, a geometric mean; nan for a single step."""
        half = len(self.distances) // 2
        count = len(self.distances) - 1 - half
        if count < 1 or self.distances[half] <= 0 or self.distances[-1] <= 0:
            return math.nan
        return float((self.distances[-1] / self.distances[half]) ** (1 / count))


def descend(race: Race, method: str, *, target: float, most: int, multiples: Sequence[float] = MULTIPLES) -> Path:
    """Run gd, bn or agd with all steps at once until the first copy arrives, or lbfgs; at most `most` iterations.

    "safe" is gradient descent with the one step that theory gives, one over the smoothness: like GDNP, nothing tuned.
    """
    if method == "lbfgs":
        return _lbfgs(race, target, most)
    multiples = (1.0,) if method == "safe" else multiples
    steps = torch.tensor(multiples, dtype=race.start.dtype)[:, None, None] / race.smoothness
    return _best_copy(race, _MOVES[method](race, steps), steps.flatten(), target, most)


def _best_copy(race: Race, mover: Mover, steps: Tensor, target: float, most: int) -> Path:
    """Iterate all copies; return the path of the first to arrive, or of the one that came closest."""
    far: list[Tensor] = []
    losses: list[Tensor] = []
    for number in range(most + 1):
        value, gradients = race.slopes(mover.weights())
        far.append(race.distances(value, gradients))
        losses.append(value)
        if number == most or float(far[-1].min()) <= target * float(far[0][0]):
            break
        mover.move(gradients)
    best = int(far[-1].argmin())
    first = float(far[0][best])
    path = Path([float(n[best]) / first for n in far], [float(v[best]) for v in losses], float(steps[best]))
    path.gradients, path.end = len(far) - 1, mover.weights()[best]
    return path


class Mover:
    """A first-order method on many copies; `weights()` is where the gradient is wanted, `move` uses it."""

    def __init__(self, race: Race, steps: Tensor) -> None:
        self.race, self.steps = race, steps
        self.w = race.start.expand(len(steps), *race.start.shape).clone()

    def weights(self) -> Tensor:
        """Return the weights of every copy."""
        return self.w

    def move(self, gradients: Tensor) -> None:
        """Take the plain gradient step."""
        self.w = self.w - self.steps * gradients


class _Accelerated(Mover):
    """Nesterov's method with the momentum of FISTA, restarted per copy whenever it runs uphill."""

    def __init__(self, race: Race, steps: Tensor) -> None:
        super().__init__(race, steps)
        self.last, self.t = self.w.clone(), torch.ones_like(steps)

    def move(self, gradients: Tensor) -> None:
        new = self.w - self.steps * gradients
        uphill = (gradients * (new - self.last)).sum((-1, -2), keepdim=True) > 0
        self.t = torch.where(uphill, 1.0, self.t)
        after = (1 + (1 + 4 * self.t.square()).sqrt()) / 2
        self.w = new + torch.where(uphill, 0.0, (self.t - 1) / after) * (new - self.last)
        self.last, self.t = new, after


class _Normalized(Mover):
    """Gradient descent on direction and length of `g v / |v|_S`, as a unit with batch normalization has them."""

    def __init__(self, race: Race, steps: Tensor) -> None:
        super().__init__(race, steps)
        self.g = self._length(self.w)
        self.v = self.w / self.g

    def _length(self, w: Tensor) -> Tensor:
        return ((w @ self.race.S) * w).sum(-1, keepdim=True).sqrt()

    def weights(self) -> Tensor:
        return self.g * self.v / self._length(self.v)

    def move(self, gradients: Tensor) -> None:
        length = self._length(self.v)
        along = (gradients * self.v).sum(-1, keepdim=True)
        turn = self.g / length * (gradients - (self.v @ self.race.S) * along / length.square())
        self.v, self.g = self.v - self.steps * turn, self.g - self.steps * along / length


_MOVES: dict[str, type[Mover]] = {"gd": Mover, "safe": Mover, "bn": _Normalized, "agd": _Accelerated}


def _lbfgs(race: Race, target: float, most: int) -> Path:
    from scipy.optimize import minimize

    path, shape, evaluations = Path(), race.start.shape, [0]

    def value_and_slope(flat: numpy.ndarray) -> tuple[float, numpy.ndarray]:
        evaluations[0] += 1
        value, gradients = race.slopes(torch.from_numpy(flat).reshape(1, *shape))
        return float(value[0]), gradients.flatten().numpy()

    def look(flat: numpy.ndarray) -> None:
        value, gradients = race.slopes(torch.from_numpy(numpy.array(flat)).reshape(1, *shape))
        path.distances.append(float(race.distances(value, gradients)[0]))
        path.losses.append(float(value[0]))
        path.gradients = evaluations[0]
        if path.distances[-1] <= target * path.distances[0]:
            raise StopIteration

    begin = race.start.flatten().numpy().astype(float)
    look(begin)
    options = {"maxiter": most, "maxfun": 20 * most + 20, "gtol": 0.0, "ftol": 0.0}
    optimum = minimize(value_and_slope, begin, jac=True, method="L-BFGS-B", callback=look, options=options)
    path.end = torch.from_numpy(numpy.array(optimum.x)).reshape(shape)
    path.distances = [far / path.distances[0] for far in path.distances]
    return path


def record_path(record: Record, path: Path, target: float, most: int) -> None:
    """Record the curve, and iterations and gradients to the target; one that never arrives counts `most` of both."""
    last = len(path.distances) - 1
    kept = sorted({round(last * k / POINTS) for k in range(POINTS + 1)})
    for number in kept:
        record(number, "distance", path.distances[number])
    arrived = path.iterations(target)
    record(last, "iterations", max(1, most if arrived is None else arrived))
    record(last, "gradients", max(1, most if arrived is None else path.gradients))
    record(last, "arrived", float(arrived is not None))
    record(last, "rate", path.rate(), status="skipped")
    record(last, "final_loss", path.losses[-1])
    record(last, "step_size", path.step, status="skipped")
