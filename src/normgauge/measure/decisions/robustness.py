"""`ng.robustness`: accuracy when the inputs are noisy or chosen against the model."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, InputError, NotDifferentiableError, unknown_name
from normgauge.measure.decisions.attacks import Attack, Bounds, ascend, attack_named, gaussian_noise, random_start
from normgauge.measure.decisions.classes import decisions
from normgauge.objective import Objective
from normgauge.records import Kind, Reading, Status
from normgauge.results import Result, instrument
from normgauge.rng import generator

if TYPE_CHECKING:
    import altair

FEW = 10  # right decisions: with fewer each is over 10 % of what an attack could take
KEPT = 0.5  # share of the right decisions that must survive: below, the attack wins more often than not
Statistics = Literal["stored", "batch", "noisy"]
STATISTICS = ("stored", "batch", "noisy")


@dataclass(frozen=True, slots=True)
class UnderAttack:
    """Accuracy at one radius.

    Args:
        radius: of the ball, or standard deviation of Gaussian noise.
        accuracy: share of samples still right; against attacks with restarts, right after every one.
        loss: mean cross-entropy of the changed inputs (of the last restart).
        largest: the largest change found, in the norm of the attack; at most the radius.
        status: ok or diverged (logits not finite).
    """

    radius: float
    accuracy: float
    loss: float
    largest: float
    status: Status = "ok"


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
        names = UnderAttack.__slots__
        return [{name: getattr(entry, name) for name in names} for entry in self.entries]

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
            return (
                f"Only {right} of {self.samples} samples are right without an attack ({FEW} would tell): train first."
            )
        kept = last.accuracy / self.clean
        said = f"Within {last.radius:g} {self.attack.name} leaves {last.accuracy:.1%} right of {self.clean:.1%}"
        if kept >= KEPT:
            return f"{said}, over {KEPT:.0%} of them: robust to this attack at this radius; try a stronger one."
        half = next((entry.radius for entry in self.entries if entry.accuracy < KEPT * self.clean), last.radius)
        return (
            f"{said}; from {half:g} on under {KEPT:.0%} of what was right stays so: train on such inputs if they occur."
        )

    def _notes(self) -> str:
        a = self.attack
        limits = "no input range" if self.bounds is None else f"inputs kept in [{self.bounds[0]:g}, {self.bounds[1]:g}]"
        kind = "a stronger attack may find more" if a.steps else "one draw per sample"
        return (
            f"{kind}; {a.ball} radius, {a.steps} steps of {a.step:g} radius, {a.restarts} random starts, {limits}, "
            f"{self.statistics} statistics"
        )

    def chart(self) -> altair.TopLevelMixin:
        """Return accuracy against the radius."""
        from normgauge.charts import against

        rows = [{"radius": 0.0, "accuracy": self.clean}, *self._rows()]
        lines = [{"radius": row["radius"], "accuracy": row["accuracy"], "series": self.attack.name} for row in rows]
        return against(
            lines, x="radius", y="accuracy", x_scale="linear", y_scale="linear", title="accuracy under attack"
        )


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

    Raises:
        UnknownNameError: another attack or other statistics.
        InputError: a radius that is not positive, settings that make no attack, inputs outside the bounds.
        DataError: inputs that are not one real tensor, targets that are no classes.

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
    radii = _radii(radius)
    objective = Objective(model, _cross_entropy, data, mode="eval", forward=forward)
    batches = [(number, *_check_batch(batch, bounds)) for number, batch in objective.batches()]
    right = dict.fromkeys([0.0, *radii], 0.0)
    losses, largest = dict.fromkeys(radii, 0.0), dict.fromkeys(radii, 0.0)
    finite = dict.fromkeys(radii, True)
    total = done = 0
    for number, inputs, labels in batches:
        look = _Look(objective, number, labels, statistics, noise, seed)
        clean = look.right(inputs)[0]
        decided = clean.numel()
        total += decided
        right[0.0] += float(clean.sum())
        for size in radii:
            good, loss, moved = _attack(look, inputs, chosen, size, bounds, seed + number)
            right[size] += float(good.sum())
            losses[size] += loss * decided
            largest[size] = max(largest[size], moved)
            finite[size] = finite[size] and math.isfinite(loss)
            done += 1
            if progress is not None:
                progress(done, len(radii) * len(batches))
    entries = tuple(
        UnderAttack(
            size, right[size] / total, losses[size] / total, largest[size], "ok" if finite[size] else "diverged"
        )
        for size in radii
    )
    return Robustness(
        attack=chosen,
        clean=right[0.0] / total,
        entries=entries,
        statistics=statistics,
        samples=total,
        bounds=bounds,
        mode="eval",
        status="ok" if all(finite.values()) else "diverged",
        sentence=""
        if all(finite.values())
        else f"logits are not finite at {sum(not ok for ok in finite.values())} radii",
    )


def _attack(
    look: _Look, inputs: Tensor, attack: Attack, radius: float, bounds: Bounds, seed: int
) -> tuple[Tensor, float, float]:
    """Return which decisions stay right, the mean loss, and the largest change."""
    source = generator(seed)
    if not attack.steps:
        changed = gaussian_noise(inputs, radius, source, bounds)
        good, loss = look.right(changed)
        return good, loss, _largest(changed - inputs, attack)
    survived: list[Tensor] = []
    moved, loss = 0.0, math.nan
    for _ in range(max(1, attack.restarts)):
        start = random_start(inputs, attack.ball, radius, source, bounds) if attack.restarts else inputs
        size = radius * attack.step
        changed = ascend(
            inputs, start, look.slope, ball=attack.ball, radius=radius, steps=attack.steps, step=size, bounds=bounds
        )
        good, loss = look.right(changed)
        survived.append(good)
        moved = max(moved, _largest(changed - inputs, attack))
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
            shift, scale = (
                self.noise * torch.randn(shape, generator=self.source, dtype=torch.float64).to(module.running_mean)
                for _ in range(2)
            )
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
                raise NotDifferentiableError(
                    "robustness",
                    "an attack follows the gradient of the outputs in the inputs",
                    "outputs that do not depend on the inputs by differentiable operations",
                    "Look for argmax, detach or no_grad in the forward",
                )
            (gradient,) = torch.autograd.grad(value, free)
            self.objective.count_backward((inputs, self.labels))
        return gradient


def _cross_entropy(output: Any, target: Any) -> Tensor:
    return nn.functional.cross_entropy(*decisions(output, target))


def _largest(change: Tensor, attack: Attack) -> float:
    flat = change.reshape(change.shape[0], -1)
    sizes = flat.abs().amax(1) if attack.ball == "linf" else flat.norm(dim=1)
    return float(sizes.max())


def _radii(radius: float | Sequence[float]) -> list[float]:
    radii = [float(radius)] if isinstance(radius, (int, float)) else [float(r) for r in radius]
    if not radii or not all(r > 0 and math.isfinite(r) for r in radii):
        raise InputError("robustness", "radius must be positive, one or several", str(radius), "Pass radius=8 / 255")
    return sorted(radii)


def _check_batch(batch: Any, bounds: Bounds) -> tuple[Tensor, Any]:
    inputs, labels = batch
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point() or inputs.ndim == 0:
        kind = f"a tensor of {inputs.dtype}" if isinstance(inputs, Tensor) else type(inputs).__name__
        raise DataError(
            "robustness", "inputs must be one real tensor, samples first", kind, "Attack embeddings or images instead"
        )
    if bounds is not None and (float(inputs.min()) < bounds[0] or float(inputs.max()) > bounds[1]):
        raise InputError(
            "robustness",
            f"inputs must lie in bounds=({bounds[0]:g}, {bounds[1]:g})",
            f"values from {float(inputs.min()):g} to {float(inputs.max()):g}",
            "Pass the range of the inputs as the model sees them, or bounds=None",
        )
    return inputs, labels
