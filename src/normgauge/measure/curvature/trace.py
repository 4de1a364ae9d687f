"""`ng.trace`: the trace of a loss's curvature, to a requested relative error."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from normgauge.linalg import hutchinson
from normgauge.measure.curvature.products import Group, Of, Progress, curvature_of, residuals_shown
from normgauge.objective import Objective
from normgauge.records import Reading, Result, Status

if TYPE_CHECKING:
    import altair


@dataclass(frozen=True)
class Trace(Result):
    """A trace with its standard error.

    Args:
        value: the estimate.
        standard_error: its standard error.
        probes: random vectors used, one product each.
        relative_error: what was asked.
        of: which matrix.
        mode: the objective's mode.
        dimension: the number of variables.
        seed: of the probes.
        status: ok or nonconverged.
        sentence: why, where not ok.
    """

    value: float
    standard_error: float
    probes: int
    relative_error: float
    of: str
    mode: str
    dimension: int
    seed: int
    status: Status = "ok"
    sentence: str = ""

    @property
    def matvecs(self) -> int:
        """Products with the matrix."""
        return self.probes

    def reading(self) -> Reading:
        """Return the trace as a reading; the uncertainty is one standard error."""
        return Reading(f"trace of {self.of}", self.value, "unbiased", self.standard_error, self.status, self.sentence)

    def _title(self) -> str:
        return f"Trace of the {self.of.replace('_', '-')} matrix, {self.dimension} variables"

    def _rows(self) -> list[dict[str, Any]]:
        mean = self.value / self.dimension
        return [{"trace": self.value, "standard_error": self.standard_error, "mean_eigenvalue": mean}]

    def _footer(self) -> str:
        line = (
            f"kind: unbiased; mode: {self.mode}; seed: {self.seed}; cost: {self.probes} products; status: {self.status}"
        )
        return f"{line} ({self.sentence})" if self.sentence else line

    def chart(self) -> altair.TopLevelMixin:
        """Return the trace as a point with two standard errors."""
        from normgauge.charts.spectrum import interval

        return interval(self.value, 2.0 * self.standard_error, self._title())


def trace(
    objective: Objective,
    *,
    relative_error: float = 0.05,
    of: Of = "hessian",
    probes: int = 1000,
    seed: int = 0,
    group: Group = None,
    progress: Progress | None = None,
) -> Trace:
    """Return the trace of the curvature of `objective` to a standard error of `relative_error` of its value.

    tr A = E z^T A z for random signs z; probes are drawn until the standard error is small enough.

    Kind: unbiased (up to the stopping rule). Cost: one product per probe; a trace near zero needs many.

    Args:
        objective: model, loss, data and mode.
        relative_error: standard error over value, at which to stop.
        of: "hessian", "gauss_newton" or "empirical_fisher".
        probes: most probes before giving up with status "nonconverged".
        seed: of the probes.
        group: process group over which the data are sharded.
        progress: called with probes and the relative error so far; by default shown on a terminal's stderr.

    Raises:
        InputError: for a relative error or a count that is not positive.

    Examples:
        For a mean of squares over the rows of x the Hessian is diagonal here, and the trace 2 sum(x^2) / 3 exact:

        >>> import torch
        >>> x = torch.diag(torch.tensor([1.0, 2.0, 3.0]))
        >>> model = torch.nn.Linear(3, 1, bias=False)
        >>> objective = Objective(model, torch.nn.functional.mse_loss, (x, torch.zeros(3, 1)), mode="eval")
        >>> round(trace(objective).value, 4)
        9.3333

    References: hutchinson1989.
    """
    with (
        curvature_of(objective, of, group) as operator,
        residuals_shown(f"trace of {of}", progress) as shown,
    ):
        found = hutchinson(operator, relative_error=relative_error, probes=probes, seed=seed, progress=shown)
    reached = found.standard_error <= relative_error * abs(found.value)
    sentence = "" if reached else f"the standard error is {found.standard_error:.3g} after {found.probes} probes"
    return Trace(
        value=found.value,
        standard_error=found.standard_error,
        probes=found.probes,
        relative_error=relative_error,
        of=of,
        mode=objective.mode,
        dimension=objective.dimension,
        seed=seed,
        status="ok" if reached else "nonconverged",
        sentence=sentence,
    )
