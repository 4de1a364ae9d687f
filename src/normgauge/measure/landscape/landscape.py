"""How loss and gradient change along the gradient and random directions: variation, predictiveness, beta."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from torch import Tensor

from normgauge.charts import curves, panels
from normgauge.errors import InputError, NonFiniteError
from normgauge.linalg.norms import joint_norm
from normgauge.measure.landscape.loss_surface import random_direction
from normgauge.objective import Objective
from normgauge.records import Chart, Reading, Status
from normgauge.results import Cost, Result, instrument

WIDE = 10.0  # a decade: what one learning rate, kept a factor of a few below the edge, cannot cover


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

    def chart(self) -> Chart:
        """Return loss, gradient distance and effective beta against the step, side by side."""
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
    chosen = tuple(float(step) for step in steps)
    if not chosen or any(step == 0 or not math.isfinite(step) for step in chosen):
        rule, step = "steps must be non-zero finite numbers, at least one", "Pass steps=[0.5 * lr, lr, 2 * lr, 4 * lr]"
        raise InputError("landscape", rule, str(list(chosen)), step)
    if random < 0:
        raise InputError("landscape", "random counts directions", str(random), "Pass random=0 or more")
    origin, (base_loss, base) = objective.parameters, objective.loss_and_gradient()
    scale = joint_norm(base)
    if not (math.isfinite(scale) and scale > 0):
        rule = "the gradient at the starting point must be finite and not zero"
        step = "Measure at a point that is not critical, or look for the layer that produces it"
        raise NonFiniteError("landscape", rule, f"|gradient| = {scale:g}", step)

    def along(direction: Mapping[str, Tensor], name: str, others: tuple[Landscape, ...] = ()) -> Landscape:
        looks: list[tuple[float, float]] = []
        for step in chosen:
            moved = {key: value - step * direction[key] for key, value in origin.items()}
            try:
                loss, slope = objective.at(moved).loss_and_gradient()
                looks.append((float(loss), joint_norm({key: slope[key] - base[key] for key in base})))
            except NonFiniteError:
                looks.append((math.nan, math.nan))
        losses, distances = zip(*looks, strict=True)
        statuses: list[Status] = ["ok" if all(map(math.isfinite, look)) else "diverged" for look in looks]
        length, lost = joint_norm(direction), statuses.count("diverged")
        return Landscape(
            steps=chosen,
            losses=losses,
            gradient_distances=distances,
            effective_beta=tuple(d / (abs(s) * length) for s, d in zip(chosen, distances, strict=True)),
            loss=float(base_loss),
            gradient_norm=scale,
            statuses=tuple(statuses),
            direction=name,
            random=others,
            mode=objective.mode,
            status="diverged" if lost else "ok",
            sentence=f"{lost} of {len(chosen)} steps have no finite loss and gradient" if lost else "",
        )

    others = []
    for number in range(1, random + 1):
        draw = random_direction(base, seed * 1000 + number)
        size = scale / joint_norm(draw)
        others.append(along({name: size * value for name, value in draw.items()}, f"random {number}"))
    return along(base, "gradient", tuple(others))


def _largest(values: Sequence[float]) -> float:
    finite = [value for value in values if math.isfinite(value)]
    return max(finite) if finite else math.nan


@dataclass(frozen=True, slots=True)
class LandscapeBands(Result):
    """Per step of training the extremes of a landscape.

    Attributes:
        steps: the training steps, ascending.
        landscapes: the landscape measured at each.
    """

    steps: tuple[int, ...]
    landscapes: tuple[Landscape, ...]

    def _title(self) -> str:
        return f"Landscape bands over {len(self.steps)} steps of training"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "step": step,
                "loss": view.loss,
                "min_loss": view.min_loss,
                "max_loss": view.max_loss,
                "min_gradient_distance": -_largest([-d for d in view.gradient_distances]),
                "max_gradient_distance": view.max_gradient_distance,
                "max_effective_beta": view.max_effective_beta,
                "diverged": sum(status != "ok" for status in view.statuses),
            }
            for step, view in zip(self.steps, self.landscapes, strict=True)
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return the largest effective beta over training, then that of every step."""
        each = [replace(view.readings()[0], step=step) for step, view in zip(self.steps, self.landscapes, strict=True)]
        largest = max((reading.value for reading in each if reading.status == "ok"), default=math.nan)
        return Reading.measured("max effective beta over training", largest, "lower"), *each

    def _meaning(self) -> str:
        betas = [view.max_effective_beta for view in self.landscapes]
        finite = sorted((beta, step) for beta, step in zip(betas, self.steps, strict=True) if math.isfinite(beta))
        if len(finite) < 2:
            return f"{len(finite)} of {len(self.steps)} steps can be compared; measure more of them."
        (low, _), (high, step) = finite[0], finite[-1]
        said = f"The landscape is roughest at step {step}, where effective beta is at least {high:.3g}"
        if high > WIDE * low:
            return f"{said}, over {WIDE:g} times its smallest, {low:.3g}: warm the rate up, or let it decay."
        return f"{said}, under {WIDE:g} times its smallest: one learning rate suits the whole stretch."

    def chart(self) -> Chart:
        """Return the loss with the band of losses met along the gradient (S1 Fig. 4a)."""
        rows = [{**row, "series": "along the gradient"} for row in self._rows()]
        title = "loss and its variation along the gradient"
        return curves(rows, y="loss", low="min_loss", high="max_loss", title=title)


@instrument
def landscape_bands(landscapes: Mapping[int, Landscape]) -> LandscapeBands:
    """Put landscapes measured during training beside each other.

    Kind: exact. Cost: none beyond that of the landscapes.

    Args:
        landscapes: training step -> what `ng.landscape` gave there.

    Examples:
        >>> import torch
        >>> data = (torch.ones(2, 1), torch.zeros(2, 1))
        >>> objective = Objective(torch.nn.Linear(1, 1, bias=False), torch.nn.functional.mse_loss, data, mode="eval")
        >>> views = {step: landscape(objective.at(torch.tensor([w])), steps=[0.5]) for step, w in ((0, 2.0), (1, 1.0))}
        >>> [row["max_loss"] for row in landscape_bands(views)._rows()]
        [0.0, 0.0]

    References: santurkar2018.
    """
    if not landscapes:
        raise InputError("landscape_bands", "at least one landscape is needed", "none", "Measure some")
    steps = tuple(sorted(landscapes))
    views = tuple(landscapes[step] for step in steps)
    lost = [step for step, view in zip(steps, views, strict=True) if view.status != "ok"]
    return LandscapeBands(
        steps,
        views,
        mode=views[0].mode,
        seed=views[0].seed,
        status="diverged" if lost else "ok",
        sentence=f"{len(lost)} of {len(steps)} landscapes have steps without a finite loss" if lost else "",
        cost=sum((view.cost for view in views), Cost()),
    )
