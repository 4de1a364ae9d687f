"""`ng.drift`: how far data are from the statistics a model has stored, and what recalibration would change."""

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import asdict, dataclass, replace
from itertools import islice
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.charts import bars
from normgauge.errors import DataError, ModelError
from normgauge.measure.decisions.classes import NotClasses, aligned_decisions
from normgauge.measure.signal.layer_statistics import per_unit
from normgauge.network import ModuleCall, first_tensor, watched
from normgauge.objective import Objective, call_model, tensors
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument

FAR = 0.5  # stored deviations: half the scale at which the next layer tells values apart
WIDE = math.log(4.0)  # of a ratio of variances: deviations that differ by a factor of 2
NOISE = 3.0  # times what sampling alone gives
Cause = Literal["", "never updated", "frozen", "poisoned", "shifted"]


@dataclass(slots=True)
class Sums:
    """What was added up of one normalizer's inputs, per channel."""

    count: int = 0  # values per channel
    total: Tensor | float = 0.0  # their sum
    squares: Tensor | float = 0.0  # the sum of their squares
    samples: int = 0  # how many samples they came from; values of one sample depend on each other
    batch: int = 0  # the largest number of samples at once
    means: Tensor | float = 0.0  # the sum over samples of each one's mean
    mean_squares: Tensor | float = 0.0  # the sum of the squares of these means

    def add(self, inputs: Tensor) -> None:
        """Add a batch of inputs, samples first and channels second."""
        values, own = per_unit(inputs, 1), inputs.double().flatten(2).mean(2) if inputs.ndim > 2 else inputs.double()
        self.count, self.total = self.count + values.shape[0], self.total + values.sum(0)
        self.squares = self.squares + values.square().sum(0)
        self.samples, self.batch = self.samples + len(own), max(self.batch, len(own))
        self.means, self.mean_squares = self.means + own.sum(0), self.mean_squares + own.square().sum(0)

    def moments(self) -> tuple[Tensor, Tensor]:
        """Return mean and unbiased variance per channel."""
        return _moments(self.count, self.total, self.squares)

    def spread(self) -> Tensor:
        """Return the variance of the samples' means, per channel."""
        return _moments(self.samples, self.means, self.mean_squares)[1]


Moments = dict[str, Sums]


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """Distance of the data from one normalizer's stored statistics."""

    layer: str  # its name
    mean_shift: float = math.nan  # root mean square over channels of (data's mean - stored mean) / stored deviation
    worst_shift: float = math.nan  # the largest of these, in absolute value
    log_variance_ratio: float = math.nan  # root mean square of log(variance of the data / stored variance)
    divergence: float = math.nan  # mean over channels of KL(data || stored) between Gaussians of these moments, in nats
    recalibrated_shift: float = math.nan  # the same of the mean recalibration, of those before it too, would store
    floor: float = math.nan  # what sampling alone gives for `mean_shift`, see `drift`
    variance_floor: float = math.nan  # the same for `log_variance_ratio`
    cause: Cause = ""  # of what is beyond the limits; empty where nothing is
    status: Status = "ok"  # ok, skipped, or diverged where stored statistics or inputs are not finite
    sentence: str = ""  # why, where not ok; what speaks for the cause

    @property
    def limit(self) -> float:
        """The largest mean shift that is nothing to act on."""
        return max(FAR, NOISE * self.floor)

    @property
    def variance_limit(self) -> float:
        """The largest log ratio of variances that is nothing to act on."""
        return max(WIDE, NOISE * self.variance_floor)

    @property
    def excess(self) -> float:
        """How far it is off, in limits: above 1 something is to be done; infinite for what is not finite."""
        if self.cause == "poisoned":
            return math.inf
        return max(self.mean_shift / self.limit, self.log_variance_ratio / self.variance_limit)


@dataclass(frozen=True, slots=True)
class Drift(Result):
    """Distance of data from stored statistics per layer, and the effect of recalibration.

    Attributes:
        layers: one `LayerDrift` per normalizer that stores statistics.
        output_change: |outputs recalibrated - outputs stored| / |outputs stored|.
        decisions_changed: share of decisions that recalibration changes; nan without classes.
        accuracy: with stored statistics; nan without labels.
        recalibrated_accuracy: with recalibrated ones.
        samples: how many were looked at.
        recalibrated: the statistics that recalibration would store, by their names in the state dict: keep them by
            `model.load_state_dict(drift.recalibrated, strict=False)`.
    """

    layers: tuple[LayerDrift, ...]
    output_change: float
    decisions_changed: float
    accuracy: float
    recalibrated_accuracy: float
    samples: int
    recalibrated: Mapping[str, Tensor]

    def _title(self) -> str:
        return f"Drift of {self.samples} samples from the stored statistics of {len(self.layers)} normalizers"

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(entry) for entry in self.layers]

    def readings(self) -> tuple[Reading, ...]:
        """Return the largest shift of a mean, what recalibration would change, then the shift of every layer."""
        worst = max((entry.mean_shift for entry in self.layers if entry.status == "ok"), default=math.nan)
        names, why = ("output_change", "decisions_changed", "accuracy", "recalibrated_accuracy"), self.sentence
        return (
            Reading.measured("largest mean shift", worst, why=why),
            *(Reading.measured(n.replace("_", " "), getattr(self, n), why=why or "no classes") for n in names),
            *(Reading.measured("mean shift", e.mean_shift, layer=e.layer, why=e.sentence) for e in self.layers),
        )

    def _meaning(self) -> str:
        comparable = [entry for entry in self.layers if entry.status == "ok" or entry.cause]
        if not comparable:
            return f"Of {len(self.layers)} normalizers none can be compared with these {self.samples} samples."
        worst = max(comparable, key=lambda entry: entry.excess)
        if worst.cause == "poisoned":
            return f"{worst.layer!r} is poisoned: {worst.sentence}. {self._remedy()}"
        said = (
            f"{worst.layer!r} sees inputs {worst.mean_shift:.3g} stored deviations off (sampling gives "
            f"{worst.floor:.2g}, limit {worst.limit:.2g}) with {math.exp(worst.log_variance_ratio):.3g} times "
            f"the variance or its inverse (limit {math.exp(worst.variance_limit):.2g})"
        )
        far = [e for e in comparable if e.mean_shift > FAR or e.log_variance_ratio > WIDE or math.isnan(e.floor)]
        if not worst.cause and far:
            few = f"{self.samples} samples are too few to tell the statistics of {far[0].layer!r} from others"
            return f"{said}, no more than sampling may give: {few}; give more."
        if not worst.cause:
            return f"{said}: the stored statistics fit these data; leave them."
        if worst.cause == "shifted":
            return f"{said}: the data shifted, or the statistics are of other weights. {self._remedy()}"
        return f"{said}: its statistics are {worst.cause}, {worst.sentence}. {self._remedy()}"

    def _remedy(self) -> str:
        if not self.recalibrated:
            return "Recalibrate on batches of several samples."
        changed = self.decisions_changed
        gain = "" if math.isnan(changed) else f", which changes {changed:.1%} of the decisions here"
        return f"Recalibrate on such data (load_state_dict(.recalibrated, strict=False)){gain}."

    def _notes(self) -> str:
        known, before, after = not math.isnan(self.output_change), self.accuracy, self.recalibrated_accuracy
        said = f"recalibration changes the outputs by {self.output_change:.3g}" if known else ""
        if math.isnan(before) or math.isnan(after):
            return said
        return f"{said}, accuracy {before:.3g} -> {after:.3g} on the same samples"

    def chart(self) -> Chart:
        """Return bars of the mean shift per layer, as seen and as recalibration would store it."""
        rows = [
            {"layer": entry.layer, "shift": value, "series": series}
            for entry in self.layers
            for series, value in (("data", entry.mean_shift), ("recalibrated", entry.recalibrated_shift))
        ]
        rows = rows or [{"layer": "(none)", "shift": 0.0, "series": "data"}]
        return bars(rows, x="layer", y="shift", series="series", title="shift of the mean in stored deviations")


@instrument
def drift(
    model: nn.Module, loader: Any, *, batches: int | None = None, forward: Callable[[nn.Module, Any], Any] | None = None
) -> Drift:
    """Measure, per normalizer with stored statistics, how far the data are from them.

    In eval mode, with m, v the moments of a normalizer's input per channel over all batches and m0, v0 the stored
    ones: mean_shift^2 = mean of (m - m0)^2 / (v0 + eps), divergence = mean of (r - 1 - log r + (m - m0)^2 / (v0 + eps))
    / 2 with r = (v + eps) / (v0 + eps). Recalibration is then tried on copies: statistics are collected with every
    batch normalized by itself, stored, and the outputs compared.

    What sampling alone gives (`floor`) is the root mean square over channels of sqrt(s^2 (1/n + 1/k) / v0), s^2 the
    variance of the samples' own means, n the number of samples, k how many the stored mean averages: those of
    (2 - momentum) / momentum batches of this size; for the log ratio of variances sqrt(2/(n - 1) + 2/(k - 1)).

    Kind: exact for the data given. Cost: three forwards.

    Args:
        model: any module; it is left as it was.
        loader: batches `(inputs, labels)`, or inputs alone; one batch, or an iterable of them (a shuffling loader is
            fine: it is read once).
        batches: read this many only.
        forward: `forward(model, inputs) -> output` for unusual calls.

    Returns:
        One entry per normalizer; those that are not called, or that refuse to be recalibrated on such batches (one
        sample), have a status or a sentence. What is beyond its limit has a cause: never updated (mean 0 and variance
        1, as it was made), frozen (momentum 0, a class or mode that does not update, or fewer updates than others),
        poisoned (not finite) or, for all else, shifted.

    Deviations: stored variances are unbiased in torch, so the data's are taken unbiased too.

    Examples:
        A fresh BatchNorm1d stores mean 0 and variance 1; data at mean 3 are 3 deviations away:

        >>> x = torch.tensor([[2.0], [4.0]])
        >>> found = drift(nn.BatchNorm1d(1, eps=1e-12), [(x, torch.zeros(2))])
        >>> round(found.layers[0].mean_shift, 6), round(found.layers[0].recalibrated_shift, 6)
        (3.0, 3.0)

    References: akbar2025, ioffe2015.
    """
    call = forward or call_model
    read = _read_batches(loader, batches)
    objective = Objective.from_step(
        model, lambda *_: torch.zeros(()), read, mode="eval", outputs=lambda m, batch: call(m, _inputs(batch))
    )
    data = [batch for _, batch in objective.batches()]
    stored = {name or "(model)": module for name, module in model.named_modules() if _stores(module)}
    for number, batch in enumerate(data):
        _check_finite(number, _inputs(batch))
    before, after = Moments(), Moments()
    outputs = renewed = _pass(objective, before)
    sentence = "" if stored else "no normalizer stores statistics"
    if stored:
        try:
            _pass(objective, after, lambda name, module: module.train())
            renewed = _pass(objective, Moments(), lambda name, module: _store(module, after.get(name)))
        except ModelError as error:
            sentence, after = f"no recalibration: {error}", Moments()
    updates = max((int(m.num_batches_tracked) for m in stored.values() if _is_counted(m)), default=0)
    entries = tuple(
        _entry(name, module, before, after, _describe_frozen(module, model, updates)) for name, module in stored.items()
    )
    accuracy, again, changed = _compare_decisions(data, outputs, renewed)
    change = _relative_change(outputs, renewed)
    if sentence:
        again = changed = change = math.nan
    broken = next((entry for entry in entries if entry.status == "diverged"), None)
    return Drift(
        layers=entries,
        output_change=change,
        decisions_changed=changed,
        accuracy=accuracy,
        recalibrated_accuracy=again,
        samples=sum(int(objective.weight(batch)) for batch in data),
        recalibrated=_state(stored, after),
        mode="eval",
        status="skipped" if not stored else "diverged" if broken else "ok",
        sentence=sentence or ("" if broken is None else f"{broken.layer!r}: {broken.sentence}"),
    )


def _pass(objective: Objective, sums: Moments, prepare: Callable[[str, Any], Any] | None = None) -> list[Any]:
    """Run all batches, summing the inputs of normalizers into `sums`, each prepared first."""

    def add_moments(call: ModuleCall) -> None:
        if _stores(call.module) and call.given is not None and call.given.ndim > 1:
            sums.setdefault(call.name, Sums()).add(call.given)

    def body(model: nn.Module, number: int, batch: Any) -> Any:
        for name, module in model.named_modules():
            if prepare is not None and _stores(module):
                prepare(name or "(model)", module)
        with watched(model, add_moments):
            return objective.outputs_of(model, batch)

    with torch.no_grad():
        return list(objective.each_batch(body))


def _store(module: Any, sums: Sums | None) -> None:
    if sums is not None:
        mean, variance = sums.moments()
        module.running_mean.copy_(mean)
        module.running_var.copy_(variance)


def _entry(name: str, module: Any, before: Moments, after: Moments, frozen: str) -> LayerDrift:
    if name not in before:
        return LayerDrift(name, status="skipped", sentence="its forward is not called in this pass")
    sums, eps = before[name], float(getattr(module, "eps", 0.0))
    old_mean, old_variance = module.running_mean.double(), module.running_var.double() + eps
    if not bool((old_mean.isfinite() & old_variance.isfinite() & (old_variance > 0)).all()):
        sentence = "its stored statistics are not finite, or variances not positive: a batch in training was broken"
        return LayerDrift(name, cause="poisoned", status="diverged", sentence=sentence)
    if sums.count < 2:
        return LayerDrift(name, status="skipped", sentence="one value per channel has no variance")
    mean, variance = sums.moments()
    if not bool((mean.isfinite() & variance.isfinite()).all()):
        return LayerDrift(name, status="diverged", sentence="its inputs are not finite: a layer before it is broken")
    shift, ratio = (mean - old_mean) / old_variance.sqrt(), (variance + eps) / old_variance
    renewed = (after[name].moments()[0] - old_mean) / old_variance.sqrt() if name in after else None
    averaged = _averaged_samples(module, sums.batch)
    noise = sums.spread() * (1 / sums.samples + 1 / averaged) / old_variance
    entry = LayerDrift(
        layer=name,
        mean_shift=_rms(shift),
        worst_shift=float(shift.abs().max()),
        log_variance_ratio=_rms(ratio.log()),
        divergence=float((ratio - 1 - ratio.log() + shift.square()).mean() / 2),
        recalibrated_shift=math.nan if renewed is None else _rms(renewed),
        floor=_rms(noise.sqrt()) if sums.samples > 1 else math.nan,
        variance_floor=math.sqrt(2 / max(sums.samples - 1, 1) + 2 / max(averaged - 1, 1)),
    )
    if entry.excess <= 1:
        return entry
    if not bool(module.running_mean.any()) and bool((module.running_var == 1).all()):
        return replace(entry, cause="never updated", sentence="mean 0 and variance 1, as they were made")
    return replace(entry, cause="frozen" if frozen else "shifted", sentence=frozen)


def _averaged_samples(module: Any, batch: int) -> float:
    """Return how many samples a stored mean averages, were it taken on batches of this size."""
    momentum = getattr(module, "momentum", None)
    updates = int(module.num_batches_tracked) if _is_counted(module) else 0
    if momentum is None:  # a plain mean over all batches
        return batch * max(updates, 1)
    return batch * (2 - momentum) / momentum if momentum > 0 else float(batch)


def _describe_frozen(module: Any, model: nn.Module, most: int) -> str:
    """Say what speaks for statistics that training does not update; empty where nothing does."""
    if getattr(module, "momentum", None) == 0:
        return "its momentum is 0"
    if "frozen" in type(module).__name__.lower():
        return f"{type(module).__name__} does not update them"
    if model.training and not module.training:
        return "it is in eval mode inside a model in train mode"
    if _is_counted(module) and 0 < int(module.num_batches_tracked) < most:
        return f"it was updated {int(module.num_batches_tracked)} times, others {most} times"
    return ""


def _is_counted(module: Any) -> bool:
    return isinstance(getattr(module, "num_batches_tracked", None), Tensor)


def _state(stored: Mapping[str, Any], after: Moments) -> dict[str, Tensor]:
    """Return the recalibrated statistics as a part of a state dict."""
    return {
        f"{name}.{own}".removeprefix("(model)."): value.to(getattr(stored[name], own))
        for name, sums in after.items()
        for own, value in zip(("running_mean", "running_var"), sums.moments(), strict=True)
    }


def _moments(count: int, total: Any, squares: Any) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance per channel."""
    mean = total / count
    return mean, ((squares - count * mean.square()) / max(count - 1, 1)).clamp_min(0)


def _check_finite(number: int, inputs: Any) -> None:
    for tensor in tensors(inputs):
        bad = int((~torch.isfinite(tensor)).sum()) if tensor.is_floating_point() else 0
        if bad:
            got = f"{bad} of {tensor.numel()} numbers in batch {number} nan or infinite"
            raise DataError("drift", "inputs must be finite", got, "Clean the data")


def _compare_decisions(data: list[Any], stored: list[Any], renewed: list[Any]) -> tuple[float, float, float]:
    """Return accuracy with stored and with renewed statistics, and the share of decisions that differ."""
    right = again = changed = total = 0.0
    for batch, old, new in zip(data, stored, renewed, strict=True):
        try:
            (first, labels), (second, _) = (aligned_decisions(output, batch, None) for output in (old, new))
        except NotClasses:
            return (math.nan,) * 3
        if not bool(first.isfinite().all()):  # guesses of a broken network are no decisions
            return (math.nan,) * 3
        a, b = first.argmax(1), second.argmax(1)
        right, again = right + float((a == labels).sum()), again + float((b == labels).sum())
        changed, total = changed + float((a != b).sum()), total + labels.numel()
    return right / total, again / total, changed / total


def _relative_change(stored: list[Any], renewed: list[Any]) -> float:
    pairs = [(first_tensor(a), first_tensor(b)) for a, b in zip(stored, renewed, strict=True)]
    away = sum(float((b.double() - a.double()).square().sum()) for a, b in pairs if a is not None and b is not None)
    size = sum(float(a.double().square().sum()) for a, _ in pairs if a is not None)
    return math.sqrt(away / size) if size > 0 else math.nan  # also where one of them is not finite


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _stores(module: Any) -> bool:
    return all(isinstance(getattr(module, name, None), Tensor) for name in ("running_mean", "running_var"))


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _read_batches(loader: Any, count: int | None) -> Any:
    if isinstance(loader, (Tensor, tuple, Mapping)):
        return loader
    if not isinstance(loader, Iterable):
        raise DataError("drift", "loader gives batches", type(loader).__name__, "Pass a DataLoader or a list")
    batches = list(islice(loader, count))
    if not batches:
        raise DataError("drift", "loader must give at least one batch", "none", "Make a fresh iterator")
    return batches
