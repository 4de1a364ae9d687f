"""`ng.batch_noise`: what mini-batches do to the gradient: bias and noise of their statistics, noise of sampling."""

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgauge.charts import curves
from normgauge.errors import InputError, OutOfMemoryError
from normgauge.linalg import Operator, inner, machine_memory
from normgauge.linalg.quadrature import rademacher
from normgauge.objective import Objective, join_batches, sample_count, take_rows
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument, spend
from normgauge.rng import generator

BIASED = 0.1  # of the gradient's norm: a tenth turns its direction by up to six degrees
SURE = 2.0  # standard errors
NAMES = ("bias", "sampling", "statistics", "cross", "total", "curvature", "jitter")
VECTORS = 8  # of the variables that are held at once, besides one per draw where there is room
PROBES = 16  # random vectors the Hessian is held against


class Estimate(NamedTuple):
    """A number and its standard error."""

    value: float
    error: float


@dataclass(frozen=True, slots=True)
class SizeNoise:
    """The gradient of mini-batches of one size against that of all samples; each number with its standard error.

    With g the gradient of all N samples as one batch, g_B that of a batch B drawn without replacement, and s_B that
    of the losses of B's samples within the batch of all (whose mean is g): r_B = g_B - s_B is what the statistics add.

    Attributes:
        size: of the batches.
        bias: |E g_B - g| = |E r_B|, the root of an unbiased estimate of its square.
        sampling: E |s_B - g|^2, the variance from which samples are drawn.
        statistics: E |r_B|^2 - bias^2, the variance from which statistics they make.
        cross: 2 E <s_B - g, r_B>; sampling + statistics + cross = total.
        total: E |g_B - g|^2 - bias^2.
        curvature: tr(H C) / tr C, C the second moment of g_B - g: mean curvature of all samples' loss along the noise.
        jitter: share of decisions in a batch that differ from those among all samples; nan without classes.
    """

    size: int
    bias: Estimate
    sampling: Estimate
    statistics: Estimate
    cross: Estimate
    total: Estimate
    curvature: Estimate
    jitter: Estimate


@dataclass(frozen=True)
class BatchNoise(Result):
    """Bias and noise of mini-batch gradients by batch size.

    Attributes:
        sizes: one entry per batch size, ascending.
        gradient_norm: |g|, of all samples as one batch.
        samples: how many there are.
        draws: mini-batches per size.
        mean_curvature: tr H / n, what a random direction meets, and its standard error.
        exponents: name -> (p, its standard error) of the fitted size^p; variances without the factor (N - B)
            / (N - 1) that drawing without replacement puts on them.
    """

    sizes: tuple[SizeNoise, ...]
    gradient_norm: float
    samples: int
    draws: int
    mean_curvature: Estimate
    exponents: dict[str, Estimate]

    def _title(self) -> str:
        return f"Noise of mini-batch gradients, {self.draws} draws of {self.samples} samples per size"

    def _rows(self) -> list[dict[str, Any]]:
        ends = ("", "_error")
        return [
            {"size": e.size, **{n + end: v for n in NAMES for end, v in zip(ends, getattr(e, n), strict=True)}}
            for e in self.sizes
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return the relative bias per size, then the parts of the variance, curvature, jitter and the exponents."""
        unit = self.gradient_norm or math.nan
        name = "bias over the gradient"
        found = [(f"{name}, size {e.size}", e.bias.value / unit, e.bias.error / unit) for e in self.sizes]
        found += [(f"{name}, size {e.size}", *getattr(e, name)) for name in NAMES[1:] for e in self.sizes]
        found += [(f"exponent of {name}", *power) for name, power in self.exponents.items()]
        return tuple(
            Reading.measured(
                title,
                value,
                "estimate" if title.startswith(("bias", "curvature", "exponent")) else "unbiased",
                uncertainty=None if math.isnan(error) else error,
                why="no classes, no noise or no gradient",
            )
            for title, value, error in found
        )

    def _meaning(self) -> str:
        small, unit = self.sizes[0], self.gradient_norm
        biased = [e for e in self.sizes if e.bias.value - SURE * e.bias.error > BIASED * unit]
        noise, both = max(small.statistics.value, 0.0), max(small.statistics.value, 0.0) + small.sampling.value
        said = f"At size {small.size} statistics make {noise / both if both else 0.0:.0%} of the noise of a gradient, "
        said += "sampling the rest, and a bias of "
        said += f"{small.bias.value / unit if unit else 0.0:.2g} of its norm"
        power, error = self.exponents.get("statistics", (math.nan, math.nan))
        fell = f"; that variance goes as size^{power:.2f} (+- {SURE * error:.2f})" if math.isfinite(power) else ""
        jitter = small.jitter.value
        moved = f"; {jitter:.1%} of decisions hang on the batch" if math.isfinite(jitter) else ""
        verdict = f"no size has a bias surely beyond {BIASED:g}"
        if biased:
            verdict = f"biased beyond {BIASED:g} up to size {biased[-1].size}: train with larger batches, or GroupNorm"
        elif small.statistics.value <= SURE * small.statistics.error:
            verdict = f"no batch statistics are seen (beyond {SURE:g} standard errors): what is left is sampling"
        return f"{said}{fell}{moved}. In all, {verdict}."

    def _notes(self) -> str:
        mean, error = self.mean_curvature
        return f"curvature of a random direction {mean:.3g} +- {error:.2g}, of the noise per size in the table"

    def chart(self) -> Chart:
        """Return the parts of the variance by batch size."""
        rows = [
            {"size": entry.size, "series": series, "value": getattr(entry, series.removesuffix("^2")).value ** power}
            for entry in self.sizes
            for series, power in (("sampling", 1), ("statistics", 1), ("bias^2", 2))
        ]
        return curves(rows, x="size", title=self._title(), x_title="batch size", y_title="squared norm")


@instrument
def batch_noise(
    objective: Objective,
    *,
    sizes: Sequence[int] | None = None,
    draws: int = 16,
    seed: int = 0,
    memory: int | None = None,
) -> BatchNoise:
    """Measure bias and noise of mini-batch gradients, split into sampling and batch statistics (S0 sec. 9.2).

    Kind: unbiased (variances, cross, jitter), estimate (bias, curvature, exponents). Standard errors of few draws are
    too small where batches of two or three make variances near 0, and so huge gradients. Cost: per size and draw B / N
    of a gradient and of a forward, a backward through all samples and a product; 16 products besides. Dropout's masks
    differ between a batch and all samples, and count as statistics. Memory: eight vectors of the variables and one per
    draw, or, where that does not fit, without those for the gradients of each draw a second time.

    Args:
        objective: model, loss, data and mode ("train", for batch statistics); its batches are joined to all samples.
        sizes: of mini-batches, between 2 and N - 1; by default up to four halvings of N, not below 4.
        draws: mini-batches per size; standard errors fall with their square root.
        seed: of the draws.
        memory: bytes the vectors may take; by default 1 GiB, or up to a quarter of the machine's.

    Raises:
        OutOfMemoryError: before the work, where eight vectors do not fit.

    Examples:
        Without batch statistics the mean over mini-batches is the gradient itself:

        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> data = (torch.randn(12, 2), torch.randn(12, 1))
        >>> objective = Objective(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, mode="train")
        >>> bool(batch_noise(objective, sizes=[4]).sizes[0].bias.value < 1e-5)
        True

    References: akbar2025.
    """
    loss = objective.loss_function
    pool = join_batches([batch for _, batch in objective.batches()])
    count = sample_count(pool)
    sizes = sorted(sizes or [count // 2**k for k in range(1, 5) if count // 2**k >= 4])
    if loss is None or not sizes or not all(2 <= size < count for size in sizes) or draws < 3:
        rule = f"sizes lie between 2 and {count - 1} (samples but one), draws are at least 3, the objective has a loss"
        raise InputError("batch_noise", rule, f"sizes={list(sizes)}, draws={draws}", "Give more data, or others")
    work = torch.promote_types(objective.dtype, torch.float32)
    kept = _check_room(objective, work, draws, memory)
    whole, draw = objective.replace(data=pool), generator(seed)
    leaves, outputs, value = whole.graph(0, pool, outputs=True)
    if not isinstance(outputs, Tensor) or outputs.shape[:1] != (count,):
        raise InputError("batch_noise", "outputs are one tensor, a row per sample", "others", "Pass forward=")
    variables, targets = list(leaves.values()), pool[1]
    gradient = _flat(torch.autograd.grad(value, variables, retain_graph=True, materialize_grads=True), work)
    with torch.no_grad():
        classes = outputs.detach().argmax(-1) if outputs.ndim > 1 and outputs.shape[-1] > 1 else None
    entries, rounding = [], min(100 * torch.finfo(objective.dtype).eps, 0.02)  # half precision rounds by less

    def parts(rows: Tensor, batch: Objective) -> tuple[Tensor, Tensor]:
        """Return s_B - g and r_B."""
        part = loss(outputs[rows.to(outputs.device)], take_rows(targets, rows))
        sampled = _flat(torch.autograd.grad(part, variables, retain_graph=True, materialize_grads=True), work)
        spend("gradients", 2 / 3)  # the forward was made once
        extra = objective.flatten(batch.gradient()).to(work).sub_(sampled)
        spend("gradients", len(rows) / count - 1)  # a pass over this batch is no pass over all samples
        if inner(extra, extra) <= rounding**2 * inner(sampled, sampled):
            extra.zero_()
        return sampled.sub_(gradient), extra

    with whole.hessian() as hessian:
        bends = [_bend(hessian, rademacher(len(gradient), draw).to(gradient))[0] for _ in range(PROBES)]
        seen = torch.tensor(bends, dtype=torch.float64) / len(gradient)
        for size in sizes:
            extras, numbers, jitters, sums = [], [], [], torch.zeros_like(gradient)
            drawn = [torch.randperm(count, generator=draw)[:size] for _ in range(draws)]
            batches = [objective.replace(data=take_rows(pool, rows)) for rows in drawn]
            for rows, batch in zip(drawn, batches, strict=True):
                noise, extra = parts(rows, batch)
                sums += extra
                if classes is not None:
                    moved = batch.outputs().argmax(-1) != classes[rows.to(classes.device)]
                    spend("forwards", size / count - 1)
                    jitters.append(float(moved.float().mean()))
                products = inner(noise, noise), 2 * inner(noise, extra), inner(extra, extra)
                numbers.append((*products, *_bend(hessian, noise.add_(extra))))
                extras += [extra] if kept else []
            found = extras or (parts(rows, batch)[1] for rows, batch in zip(drawn, batches, strict=True))
            against = torch.tensor([inner(extra, sums) for extra in found], dtype=torch.float64)
            entries.append(_size_noise(size, against, torch.tensor(numbers, dtype=torch.float64), jitters))
    return BatchNoise(
        sizes=tuple(entries),
        gradient_norm=math.sqrt(inner(gradient, gradient)),
        samples=count,
        draws=draws,
        mean_curvature=_mean(seen),
        exponents=_exponents(entries, count),
    )


def _check_room(objective: Objective, work: torch.dtype, draws: int, memory: int | None) -> bool:
    """Tell whether there is room for one vector per draw besides those that are needed; refuse where not for these."""
    row = objective.dimension * work.itemsize
    room = max(1 << 30, machine_memory(objective.device) // 4) if memory is None else memory
    if VECTORS * row > room:
        rule = f"{VECTORS} vectors of {objective.dimension} entries need {VECTORS * row / 2**30:.3g} GiB"
        got = f"{room / 2**30:.3g} GiB, a quarter of the machine's" if memory is None else f"memory={memory} bytes"
        step = f"Select fewer parameters, or pass memory={VECTORS * row} where the machine has it"
        raise OutOfMemoryError("batch_noise", rule, got, step)
    return (VECTORS + draws) * row <= room


def _flat(pieces: Sequence[Tensor], dtype: torch.dtype) -> Tensor:
    return torch.cat([piece.detach().reshape(-1).to(dtype) for piece in pieces])


def _bend(hessian: Operator, vector: Tensor) -> tuple[float, float]:
    """Return v^T H v and v^T v."""
    return inner(vector, (hessian @ vector.to(hessian.dtype)).to(vector)), inner(vector, vector)


def _mean(values: Tensor) -> Estimate:
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return Estimate(float(values.mean()), error)


def _size_noise(size: int, against: Tensor, numbers: Tensor, jitters: list[float]) -> SizeNoise:
    """Return the estimates for one size.

    Given are <r_i, sum of all r>, and per draw |s_B - g|^2, 2 <s_B - g, r_B>, |r_B|^2, d^T H d, d^T d of d = g_B - g.
    """
    spread, mixed, own, bends, lengths = numbers.T
    # <r_i, mean of the others>: their mean is unbiased for bias^2
    pairs = (against - own) / (len(own) - 1)
    square, error = float(pairs.mean()), 2 * _mean(pairs).error
    bias = math.sqrt(max(square, 0.0))
    added = own - pairs
    # a ratio of means: its error by the deviations from it
    ratio = float(bends.sum() / lengths.sum()) if float(lengths.sum()) else math.nan
    return SizeNoise(
        size=size,
        bias=Estimate(bias, error / (2 * bias) if bias * bias > error else math.sqrt(error)),
        sampling=_mean(spread),
        statistics=_mean(added),
        cross=_mean(mixed),
        total=_mean(spread + added + mixed),
        curvature=Estimate(ratio, _mean((bends - ratio * lengths) / lengths.mean()).error),
        jitter=_mean(torch.tensor(jitters)) if jitters else Estimate(math.nan, math.nan),
    )


def _exponents(entries: Sequence[SizeNoise], count: int) -> dict[str, Estimate]:
    """Fit size^p to bias and variances by weighted least squares of the logarithms; only what is surely above 0."""
    found = {}
    for name in ("bias", "sampling", "statistics"):
        points = []
        for entry in entries:
            value, error = getattr(entry, name)
            if value > SURE * error > 0:
                rest = (count - entry.size) / (count - 1) if name != "bias" else 1.0
                points.append((math.log(entry.size), math.log(value / rest), (value / error) ** 2))
        if len(points) > 1:
            x, y, w = torch.tensor(points, dtype=torch.float64).T
            x = x - (w * x).sum() / w.sum()
            found[name] = Estimate(float((w * x * y).sum() / (w * x * x).sum()), float((w * x * x).sum() ** -0.5))
    return found
