"""`ng.robustness`: accuracy when the inputs are noisy or chosen against the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.charts import against
from normgauge.errors import DataError, InputError, NotDifferentiableError, unknown_name
from normgauge.measure.decisions.classes import cross_entropy, decisions
from normgauge.objective import Objective
from normgauge.records import Chart, Kind, Reading, Status
from normgauge.results import Result, instrument
from normgauge.rng import generator

FEW = 10  # right decisions: with fewer each is over 10 % of what an attack could take
KEPT = 0.5  # share of the right decisions that must survive: below, the attack wins more often than not
Statistics = Literal["stored", "batch", "noisy"]
STATISTICS = ("stored", "batch", "noisy")
Ball = Literal["linf", "l2"]
Slope = Callable[[Tensor], Tensor]
Bounds = tuple[float, float] | None


@dataclass(frozen=True, slots=True)
class Attack:
    """How the inputs of a batch are changed."""

    name: str  # the word users type
    ball: Ball  # the norm of the radius
    steps: int  # gradient steps; 0 for noise
    restarts: int = 0  # random starts inside the ball; 0 starts at the clean input
    step: float = 1.0  # size of a step as a share of the radius


ATTACKS = {
    "gaussian": Attack("gaussian", "l2", 0),
    "fgsm": Attack("fgsm", "linf", 1),
    "bim": Attack("bim", "linf", 10, step=0.25),
    "pgd": Attack("pgd", "linf", 20, restarts=1, step=0.1),
    "pgd_l2": Attack("pgd_l2", "l2", 20, restarts=1, step=0.1),
}


def attack_named(name: str, steps: int | None, restarts: int | None, step: float | None) -> Attack:
    """Return an attack by name with some of its settings replaced."""
    if name not in ATTACKS:
        raise unknown_name("attack", name, ATTACKS)
    given: dict[str, Any] = {"steps": None if name in ("gaussian", "fgsm") else steps, "step": step}
    given["restarts"] = restarts if name in ("pgd", "pgd_l2") else None
    chosen = replace(ATTACKS[name], **{setting: value for setting, value in given.items() if value is not None})
    if chosen.steps < (name != "gaussian") or chosen.restarts < 0 or not chosen.step > 0:
        rule = "iterations must be at least 1, restarts at least 0 and the step positive"
        got = f"iterations={chosen.steps}, restarts={chosen.restarts}, step={chosen.step:g}"
        raise InputError(f"attack {name!r}", rule, got, "Leave them out for the defaults")
    return chosen


def gaussian_noise(inputs: Tensor, sigma: float, source: torch.Generator, bounds: Bounds) -> Tensor:
    """Return `inputs + sigma N(0, 1)`, clipped to the bounds."""
    draw = torch.randn(inputs.shape, generator=source, dtype=torch.float64).to(inputs)
    return _clip(inputs + sigma * draw, bounds)


def ascend(
    inputs: Tensor, start: Tensor, slope: Slope, *, ball: Ball, radius: float, steps: int, step: float, bounds: Bounds
) -> Tensor:
    """Return where gradient ascent from `start` ends, each step projected onto the ball around `inputs` and the bounds.

    A step has length `step` in the norm of the ball: by the sign of the gradient (linf), along it (l2).

    Examples:
        One step of size 1 in the ball of radius 1 is FGSM:

        >>> x = torch.tensor([[0.5, 0.5]])
        >>> ascend(x, x, lambda z: torch.tensor([[2.0, -3.0]]), ball="linf", radius=0.1, steps=1, step=0.1, bounds=None)
        tensor([[0.6000, 0.4000]])
    """
    points = start
    for _ in range(steps):
        gradient = slope(points)
        if ball == "linf":
            points = points + step * gradient.sign()
        else:
            length = _lengths(gradient)
            points = points + step * gradient / length.clamp_min(torch.finfo(gradient.dtype).tiny)
        points = _clip(project(points, inputs, ball, radius), bounds)
    return points


def random_start(inputs: Tensor, ball: Ball, radius: float, source: torch.Generator, bounds: Bounds) -> Tensor:
    """Return a point drawn uniformly from the ball around each input, clipped to the bounds."""
    if ball == "linf":
        draw = 2 * torch.rand(inputs.shape, generator=source, dtype=torch.float64) - 1
        return _clip(inputs + radius * draw.to(inputs), bounds)
    draw = torch.randn(inputs.shape, generator=source, dtype=torch.float64)
    size = torch.rand(inputs.shape[0], generator=source, dtype=torch.float64) ** (1 / max(inputs[0].numel(), 1))
    draw = draw / _lengths(draw) * size.reshape(-1, *(1,) * (inputs.ndim - 1))
    return _clip(inputs + radius * draw.to(inputs), bounds)


def project(points: Tensor, centres: Tensor, ball: Ball, radius: float) -> Tensor:
    """Return the nearest points of the balls of `radius` around `centres`, one ball per sample.

    Examples:
        >>> project(torch.tensor([[3.0, 4.0]]), torch.zeros(1, 2), "l2", 1.0)
        tensor([[0.6000, 0.8000]])
    """
    away = points - centres
    if ball == "linf":
        return centres + away.clamp(-radius, radius)
    length = _lengths(away)
    return centres + away * (radius / length.clamp_min(radius))


def _lengths(values: Tensor) -> Tensor:
    flat = values.reshape(values.shape[0], -1).norm(dim=1)
    return flat.reshape(-1, *(1,) * (values.ndim - 1))


def _clip(values: Tensor, bounds: Bounds) -> Tensor:
    return values if bounds is None else values.clamp(*bounds)


@dataclass(frozen=True, slots=True)
class UnderAttack:
    """Accuracy at one radius."""

    radius: float  # of the ball, or standard deviation of Gaussian noise
    accuracy: float  # share of samples still right; against attacks with restarts, right after every one
    loss: float  # mean cross-entropy of the changed inputs (of the last restart)
    largest: float  # the largest change found, in the norm of the attack; at most the radius
    status: Status = "ok"  # ok or diverged (logits not finite)


@dataclass(frozen=True, slots=True)
class Robustness(Result):
    """Accuracy under an attack at several radii.

    Attributes:
        attack: the attack and its settings.
        clean: accuracy of the unchanged inputs, with the same statistics.
        entries: one `UnderAttack` per radius.
        statistics: stored, batch or noisy.
        samples: how many were attacked.
        bounds: the input range respected.
    """

    attack: Attack
    clean: float
    entries: tuple[UnderAttack, ...]
    statistics: str
    samples: int
    bounds: Bounds

    @property
    def accuracy(self) -> float:
        """Accuracy at the largest radius."""
        return max(self.entries, key=lambda entry: entry.radius).accuracy

    def _title(self) -> str:
        return f"Robustness to {self.attack.name}: clean accuracy {self.clean:.4g} on {self.samples} samples"

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.entries]

    def readings(self) -> tuple[Reading, ...]:
        """Return the accuracy at every radius, the largest first, and without attack."""
        kind: Kind = "upper" if self.attack.steps else "unbiased"
        attacked = [
            Reading(f"accuracy at radius {entry.radius:g}", entry.accuracy, kind, status=entry.status)
            for entry in reversed(self.entries)
        ]
        return *attacked, Reading("clean accuracy", self.clean)

    def _meaning(self) -> str:
        if not self.clean:
            return f"None of the {self.samples} samples is right without an attack: nothing is left to attack."
        last = max(self.entries, key=lambda entry: entry.radius)
        if (right := round(self.clean * self.samples)) < FEW:
            said = f"Only {right} of {self.samples} samples are right without an attack"
            return f"{said} ({FEW} would tell): train first."
        kept = last.accuracy / self.clean
        said = f"Within {last.radius:g} {self.attack.name} leaves {last.accuracy:.1%} right of {self.clean:.1%}"
        if kept >= KEPT:
            return f"{said}, over {KEPT:.0%} of them: robust to this attack at this radius; try a stronger one."
        half = next((entry.radius for entry in self.entries if entry.accuracy < KEPT * self.clean), last.radius)
        said += f"; from {half:g} on under {KEPT:.0%} of what was right stays so"
        return f"{said}: train on such inputs if they occur."

    def _notes(self) -> str:
        a = self.attack
        limits = "no input range" if self.bounds is None else f"inputs kept in [{self.bounds[0]:g}, {self.bounds[1]:g}]"
        kind = "a stronger attack may find more" if a.steps else "one draw per sample"
        how = f"{a.ball} radius, {a.steps} steps of {a.step:g} radius, {a.restarts} random starts"
        return f"{kind}; {how}, {limits}, {self.statistics} statistics"

    def chart(self) -> Chart:
        """Return accuracy against the radius."""
        points = [(0.0, self.clean), *((entry.radius, entry.accuracy) for entry in self.entries)]
        lines = [{"radius": radius, "accuracy": kept, "series": self.attack.name} for radius, kept in points]
        named = {"x": "radius", "y": "accuracy", "title": "accuracy under attack"}
        return against(lines, x_scale="linear", y_scale="linear", **named)  # type: ignore[arg-type]


@instrument
def robustness(
    model: nn.Module,
    data: Any,
    *,
    attack: str,
    radius: float | Sequence[float],
    statistics: Statistics = "stored",
    bounds: Bounds = None,
    iterations: int | None = None,
    restarts: int | None = None,
    step: float | None = None,
    noise: float = 0.1,
    seed: int = 0,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    progress: Callable[[int, int], None] | None = None,
) -> Robustness:
    """Measure accuracy under Gaussian noise, FGSM, BIM or PGD within a radius.

    gaussian: x + radius N(0, 1). fgsm: x + radius sign(g). bim: steps of step * radius along sign(g), projected onto
    the linf ball. pgd, pgd_l2: the same from random starts in the linf or l2 ball; a sample counts as right only if
    it is right after every start. g is the gradient of the cross-entropy summed over the samples.

    Kind: upper bound of the accuracy within the ball (unbiased for Gaussian noise). Cost: iterations * restarts
    gradients with respect to the inputs per radius.

    Args:
        model: a classifier; it is left as it was and runs in eval mode (no dropout).
        data: a batch `(inputs, labels)` or a re-iterable of them; inputs are one real tensor.
        attack: gaussian, fgsm, bim, pgd or pgd_l2.
        radius: one or several.
        statistics: "stored", running statistics; "batch", batch norms use the (changed) batch; "noisy", stored ones
            with mean + noise std N(0, 1) and variance * exp(noise N(0, 1)), redrawn at every evaluation.
        bounds: range of valid inputs, for example (0, 1); nothing is clipped without it.
        iterations: of bim and pgd.
        restarts: of pgd; 0 starts at the clean input, once.
        step: size of a step as a share of the radius.
        noise: relative size of the noise on the statistics.
        seed: of noise and starts.
        forward: `forward(model, inputs) -> logits` for unusual calls.
        progress: called as `progress(done, total)` after each batch and radius.

    Deviations: S4 gives neither steps nor step size of BIM; Kurakin et al.'s linf version with 10 steps of a quarter
        of the radius is the default.

    Examples:
        For a linear classifier FGSM moves the margin by radius |w|_1, here 2 * 0.3 * 2 against a margin of 2:

        >>> model = nn.Linear(2, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[1.0, 1.0], [-1.0, -1.0]]))
        >>> data = (torch.tensor([[0.5, 0.5]]), torch.tensor([0]))
        >>> [e.accuracy for e in robustness(model, data, attack="fgsm", radius=[0.3, 0.6]).entries]
        [1.0, 0.0]

    References: goodfellow2015, kurakin2017, madry2018, sun2020.
    """
    if statistics not in STATISTICS:
        raise unknown_name("statistics", statistics, STATISTICS)
    chosen = attack_named(attack, iterations, restarts, step)
    radii = sorted(float(size) for size in ([radius] if isinstance(radius, (int, float)) else radius))
    if not radii or not all(0 < size < math.inf for size in radii):
        raise InputError("robustness", "radius must be positive, one or several", str(radius), "Pass radius=8 / 255")
    objective = Objective(model, cross_entropy, data, mode="eval", forward=forward)
    batches = [(number, *_check_batch(batch, bounds)) for number, batch in objective.batches()]
    right, losses, largest = (dict.fromkeys([0.0, *radii], 0.0) for _ in range(3))
    total = done = 0
    for number, inputs, labels in batches:
        look = _Look(objective, number, labels, statistics, noise, seed)
        clean = look.right(inputs)[0]
        total += clean.numel()
        right[0.0] += float(clean.sum())
        for size in radii:
            good, loss, moved = _attack(look, inputs, chosen, size, bounds, seed + number)
            right[size] += float(good.sum())
            losses[size] += loss * clean.numel()
            largest[size] = max(largest[size], moved)
            done += 1
            if progress is not None:
                progress(done, len(radii) * len(batches))
    states: dict[float, Status] = {r: "ok" if math.isfinite(losses[r]) else "diverged" for r in radii}
    entries = [UnderAttack(r, right[r] / total, losses[r] / total, largest[r], states[r]) for r in radii]
    broken = sum(state != "ok" for state in states.values())
    return Robustness(
        attack=chosen,
        clean=right[0.0] / total,
        entries=tuple(entries),
        statistics=statistics,
        samples=total,
        bounds=bounds,
        mode="eval",
        status="diverged" if broken else "ok",
        sentence=f"logits are not finite at {broken} radii" if broken else "",
    )


def _attack(
    look: _Look, inputs: Tensor, attack: Attack, radius: float, bounds: Bounds, seed: int
) -> tuple[Tensor, float, float]:
    """Return which decisions stay right, the mean loss, and the largest change."""
    source, survived, moved, loss = generator(seed), list[Tensor](), 0.0, math.nan
    ball = {"ball": attack.ball, "radius": radius, "steps": attack.steps, "step": radius * attack.step}
    for _ in range(max(1, attack.restarts)):
        if not attack.steps:
            changed = gaussian_noise(inputs, radius, source, bounds)
        else:
            start = random_start(inputs, attack.ball, radius, source, bounds) if attack.restarts else inputs
            changed = ascend(inputs, start, look.slope, **ball, bounds=bounds)  # type: ignore[arg-type]
        good, loss = look.right(changed)
        survived.append(good)
        away = (changed - inputs).flatten(1)
        sizes = away.abs().amax(1) if attack.ball == "linf" else away.norm(dim=1)
        moved = max(moved, float(sizes.max()))
    return torch.stack(survived).all(dim=0), loss, moved


class _Look:
    """The model on one batch's labels, with the statistics asked for, leaving no trace."""

    def __init__(
        self, objective: Objective, number: int, labels: Any, statistics: str, noise: float, seed: int
    ) -> None:
        self.objective, self.number, self.labels = objective, number, labels
        self.statistics, self.noise = statistics, noise
        self.source = generator(seed + 1)

    def _decisions(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
        def body(model: nn.Module) -> Any:
            for module in model.modules():
                if isinstance(getattr(module, "running_mean", None), Tensor):
                    self._set_statistics(module)
            return self.objective.outputs_of(model, (inputs, self.labels))

        return decisions(self.objective.evaluate(self.number, body), self.labels)

    def _set_statistics(self, module: Any) -> None:
        """Give one normalizer its statistics; its buffers are copies here and its flag is restored afterwards."""
        if self.statistics == "batch":
            module.train()
        elif self.statistics == "noisy":
            shape = module.running_mean.shape
            draws = torch.randn((2, *shape), generator=self.source, dtype=torch.float64).to(module.running_mean)
            shift, scale = self.noise * draws
            module.running_mean.add_(shift * module.running_var.sqrt())
            module.running_var.mul_(scale.exp())

    def right(self, inputs: Tensor) -> tuple[Tensor, float]:
        """Return which decisions are right, and the mean cross-entropy."""
        with torch.no_grad():
            logits, labels = self._decisions(inputs)
            return logits.argmax(1) == labels, float(nn.functional.cross_entropy(logits, labels))

    def slope(self, inputs: Tensor) -> Tensor:
        """Return the gradient of the summed cross-entropy with respect to the inputs."""
        with torch.enable_grad():
            free = inputs.detach().clone().requires_grad_()
            logits, labels = self._decisions(free)
            value = nn.functional.cross_entropy(logits, labels, reduction="sum")
            if not value.requires_grad:
                rule = "an attack follows the gradient of the outputs in the inputs"
                got = "outputs that do not depend on the inputs by differentiable operations"
                step = "Look for argmax, detach or no_grad in the forward"
                raise NotDifferentiableError("robustness", rule, got, step)
            (gradient,) = torch.autograd.grad(value, free)
            self.objective.count_backward((inputs, self.labels))
        return gradient


def _check_batch(batch: Any, bounds: Bounds) -> tuple[Tensor, Any]:
    inputs, labels = batch
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim == 0:
        kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        rule = "inputs must be one real tensor, samples first"
        raise DataError("robustness", rule, kind, "Attack embeddings or images instead")
    if bounds is not None and (float(inputs.min()) < bounds[0] or float(inputs.max()) > bounds[1]):
        rule = f"inputs must lie in bounds=({bounds[0]:g}, {bounds[1]:g})"
        got = f"values from {float(inputs.min()):g} to {float(inputs.max()):g}"
        step = "Pass the range of the inputs as the model sees them, or bounds=None"
        raise InputError("robustness", rule, got, step)
    return inputs, labels
