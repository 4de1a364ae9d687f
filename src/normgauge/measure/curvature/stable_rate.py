"""`ng.stable_rate`, `ng.sharpness_track`: the largest stable rate of an optimizer, and how near to it training runs."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from statistics import fmean
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor

from normgauge.charts import curves
from normgauge.charts.spectrum import rates
from normgauge.errors import InputError, NonFiniteError, unknown_name
from normgauge.measure.curvature.edge import FULL_BATCH, Edge, bisect, bracket, critical_rate, edge_of, top_eigenvalues
from normgauge.measure.signal.updates import copy_optimizer
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Result, counting, instrument
from normgauge.symmetry import symmetries as find_symmetries

Of = Literal["hessian", "quotient"]
DOUBLINGS = 12
AGREEMENT = 2.0  # observed / predicted, either way: one doubling, the first step of the search for the bracket
AT_EDGE = 0.2  # of the threshold, either way: full-batch training hovers within it (cohen2021, fig. 1)


class RateRun(NamedTuple):
    """A short run: rate, whether it was stable, loss reached (nan if not finite; it holds decay's term, if added)."""

    rate: float
    stable: bool
    loss: float


@dataclass(frozen=True, slots=True)
class StableRate(Result):
    """The largest stable learning rate of an optimizer on these data.

    Attributes:
        predicted: the rate at which lambda_max meets the optimizer's threshold (2 / lambda_max for gradient descent);
            inf where lambda_max is not positive, nan where no threshold is known.
        critical: the rate at which the optimizer's next step comes to raise the loss.
        observed: the geometric middle of the bracket below; nan where none was found.
        observed_low: largest rate seen to be stable below every unstable one.
        observed_high: smallest rate seen to be unstable.
        top_eigenvalue: lambda_max of the matrix that decides: the Hessian, for Adam and RMSprop the preconditioned one.
        quotient_eigenvalue: the same with the symmetry directions projected out; nan where not asked.
        of: "hessian", or "quotient": which of the two predicts.
        runs: rate, whether it was stable and the loss reached, by ascending rate.
        steps: steps per run.
        optimizer: its name.
        multiple: the threshold is multiple / rate.
        used: the optimizer's own rate, 1 where none was given.
        why: no threshold is known, or empty.
        first_loss: where the runs begin, with the same term of decay, `decay_term`.
    """

    predicted: float
    critical: float
    observed: float
    observed_low: float
    observed_high: float
    top_eigenvalue: float
    quotient_eigenvalue: float
    of: str
    runs: tuple[RateRun, ...]
    steps: int
    optimizer: str
    multiple: float
    used: float
    why: str
    first_loss: float
    decay_term: float = 0.0

    @property
    def ratio(self) -> float:
        """Ratio of observed to predicted: 1 where the curvature at the start decides."""
        return self.observed / self.predicted

    @property
    def limit(self) -> float:
        """The largest stable rate: what the curvature allows, or less where runs are unstable below; nan if all are."""
        if math.isnan(self.observed_low) and math.isfinite(self.observed_high):
            return math.nan
        seen = math.nan if math.isnan(self.observed_high) else self.observed_low
        limits = [value for value in (self.predicted, seen) if math.isfinite(value) and value > 0]
        return min(limits) if limits else self.critical

    @property
    def best(self) -> RateRun | None:
        """The stable run within the limit that reached the lowest loss."""
        inside = [run for run in self.runs if run.stable and run.rate <= self.limit]
        return min(inside, key=lambda run: run.loss, default=None)

    @property
    def rate(self) -> float:
        """The usable number: the rate that reached the lowest loss within the limit, else the limit."""
        return self.limit if self.best is None else self.best.rate

    def _title(self) -> str:
        return f"Learning rate to use with {self.optimizer}: {self.rate:.4g}, stable up to {self.limit:.4g}"

    def _rows(self) -> list[dict[str, Any]]:
        return [{**run._asdict(), "over_predicted": run.rate / self.predicted} for run in self.runs]

    def readings(self) -> tuple[Reading, ...]:
        """Return the usable rate and the limit, then what they rest on: curvature, the next step, runs."""
        half = (self.observed_high - self.observed_low) / 2
        free = self.sentence if math.isnan(self.limit) else "neither curvature nor runs limit it"
        named = (
            ("rate to use", self.rate, free),
            ("largest stable rate", self.limit, free),
            ("predicted largest stable rate", self.predicted, self.why),
            ("top eigenvalue", self.top_eigenvalue, self.why),
            ("top eigenvalue of the quotient", self.quotient_eigenvalue, "not asked"),
            ("rate over its threshold", self.used / self.predicted, self.why),
            ("critical rate of the next step", self.critical, "there is no next step"),
            ("observed largest stable rate", self.observed, self.sentence or "no run stopped being stable"),
        )
        readings = [Reading.measured(name, value, "estimate", why=why) for name, value, why in named]
        return *readings[:-1], replace(readings[-1], uncertainty=None if math.isnan(half) else half)

    def _say_beyond(self) -> str:
        there = [run for run in self.runs if run.stable and run.rate > self.limit]
        far = min(there, key=lambda run: run.loss, default=None)
        if far is None or self.best is None or not far.loss < self.best.loss:
            return "survival and no good training"
        return f"{far.rate:.3g} reaches {far.loss:.4g}, so try larger rates in training"

    def _meaning(self) -> str:
        if math.isnan(self.observed_low) and math.isfinite(self.observed_high):
            said = f"No rate of {self.optimizer} can be named: the loss rises at all down to {self.observed_high:.3g}"
            return f"{said}, so that its direction (decay, momentum, maximize) is at fault and not its size."
        if not math.isfinite(self.limit):
            within = f"within {DOUBLINGS} doublings"
            return f"Nothing limits the rate of {self.optimizer} here {within}: search it by training."
        use = f"Use a learning rate of about {self.rate:.3g} with {self.optimizer}"
        if self.best is not None:
            use += ", which took the loss" + f" with {self.decay_term:.3g} of decay" * bool(self.decay_term)
            use += f" from {self.first_loss:.4g} to {self.best.loss:.4g} in {self.steps} steps"
        use += f"; it is stable up to {self.limit:.4g}"
        seen = f"runs turn unstable at {self.observed:.4g}"
        if not math.isfinite(self.predicted):
            lead = self.why or "the loss does not bend up at the start"
            seen = seen if math.isfinite(self.observed) else f"its next step raises the loss from {self.critical:.4g}"
            return f"{use}; {seen}. No edge is predicted: {lead}."
        if math.isnan(self.observed_high):
            return (
                f"{use}, what the curvature allows. No run met an edge within {DOUBLINGS} doublings, as where weights "
                f"before a normalizer grow: {self._say_beyond()}."
            )
        if 1 / AGREEMENT <= self.ratio <= AGREEMENT:
            return f"{use}: the curvature allows {self.predicted:.4g}, and {seen}, within a factor of {AGREEMENT:g}."
        if self.ratio > 1:
            far = f"{self.ratio:.3g} times that (agreement: {AGREEMENT:g})"
            return f"{use}, what the curvature allows; {seen}, {far}: {self._say_beyond()}."
        return f"{use}: the curvature allows {self.predicted:.4g}, but it rises on the way and {seen}."

    def _notes(self) -> str:
        known = f"threshold {self.multiple:.4g} / rate; {FULL_BATCH}" if math.isfinite(self.multiple) else self.why
        return (
            f"{known}; observed {self.observed:.4g}, bracket [{self.observed_low:.4g}, {self.observed_high:.4g}] from "
            f"{len(self.runs)} runs of {self.steps} steps on all the data ({self.of})"
        )

    def chart(self) -> Chart:
        """Return the loss reached per rate, stable runs and others, with lines at the usable rate and at the limit."""
        return rates(self._rows(), {"use": self.rate, "limit": self.limit}, self._title())


@instrument
def stable_rate(
    objective: Objective,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    of: Of = "hessian",
    iterations: int | None = None,
    tol: float = 0.05,
    nudge: float = 1e-3,
    seed: int = 0,
    symmetries: Any = None,
) -> StableRate:
    """Return the largest stable learning rate of an optimizer, by its curvature threshold and by short runs.

    On a quadratic gradient descent shrinks the component along the top eigenvector v by |1 - rate lambda_max|, so it
    is stable up to 2 / lambda_max; what momentum, Adam and RMSprop make of the 2 is in `Edge`. Runs of a copy of the
    optimizer start at theta + nudge |theta| v, so that the component is there, and use all of the objective's data
    at each step. A run is unstable when its loss, with the term of decay that is added to the gradient, stops being
    finite, or is larger at the end than at the start or half way (with momentum: in its last quarter than in its
    second). Rates are doubled or halved from the prediction until the verdict changes, then bisected to `tol`.

    Kind: estimate. Cost: one largest eigenvalue, one gradient and about seven forwards for the critical rate, and
    `iterations` gradients for each of about ten runs, some at quarters of the rate until they reach less.

    Args:
        objective: model, loss, data and mode.
        optimizer: whose rate is asked for, with its state; plain gradient descent by default.
        of: "hessian", or "quotient": the Hessian between directions orthogonal to the symmetries predicts.
        iterations: of a run; more see weaker instabilities. By default 20, with momentum 40.
        tol: relative width of the bracket.
        nudge: size of the start along the top eigenvector, relative to |theta|.
        seed: of the eigenvalue search.
        symmetries: what `ng.symmetries(objective)` gave: both eigenvalues are then measured. Discovered for the
            quotient when left out.

    Returns:
        `.rate` is the number to use, `.limit` the largest stable one. Normalized networks may stay bounded at any rate,
        because their weights grow until the step is small: then status is "nonconverged" and the bracket is open.

    Examples:
        L = 3 w^2 has curvature 6: gradient descent is stable up to 1/3, heavy ball with 0.5 up to 3/6:

        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> data = (torch.full((2, 1), 3.0**0.5), torch.zeros(2, 1))
        >>> objective = Objective(model, torch.nn.functional.mse_loss, data, mode="eval")
        >>> found = stable_rate(objective)
        >>> round(found.predicted, 4), bool(0.95 < found.ratio < 1.05)
        (0.3333, True)
        >>> round(stable_rate(objective, torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.5)).predicted, 4)
        0.5

    References: lyu2022, cohen2021, cohen2022, kalra2024.
    """
    if of not in ("hessian", "quotient"):
        raise unknown_name("curvature", of, ("hessian", "quotient"))
    edge = edge_of(objective, optimizer)
    if of == "quotient" and edge.scale is not None:
        rule = "symmetries are divided out of the plain Hessian, not of a preconditioned one"
        raise InputError("stable_rate", rule, edge.name, "Leave of= out")
    remembers = edge.multiple != 2
    iterations = (40 if remembers else 20) if iterations is None else iterations
    if iterations < 4 or not tol > 0 or not 0 < nudge < math.inf:
        rule, got = "iterations must be at least 4, tol and nudge positive", f"{iterations}, {tol:g}, {nudge:g}"
        raise InputError("stable_rate", rule, got, "Use the defaults")
    if of == "quotient" and symmetries is None:
        symmetries = find_symmetries(objective)
    plain, quotient, vector = top_eigenvalues(objective, edge, symmetries, seed)
    top = quotient if of == "quotient" else plain
    predicted = edge.multiple / top if top > 0 or math.isnan(top) else math.inf
    critical = critical_rate(objective, optimizer)
    point = objective.flatten(objective.parameters)
    start = objective.at(point + nudge * max(float(point.norm()), 1e-12) * vector.to(point))
    runs: dict[float, RateRun] = {}

    def stable(rate: float) -> bool:
        if rate not in runs:
            runs[rate] = _run(start, optimizer, edge, rate, iterations)
        return runs[rate].stable

    guess = next((value for value in (predicted, critical) if math.isfinite(value) and value > 0), edge.rate or 1.0)
    low, high = bracket(stable, guess, DOUBLINGS)
    sentence = ""
    rate, lowest = min(guess, low or guess), math.inf
    for _ in range(4):  # where it is stable it need not train well: see what smaller rates reach
        rate /= 4
        stable(rate)
        if not runs[rate].loss < lowest:
            break
        lowest = runs[rate].loss
    if low is None or high is None:
        ends = f"stable up to rate {max(runs):.3g}" if high is None else f"unstable down to rate {min(runs):.3g}"
        sentence = f"every run was {ends}"
    else:
        low, high = bisect(stable, low, high, tol)
    return StableRate(
        predicted=predicted,
        critical=critical,
        observed=math.nan if low is None or high is None else math.sqrt(low * high),
        observed_low=math.nan if low is None else low,
        observed_high=math.nan if high is None else high,
        top_eigenvalue=plain if of == "hessian" else quotient,
        quotient_eigenvalue=quotient,
        of=of,
        runs=tuple(runs[rate] for rate in sorted(runs)),
        steps=iterations,
        optimizer=edge.name,
        multiple=edge.multiple,
        used=edge.rate,
        why=edge.why,
        first_loss=float(start.loss()) + _decay_term(edge, start),
        decay_term=_decay_term(edge, start),
        status="nonconverged" if sentence else "ok",
        sentence=sentence,
    )


def _run(start: Objective, optimizer: Any, edge: Edge, rate: float, iterations: int) -> RateRun:
    """Run a copy of the optimizer with its rates scaled so that the largest is `rate`; see `stable_rate`."""
    if optimizer is None:
        optimizer = torch.optim.SGD([p for p in start.model.parameters() if p.requires_grad], lr=1.0)
    twin, copies = copy_optimizer(start, optimizer)
    for group in twin.param_groups:
        group["lr"] = group["lr"] * (rate / edge.rate) if edge.rate else rate
    losses: list[float] = []
    try:
        for _ in range(iterations):
            here = start.at({name: copies[name].detach() for name in start.names})
            loss, gradient = here.loss_and_gradient()
            losses.append(float(loss) + _decay_term(edge, here))
            for name in start.names:
                copies[name].grad = gradient[name]
            try:
                type(twin).step(twin)
            except TypeError as error:
                rule = "the optimizer steps without a closure"
                raise InputError("stable_rate", rule, type(twin).__name__, "Ask for SGD or Adam") from error
            if not all(bool(torch.isfinite(copies[name]).all()) for name in start.names):
                return RateRun(rate, False, math.nan)
        here = start.at({name: copies[name].detach() for name in start.names})
        losses.append(float(here.loss()) + _decay_term(edge, here))
    except NonFiniteError:
        return RateRun(rate, False, math.nan)
    half, quarter = iterations // 2, iterations // 4
    if edge.multiple == 2:
        before, after = losses[half], losses[-1]
    else:  # with momentum the loss swings: compare the crests
        before, after = max(losses[quarter : half + 1]), max(losses[-quarter - 1 :])
    slack = math.sqrt(torch.finfo(start.dtype).eps) * 1e-2
    settles = after <= before + slack * abs(before)
    return RateRun(rate, settles and losses[-1] <= losses[0] + slack * abs(losses[0]), losses[-1])


def _decay_term(edge: Edge, place: Objective) -> float:
    """Return what decay that is added to the gradient makes an optimizer descend on besides the loss."""
    point = place.flatten(place.parameters).double()
    return 0.0 if edge.shift is None else float((edge.shift.double() * point.square()).sum()) / 2


@dataclass(frozen=True, slots=True)
class SharpnessPoint:
    """Sharpness at one step of training.

    Attributes:
        step: of training.
        loss: on the objective's data.
        rate: of the optimizer, the largest of its groups.
        threshold: the largest curvature that is stable at this rate; nan where no theory covers the
            optimizer.
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
                plain, quotient, _ = top_eigenvalues(objective, edge, *given)
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
        begins = last.step <= 0 or (last is not self.points[0] and last.loss == self.points[0].loss)
        said += ", before training" if begins else ""
        again = "that is where training starts, no sign of what it bears: measure again after its first steps"
        if ratio > 1 + AT_EDGE:
            warm = "warm up or lower the rate" if begins else "lower the rate"
            return f"{said}: beyond the edge (over {1 + AT_EDGE:g}), steps climb to second order; {warm}."
        if ratio < 1 - AT_EDGE:
            more = f"the rate could be {1 / ratio:.3g} times as large" if ratio > 0 else "nothing bends up"
            more = again if begins else more
            if last.critical_ratio > 1:  # as where decay leads away from a minimum
                more = f"but the next step raises the loss at rates above {last.critical_rate:.3g}"
            return f"{said}: inside the edge (under {1 - AT_EDGE:g}); {more}."
        known = "where the rate sets the sharpness; before comparing it with a run at another rate use "
        known += ".against(other), which divides the rates out"
        return f"{said}: at the edge (within {AT_EDGE:g} of 1), {again if begins else known}."

    def _notes(self) -> str:
        return FULL_BATCH

    def chart(self) -> Chart:
        """Return both ratios over training; 1 is the edge."""
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
