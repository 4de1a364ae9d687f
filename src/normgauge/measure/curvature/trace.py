"""`ng.trace`: the trace of a loss's curvature, to a requested relative error."""

from dataclasses import dataclass
from typing import Any

from normgauge.errors import offer_partial
from normgauge.linalg import TraceEstimate, hutchinson
from normgauge.measure.curvature.products import Group, Of, Progress, curvature_of, show_residuals
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument

CERTAIN = 2.0  # standard errors: 95 % of a normal distribution lies within


@dataclass(frozen=True)
class Trace(Result):
    """A trace with its standard error.

    Args:
        value: the estimate.
        standard_error: its standard error.
        probes: random vectors used, one product each.
        relative_error: what was asked.
        of: which matrix.
        dimension: the number of variables.
    """

    value: float
    standard_error: float
    probes: int
    relative_error: float
    of: str
    dimension: int

    def readings(self) -> tuple[Reading, ...]:
        """Return the trace and the mean eigenvalue; the uncertainty is one standard error."""
        named = ((f"trace of {self.of}", 1), ("mean eigenvalue", self.dimension))
        return tuple(
            Reading(name, self.value / n, "unbiased", self.standard_error / n, self.status, self.sentence)
            for name, n in named
        )

    def _meaning(self) -> str:
        doubt = CERTAIN * self.standard_error
        if abs(self.value) <= doubt:
            return f"Zero lies within {CERTAIN:g} standard errors ({doubt:.3g}): not even the sign is known."
        if self.of == "empirical_fisher":
            return f"The squared gradient norm of a single sample is {self.value:.4g} +- {doubt:.2g} in the mean."
        way = "raises" if self.value > 0 else "lowers"
        return (
            f"To second order, noise of standard deviation s on every parameter {way} the loss by "
            f"{abs(self.value) / 2:.4g} s^2 in the mean (+- {doubt / 2:.2g} s^2, {CERTAIN:g} standard errors)."
        )

    def _title(self) -> str:
        return f"Trace of the {self.of.replace('_', '-')} matrix, {self.dimension} variables"

    def _rows(self) -> list[dict[str, Any]]:
        mean = self.value / self.dimension
        return [{"trace": self.value, "standard_error": self.standard_error, "mean_eigenvalue": mean}]

    def chart(self) -> Chart:
        """Return the trace as a point with two standard errors."""
        from normgauge.charts import intervals

        half = CERTAIN * self.standard_error
        row = {"of": self.of, "trace": self.value, "low": self.value - half, "high": self.value + half}
        return intervals([row], value="trace", series="of", low="low", high="high", title=self._title())


@instrument
def trace(
    objective: Objective,
    *,
    relative_error: float = 0.05,
    of: Of = "hessian",
    probes: int = 1000,
    seed: int = 0,
    group: Group = None,
    progress: Progress | None = None,
    partial: bool = False,
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
        partial: on Ctrl-C return the estimate of the probes so far, with status "nonconverged"; otherwise
            KeyboardInterrupt is raised and carries it as `partial`.

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

    def result(estimate: TraceEstimate, why: str = "") -> Trace:
        reached = not why and estimate.standard_error <= relative_error * abs(estimate.value)
        doubt = f"{why}the standard error is {estimate.standard_error:.3g} after {estimate.probes} probes"
        return Trace(
            value=estimate.value,
            standard_error=estimate.standard_error,
            probes=estimate.probes,
            relative_error=relative_error,
            of=of,
            dimension=objective.dimension,
            status="ok" if reached else "nonconverged",
            sentence="" if reached else doubt,
        )

    with (
        offer_partial(lambda estimate: estimate and result(estimate, "interrupted: ")),
        curvature_of(objective, of, group) as operator,
        show_residuals(f"trace of {of}", progress) as callback,
    ):
        estimate = hutchinson(operator, relative_error=relative_error, probes=probes, seed=seed, progress=callback)
    return result(estimate)
