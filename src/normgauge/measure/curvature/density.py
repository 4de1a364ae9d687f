"""`ng.density` and `ng.trace`: how the eigenvalues of a loss's curvature are distributed, and what they add up to."""

from __future__ import annotations

import bisect
import itertools
import math
import random
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Any, NamedTuple

import torch

from normgauge.charts import intervals
from normgauge.charts.spectrum import density_curve
from normgauge.errors import InputError, offer_partial
from normgauge.linalg import Nodes, TraceEstimate, hutchinson, spectral_nodes
from normgauge.measure.curvature.products import Group, Of, Progress, curvature_of, show_residuals
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument

MULTIPLE = 6.0  # eigenvalues in a node: a single one weighs chi^2_1 of one, above 6 in 1.4 % of draws
CLOSED = 1e-6  # of the largest |eigenvalue|: residuals below are rounding
UNSURE = 0.9  # of all: an interval as wide says nothing
FLAT = 0.01  # of the largest |eigenvalue|: one percent of the curvature that limits the learning rate
CERTAIN = 2.0  # standard errors: 95 % of a normal distribution lies within


class SpectrumDistance(NamedTuple):
    """The Wasserstein-1 distance between two spectra, in units of eigenvalues.

    Attributes:
        value: the distance.
        low: end of its 95 % bootstrap interval over the probes.
        high: the other end.
        noise: what 95 % of pairs of draws from one side's probes stay below; under it spectra cannot be told
            apart.
    """

    value: float
    low: float
    high: float
    noise: float

    def meaning(self) -> str:
        """Return the distance in words."""
        seen = "they differ" if self.value > self.noise else "the probes cannot tell them apart"
        return (
            f"Eigenvalues in order are {self.value:.3g} apart in the mean (95 % interval {self.low:.3g} to "
            f"{self.high:.3g}); probes alone give up to {self.noise:.3g}, so {seen}."
        )


@dataclass(frozen=True)
class Density(Result):
    """Spectral density of a curvature matrix: the share of eigenvalues per unit of eigenvalue.

    Attributes:
        grid: eigenvalues at which the density is given, evenly spaced.
        values: the density there; its integral over the grid is one.
        moments: mean of lambda^p over all eigenvalues, p = 1..4 (times `dimension`: the trace of A^p).
        moment_errors: their standard errors over the probes; nan for one probe.
        width: standard deviation of the Gaussian each node is drawn with.
        nodes: the quadratures behind it, one per probe.
        of: which matrix.
        dimension: the number of variables.
    """

    grid: tuple[float, ...] = field(repr=False)
    values: tuple[float, ...] = field(repr=False)
    moments: tuple[float, ...]
    moment_errors: tuple[float, ...]
    width: float
    nodes: tuple[Nodes, ...] = field(repr=False)
    of: str
    dimension: int

    def extremes(self, tol: float = 1e-3) -> tuple[float, ...]:
        """Return the outermost eigenvalues the first probe's run has already found to `tol`, descending.

        From both ends inwards, up to the first Ritz value whose residual is above tol |lambda|: the same run that
        gave the density gives these for nothing.
        """
        pairs = list(zip(self.nodes[0].values, self.nodes[0].residuals, strict=True))
        blunt = [i for i, (value, residual) in enumerate(pairs) if residual > tol * abs(value)] or [len(pairs)]
        return tuple(value for value, _ in (pairs[: blunt[0]] + pairs[blunt[-1] + 1 :])[::-1])

    @property
    def outliers(self) -> tuple[float, ...]:
        """The eigenvalues outside the bulk, descending: single ones, found to 1e-3, and `width` or more from the next.

        Walked from both ends of the first probe inwards up to the first that is not: outside at this resolution.
        """
        first = self.nodes[0]
        values, last = first.values, len(first.values) - 1
        single = [
            r <= 1e-3 * abs(v) and w * self.dimension < MULTIPLE
            for v, w, r in zip(values, first.weights, first.residuals, strict=True)
        ]
        low = next((i for i in range(last) if not (single[i] and values[i + 1] - values[i] >= self.width)), last)
        above = (i for i in range(last, low, -1) if not (single[i] and values[i] - values[i - 1] >= self.width))
        high = next(above, low)
        return tuple(sorted((*values[:low], *values[high + 1 :]), reverse=True))

    @property
    def bulk(self) -> tuple[float, float]:
        """The lowest and the highest node of the first probe that is no outlier: the edges of the bulk."""
        inside = [value for value in self.nodes[0].values if value not in self.outliers]
        return min(inside), max(inside)

    @property
    def error(self) -> float:
        """The largest standard error over the probes of the share of eigenvalues below any point; nan for one probe."""
        return share_error(self.nodes)

    def distance(self, other: Density, *, draws: int = 400, seed: int = 0) -> SpectrumDistance:
        """Return the Wasserstein-1 distance to another spectrum, by a bootstrap over the probes of both.

        W1 = integral of |F - G| over eigenvalues, F and G the shares below; of n eigenvalues each it is the mean of
        |lambda_i - mu_i| in order. `noise` is what two such draws of one spectrum's probes are apart.

        Kind: estimate. Cost: none.
        """
        if min(len(self.nodes), len(other.nodes)) < 2:
            rule = "both densities have two probes or more"
            raise InputError("Density.distance", rule, "one", "Measure with probes=10, or error=0.01")
        sides, draw = (self.nodes, other.nodes), random.Random(seed)

        def again(side: Sequence[Nodes]) -> list[Nodes]:
            return [draw.choice(side) for _ in side]

        drawn = [wasserstein(*map(again, sides)) for _ in range(draws)]
        same = [max(wasserstein(again(side), again(side)) for side in sides) for _ in range(draws)]
        value, ends = wasserstein(*sides), sorted(drawn)
        low, high, noise = ends[int(0.025 * draws)], ends[int(0.975 * draws)], sorted(same)[int(0.95 * draws)]
        return SpectrumDistance(value, min(low, value), max(high, value), noise)

    def share(self, lower: float = -math.inf, upper: float = math.inf) -> float:
        """Return the share of eigenvalues in (lower, upper], by the weights of the nodes."""
        pairs = ((v, w) for each in self.nodes for v, w in zip(each.values, each.weights, strict=True))
        return sum(w for v, w in pairs if lower < v <= upper) / len(self.nodes)

    def share_bounds(self, lower: float, upper: float) -> tuple[float, float]:
        """Return between what the share of eigenvalues in (lower, upper] lies: quadrature exactly, probes to 95 %.

        Of one probe's measure, n nodes leave F(x) between the weights of the nodes before the last one below x and of
        those up to the first one above it (Chebyshev, Markov, Stieltjes). What random signs put on a share p of d
        eigenvectors has a variance of at most 2 p (1 - p) / d.
        """
        ends: list[tuple[float, float]] = []
        for each in self.nodes:
            sums, most = [0.0, *itertools.accumulate(each.weights)], len(each.values)
            first, last = (bisect.bisect_right(each.values, x) for x in (lower, upper))
            loose = int(max(each.residuals) > CLOSED * self.largest)  # a closed Krylov space has the measure itself
            up, down = loose * math.isfinite(upper), loose * math.isfinite(lower)  # F is known at both infinities
            low = sums[max(last - up, 0)] - sums[min(first + down, most)]
            ends.append((max(low, 0.0), sums[min(last + up, most)] - sums[max(first - down, 0)]))
        low, high = (statistics.fmean(side) for side in zip(*ends, strict=True))
        middle = min(max(low, 0.5), high, 1.0)  # the share in between that probes know least
        noise = 1.96 * math.sqrt(2 * middle * (1 - middle) / self.dimension / len(self.nodes))
        return max(low - noise, 0.0), min(high + noise, 1.0)

    @property
    def largest(self) -> float:
        """The largest |node|: about the largest eigenvalue."""
        return max(abs(value) for each in self.nodes for value in each.values)

    def readings(self) -> tuple[Reading, ...]:
        """Return mean eigenvalue, shares of flat and of negative directions, then the other moments."""
        mean, *others = (
            Reading(f"mean of lambda^{p}", value, "unbiased", uncertainty=None if math.isnan(error) else error)
            for p, (value, error) in enumerate(zip(self.moments, self.moment_errors, strict=True), 1)
        )
        cut = FLAT * self.largest
        within = {
            f"share within {FLAT:g} of the largest from zero": (self.share(-cut, cut), *self.share_bounds(-cut, cut))
        }
        shares = (
            Reading(name, value, "estimate", uncertainty=max(high - value, value - low))
            for name, (value, low, high) in (within | self._shares()).items()
        )
        edges = zip(("lower", "upper"), self.bulk, strict=True)
        bulk = (Reading(f"{side} edge of the bulk", value, "estimate") for side, value in edges)
        return mean, *shares, *bulk, Reading("outliers", len(self.outliers), "estimate"), *others

    def _shares(self) -> dict[str, tuple[float, float, float]]:
        """Return the shares below, about and above zero with bounds; within `width` of it no signs are told apart."""
        ends = {
            "share below -width": (-math.inf, -self.width),
            "share within width of zero": (-self.width, self.width),
            "share above width": (self.width, math.inf),
        }
        return {name: (self.share(*pair), *self.share_bounds(*pair)) for name, pair in ends.items()}

    def _meaning(self) -> str:
        cut = FLAT * self.largest
        if not cut:
            return f"All {self.dimension} eigenvalues seen are 0: the loss is piecewise linear in these variables."
        (low, high), ((_, least, most), (near, *_), _) = self.share_bounds(-cut, cut), self._shares().values()
        sure = f"Between {low:.0%} and {high:.0%}"
        sure = sure if high - low < UNSURE else "More iterations are needed to say how many"
        return (
            f"{sure} of the {self.dimension} directions are flat (within {FLAT:.0%} of the largest "
            f"eigenvalue, {self.largest:.3g}): a step sized for the steepest hardly moves along them. Between "
            f"{least:.0%} and {most:.0%} bend down by more than {self.width:.3g}; the signs of about {near:.0%} are "
            "not resolved. "
            f"{len(self.outliers)} eigenvalues stand alone at the ends; the rest reach {self.bulk[1]:.3g}."
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [{"eigenvalue": at, "density": value} for at, value in zip(self.grid, self.values, strict=True)]

    def _title(self) -> str:
        return f"Spectral density of the {self.of.replace('_', '-')} matrix, {self.dimension} variables"

    def _shown_rows(self) -> list[dict[str, Any]]:
        rows: list[dict[str, Any]] = [
            {"quantity": f"mean of lambda^{p}", "value": value, "standard_error": "-" if math.isnan(error) else error}
            for p, (value, error) in enumerate(zip(self.moments, self.moment_errors, strict=True), 1)
        ]
        values = [value for each in self.nodes for value in each.values]
        ends = {"smallest node": min(values), "largest node": max(values)}
        rows += [{"quantity": name, "value": value} for name, value in ends.items()]
        shares = self._shares().items()
        return rows + [{"quantity": n, "value": at, "at least": low, "at most": high} for n, (at, low, high) in shares]

    def _notes(self) -> str:
        more = f", which leave shares a standard error of {self.error:.2g}; their bounds hold the quadrature's too"
        if len(self.nodes) == 1:
            more = "; one probe has no standard error, pass probes=2 or more"
        return f"density smoothed by width {self.width:.3g}, {len(self.nodes)} probes{more}"

    def chart(self) -> Chart:
        """Return the density on a logarithmic axis."""
        return density_curve(self.grid, self.values, self._title())


def wasserstein(one: Sequence[Nodes], two: Sequence[Nodes]) -> float:
    """Return the integral of |F - G|, F and G the mean distribution functions of the nodes."""
    values, weights = (
        [x for nodes in (one, two) for each in nodes for x in getattr(each, n)] for n in ("values", "weights")
    )
    first = sum(len(each.values) for each in one)
    at, order = torch.tensor(values, dtype=torch.float64).sort()
    sizes = torch.tensor(weights, dtype=torch.float64)
    sizes[:first] /= len(one)
    sizes[first:] /= -len(two)
    return float((sizes[order].cumsum(0)[:-1].abs() * at.diff()).sum())


def share_error(nodes: Sequence[Nodes]) -> float:
    """Return the largest standard error, over all points, of the share of eigenvalues below; nan for one probe."""
    if len(nodes) < 2:
        return math.nan
    at = torch.tensor(sorted(value for each in nodes for value in each.values), dtype=torch.float64)
    below = []
    for each in nodes:
        values, weights = (torch.tensor(part, dtype=torch.float64) for part in (each.values, (0.0, *each.weights)))
        below.append(weights.cumsum(0)[torch.searchsorted(values, at, right=True)])
    return float(torch.stack(below).std(0).max()) / math.sqrt(len(nodes))


@instrument
def density(
    objective: Objective,
    *,
    of: Of = "hessian",
    probes: int | None = None,
    error: float | None = None,
    iterations: int = 50,
    seed: int = 0,
    width: float | None = None,
    points: int = 1000,
    group: Group = None,
    progress: Progress | None = None,
    partial: bool = False,
) -> Density:
    """Return the spectral density of the curvature of `objective` by stochastic Lanczos quadrature.

    phi(x) = mean over probes of sum_i weights_i N(x; values_i, width^2), where values and weights are the Gauss
    quadrature of a random vector's spectral measure after `iterations` Lanczos steps with reorthogonalization.

    Kind: unbiased moments; the density itself is smoothed. Cost: probes * iterations products and a basis of as
    many vectors.

    Args:
        objective: model, loss, data and mode.
        of: "hessian", "gauss_newton" or "empirical_fisher".
        probes: random vectors; the standard error falls with their square root. By default 1, with `error` up to 100.
        error: draw probes, three at least, until the share of eigenvalues below any point has this standard error.
        iterations: Lanczos steps per probe.
        seed: of the probes.
        width: standard deviation of the smoothing; by default a hundredth of the range.
        points: of the grid.
        group: process group over which the data are sharded.
        progress: called with the number of products; by default shown on a terminal's stderr.
        partial: as in `spectrum`, the density of the probes that were finished.

    Examples:
        The Hessian of |w|^2 is twice the identity:

        >>> step = lambda model, _: model.weight.square().sum()
        >>> objective = Objective.from_step(torch.nn.Linear(4, 1, bias=False), step, torch.ones(1), mode="eval")
        >>> [round(moment, 4) for moment in density(objective, width=0.1).moments]
        [2.0, 4.0, 8.0, 16.0]

    References: ubaru2017.
    """
    if points < 2 or any(value is not None and not 0.0 < value < math.inf for value in (width, error)):
        rule = "width is positive and points at least 2; so is error"
        raise InputError("density", rule, f"width={width}, points={points}, error={error}", "Change it")
    most = (1 if error is None else 100) if probes is None else probes

    def result(nodes: list[Nodes]) -> Density:
        whole = _smoothed(nodes, width, points, of, objective.dimension)
        lost = most - len(nodes)
        if error is not None and whole.error <= error and len(nodes) > 2:
            return whole
        why = f"interrupted: {lost} of {most} probes are missing"
        if error is not None and not lost:
            why = f"after {most} probes the standard error is {whole.error:.2g}, {error:.2g} was asked"
        return replace(whole, status="nonconverged", sentence=why) if lost or error is not None else whole

    with (
        offer_partial(lambda nodes: result(nodes) if nodes else None),
        curvature_of(objective, of, group) as operator,
        show_residuals(f"density of {of}", progress) as callback,
    ):
        nodes = spectral_nodes(
            operator,
            probes=most,
            steps=iterations,
            seed=seed,
            progress=callback,
            enough=None if error is None else lambda nodes: len(nodes) > 2 and share_error(nodes) <= error,
        )
    return result(nodes)


def _smoothed(nodes: list[Nodes], width: float | None, points: int, of: str, dimension: int) -> Density:
    """Return the density of some nodes on a grid, bells of a width; see `density`."""
    values = torch.tensor([value for each in nodes for value in each.values], dtype=torch.float64)
    weights = torch.tensor([weight for each in nodes for weight in each.weights], dtype=torch.float64) / len(nodes)
    spread = float(values.max() - values.min())
    width = width or 0.01 * spread or 0.01 * float(values.abs().max()) or 1.0
    grid = torch.linspace(float(values.min()) - 5 * width, float(values.max()) + 5 * width, points, dtype=torch.float64)
    bells = torch.exp(-0.5 * ((grid[:, None] - values) / width) ** 2) / (width * math.sqrt(2 * math.pi))
    powers = values[None] ** torch.arange(1, 5)[:, None] * weights * len(nodes)
    table = torch.stack([part.sum(1) for part in powers.split([len(each.values) for each in nodes], dim=1)])
    errors = table.std(0) / math.sqrt(len(nodes)) if len(nodes) > 1 else torch.full((4,), math.nan)
    return Density(
        grid=tuple(grid.tolist()),
        values=tuple((bells @ weights).tolist()),
        moments=tuple(table.mean(0).tolist()),
        moment_errors=tuple(errors.tolist()),
        width=width,
        nodes=tuple(nodes),
        of=of,
        dimension=dimension,
    )


@dataclass(frozen=True)
class Trace(Result):
    """A trace with its standard error.

    Attributes:
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
        partial: as in `spectrum`, the estimate of the probes so far.

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
