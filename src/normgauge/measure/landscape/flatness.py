"""`ng.flatness`: what noise on the parameters does to loss and accuracy, in units that rescaling cannot fake."""

import math
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.charts import against
from normgauge.errors import InputError, NonFiniteError, unknown_name
from normgauge.measure.curvature.spectrum import spectrum
from normgauge.measure.decisions.classes import NotClasses, aligned_decisions
from normgauge.measure.landscape.loss_surface import random_direction
from normgauge.objective import Objective
from normgauge.records import Chart, Reading, Status, format_number
from normgauge.results import Result, instrument
from normgauge.rng import generator
from normgauge.symmetry import symmetries as find_symmetries

Noise = Literal["absolute", "filter", "quotient"]
Sharpness = Literal["adaptive", "spherical"]
NOISES = ("absolute", "filter", "quotient")
SHARPNESSES = ("adaptive", "spherical")
TOLERABLE = 0.1  # of the loss without noise: an increase that is small next to what seeds change


@dataclass(frozen=True, slots=True)
class Perturbed:
    """Loss and accuracy under one kind and size of noise."""

    noise: str  # absolute, filter or quotient
    sigma: float  # its size
    loss: float  # mean over the draws with a finite loss
    loss_error: float  # standard error of that mean
    accuracy: float  # mean over the same draws; nan without classes
    diverged: int = 0  # draws whose loss was not finite
    status: Status = "ok"  # ok, or diverged where every draw was


@dataclass(frozen=True, slots=True)
class Flatness(Result):
    """Loss and accuracy under parameter noise, and sharpness.

    Attributes:
        entries: one `Perturbed` per noise and sigma.
        sharpness: one `Reading` per measure asked for.
        loss: without noise.
        accuracy: without noise; nan without classes.
        samples: draws per entry, shared by all sigmas of a noise.
    """

    entries: tuple[Perturbed, ...]
    sharpness: tuple[Reading, ...]
    loss: float
    accuracy: float
    samples: int

    def _title(self) -> str:
        return f"Flatness: loss {self.loss:.4g}, accuracy {format_number(self.accuracy)} without noise"

    def _rows(self) -> list[dict[str, Any]]:
        names = "noise", "sigma", "loss", "increase", "loss_error", "accuracy", "diverged", "status"
        rows = [{"increase": entry.loss - self.loss, **asdict(entry)} for entry in self.entries]
        return [{name: row[name] for name in names} for row in rows]

    def readings(self) -> tuple[Reading, ...]:
        """Return the increase of the loss under each noise, smallest sigma first, then the sharpness."""
        increases = tuple(
            Reading.measured(
                f"loss increase under {entry.noise} noise of {entry.sigma:g}",
                entry.loss - self.loss,
                "unbiased",
                uncertainty=None if math.isnan(entry.loss_error) else entry.loss_error,
                why="no draw had a finite loss",
            )
            for entry in self._sort_entries()
        )
        return (*increases, *self.sharpness, Reading.measured("loss", self.loss, why="it is not finite without noise"))

    def _sort_entries(self) -> list[Perturbed]:
        """Return the entries that rescaling cannot fake first, from the smallest noise on."""
        return sorted(self.entries, key=lambda entry: (entry.noise == "absolute", entry.noise, entry.sigma))

    def _meaning(self) -> str:
        if math.isnan(self.loss) or not self.entries:
            return f"There are {len(self.entries)} noises and a loss of {self.loss:g} to compare with: nothing follows."
        noise = self._sort_entries()[0].noise
        own = [entry for entry in self._sort_entries() if entry.noise == noise]
        limit = TOLERABLE * abs(self.loss)
        safe = [entry.sigma for entry in own if entry.loss - self.loss <= limit]  # nan is not safe
        size = "relative " if noise == "filter" else ""
        first = min((entry.sigma for entry in own if entry.sigma not in safe), default=None)
        if first is None:
            said = f"Up to a {size}size of {max(safe):g}, the largest tried, {noise} noise raises the loss by under "
            return f"{said}{TOLERABLE:.0%} in the mean: at that scale the loss is flat."
        said = f"From a {size}size of {first:g} on, {noise} noise raises the loss by over {TOLERABLE:.0%}"
        scale = "" if noise != "absolute" else " It depends on the scale of the weights: compare by filter noise."
        return f"{said} in the mean: expect rounding of that size to cost as much.{scale}"

    def _notes(self) -> str:
        told = "".join(f"; {reading}" for reading in self.sharpness)
        if math.isnan(self.accuracy):
            told += "; no accuracy: outputs and targets are no classes whose place the loss tells"
        return f"{self.samples} samples; absolute noise means nothing across rescalings of the parameters{told}"

    def chart(self) -> Chart:
        """Return the mean loss against sigma, one line per noise, with its standard error."""
        rows = [
            {**row, "low": row["loss"] - row["loss_error"], "high": row["loss"] + row["loss_error"]}
            for row in self._rows()
        ]
        return against(rows, x="sigma", y="loss", series="noise", low="low", high="high", title="loss under noise")


@instrument
def flatness(
    objective: Objective,
    *,
    sigmas: Sequence[float] = (0.01, 0.03, 0.1),
    samples: int = 10,
    seed: int = 0,
    noises: Sequence[Noise] = ("absolute", "filter"),
    sharpness: Sequence[Sharpness] = ("adaptive",),
    radius: float = 0.05,
    symmetries: Any = None,
) -> Flatness:
    """Measure loss and accuracy at theta + noise, for each noise and sigma, and sharpness.

    absolute: sigma * N(0, 1) on every entry. filter: on each filter w_f (a slice of the first axis) of n entries,
    sigma |w_f| / sqrt(n) * N(0, 1), so that |noise| is about sigma |w_f|; on entries of vectors, sigma |w_i| * N(0, 1).
    quotient: sigma * N(0, 1) at the canonical point of theta's orbit under the symmetries, without the part along
    them. adaptive sharpness: L(theta + r t^2 g / |t g|) - L(theta), t = |theta| entry by entry, r = `radius`, g the
    gradient. spherical sharpness: |theta|^2 lambda_max(Hessian), for losses that scaling does not change.

    Kind: unbiased means over `samples` draws; adaptive sharpness is a lower bound of the maximum over its ellipsoid
    (one ascent step); spherical an estimate. Cost: samples * len(sigmas) * len(noises) + 1 forwards; adaptive one
    gradient and one forward; spherical a `spectrum`; quotient a discovery of the symmetries unless given.

    Args:
        objective: model, loss, data, mode.
        sigmas: positive sizes; the same draws are scaled for all of them.
        samples: draws per noise.
        seed: of the draws.
        noises: among absolute, filter, quotient.
        sharpness: among adaptive, spherical.
        radius: of adaptive sharpness.
        symmetries: what `ng.symmetries(objective)` gave, for quotient noise; discovered when left out.

    Deviations: Kwon et al. take the maximum over the ellipsoid; one ascent step bounds it from below.

    Examples:
        For L = mean over x of (w x)^2 with x = 1 the mean increase is sigma^2:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = (torch.ones(2, 1), torch.zeros(2, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval").at(torch.zeros(1))
        >>> found = flatness(objective, sigmas=[0.5], samples=2000, noises=["absolute"], sharpness=[])
        >>> abs(found.entries[0].loss - 0.25) < 4 * found.entries[0].loss_error
        True

    References: lyu2022, kwon2021, li2018.
    """
    if not sigmas or not all(0 < sigma < math.inf for sigma in sigmas):
        rule = "sigmas must be positive numbers"
        raise InputError("flatness", rule, str(list(sigmas)), "Pass for example sigmas=[0.01]")
    if samples < 1:
        raise InputError("flatness", "samples must be at least 1", str(samples), "Pass samples=10")
    for chosen, choices, what in ((noises, NOISES, "noise"), (sharpness, SHARPNESSES, "sharpness")):
        if unknown := [name for name in chosen if name not in choices]:
            raise unknown_name(what, unknown[0], choices)
    if not 0 < radius < math.inf:
        raise InputError("flatness", "radius is positive and finite", repr(radius), "Try radius=0.05")
    loss, accuracy = loss_and_accuracy(objective)
    entries: list[Perturbed] = []
    if "quotient" in noises and symmetries is None:
        symmetries = find_symmetries(objective)
    for noise in noises:
        entries += _perturb(objective, noise, [float(sigma) for sigma in sigmas], samples, seed, symmetries)
    measures = {
        "adaptive": lambda: _adaptive_sharpness(objective, loss, radius),
        "spherical": lambda: spherical_sharpness(objective, loss, seed),
    }
    readings = tuple(measures[name]() for name in sharpness)
    why = "the loss is not finite without noise" if math.isnan(loss) else ""
    status: Status = "diverged" if why else "ok"
    return Flatness(tuple(entries), readings, loss, accuracy, samples, status=status, sentence=why)


def _perturb(
    objective: Objective, noise: str, sigmas: Sequence[float], samples: int, seed: int, symmetries: Any
) -> list[Perturbed]:
    origin = dict(objective.parameters)
    if noise == "quotient":
        origin = symmetries.canonical(origin)
    source = generator(seed)
    outcomes: dict[float, list[tuple[float, float]]] = {sigma: [] for sigma in sigmas}
    for _ in range(samples):
        draw = random_direction(origin, source)
        if noise == "filter":
            draw = {name: value * filter_scale(origin[name]) for name, value in draw.items()}
        elif noise == "quotient":
            draw = symmetries.project(draw, origin)
        for sigma in sigmas:
            moved = {name: origin[name] + sigma * draw[name] for name in origin}
            outcomes[sigma].append(loss_and_accuracy(objective.at(moved)))
    return [_summary(noise, sigma, values) for sigma, values in outcomes.items()]


def _summary(noise: str, sigma: float, values: Sequence[tuple[float, float]]) -> Perturbed:
    finite = [pair for pair in values if math.isfinite(pair[0])]
    lost = len(values) - len(finite)
    if not finite:
        return Perturbed(noise, sigma, math.nan, math.nan, math.nan, lost, status="diverged")
    losses = torch.tensor([loss for loss, _ in finite], dtype=torch.float64)
    error = float(losses.std() / math.sqrt(len(finite))) if len(finite) > 1 else math.nan
    # where labels lie may be unclear in some draws
    told = [accuracy for _, accuracy in finite if not math.isnan(accuracy)]
    accuracy = sum(told) / len(told) if told else math.nan
    return Perturbed(noise, sigma, float(losses.mean()), error, accuracy, lost)


def filter_scale(value: Tensor) -> Tensor:
    """Return the size of filter noise per entry: |w_f| / sqrt(n) for slices of the first axis, |w_i| for vectors."""
    axes = tuple(range(1, value.ndim))
    return value.square().mean(dim=axes, keepdim=True).sqrt() if axes else value.abs()


def _adaptive_sharpness(objective: Objective, loss: float, radius: float) -> Reading:
    name = f"adaptive sharpness at radius {radius:g}"
    try:
        gradient = objective.gradient()
    except NonFiniteError as error:
        return Reading.measured(name, math.nan, "lower", why=str(error))
    origin = objective.parameters
    scale = math.sqrt(sum(float((origin[n] * g).double().square().sum()) for n, g in gradient.items()))
    if not scale > 0:
        return Reading.measured(name, math.nan, "lower", why="the gradient is zero where parameters are not")
    moved = {n: origin[n] + radius * origin[n].square() * g / scale for n, g in gradient.items()}
    there = loss_and_accuracy(objective.at(moved))[0]
    if not math.isfinite(there):
        return Reading(name, math.nan, "lower", status="diverged", sentence="the loss is not finite at the radius")
    return Reading(name, there - loss, "lower")


def spherical_sharpness(objective: Objective, loss: float, seed: int) -> Reading:
    """Return the squared norm of the parameters times the largest eigenvalue of the Hessian."""
    name = "spherical sharpness |theta|^2 lambda_max"
    origin = objective.parameters
    doubled = loss_and_accuracy(objective.at({n: 2 * value for n, value in origin.items()}))[0]
    change = abs(doubled - loss) / max(abs(loss), 1e-12)
    if not change < 1e-3:
        why = f"doubling the variables changes the loss by {100 * change:.3g} %, so it is not scale invariant; "
        return Reading.measured(name, math.nan, "estimate", why=f"{why}select the scale-invariant parameters")
    top = spectrum(objective, top=1, tol=1e-2, seed=seed)
    square = sum(float(value.double().square().sum()) for value in origin.values())
    value = top.top[0]
    return Reading(name, square * value, "estimate", uncertainty=square * abs(value) * top.residuals[0])


def loss_and_accuracy(objective: Objective) -> tuple[float, float]:
    """Return loss and share of right decisions; nan for a loss that is not finite, and where there are no classes."""

    def body(model: nn.Module, number: int, batch: Any) -> tuple[float, float, float, float]:
        weight = objective.weight(batch)
        try:
            output, loss = objective.outputs_and_loss_of(model, number, batch)
        except InputError:  # a step without outputs has a loss only
            return weight, float(objective.loss_of(model, number, batch)), 0.0, 0.0
        try:
            logits, labels = aligned_decisions(output, batch, loss)
        except NotClasses:
            return weight, float(loss), 0.0, 0.0
        return weight, float(loss), float((logits.argmax(1) == labels).sum()), float(labels.numel())

    total = right = decided = weights = 0.0
    try:
        with torch.no_grad():
            for weight, loss, good, asked in objective.each_batch(body):
                total, weights = total + weight * loss, weights + weight
                right, decided = right + good, decided + asked
    except NonFiniteError:
        return math.nan, math.nan
    return total / weights, right / decided if decided else math.nan
