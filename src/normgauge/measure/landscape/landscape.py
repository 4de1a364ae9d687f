"""How loss and gradient change along the gradient and random directions: variation, predictiveness, beta."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from torch import Tensor

from normgauge.errors import InputError, NonFiniteError
from normgauge.linalg.norms import joint_norm
from normgauge.measure.landscape.directions import random_direction
from normgauge.objective import Objective
from normgauge.records import Reading, Status
from normgauge.results import Result, instrument

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True, slots=True)
class Landscape(Result):
    """Loss and gradient at theta - s d for each step s, along one direction d: the gradient unless said otherwise.

    Attributes:
        steps: the step sizes s.
        losses: L(theta - s d).
        gradient_distances: |grad L(theta - s d) - g|, S1's gradient predictiveness (smaller predicts better).
        effective_beta: gradient_distances / (s |d|), the Lipschitz constant of the gradient seen on that step.
        loss: L(theta).
        gradient_norm: |g|.
        statuses: per step, "ok" or "diverged" (loss or gradient not finite there; its values are nan).
        direction: "gradient", or "random 1" and so on.
        random: the same along random directions of the gradient's length, as many as asked for.
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_distances: tuple[float, ...]
    effective_beta: tuple[float, ...]
    loss: float
    gradient_norm: float
    statuses: tuple[Status, ...]
    direction: str = "gradient"
    random: tuple[Landscape, ...] = ()

    @property
    def max_loss(self) -> float:
        """The largest loss met; with `min_loss`, the band of S1 Fig. 4(a)."""
        return _largest(self.losses)

    @property
    def min_loss(self) -> float:
        """The smallest loss met."""
        return -_largest([-value for value in self.losses])

    @property
    def loss_variation(self) -> float:
        """max_loss - min_loss."""
        return self.max_loss - self.min_loss

    @property
    def max_gradient_distance(self) -> float:
        """The largest change of the gradient (S1 Fig. 4(b))."""
        return _largest(self.gradient_distances)

    @property
    def max_effective_beta(self) -> float:
        """The largest effective beta (S1 Fig. 4(c))."""
        return _largest(self.effective_beta)

    def _title(self) -> str:
        return f"Landscape along the gradient: loss {self.loss:.4g}, |gradient| {self.gradient_norm:.4g}"

    def _rows(self) -> list[dict[str, Any]]:
        columns = (self.steps, self.losses, self.gradient_distances, self.effective_beta, self.statuses)
        names = ("step", "loss", "gradient_distance", "effective_beta", "status")
        rows = [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]
        if not self.random and self.direction == "gradient":
            return rows
        own = [{"direction": self.direction, **row} for row in rows]
        return own + [row for other in self.random for row in other._rows()]

    def readings(self) -> tuple[Reading, ...]:
        """Return the largest effective beta (a lower bound on the smoothness constant) and the other summaries."""
        why = "no step has a finite loss"
        summaries = (
            Reading.measured("max effective beta", self.max_effective_beta, "lower", why=why),
            Reading.measured("max gradient distance", self.max_gradient_distance, why=why),
            Reading.measured("loss variation", self.loss_variation, why=why),
            Reading("loss", self.loss),
            Reading("gradient norm", self.gradient_norm),
        )
        return (*summaries, *(replace(other.readings()[0], layer=other.direction) for other in self.random))

    def _meaning(self) -> str:
        beta, farthest = self.max_effective_beta, max(self.steps)
        if math.isnan(beta):
            return f"No step up to {farthest:g} has a finite loss and gradient: use smaller ones."
        said = f"On these steps the gradient changes with a Lipschitz constant of at least {beta:.4g}"
        if not beta:
            return f"{said}: the loss is linear along the gradient up to {farthest:g}."
        safe = f"{said}, so descent is promised up to a rate of 1 / beta = {1 / beta:.3g} at most; "
        worst = max((loss, step) for step, loss in zip(self.steps, self.losses, strict=True) if math.isfinite(loss))
        if worst[0] > self.loss:
            return f"{safe}at {worst[1]:g} the loss has risen from {self.loss:.4g} to {worst[0]:.4g}."
        return f"{safe}no step tried, up to {farthest:g}, raises the loss above {self.loss:.4g}."

    def chart(self) -> altair.TopLevelMixin:
        """Return loss, gradient distance and effective beta against the step, side by side."""
        from normgauge.charts import panels

        return panels(
            [row for row in self._rows() if row.get("direction", "gradient") == self.direction],
            x="step",
            ys={"loss": "loss", "gradient_distance": "change of the gradient", "effective_beta": "effective beta"},
            x_title="step s along -gradient",
            log_x=min(self.steps) > 0 and max(self.steps) / min(self.steps) > 30,
        )


@instrument
def landscape(objective: Objective, *, steps: Sequence[float], random: int = 0, seed: int = 0) -> Landscape:
    """Measure loss and gradient at theta - s g for each s in `steps`, and along random directions.

    With g = grad L(theta): losses[i] = L(theta - s_i g), gradient_distances[i] = |grad L(theta - s_i g) - g|,
    effective_beta[i] = gradient_distances[i] / (s_i |g|). The maximum of the last is a lower bound on any
    Lipschitz constant of the gradient on the segment. A random direction has independent normal entries and is scaled
    to |g|, so that equal steps are equal distances.

    Kind: exact at the steps given. Cost: len(steps) * (1 + random) + 1 gradients.

    Args:
        objective: what to measure; the model is left as it was.
        steps: the step sizes, non-zero and finite; S1 uses [1/2, 4] times the learning rate.
        random: how many random directions to look along as well.
        seed: of the random directions.

    Raises:
        InputError: when steps are empty, zero or not finite, or `random` is negative.
        NonFiniteError: when the loss or gradient is not finite at theta itself, or the gradient is zero.

    Deviations: S1 App. A.2.2 does not say over which distances its "effective beta" takes the maximum; here
        every step has its own value and the maximum is a summary.

    Examples:
        For L = c w^2 the gradient is 2 c w, so the effective beta is 2 c everywhere:

        >>> import torch
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = (torch.full((4, 1), 2.0), torch.zeros(4, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval")
        >>> [round(beta, 4) for beta in landscape(objective, steps=[0.1, 0.5]).effective_beta]
        [8.0, 8.0]

    References: santurkar2018.
    """
    chosen = _check_steps(steps)
    if random < 0:
        raise InputError("landscape", "random counts directions", str(random), "Pass random=0 or more")
    at_start = objective.loss_and_gradient()
    base = at_start[1]
    scale = joint_norm(base)
    if not (math.isfinite(scale) and scale > 0):
        raise NonFiniteError(
            "landscape",
            "the gradient at the starting point must be finite and not zero",
            f"|gradient| = {scale:g}",
            "Measure at a point that is not critical, or look for the layer that produces it",
        )
    others: list[Landscape] = []
    for number in range(1, random + 1):
        draw = random_direction(base, seed * 1000 + number)
        size = scale / joint_norm(draw)
        direction = {name: size * value for name, value in draw.items()}
        others.append(_landscape_along(objective, at_start, direction, chosen, f"random {number}", ()))
    return _landscape_along(objective, at_start, base, chosen, "gradient", tuple(others))


def _landscape_along(
    objective: Objective,
    at_start: tuple[Tensor, dict[str, Tensor]],
    direction: Mapping[str, Tensor],
    steps: tuple[float, ...],
    name: str,
    others: tuple[Landscape, ...],
) -> Landscape:
    """Return the landscape at theta - s direction; `at_start` are loss and gradient at theta."""
    base_loss, base = at_start
    origin = objective.parameters
    losses, distances = [], []
    statuses: list[Status] = []
    for step in steps:
        moved = {key: value - step * direction[key] for key, value in origin.items()}
        loss, distance = _look(objective.at(moved), base)
        losses.append(loss)
        distances.append(distance)
        statuses.append("ok" if math.isfinite(loss) and math.isfinite(distance) else "diverged")
    scale, lost = joint_norm(direction), statuses.count("diverged")
    return Landscape(
        steps=steps,
        losses=tuple(losses),
        gradient_distances=tuple(distances),
        effective_beta=tuple(d / (abs(s) * scale) for s, d in zip(steps, distances, strict=True)),
        loss=float(base_loss),
        gradient_norm=joint_norm(base),
        statuses=tuple(statuses),
        direction=name,
        random=others,
        mode=objective.mode,
        status="diverged" if lost else "ok",
        sentence=f"{lost} of {len(steps)} steps have no finite loss and gradient" if lost else "",
    )


def _look(there: Objective, base: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return loss and gradient distance at one point; nan where the loss stops being finite."""
    try:
        loss, slope = there.loss_and_gradient()
    except NonFiniteError:
        return math.nan, math.nan
    return float(loss), joint_norm({name: slope[name] - base[name] for name in base})


def _largest(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else math.nan


def _check_steps(steps: Sequence[float]) -> tuple[float, ...]:
    chosen = tuple(float(step) for step in steps)
    if not chosen or any(step == 0 or not math.isfinite(step) for step in chosen):
        raise InputError(
            "landscape",
            "steps must be non-zero finite numbers, at least one",
            str(list(chosen)),
            "Pass for example steps=[0.5 * lr, lr, 2 * lr, 4 * lr]",
        )
    return chosen
