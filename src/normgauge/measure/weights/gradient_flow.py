"""Gradient flow of an objective, with the drift of everything its symmetries conserve."""

from __future__ import annotations

import math
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Literal, get_args

import torch
from torch import Tensor, nn

from normgauge.charts import panels
from normgauge.errors import InputError, NonFiniteError, NormgaugeWarning, explain, unknown_name
from normgauge.objective import Objective
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument
from normgauge.symmetry import Family, Symmetries
from normgauge.symmetry import symmetries as find_symmetries

ACCURATE = 1e-3  # relative drift of what the flow keeps exactly: what a plot of the path would still show
CLOSE = 0.1  # of the way travelled: where gradient descent still follows the flow
Slope = Callable[[Tensor], tuple[float, Tensor]]
Integrator = Literal["dormand_prince", "runge_kutta"]
KINKED = (
    *(nn.ReLU, nn.LeakyReLU, nn.PReLU, nn.ReLU6, nn.Hardtanh, nn.Hardswish),
    *(nn.MaxPool1d, nn.MaxPool2d, nn.MaxPool3d),
)


@dataclass(frozen=True)
class Conserved:
    """One family of conserved quantities and how far they drifted."""

    name: str  # the change that leaves the function unchanged
    kind: str  # "scale" and "rescale" conserve signed sums of squared norms, "shift" conserves sums
    count: int  # how many
    start: float  # their values at the beginning (median)
    drift: float  # the largest change along the flow, relative to the size of the terms
    discrete: dict[float, float]  # learning rate -> the same for gradient descent with that rate over the same time


@dataclass(frozen=True)
class GradientFlow(Result):
    """A trajectory of `d theta / dt = -grad L` with its conserved quantities.

    Attributes:
        times: where the trajectory was recorded.
        losses: there.
        conserved: what the symmetries conserve.
        parameters: at the end.
        rejected: steps the adaptive integrator took back.
        distances: learning rate -> relative distance of gradient descent's end from the flow's.
        kinks: the kinds of layers at which the gradient jumps.
        integrator: its name.
    """

    times: tuple[float, ...]
    losses: tuple[float, ...]
    conserved: tuple[Conserved, ...]
    parameters: dict[str, Tensor]
    rejected: int
    distances: dict[float, float]
    kinks: tuple[str, ...]
    integrator: str

    @property
    def drift(self) -> float:
        """The largest drift of all conserved quantities."""
        return max((item.drift for item in self.conserved), default=0.0)

    def _title(self) -> str:
        losses = f"loss {self.losses[0]:.4g} -> {self.losses[-1]:.4g}"
        return f"Gradient flow to t = {self.times[-1]:.4g}: {losses}, largest drift {self.drift:.3g}"

    def _rows(self) -> list[dict[str, Any]]:
        names = ("kind", "count", "start", "drift")
        return [
            {"conserved": item.name, **{name: getattr(item, name) for name in names}}
            | {f"drift_gd_{rate:g}": value for rate, value in item.discrete.items()}
            for item in self.conserved
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return the largest drift, the loss at the end, and how far gradient descent ends from the flow."""
        return (
            Reading("largest drift", self.drift, "estimate"),
            Reading.measured("loss at the end", self.losses[-1], "estimate"),
            *(
                Reading.measured(f"distance of gradient descent at {rate:g}", value, "estimate", why="it diverged")
                for rate, value in self.distances.items()
            ),
        )

    def _meaning(self) -> str:
        way = f"To t = {self.times[-1]:.4g} the loss goes from {self.losses[0]:.4g} to {self.losses[-1]:.4g}; "
        if not self.conserved:
            return f"{way}0 conserved quantities were found, so nothing checks the integration: compare two tolerances."
        count = sum(item.count for item in self.conserved)
        said = f"{way}{count} conserved quantities drift by {self.drift:.2g} at most"
        if not self.drift <= ACCURATE:
            coarse = "the integration is too coarse to trust; lower tol or use more iterations"
            return f"{said} (over {ACCURATE:g}): {coarse}."
        far = [rate for rate, value in self.distances.items() if not value <= CLOSE]
        apart = f" Gradient descent at {min(far):g} ends over {CLOSE:.0%} away from the flow." if far else ""
        return f"{said} (limit {ACCURATE:g}): the path can be trusted.{apart}"

    def _notes(self) -> str:
        kinks = f"; kinks at {', '.join(self.kinks)} bound the accuracy" if self.kinks else ""
        return f"integration error of {self.integrator}, {self.rejected} steps rejected{kinks}"

    def chart(self) -> Chart:
        """Return the loss against time."""
        rows = [{"time": t, "loss": loss} for t, loss in zip(self.times, self.losses, strict=True)]
        return panels(rows, x="time", ys={"loss": "loss along the flow"})


@instrument
def gradient_flow(
    objective: Objective,
    time: float,
    *,
    integrator: Integrator = "dormand_prince",
    tol: float = 1e-6,
    iterations: int = 200,
    rates: Sequence[float] = (),
    symmetries: Symmetries | None = None,
    max_gradients: int = 3000,
    seed: int = 0,
) -> GradientFlow:
    """Integrate `d theta / dt = -grad L(theta)` and report the drift of every conserved quantity.

    A symmetry whose generator is `v = M theta` with symmetric M conserves `<theta, M theta>`: the squared norm of
    every scale-invariant row (or joint norm), and `gamma^2 + beta^2 - |V_col|^2` and its like for rescalings; a shift
    conserves a sum of entries. The flow keeps them up to integration error; gradient descent with rate eta departs by
    O(eta).

    Kind: estimate; the drift itself measures the integration error along the symmetries. Cost: 6 gradients per adaptive
        step, 4 per fixed step, and time / rate per rate.

    Args:
        objective: what flows; the model is left as it was. Double precision is worth its price here.
        time: how long, in units where one step of gradient descent with rate eta is eta long.
        integrator: "dormand_prince" (adaptive) or "runge_kutta" (fixed steps, robust at kinks).
        tol: relative tolerance of the adaptive integrator.
        iterations: of the fixed one.
        rates: learning rates of gradient descent to compare.
        symmetries: from `ng.symmetries`, if at hand.
        max_gradients: of the adaptive integrator.
        seed: of the symmetries otherwise.

    Deviations: S0 sec. 5.1 calls the joint vector `(v, -g)` the direction of weight normalization's invariance; it is v
        alone, and the conserved quantity is `|v|`.

    Examples:
        A row before BatchNorm keeps its norm:

        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False), torch.nn.BatchNorm1d(1, eps=1e-12)).double()
        >>> x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0), dtype=torch.float64)
        >>> o = Objective(net, torch.nn.functional.mse_loss, (x, x[:, :1] ** 2), mode="train")
        >>> flow = gradient_flow(o, 1.0, rates=[0.1])
        >>> row = flow.conserved[0]
        >>> row.kind, row.drift < 1e-5, row.discrete[0.1] > 100 * row.drift
        ('scale', True, True)

    References: akbar2025, kunin2021
    """
    for name, value in (("time", time), ("tol", tol), ("iterations", iterations), *(("rates", rate) for rate in rates)):
        if not (value > 0 and math.isfinite(value)):
            raise InputError("gradient_flow", f"{name} must be positive and finite", str(value), "Correct it")
    if integrator not in get_args(Integrator):
        raise unknown_name("integrator", integrator, get_args(Integrator))
    symmetries = find_symmetries(objective, seed=seed) if symmetries is None else symmetries
    kinds, roles = ("scale", "rescale", "shift"), ({"scale"}, {"shift"})  # fields v that keep `<v, theta>`
    families = [f for f in symmetries.families if f.kind in kinds and {term.role for term in f.terms} in roles]
    start = objective.flatten(objective.parameters).clone()

    def slope(theta: Tensor) -> tuple[float, Tensor]:
        loss, gradient = objective.at(theta).loss_and_gradient()
        return float(loss), -objective.flatten(gradient)

    if integrator == "dormand_prince":
        path = dormand_prince(slope, start, time, rtol=tol, max_evaluations=max_gradients)
    else:
        path = runge_kutta(slope, start, time, steps=iterations)
    kinks = tuple(sorted({type(module).__name__ for module in objective.model.modules() if isinstance(module, KINKED)}))
    _warn_about_kinks(path, kinks)
    drifts = [_drifts(family, objective, path.points) for family in families]
    discrete, distances = _descents(objective, families, slope, start, path, rates)
    conserved = tuple(
        Conserved(f.describe(), f.kind, len(f), first, drift, {rate: discrete[rate][i] for rate in discrete})
        for i, (f, (first, drift)) in enumerate(zip(families, drifts, strict=True))
    )
    early = f"after {path.evaluations} gradients it has come to {path.times[-1]:.3g}"
    return GradientFlow(
        times=tuple(path.times),
        losses=tuple(path.losses),
        conserved=conserved,
        parameters=objective.unflatten(path.points[-1]),
        rejected=path.rejected,
        distances=distances,
        kinks=kinks,
        integrator=integrator,
        status=path.status,
        sentence="" if path.status == "ok" else early,
    )


def _drifts(family: Family, objective: Objective, points: Sequence[Tensor]) -> tuple[float, float]:
    """Return the median start and the largest relative change; relative to the sum of the terms' sizes."""
    dicts = [{k: v.double() for k, v in objective.unflatten(point).items()} for point in points]
    values = torch.stack([family.gather(point, point) for point in dicts])
    sizes = [term.gather(dicts[0], dicts[0]).abs() for term in family.terms]
    scale = torch.stack(sizes).sum(0)
    scale = (scale if family.indices is None else scale[list(family.indices)]).clamp_min(1e-12)
    if family.kind == "shift":
        scale = scale.clamp_min(1.0)  # a sum may start at zero
    return float(values[0].median()), float(((values - values[0]).abs() / scale).max())


def _descents(
    objective: Objective, families: Sequence[Family], slope: Slope, start: Tensor, path: Path, rates: Sequence[float]
) -> tuple[dict[float, list[float]], dict[float, float]]:
    """Run gradient descent over the same time with each rate; return drifts and distances from the flow."""
    drifts: dict[float, list[float]] = {}
    distances: dict[float, float] = {}
    travelled = float((path.points[-1] - start).norm()) or 1.0
    for rate in rates:
        theta, points = start.clone(), [start]
        try:
            for _ in range(max(1, round(path.times[-1] / rate))):
                theta = theta + rate * slope(theta)[1]
                points.append(theta)
        except NonFiniteError:
            drifts[rate], distances[rate] = [math.nan] * len(families), math.nan
            continue
        drifts[rate] = [_drifts(family, objective, points)[1] for family in families]
        distances[rate] = float((theta - path.points[-1]).norm()) / travelled
    return drifts, distances


def _warn_about_kinks(path: Path, kinks: tuple[str, ...]) -> None:
    hard = path.status == "nonconverged" or path.rejected > 0.3 * max(1, len(path.times))
    if kinks and hard and path.adaptive:
        rule = f"at the kinks of {', '.join(kinks)} the gradient jumps, and adaptive steps shrink without end"
        got = f"{path.rejected} rejected steps, {path.evaluations} gradients, time {path.times[-1]:.3g}"
        step = "Pass integrator='runge_kutta', a larger tol, or a smooth activation"
        warnings.warn(explain("gradient_flow", rule, got, step), NormgaugeWarning, stacklevel=3)


# Dormand and Prince's pair of orders 5 and 4; the last row is the fifth-order solution, so the last slope is reused
STAGES = (
    (1 / 5,),
    (3 / 40, 9 / 40),
    (44 / 45, -56 / 15, 32 / 9),
    (19372 / 6561, -25360 / 2187, 64448 / 6561, -212 / 729),
    (9017 / 3168, -355 / 33, 46732 / 5247, 49 / 176, -5103 / 18656),
    (35 / 384, 0.0, 500 / 1113, 125 / 192, -2187 / 6784, 11 / 84),
)
ERROR = (71 / 57600, 0.0, -71 / 16695, 71 / 1920, -17253 / 339200, 22 / 525, -1 / 40)


@dataclass
class Path:
    """A trajectory: times, points and losses, and what it cost."""

    times: list[float]
    points: list[Tensor]
    losses: list[float]
    evaluations: int
    adaptive: bool
    rejected: int = 0
    status: Status = "ok"

    def add(self, time: float, point: Tensor, loss: float) -> None:
        """Go on to a point."""
        self.times.append(time)
        self.points.append(point)
        self.losses.append(loss)


def runge_kutta(f: Slope, start: Tensor, time: float, *, steps: int) -> Path:
    """Integrate with `steps` steps of the classical method of order four."""
    h, theta = time / steps, start
    loss, k1 = f(theta)
    path = Path([0.0], [theta], [loss], 1, adaptive=False)
    for number in range(1, steps + 1):
        try:
            k2 = f(theta + h / 2 * k1)[1]
            k3 = f(theta + h / 2 * k2)[1]
            k4 = f(theta + h * k3)[1]
            theta = theta + h / 6 * (k1 + 2 * k2 + 2 * k3 + k4)
            loss, k1 = f(theta)
        except NonFiniteError:
            path.status = "diverged"
            break
        path.evaluations += 4
        path.add(number * h, theta, loss)
    return path


def dormand_prince(f: Slope, start: Tensor, time: float, *, rtol: float, max_evaluations: int) -> Path:
    """Integrate with steps that keep the error estimate below `rtol` times the size of theta."""
    loss, slope = f(start)
    path = Path([0.0], [start], [loss], 1, adaptive=True)
    theta, t = start, 0.0
    scale = float(start.norm()) + 1e-12
    h = min(time, 0.01 * scale / (float(slope.norm()) + 1e-300))
    while t < time * (1 - 1e-12):
        if path.evaluations + 6 > max_evaluations:
            path.status = "nonconverged"
            break
        h = min(h, time - t)
        slopes = [slope]
        try:
            for row in STAGES:
                moved = theta + h * _weighted_sum(row, slopes)
                loss, new = f(moved)
                slopes.append(new)
            error = h * float(_weighted_sum(ERROR, slopes).norm())
        except NonFiniteError:
            error = math.inf
        path.evaluations += 6
        ratio = error / (rtol * (float(theta.norm()) + 1e-12))
        if ratio <= 1:
            t, theta, slope = t + h, moved, slopes[-1]
            path.add(t, theta, loss)
        else:
            path.rejected += 1
        h *= min(5.0, max(0.2, 0.9 * ratio**-0.2)) if ratio > 0 else 5.0
        if h < 1e-14 * time:
            path.status = "nonconverged"
            break
    return path


def _weighted_sum(coefficients: tuple[float, ...], slopes: list[Tensor]) -> Tensor:
    total = torch.zeros_like(slopes[0])
    for coefficient, slope in zip(coefficients, slopes, strict=True):
        total = total.add(slope, alpha=coefficient)
    return total
