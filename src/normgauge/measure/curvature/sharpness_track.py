"""`ng.sharpness_track`: how far from the edge of stability training runs, step by step."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.measure.curvature.edge import FULL_BATCH, critical_rate, edge_of
from normgauge.measure.curvature.stable_rate import largest_eigenvalues
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Result, counting, instrument

AT_EDGE = 0.2  # of the threshold, either way: full-batch training hovers within it (cohen2021, fig. 1)


@dataclass(frozen=True, slots=True)
class SharpnessPoint:
    """Sharpness at one step of training.

    Attributes:
        step: of training.
        loss: on the objective's data.
        rate: of the optimizer, the largest of its groups.
        threshold: the largest curvature that is stable at this rate; nan where no theory covers the optimizer.
        sharpness: lambda_max of the matrix that decides (`Edge`); nan where not measured.
        quotient: the same with the symmetry directions projected out; nan where not asked.
        critical_rate: at which the optimizer's next step comes to raise the loss.
        why: a number is missing.
    """

    step: int
    loss: float
    rate: float
    threshold: float
    sharpness: float
    quotient: float
    critical_rate: float
    why: str = ""

    @property
    def ratio(self) -> float:
        """Sharpness over the threshold: 1 is the edge of stability."""
        return self.sharpness / self.threshold

    @property
    def critical_ratio(self) -> float:
        """The rate over the critical rate of the next step: above 1 the next step raises the loss."""
        return self.rate / self.critical_rate if self.critical_rate else math.inf


class SharpnessDifference(NamedTuple):
    """The factor between the sharpness of two runs, and its part that is only their rates.

    Attributes:
        sharpness: geometric mean over the steps of lambda_1 / lambda_2.
        threshold: the same of the thresholds: what the rates alone would make it at the edge of stability.
        ratio: the same of the distances to the edge: what is left; threshold * ratio = sharpness.
        places: of both runs, sharpness over the threshold; near 1 the rate decides the sharpness.
    """

    sharpness: float
    threshold: float
    ratio: float
    places: tuple[float, ...]

    def meaning(self) -> str:
        """Return the difference in words."""
        said = f"One run is {self.sharpness:.3g} times as sharp as the other"
        if any(abs(place - 1) > AT_EDGE for place in self.places):
            where = " and ".join(f"{place:.3g}" for place in self.places)
            return (
                f"{said}, but they are at {where} of their thresholds, not both at the edge (within {AT_EDGE:g} of 1): "
                f"the rates, {self.threshold:.3g} apart, need not be what decides."
            )
        return (
            f"{said}; both are at the edge of stability (within {AT_EDGE:g} of 1), where their rates alone make that "
            f"{self.threshold:.3g}, and a factor of {self.ratio:.3g} is left for the networks."
        )


@dataclass(frozen=True)
class SharpnessTrack(Result):
    """Sharpness over training as a ratio to the optimizer's own threshold; it grows by `measure`.

    Attributes:
        points: in the order of measurement.
        optimizer: its name.
    """

    points: list[SharpnessPoint]
    optimizer: str
    _settings: Mapping[str, Any] = field(default_factory=dict, repr=False, compare=False)

    def measure(self, step: int, parameters: Mapping[str, Tensor] | None = None) -> SharpnessPoint:
        """Add and return the point of the model and the optimizer as they are now, or of other parameters.

        Kind: estimate. Cost: one gradient and about seven forwards; with `curvature` a largest eigenvalue besides.
        """
        objective, optimizer = self._settings["objective"], self._settings["optimizer"]
        if parameters is not None:
            objective = objective.at(parameters)
        with counting() as spent:
            edge = edge_of(objective, optimizer)
            loss, gradient = objective.loss_and_gradient()
            last = self.points[-1].critical_rate if self.points else math.nan
            start = last if math.isfinite(last) and last > 0 else None
            critical = critical_rate(objective, optimizer, gradient=gradient, start=start)
            plain = quotient = math.nan
            if self._settings["curvature"] and not edge.why:
                given = self._settings["symmetries"], self._settings["seed"]
                plain, quotient, _ = largest_eigenvalues(objective, edge, *given)
        why = edge.why or ("" if self._settings["curvature"] else "curvature=False")
        numbers = float(loss), edge.rate, edge.threshold, plain, quotient, critical
        point = SharpnessPoint(step, *numbers, why=why if math.isnan(plain) else "")
        self.points.append(point)
        object.__setattr__(self, "cost", self.cost + spent())  # a track is one result that grows
        return point

    def against(self, other: SharpnessTrack) -> SharpnessDifference:
        """Return how much of the difference in sharpness to another run is only the two rates.

        lambda = threshold * ratio, so log(lambda_1 / lambda_2) is the log ratio of the thresholds, which the rates
        decide, plus that of the distances to the edge, which the networks decide. Means over the steps both have.

        Raises:
            InputError: without a common step at which both have a sharpness and a threshold.
        """
        mine, theirs = ({p.step: p for p in track.points if p.ratio > 0} for track in (self, other))
        steps = tuple(sorted(mine.keys() & theirs.keys()))
        if not steps:
            rule = "both tracks have a positive sharpness and a threshold at a common step"
            raise InputError("SharpnessTrack.against", rule, "none", "Measure both at the same steps")

        def mean(name: str) -> float:
            return fmean(math.log(getattr(mine[s], name) / getattr(theirs[s], name)) for s in steps)

        sharpness, threshold, ratio = (math.exp(mean(name)) for name in ("sharpness", "threshold", "ratio"))
        places = tuple(math.exp(fmean(math.log(run[s].ratio) for s in steps)) for run in (mine, theirs))
        return SharpnessDifference(sharpness, threshold, ratio, places)

    def _title(self) -> str:
        return f"Sharpness over {len(self.points)} steps of {self.optimizer}, against the edge of stability"

    def _rows(self) -> list[dict[str, Any]]:
        names = "loss", "rate", "sharpness", "quotient", "threshold", "ratio", "critical_rate", "critical_ratio"
        return [{"step": point.step, **{name: getattr(point, name) for name in names}} for point in self.points]

    def readings(self) -> tuple[Reading, ...]:
        """Return the last distance to the edge, by curvature and by the next step, then those of every step."""
        if not self.points:
            return (Reading.measured("sharpness over its threshold", math.nan, "estimate", why="nothing was measured"),)
        named = (("sharpness over its threshold", "ratio"), ("rate over the critical rate", "critical_ratio"))
        why = "the rate or the step is zero"
        return tuple(
            Reading.measured(title, getattr(point, name), "estimate", why=point.why or why, step=point.step)
            for point in reversed(self.points)
            for title, name in named
        )

    def _meaning(self) -> str:
        if not self.points:
            return "Nothing was measured yet, at 0 steps: call .measure(step) in the training loop."
        last = self.points[-1]
        ratio, what, limit = last.ratio, "sharpness is", "its threshold"
        if not math.isfinite(ratio):
            ratio, what, limit = last.critical_ratio, "the rate is", "that at which the next step raises the loss"
        if math.isnan(ratio):
            return f"At step {last.step} nothing can be said: the rate is {last.rate:g} and the step is zero."
        said = f"At step {last.step} {what} {ratio:.3g} times {limit} at rate {last.rate:.3g}"
        if ratio > 1 + AT_EDGE:
            return f"{said}: beyond the edge (over {1 + AT_EDGE:g}), steps climb to second order; lower the rate."
        if ratio < 1 - AT_EDGE:
            more = f"the rate could be {1 / ratio:.3g} times as large" if ratio > 0 else "nothing bends up"
            if last.critical_ratio > 1:  # as where decay leads away from a minimum
                more = f"but the next step raises the loss at rates above {last.critical_rate:.3g}"
            return f"{said}: inside the edge (under {1 - AT_EDGE:g}); {more}."
        return (
            f"{said}: at the edge (within {AT_EDGE:g} of 1), where the rate sets the sharpness; before comparing it "
            f"with a run at another rate use .against(other), which divides the rates out."
        )

    def _notes(self) -> str:
        return FULL_BATCH

    def chart(self) -> Chart:
        """Return both ratios over training; 1 is the edge."""
        from normgauge.charts import curves

        named = {"ratio": "sharpness / threshold", "critical_ratio": "rate / critical rate"}
        rows = [
            {"step": row["step"], "value": row[name], "series": title}
            for row in self._rows()
            for name, title in named.items()
            if math.isfinite(row[name])
        ]
        rows += [{"step": point.step, "value": 1.0, "series": "edge"} for point in self.points]
        return curves(rows, title=self._title(), x_title="step", y_title="ratio")


@instrument
def sharpness_track(
    objective: Objective,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    checkpoints: Mapping[int, Mapping[str, Tensor]] | None = None,
    curvature: bool = True,
    symmetries: Any = None,
    seed: int = 0,
) -> SharpnessTrack:
    """Return a track of the sharpness over training, as a ratio to the threshold of the optimizer that trains.

    In a loop: make it once, call `track.measure(step)` when a number is wanted, print it at the end; model and
    optimizer are read as they are then. Afterwards: give `checkpoints`. Each point has lambda_max over the optimizer's
    threshold (`Edge`: 2 / rate for gradient descent), the same without symmetry directions where they are given, and
    the rate over the critical rate of the next step.

    Kind: estimate. Cost: nothing to make; per point that of `SharpnessTrack.measure`.

    Args:
        objective: model, loss, data and mode: the data the sharpness is measured on.
        optimizer: that trains the model; plain gradient descent at rate 1 by default.
        checkpoints: training step -> parameters, to be measured at once. Adam's preconditioner is not in them.
        curvature: false measures the critical rate alone, by a few forwards.
        symmetries: what `ng.symmetries(objective)` gave, to divide them out.
        seed: of the eigenvalue search.

    Raises:
        InputError: an optimizer of another model, or checkpoints for one with a preconditioner.

    Examples:
        Gradient descent on 3 w^2 at rate 0.1 is at 0.3 of its edge, 2 / 0.1:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = (torch.full((2, 1), 3.0**0.5), torch.zeros(2, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval")
        >>> track = sharpness_track(objective, torch.optim.SGD(model.parameters(), lr=0.1))
        >>> round(track.measure(0).ratio, 4)
        0.3

    References: cohen2021, cohen2022, kalra2024.
    """
    edge = edge_of(objective, optimizer)
    if checkpoints is not None and edge.scale is not None:
        rule = "checkpoints hold parameters, and this optimizer's steps hang on its state too"
        raise InputError("sharpness_track", rule, edge.name, "Call .measure(step) while training")
    settings = {"curvature": curvature, "symmetries": symmetries, "seed": seed}
    track = SharpnessTrack([], edge.name, {"objective": objective, "optimizer": optimizer, **settings})
    for step, parameters in sorted((checkpoints or {}).items()):
        track.measure(step, parameters)
    return track
