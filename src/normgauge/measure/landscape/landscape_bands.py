"""Landscapes over training: the bands of S1 Fig. 4 and 10 to 13."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from normgauge.errors import InputError
from normgauge.measure.landscape.landscape import Landscape
from normgauge.records import Reading
from normgauge.results import Cost, Result, instrument

if TYPE_CHECKING:
    import altair

WIDE = 10.0  # a decade: what one learning rate, kept a factor of a few below the edge, cannot cover


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
                "min_gradient_distance": min((d for d in view.gradient_distances if d == d), default=float("nan")),
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

    def chart(self) -> altair.TopLevelMixin:
        """Return the loss with the band of losses met along the gradient (S1 Fig. 4a)."""
        from normgauge.charts import curves

        rows = [{**row, "series": "along the gradient"} for row in self._rows()]
        return curves(
            rows, y="loss", low="min_loss", high="max_loss", title="loss and its variation along the gradient"
        )


@instrument
def landscape_bands(landscapes: Mapping[int, Landscape]) -> LandscapeBands:
    """Put landscapes measured during training beside each other.

    Kind: exact. Cost: none beyond that of the landscapes.

    Args:
        landscapes: training step -> what `ng.landscape` gave there.

    Raises:
        InputError: when there is none.

    Examples:
        >>> import torch
        >>> from normgauge.measure.landscape.landscape import landscape
        >>> from normgauge.objective import Objective
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
