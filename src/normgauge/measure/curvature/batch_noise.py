"""`ng.batch_noise`: what mini-batches do to the gradient: bias and noise of their statistics, noise of sampling."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from normgauge.errors import InputError, explain
from normgauge.linalg.quadrature import rademacher
from normgauge.objective import Objective, join_batches, sample_count, take_rows
from normgauge.records import Kind, Reading
from normgauge.results import Result, instrument, spend
from normgauge.rng import generator

if TYPE_CHECKING:
    import altair

BIASED = 0.1  # of the gradient's norm: a tenth turns its direction by up to six degrees
SURE = 2.0  # standard errors
PROBES = 16  # random vectors the Hessian is held against


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
    bias: float
    bias_error: float
    sampling: float
    sampling_error: float
    statistics: float
    statistics_error: float
    cross: float
    cross_error: float
    total: float
    total_error: float
    curvature: float
    curvature_error: float
    jitter: float
    jitter_error: float


@dataclass(frozen=True)
class BatchNoise(Result):
    """Bias and noise of mini-batch gradients by batch size.

    Attributes:
        sizes: one entry per batch size, ascending.
        gradient_norm: |g|, of all samples as one batch.
        samples: how many there are.
        draws: mini-batches per size.
        mean_curvature: tr H / n, what a random direction meets, and its standard error.
        exponents: name -> (p, its standard error) of the fitted size^p; variances without the factor (N - B) / (N - 1)
            that drawing without replacement puts on them.
    """

    sizes: tuple[SizeNoise, ...]
    gradient_norm: float
    samples: int
    draws: int
    mean_curvature: tuple[float, float]
    exponents: dict[str, tuple[float, float]]

    def _title(self) -> str:
        return f"Noise of mini-batch gradients, {self.draws} draws of {self.samples} samples per size"

    def _rows(self) -> list[dict[str, Any]]:
        return [{item.name: getattr(entry, item.name) for item in fields(entry)} for entry in self.sizes]

    def readings(self) -> tuple[Reading, ...]:
        """Return the relative bias per size, then the parts of the variance, curvature, jitter and the exponents."""
        named = ("sampling", "statistics", "cross", "total", "curvature", "jitter")
        unit = self.gradient_norm or math.nan
        found = [
            Reading.measured(
                f"bias over the gradient, size {entry.size}",
                entry.bias / unit,
                "estimate",
                uncertainty=entry.bias_error / unit,
                why="the gradient is 0",
            )
            for entry in self.sizes
        ]
        for name in named:
            for entry in self.sizes:
                value, error = getattr(entry, name), getattr(entry, f"{name}_error")
                title, why = f"{name}, size {entry.size}", "no classes, or no noise"
                kind: Kind = "estimate" if name == "curvature" else "unbiased"
                found.append(
                    Reading.measured(title, value, kind, uncertainty=None if math.isnan(error) else error, why=why)
                )
        for name, (power, error) in self.exponents.items():
            found.append(
                Reading.measured(f"exponent of {name}", power, "estimate", uncertainty=error, why="too few sizes")
            )
        return tuple(found)

    def _meaning(self) -> str:
        small = self.sizes[0]
        biased = [e for e in self.sizes if e.bias - SURE * e.bias_error > BIASED * self.gradient_norm]
        part = small.statistics / small.total if small.total else 0.0
        said = f"At size {small.size} statistics make {max(part, 0.0):.0%} of the variance of a gradient and a bias of "
        said += f"{small.bias / (self.gradient_norm or math.nan):.2g} of its norm"
        power, error = self.exponents.get("statistics", (math.nan, math.nan))
        fell = f"; that variance goes as size^{power:.2f} (+- {SURE * error:.2f})" if math.isfinite(power) else ""
        moved = f"; {small.jitter:.1%} of decisions hang on the batch" if math.isfinite(small.jitter) else ""
        if biased:
            verdict = (
                f"biased beyond {BIASED:g} up to size {biased[-1].size}: train with larger batches, or by GroupNorm"
            )
        elif small.statistics <= SURE * small.statistics_error and small.bias <= SURE * (small.bias_error or 1e-300):
            verdict = f"no batch statistics are seen (beyond {SURE:g} standard errors): what is left is sampling"
        else:
            verdict = f"no size has a bias surely beyond {BIASED:g}"
        return f"{said}{fell}{moved}. In all, {verdict}."

    def _notes(self) -> str:
        mean, error = self.mean_curvature
        return f"curvature of a random direction {mean:.3g} +- {error:.2g}, of the noise per size in the table"

    def chart(self) -> altair.TopLevelMixin:
        """Return the parts of the variance by batch size."""
        from normgauge.charts import curves

        rows = [
            {"size": entry.size, "series": name, "value": value}
            for entry in self.sizes
            for name, value in (
                ("sampling", entry.sampling),
                ("statistics", entry.statistics),
                ("bias^2", entry.bias**2),
            )
        ]
        return curves(rows, x="size", title=self._title(), x_title="batch size", y_title="squared norm")


@instrument
def batch_noise(
    objective: Objective, *, sizes: Sequence[int] | None = None, draws: int = 16, seed: int = 0
) -> BatchNoise:
    """Measure bias and noise of mini-batch gradients, split into sampling and batch statistics (S0 sec. 9.2).

    Kind: unbiased (variances, cross, jitter), estimate (bias, curvature, exponents). Standard errors of few draws are
    too small where batches of two or three make variances near 0, and so huge gradients. Cost: per size and draw B / N
    of a gradient and of a forward, a backward through all samples and a product; 16 products besides.

    Args:
        objective: model, loss, data and mode ("train", for batch statistics); its batches are joined to all samples.
        sizes: of mini-batches, between 2 and N - 1; by default up to four halvings of N, not below 4.
        draws: mini-batches per size; standard errors fall with their square root.
        seed: of the draws.

    Raises:
        InputError: sizes out of range, fewer than 3 draws, an objective from a step, outputs not by sample.

    Examples:
        Without batch statistics the mean over mini-batches is the gradient itself:

        >>> torch.manual_seed(0)  # doctest: +ELLIPSIS
        <torch._C.Generator object at ...>
        >>> data = (torch.randn(12, 2), torch.randn(12, 1))
        >>> objective = Objective(torch.nn.Linear(2, 1), torch.nn.functional.mse_loss, data, mode="train")
        >>> bool(batch_noise(objective, sizes=[4]).sizes[0].bias < 1e-5)
        True

    References: akbar2025.
    """
    loss = objective.loss_function
    pool = join_batches([batch for _, batch in objective.batches()])
    count = sample_count(pool)
    sizes = sorted(sizes or [count // 2**k for k in range(1, 5) if count // 2**k >= 4])
    if loss is None or not sizes or not all(2 <= size < count for size in sizes) or draws < 3:
        rule = (
            f"sizes lie between 2 and {count - 1} (the samples but one), draws are at least 3, the objective has a loss"
        )
        raise InputError(
            explain("batch_noise", rule, f"sizes={list(sizes)}, draws={draws}", "Give more data, or others")
        )
    whole, draw = objective.replace(data=pool), generator(seed)
    leaves, outputs, value = whole.graph(0, pool, outputs=True)
    if not isinstance(outputs, Tensor) or outputs.shape[:1] != (count,):
        raise InputError(explain("batch_noise", "outputs are one tensor, a row per sample", "others", "Pass forward="))
    variables, targets = list(leaves.values()), pool[1]
    gradient = _flat(torch.autograd.grad(value, variables, retain_graph=True, materialize_grads=True))
    with torch.no_grad():
        classes = outputs.detach().argmax(-1) if outputs.ndim > 1 and outputs.shape[-1] > 1 else None
    entries, rounding = [], 100 * torch.finfo(objective.dtype).eps
    with whole.hessian() as hessian:
        probes = [rademacher(len(gradient), draw).to(gradient) for _ in range(PROBES)]
        seen = torch.tensor([float(z @ (hessian @ z)) / len(z) for z in probes], dtype=torch.float64)
        for size in sizes:
            noises, extras, jitters = [], [], []
            for _ in range(draws):
                rows = torch.randperm(count, generator=draw)[:size]
                batch = objective.replace(data=take_rows(pool, rows))
                part = loss(outputs[rows.to(outputs.device)], take_rows(targets, rows))
                sampled = _flat(torch.autograd.grad(part, variables, retain_graph=True, materialize_grads=True))
                spend("gradients", 2 / 3)  # the forward was made once
                noises.append(sampled - gradient)
                extra = objective.flatten(batch.gradient()).to(gradient) - sampled
                extras.append(extra if float(extra.norm()) > rounding * float(sampled.norm()) else extra.zero_())
                spend("gradients", size / count - 1)  # a pass over this batch is no pass over all samples
                if classes is not None:
                    moved = batch.outputs().argmax(-1) != classes[rows.to(classes.device)]
                    spend("forwards", size / count - 1)
                    jitters.append(float(moved.float().mean()))
            directions = [noise + extra for noise, extra in zip(noises, extras, strict=True)]
            bends = torch.tensor([[float(d @ (hessian @ d)), float(d @ d)] for d in directions], dtype=torch.float64)
            entries.append(_size_noise(size, torch.stack(noises), torch.stack(extras), bends, jitters))
    return BatchNoise(
        sizes=tuple(entries),
        gradient_norm=float(gradient.norm()),
        samples=count,
        draws=draws,
        mean_curvature=_mean(seen),
        exponents=_exponents(entries, count),
    )


def _flat(pieces: Sequence[Tensor]) -> Tensor:
    return torch.cat([piece.detach().reshape(-1).double() for piece in pieces])


def _mean(values: Tensor) -> tuple[float, float]:
    """Return mean and standard error."""
    error = float(values.std()) / math.sqrt(len(values)) if len(values) > 1 else math.nan
    return float(values.mean()), error


def _size_noise(size: int, noises: Tensor, extras: Tensor, bends: Tensor, jitters: list[float]) -> SizeNoise:
    """Return the estimates for one size from s_B - g and r_B, one row per draw."""
    draws = len(noises)
    gram = extras @ extras.T
    pairs = (gram.sum(1) - gram.diagonal()) / (
        draws - 1
    )  # <r_i, mean of the others>: their mean is unbiased for bias^2
    square, square_error = float(pairs.mean()), 2 * _mean(pairs)[1]
    bias = math.sqrt(max(square, 0.0))
    spread, mixed = noises.square().sum(1), 2 * (noises * extras).sum(1)
    added = gram.diagonal() - pairs
    # a ratio of means: its error by the deviations from it
    ratio = float(bends[:, 0].sum() / bends[:, 1].sum()) if float(bends[:, 1].sum()) else math.nan
    off = (bends[:, 0] - ratio * bends[:, 1]) / bends[:, 1].mean()
    sampling, statistics, cross, total = (_mean(part) for part in (spread, added, mixed, spread + added + mixed))
    jitter = _mean(torch.tensor(jitters)) if jitters else (math.nan, math.nan)
    return SizeNoise(
        size=size,
        bias=bias,
        bias_error=square_error / (2 * bias) if bias * bias > square_error else math.sqrt(square_error),
        **{"sampling": sampling[0], "sampling_error": sampling[1]},
        **{"statistics": statistics[0], "statistics_error": statistics[1]},
        **{"cross": cross[0], "cross_error": cross[1], "total": total[0], "total_error": total[1]},
        **{"curvature": ratio, "curvature_error": _mean(off)[1], "jitter": jitter[0], "jitter_error": jitter[1]},
    )


def _exponents(entries: Sequence[SizeNoise], count: int) -> dict[str, tuple[float, float]]:
    """Fit size^p to bias and variances by weighted least squares of the logarithms; only what is surely above 0."""
    found = {}
    for name in ("bias", "sampling", "statistics"):
        points = []
        for entry in entries:
            value, error = getattr(entry, name), getattr(entry, f"{name}_error")
            if value > SURE * error > 0:
                rest = (count - entry.size) / (count - 1) if name != "bias" else 1.0
                points.append((math.log(entry.size), math.log(value / rest), (value / error) ** 2))
        if len(points) > 1:
            x, y, w = torch.tensor(points, dtype=torch.float64).T
            x = x - (w * x).sum() / w.sum()
            found[name] = float((w * x * y).sum() / (w * x * x).sum()), float((w * x * x).sum() ** -0.5)
    return found
