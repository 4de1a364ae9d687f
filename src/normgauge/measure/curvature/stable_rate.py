"""`ng.stable_rate`: the largest stable learning rate, predicted from curvature and observed in short runs."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor

from normgauge.errors import InputError, NonFiniteError, explain, unknown_name
from normgauge.linalg import Operator, eigenpairs
from normgauge.measure.curvature.spectrum import spectrum
from normgauge.objective import HessianOperator, Objective
from normgauge.records import Reading
from normgauge.results import Result, instrument

if TYPE_CHECKING:
    import altair

Of = Literal["hessian", "quotient"]
DOUBLINGS = 12
AGREEMENT = 2.0  # observed / predicted, either way: one doubling, the first step of the search for the bracket


@dataclass(frozen=True, slots=True)
class StableRate(Result):
    """Predicted and observed largest stable learning rate of gradient descent on these data.

    Attributes:
        predicted: 2 / lambda_max; inf where lambda_max is not positive.
        observed: the geometric middle of the bracket below; nan where none was found.
        observed_low: largest rate seen to be stable.
        observed_high: smallest rate seen to be unstable.
        top_eigenvalue: lambda_max.
        of: "hessian", or "quotient" with the symmetry directions projected out.
        runs: rate -> was it stable, in ascending order.
        steps: gradient steps per run.
    """

    predicted: float
    observed: float
    observed_low: float
    observed_high: float
    top_eigenvalue: float
    of: str
    runs: tuple[tuple[float, bool], ...]
    steps: int

    @property
    def ratio(self) -> float:
        """Ratio of observed to predicted: 1 where the curvature at the start decides."""
        return self.observed / self.predicted

    def _title(self) -> str:
        return f"Largest stable learning rate: {self.predicted:.4g} by the curvature at the start"

    def _rows(self) -> list[dict[str, Any]]:
        return [{"rate": rate, "stable": stable, "over_predicted": rate / self.predicted} for rate, stable in self.runs]

    def readings(self) -> tuple[Reading, ...]:
        """Return the predicted rate, the eigenvalue behind it, and where short runs stopped being stable."""
        half = (self.observed_high - self.observed_low) / 2
        observed = Reading("observed largest stable rate", self.observed, "estimate", half, self.status, self.sentence)
        return (
            Reading("predicted largest stable rate", self.predicted, "estimate"),
            Reading("top eigenvalue", self.top_eigenvalue, "estimate"),
            replace(observed, uncertainty=None) if math.isnan(half) else observed,
        )

    def _meaning(self) -> str:
        if not math.isfinite(self.predicted):
            return "The loss does not bend up at the start, so curvature limits no rate there: search rates by runs."
        use = f"Use learning rates of plain gradient descent up to {self.predicted:.4g}, what the curvature allows"
        grown = "weights before a normalizer grow until the step is small, which is survival and no good training"
        if self.status != "ok" and math.isnan(self.observed_low):
            return f"No run was stable within {DOUBLINGS} halvings of the predicted {self.predicted:.4g}."
        if self.status != "ok":
            return f"{use}. Runs met no edge within {DOUBLINGS} doublings of it: {grown}."
        if 1 / AGREEMENT <= self.ratio <= AGREEMENT:
            seen = f"runs of {self.steps} steps turn unstable at {self.observed:.4g}"
            return f"{use}; {seen}, which agrees within a factor of {AGREEMENT:g}."
        apart = f"{self.ratio:.3g} times that (agreement: within {AGREEMENT:g})"
        if self.ratio > 1:
            return f"{use}. Runs of {self.steps} steps turn unstable only at {self.observed:.4g}, {apart}: {grown}."
        return (
            f"The curvature allows {self.predicted:.4g}, but runs turn unstable at {self.observed:.4g}, {apart}: "
            f"it rises on the way, so use learning rates below {self.observed_low:.4g}."
        )

    def _notes(self) -> str:
        return (
            f"observed {self.observed:.4g}, bracket [{self.observed_low:.4g}, {self.observed_high:.4g}] from "
            f"{len(self.runs)} runs of {self.steps} steps; predicted 2 / {self.top_eigenvalue:.4g} ({self.of})"
        )

    def chart(self) -> altair.TopLevelMixin:
        """Return the rates tried on a logarithmic axis, stable ones and others, with the prediction as a line."""
        from normgauge.charts.spectrum import rates

        return rates(self._rows(), self.predicted, self._title())


@instrument
def stable_rate(
    objective: Objective,
    *,
    of: Of = "hessian",
    iterations: int = 20,
    tol: float = 0.05,
    nudge: float = 1e-3,
    seed: int = 0,
    symmetries: Any = None,
) -> StableRate:
    """Return 2 / lambda_max and the learning rate at which short runs of gradient descent stop being stable.

    On a quadratic, theta <- theta - rate * gradient shrinks the component along the top eigenvector v by
    |1 - rate lambda_max|, so it is stable up to 2 / lambda_max. Runs start at theta + nudge |theta| v, so that the
    component is there, and use the whole of the objective's data at each step. A run is unstable when its loss stops
    being finite or is larger at the end than half way. Rates are doubled or halved from the prediction until the
    verdict changes, then bisected until the bracket is `tol` wide.

    Kind: estimate. Cost: one `spectrum`, and `iterations` gradients for each of about ten runs.

    Args:
        objective: model, loss, data and mode.
        of: "hessian", or "quotient": the Hessian between directions orthogonal to the symmetries.
        iterations: of a run; more see weaker instabilities.
        tol: relative width of the bracket.
        nudge: size of the start along the top eigenvector, relative to |theta|.
        seed: of the eigenvalue search.
        symmetries: what `ng.symmetries(objective)` gave; discovered for the quotient when left out.

    Returns:
        Both numbers and how far apart they are. Normalized networks may stay bounded at any rate, because their
        weights grow until the step is small: then status is "nonconverged" and the bracket is open.

    Raises:
        InputError: settings out of range.
        NonFiniteError: when the loss is not finite at the start.

    Examples:
        L = 3 w^2 has curvature 6, and gradient descent is stable up to 1/3:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = (torch.full((2, 1), 3.0**0.5), torch.zeros(2, 1))
        >>> found = stable_rate(Objective(model, torch.nn.functional.mse_loss, data, mode="eval"))
        >>> round(found.predicted, 4), bool(0.95 < found.ratio < 1.05)
        (0.3333, True)

    References: lyu2022.
    """
    if of not in ("hessian", "quotient"):
        raise unknown_name("curvature", of, ("hessian", "quotient"))
    if iterations < 4 or not tol > 0 or not 0 < nudge < math.inf:
        raise InputError(
            explain(
                "stable_rate",
                "iterations must be at least 4, tol and nudge positive",
                f"{iterations}, {tol:g}, {nudge:g}",
                "Use the defaults",
            )
        )
    top, vector = _top(objective, of, seed, symmetries)
    predicted = 2 / top if top > 0 else math.inf
    start = objective.flatten(objective.parameters)
    start = start + nudge * max(float(start.norm()), 1e-12) * vector.to(start)
    runs: dict[float, bool] = {}

    def stable(rate: float) -> bool:
        if rate not in runs:
            runs[rate] = _runs_stably(objective, start, rate, iterations)
        return runs[rate]

    low, high = _bracket(stable, predicted if math.isfinite(predicted) else 1.0)
    sentence = ""
    if low is None or high is None:
        edge = max(runs) if high is None else min(runs)
        sentence = f"every run was {'stable up to' if high is None else 'unstable down to'} rate {edge:.3g}"
    else:
        while high / low > 1 + tol:
            middle = math.sqrt(low * high)
            low, high = (middle, high) if stable(middle) else (low, middle)
    return StableRate(
        predicted=predicted,
        observed=math.nan if low is None or high is None else math.sqrt(low * high),
        observed_low=math.nan if low is None else low,
        observed_high=math.nan if high is None else high,
        top_eigenvalue=top,
        of=of,
        runs=tuple(sorted(runs.items())),
        steps=iterations,
        status="nonconverged" if sentence else "ok",
        sentence=sentence,
    )


def _bracket(stable: Callable[[float], bool], rate: float) -> tuple[float | None, float | None]:
    """Return a stable and an unstable rate a factor of two apart, or `None` for the one that was not met."""
    first = stable(rate)
    for _ in range(DOUBLINGS):
        following = rate * 2 if first else rate / 2
        if stable(following) != first:
            return (rate, following) if first else (following, rate)
        rate = following
    return (rate, None) if first else (None, rate)


def _runs_stably(objective: Objective, start: Tensor, rate: float, iterations: int) -> bool:
    """Run gradient descent functionally; tell whether the loss at the end is not above the one half way."""
    point, half = start, math.nan
    try:
        for step in range(iterations):
            loss, gradient = objective.at(point).loss_and_gradient()
            if step == iterations // 2:
                half = float(loss)
            point = point - rate * objective.flatten(gradient)
            if not bool(torch.isfinite(point).all()):
                return False
        last = float(objective.at(point).loss())
    except NonFiniteError:
        return False
    slack = math.sqrt(torch.finfo(objective.dtype).eps) * 1e-2 * abs(half)
    return last <= half + slack


def _top(objective: Objective, of: str, seed: int, symmetries: Any) -> tuple[float, Tensor]:
    """Return the largest eigenvalue and its unit vector, of the Hessian or of P H P for the quotient."""
    if of == "hessian":
        hessian_spectrum = spectrum(objective, top=1, tol=1e-2, seed=seed)
        return hessian_spectrum.top[0], hessian_spectrum.vectors[0]
    if symmetries is None:
        from normgauge.symmetry import symmetries as discover

        symmetries = discover(objective)
    operator = _Projected(objective, symmetries)
    try:
        pairs = eigenpairs(operator, top=1, tol=1e-2, seed=seed)
    finally:
        operator.close()
    return pairs.top[0], pairs.vectors[0]


class _Projected(Operator):
    """P H P with P the projector onto the complement of the symmetries at the objective's point."""

    self_adjoint = True

    def __init__(self, objective: Objective, symmetries: Any) -> None:
        self.hessian = HessianOperator(objective)
        self.shape, self.dtype, self.device = self.hessian.shape, self.hessian.dtype, self.hessian.device
        self.symmetries = symmetries
        self.point = objective.flatten(objective.parameters)

    def _matvec(self, vector: Tensor) -> Tensor:
        inside = self.symmetries.project(vector, self.point)
        return self.symmetries.project(self.hessian.matvec(inside), self.point)

    def close(self) -> None:
        self.hessian.close()
