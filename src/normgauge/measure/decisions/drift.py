"""`ng.drift`: how far data are from the statistics a model has stored, and what recalibration would change."""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass
from itertools import islice
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from normgauge.errors import DataError, ModelError, explain
from normgauge.measure.decisions.classes import NotClasses, decisions, targets_of
from normgauge.measure.signal.execution import per_unit
from normgauge.network import ModuleCall, first_tensor, watched
from normgauge.objective import Objective, call_model
from normgauge.records import Reading, Status
from normgauge.results import Result, instrument

if TYPE_CHECKING:
    import altair

FAR = 0.5  # stored deviations: half the scale at which the next layer tells values apart
NOISE = 3.0  # times what sampling alone gives
Moments = dict[str, tuple[int, Tensor, Tensor]]  # layer -> values per channel, sum, sum of squares


@dataclass(frozen=True, slots=True)
class LayerDrift:
    """Distance of the data from one normalizer's stored statistics.

    Args:
        layer: its name.
        mean_shift: root mean square over channels of (mean of the data - stored mean) / stored deviation.
        worst_shift: the largest of these, in absolute value.
        log_variance_ratio: root mean square of log(variance of the data / stored variance).
        divergence: mean over channels of KL(data || stored) between Gaussians of these moments, in nats.
        recalibrated_shift: root mean square change, in stored deviations, of the mean that recalibration would
            store: with every normalizer before it recalibrated too.
        floor: what sampling alone gives for `mean_shift`, 1 / sqrt(values per channel), were values independent.
        status: ok or skipped.
        sentence: why, where not ok.
    """

    layer: str
    mean_shift: float = math.nan
    worst_shift: float = math.nan
    log_variance_ratio: float = math.nan
    divergence: float = math.nan
    recalibrated_shift: float = math.nan
    floor: float = math.nan
    status: Status = "ok"
    sentence: str = ""


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
    """

    layers: tuple[LayerDrift, ...]
    output_change: float
    decisions_changed: float
    accuracy: float
    recalibrated_accuracy: float
    samples: int

    def _title(self) -> str:
        return f"Drift of {self.samples} samples from the stored statistics of {len(self.layers)} normalizers"

    def _rows(self) -> list[dict[str, Any]]:
        names = LayerDrift.__slots__
        return [{name: getattr(entry, name) for name in names} for entry in self.layers]

    def readings(self) -> tuple[Reading, ...]:
        """Return the largest shift of a mean, what recalibration would change, then the shift of every layer."""
        worst = max((entry.mean_shift for entry in self.layers if entry.status == "ok"), default=math.nan)
        whole = [Reading.measured("largest mean shift", worst, why=self.sentence)]
        for name in ("output_change", "decisions_changed", "accuracy", "recalibrated_accuracy"):
            whole.append(
                Reading.measured(name.replace("_", " "), getattr(self, name), why=self.sentence or "no classes")
            )
        return *whole, *(
            Reading.measured("mean shift", entry.mean_shift, layer=entry.layer, why=entry.sentence)
            for entry in self.layers
        )

    def _meaning(self) -> str:
        comparable = [entry for entry in self.layers if entry.status == "ok"]
        if not comparable:
            return f"Of {len(self.layers)} normalizers none can be compared with these {self.samples} samples."
        worst = max(comparable, key=lambda entry: entry.mean_shift)
        limit = max(FAR, NOISE * worst.floor)
        said = f"{worst.layer!r} sees inputs {worst.mean_shift:.3g} stored deviations off (limit {limit:.2g})"
        if worst.mean_shift <= limit:
            return f"{said}: the stored statistics fit these data; leave them."
        gain = (
            ""
            if math.isnan(self.decisions_changed)
            else f", which changes {self.decisions_changed:.1%} of the decisions"
        )
        return f"{said}: recalibrate on such data{gain}, or find out why they differ from the training data."

    def _notes(self) -> str:
        return (
            f"recalibration changes the outputs by {self.output_change:.3g}, accuracy {self.accuracy:.4g} -> "
            f"{self.recalibrated_accuracy:.4g} on the same samples"
        )

    def chart(self) -> altair.TopLevelMixin:
        """Return bars of the mean shift per layer, as seen and as recalibration would store it."""
        from normgauge.charts import bars

        rows = [
            {"layer": entry.layer, "shift": value, "series": series}
            for entry in self.layers
            for series, value in (("data", entry.mean_shift), ("recalibrated", entry.recalibrated_shift))
        ]
        rows = rows or [{"layer": "(none)", "shift": 0.0, "series": "data"}]
        return bars(rows, x="layer", y="shift", series="series", title="shift of the mean in stored deviations")


@instrument
def drift(
    model: nn.Module,
    loader: Any,
    *,
    batches: int | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
) -> Drift:
    """Measure, per normalizer with stored statistics, how far the data are from them.

    In eval mode, with m, v the moments of a normalizer's input per channel over all batches and m0, v0 the stored
    ones: mean_shift^2 = mean of (m - m0)^2 / (v0 + eps), divergence = mean of (r - 1 - log r + (m - m0)^2 / (v0 + eps))
    / 2 with r = (v + eps) / (v0 + eps). Recalibration is then tried on copies: statistics are collected with every
    batch normalized by itself, stored, and the outputs compared.

    Kind: exact for the data given. Cost: three forwards.

    Args:
        model: any module; it is left as it was.
        loader: batches `(inputs, labels)`, or inputs alone; one batch, or an iterable of them (a shuffling loader is
            fine: it is read once).
        batches: read this many only.
        forward: `forward(model, inputs) -> output` for unusual calls.

    Returns:
        One entry per normalizer; those that are not called, or that refuse to be recalibrated on such batches (one
        sample), have a status or a sentence.

    Raises:
        DataError: when there is no batch.
        ModelError: when the model has no parameters.

    Deviations: stored variances are unbiased in torch, so the data's are taken unbiased too.

    Examples:
        A fresh BatchNorm1d stores mean 0 and variance 1; data at mean 3 are 3 deviations away:

        >>> x = torch.tensor([[2.0], [4.0]])
        >>> found = drift(nn.BatchNorm1d(1, eps=1e-12), [(x, torch.zeros(2))])
        >>> round(found.layers[0].mean_shift, 6), round(found.layers[0].recalibrated_shift, 6)
        (3.0, 3.0)

    References: akbar2025, ioffe2015.
    """
    data = _read_batches(loader, batches)
    objective = Objective.from_step(
        model, _no_step, data, mode="eval", outputs=lambda m, batch: (forward or call_model)(m, _inputs(batch))
    )
    stored = {name or "(model)": module for name, module in model.named_modules() if _stores(module)}
    before: Moments = {}
    outputs = _pass(objective, before)
    samples = sum(int(objective.weight(batch)) for _, batch in objective.batches())
    sentence = "" if stored else "no normalizer stores statistics"
    after: Moments = {}
    renewed: list[Any] = outputs
    if stored:
        try:
            _pass(objective, after, lambda module: module.train())
            renewed = _pass(objective, {}, lambda module: None, after)
        except ModelError as error:
            sentence = f"no recalibration: {error}"
            after = {}
    entries = tuple(_entry(name, module, before, after) for name, module in stored.items())
    accuracy, again, changed = _compare_decisions([batch for _, batch in objective.batches()], outputs, renewed)
    if sentence:
        again = changed = math.nan
    return Drift(
        layers=entries,
        output_change=_relative_change(outputs, renewed),
        decisions_changed=changed,
        accuracy=accuracy,
        recalibrated_accuracy=again,
        samples=samples,
        mode="eval",
        status="skipped" if sentence else "ok",
        sentence=sentence,
    )


def _pass(
    objective: Objective,
    sums: Moments,
    prepare: Callable[[Any], Any] | None = None,
    new: Mapping[str, tuple[int, Tensor, Tensor]] | None = None,
) -> list[Any]:
    """Run all batches, summing the inputs of normalizers into `sums`; `new` moments replace the stored ones first."""

    def add_moments(call: ModuleCall) -> None:
        name, inputs = call.name, call.given
        if _stores(call.module) and inputs is not None and inputs.ndim > 1:
            values = per_unit(inputs, 1)
            count, total, squares = sums.get(name, (0, torch.zeros(()), torch.zeros(())))
            sums[name] = (count + values.shape[0], total + values.sum(0), squares + values.square().sum(0))

    def body(model: nn.Module, number: int, batch: Any) -> Any:
        for name, module in model.named_modules():
            if prepare is not None and _stores(module):
                prepare(module)
                if new is not None and (name or "(model)") in new:
                    mean, variance = _moments(new[name or "(model)"])
                    module.running_mean.copy_(mean)
                    module.running_var.copy_(variance)
        with watched(model, add_moments):
            return objective.outputs_of(model, batch)

    with torch.no_grad():
        return list(objective.each_batch(body))


def _entry(name: str, module: Any, before: Moments, after: Moments) -> LayerDrift:
    if name not in before:
        return LayerDrift(name, status="skipped", sentence="its forward is not called in this pass")
    if before[name][0] < 2:
        return LayerDrift(name, status="skipped", sentence="one value per channel has no variance")
    eps = float(getattr(module, "eps", 0.0))
    old_mean, old_variance = module.running_mean.double(), module.running_var.double() + eps
    mean, variance = _moments(before[name])
    shift = (mean - old_mean) / old_variance.sqrt()
    ratio = (variance + eps) / old_variance
    recalibrated = math.nan
    if name in after:
        recalibrated = _rms((_moments(after[name])[0] - old_mean) / old_variance.sqrt())
    return LayerDrift(
        layer=name,
        mean_shift=_rms(shift),
        worst_shift=float(shift.abs().max()),
        log_variance_ratio=_rms(ratio.log()),
        divergence=float((ratio - 1 - ratio.log() + shift.square()).mean() / 2),
        recalibrated_shift=recalibrated,
        floor=1 / math.sqrt(before[name][0]),
    )


def _moments(sums: tuple[int, Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    """Return mean and unbiased variance per channel."""
    count, total, squares = sums
    mean = total / count
    return mean, ((squares - count * mean.square()) / max(count - 1, 1)).clamp_min(0)


def _compare_decisions(data: list[Any], stored: list[Any], renewed: list[Any]) -> tuple[float, float, float]:
    """Return accuracy with stored and with renewed statistics, and the share of decisions that differ."""
    right = again = changed = total = 0.0
    for batch, old, new in zip(data, stored, renewed, strict=True):
        try:
            (first, labels), (second, _) = (decisions(output, targets_of(batch)) for output in (old, new))
        except NotClasses:
            return math.nan, math.nan, math.nan
        a, b = first.argmax(1), second.argmax(1)
        right, again = right + float((a == labels).sum()), again + float((b == labels).sum())
        changed, total = changed + float((a != b).sum()), total + labels.numel()
    return right / total, again / total, changed / total


def _relative_change(stored: list[Any], renewed: list[Any]) -> float:
    pairs = [(first_tensor(a), first_tensor(b)) for a, b in zip(stored, renewed, strict=True)]
    away = sum(float((b.double() - a.double()).square().sum()) for a, b in pairs if a is not None and b is not None)
    size = sum(float(a.double().square().sum()) for a, _ in pairs if a is not None)
    return math.sqrt(away / size) if size > 0 else math.nan


def _rms(values: Tensor) -> float:
    return float(values.square().mean().sqrt())


def _stores(module: Any) -> bool:
    return isinstance(getattr(module, "running_mean", None), Tensor) and isinstance(
        getattr(module, "running_var", None), Tensor
    )


def _inputs(batch: Any) -> Any:
    return batch[0] if isinstance(batch, (tuple, list)) and len(batch) == 2 else batch


def _read_batches(loader: Any, count: int | None) -> Any:
    if isinstance(loader, (Tensor, tuple, Mapping)):
        return loader
    if not isinstance(loader, Iterable):
        raise DataError(explain("drift", "loader gives batches", type(loader).__name__, "Pass a DataLoader or a list"))
    batches = list(islice(loader, count))
    if not batches:
        raise DataError(explain("drift", "loader must give at least one batch", "none", "Make a fresh iterator"))
    return batches


def _no_step(model: nn.Module, batch: Any) -> Tensor:
    raise NotImplementedError("drift has no loss")
