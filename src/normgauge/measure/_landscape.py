"""How loss and gradient change along the gradient: loss variation, predictiveness, effective beta."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgauge.errors import InputError, NonFiniteError, explain
from normgauge.objective import Objective
from normgauge.records import Result, Status

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True, slots=True)
class Landscape(Result):
    """Loss and gradient at theta - s g for each step s, g the gradient at theta.

    Attributes:
        steps: the step sizes s.
        losses: L(theta - s g).
        gradient_distances: |grad L(theta - s g) - g|, S1's gradient predictiveness (smaller predicts better).
        effective_beta: gradient_distances / (s |g|), the Lipschitz constant of the gradient seen on that step.
        loss: L(theta).
        gradient_norm: |g|.
        mode: "train" or "eval".
        statuses: per step, "ok" or "diverged" (loss or gradient not finite there; its values are nan).
    """

    steps: tuple[float, ...]
    losses: tuple[float, ...]
    gradient_distances: tuple[float, ...]
    effective_beta: tuple[float, ...]
    loss: float
    gradient_norm: float
    mode: str
    statuses: tuple[Status, ...]

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
        return [dict(zip(names, row, strict=True)) for row in zip(*columns, strict=True)]

    def _footer(self) -> str:
        return (
            f"max effective beta {self.max_effective_beta:.4g}, max gradient distance "
            f"{self.max_gradient_distance:.4g}, loss variation {self.loss_variation:.4g}; "
            f"kind exact (a lower bound on the smoothness constant), mode {self.mode}, "
            f"cost {len(self.steps) + 1} gradients"
        )

    def chart(self) -> altair.TopLevelMixin:
        """Return loss, gradient distance and effective beta against the step, side by side."""
        from normgauge.charts import panels

        return panels(
            self._rows(),
            x="step",
            ys={"loss": "loss", "gradient_distance": "change of the gradient", "effective_beta": "effective beta"},
            x_title="step s along -gradient",
            log_x=min(self.steps) > 0 and max(self.steps) / min(self.steps) > 30,
        )


def landscape(objective: Objective, *, steps: Sequence[float]) -> Landscape:
    """Measure loss and gradient at theta - s g for each s in `steps`.

    With g = grad L(theta): losses[i] = L(theta - s_i g), gradient_distances[i] = |grad L(theta - s_i g) - g|,
    effective_beta[i] = gradient_distances[i] / (s_i |g|). The maximum of the last is a lower bound on any
    Lipschitz constant of the gradient on the segment.

    Kind: exact at the steps given. Cost: len(steps) + 1 gradients.

    Args:
        objective: what to measure; the model is left as it was.
        steps: the step sizes, non-zero and finite; S1 uses [1/2, 4] times the learning rate.

    Raises:
        InputError: when steps are empty, zero or not finite.
        NonFiniteError: when the loss or gradient is not finite at theta itself, or the gradient is zero.

    Deviations: S1 App. A.2.2 does not say over which distances its "effective beta" takes the maximum; here
        every step has its own value and the maximum is a summary.

    Example:
        For L = c w^2 the gradient is 2 c w, so the effective beta is 2 c everywhere:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = (torch.full((4, 1), 2.0), torch.zeros(4, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval")
        >>> [round(beta, 4) for beta in landscape(objective, steps=[0.1, 0.5]).effective_beta]
        [8.0, 8.0]

    References: santurkar2018.
    """
    chosen = _checked_steps(steps)
    base_loss, base = objective.loss_and_gradient()
    scale = _norm(base)
    if not (math.isfinite(scale) and scale > 0):
        raise NonFiniteError(
            explain(
                "landscape",
                "the gradient at the starting point must be finite and not zero",
                f"|gradient| = {scale:g}",
                "Measure at a point that is not critical, or look for the layer that produces it",
            )
        )
    origin = objective.parameters
    losses, distances, statuses = [], [], []
    for step in chosen:
        moved = {name: value - step * base[name] for name, value in origin.items()}
        loss, distance = _look(objective.at(moved), base)
        losses.append(loss)
        distances.append(distance)
        finite = math.isfinite(loss) and math.isfinite(distance)
        statuses.append("ok" if finite else "diverged")
    return Landscape(
        steps=chosen,
        losses=tuple(losses),
        gradient_distances=tuple(distances),
        effective_beta=tuple(d / (abs(s) * scale) for s, d in zip(chosen, distances, strict=True)),
        loss=float(base_loss),
        gradient_norm=scale,
        mode=objective.mode,
        statuses=tuple(statuses),  # type: ignore[arg-type]
    )


def _look(there: Objective, base: Mapping[str, Tensor]) -> tuple[float, float]:
    """Return loss and gradient distance at one point; nan where the loss stops being finite."""
    try:
        loss, slope = there.loss_and_gradient()
    except NonFiniteError:
        return math.nan, math.nan
    return float(loss), _norm({name: slope[name] - base[name] for name in base})


def _norm(values: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all entries, summed in float64: float32 sums lose digits on large nets."""
    return math.sqrt(sum(float(torch.linalg.vector_norm(v, dtype=torch.float64)) ** 2 for v in values.values()))


def _largest(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else math.nan


def _checked_steps(steps: Sequence[float]) -> tuple[float, ...]:
    chosen = tuple(float(step) for step in steps)
    if not chosen or any(step == 0 or not math.isfinite(step) for step in chosen):
        raise InputError(
            explain(
                "landscape",
                "steps must be non-zero finite numbers, at least one",
                str(list(chosen)),
                "Pass for example steps=[0.5 * lr, lr, 2 * lr, 4 * lr]",
            )
        )
    return chosen
