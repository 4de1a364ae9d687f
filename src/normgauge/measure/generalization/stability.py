"""`ng.stability`: how much a trained model's losses change when one training sample is replaced."""

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.charts import bars
from normgauge.errors import DataError, InputError
from normgauge.objective import untouched
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument, spend
from normgauge.rng import generator

DROWNED = 1.0  # difference by a sample over difference by the seed: below, the noise of training hides it
Batch = tuple[Tensor, Tensor]


@dataclass(frozen=True, slots=True)
class Pair:
    """Two runs that differ in one sample, or in the seed alone."""

    replaced: int  # index of the sample that was exchanged; -1 where only the seed differs
    seed: int  # of both runs (of the first, where seeds differ)
    largest: float  # the largest difference of losses over the evaluation points
    mean: float  # the mean difference, without signs
    at_replaced: float  # the difference at the sample that was taken out; nan where only the seed differs


@dataclass(frozen=True)
class Stability(Result):
    """Differences of losses between paired runs.

    Attributes:
        pairs: one `Pair` per replaced sample.
        seeds: pairs of runs on the same data with different seeds, for comparison.
        samples: size of the training set.
        points: evaluation points.
    """

    pairs: tuple[Pair, ...]
    seeds: tuple[Pair, ...]
    samples: int
    points: int

    @property
    def uniform(self) -> float:
        """The largest difference seen: the uniform stability of the algorithm is at least this."""
        return max(pair.largest for pair in self.pairs)

    @property
    def mean(self) -> float:
        """The mean difference over pairs and points: an estimate of stability in the mean, an unsigned one."""
        return sum(pair.mean for pair in self.pairs) / len(self.pairs)

    @property
    def mean_error(self) -> float:
        """Standard error of `mean` over the pairs; nan for one pair."""
        count, squares = len(self.pairs), sum((pair.mean - self.mean) ** 2 for pair in self.pairs)
        return math.sqrt(squares / (count - 1) / count) if count > 1 else math.nan

    @property
    def pointwise(self) -> float:
        """The mean difference at the sample taken out (hypothesis stability): it bounds the mean gap train to test."""
        return sum(pair.at_replaced for pair in self.pairs) / len(self.pairs)

    @property
    def seed_noise(self) -> float:
        """The mean difference between runs that differ in the seed alone; nan if not asked for."""
        return sum(pair.mean for pair in self.seeds) / len(self.seeds) if self.seeds else math.nan

    def _title(self) -> str:
        noise = "" if not self.seeds else f"; another seed alone changes it by {self.seed_noise:.4g} in the mean"
        return (
            f"Replace-one stability on {self.samples} samples: the loss changes by {self.mean:.4g} in the mean, "
            f"{self.uniform:.4g} at most, {self.pointwise:.4g} at the sample taken out{noise}"
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"changed": what, **asdict(pair)}
            for what, pairs in (("sample", self.pairs), ("seed", self.seeds))
            for pair in pairs
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return uniform stability from below, then the means."""
        error = None if math.isnan(self.mean_error) else self.mean_error
        return (
            Reading("uniform stability", self.uniform, "lower"),
            Reading("mean difference", self.mean, "estimate", error),
            Reading("mean difference at the sample taken out", self.pointwise, "estimate"),
            Reading.measured("mean difference by the seed", self.seed_noise, "estimate", why="seeds=0"),
        )

    def _meaning(self) -> str:
        said = f"Exchanging one of {self.samples} samples changes a loss by {self.mean:.3g} in the mean"
        gap = f"; expect a gap from training to test of about {self.pointwise:.3g} in the mean"
        if not self.seeds:
            return f"{said} and {self.uniform:.3g} at most{gap}. Pass seeds=2 to see what the seed alone does."
        if not self.mean and not self.seed_noise:
            return f"{said}, and so does another seed: this training depends on neither. See that it is given the data."
        ratio = self.mean / self.seed_noise if self.seed_noise else math.inf
        if ratio < DROWNED:
            return f"{said}, {ratio:.2g} of what another seed does (under {DROWNED:g}): the seed matters more{gap}."
        return f"{said}, {ratio:.2g} times what another seed does (at least {DROWNED:g}): single samples matter{gap}."

    def _notes(self) -> str:
        trainings = 1 + len(self.pairs) + len(self.seeds)
        return f"{len(self.pairs)} pairs, {self.points} points; {trainings} trainings besides"

    def chart(self) -> Chart:
        """Return the mean and the largest difference per pair of runs."""
        rows = [
            {"pair": f"{row['changed']} {number}", "difference": row[name], "of": name}
            for number, row in enumerate(self._rows())
            for name in ("mean", "largest")
        ]
        return bars(rows, x="pair", y="difference", series="of", title="loss difference between paired runs")


@instrument
def stability(
    train: Callable[[Batch, int], torch.nn.Module],
    data: Batch,
    fresh: Batch,
    *,
    loss: Callable[[Any, Tensor], Tensor],
    points: Batch | None = None,
    pairs: int = 8,
    seeds: int = 0,
    seed: int = 0,
) -> Stability:
    """Measure replace-one stability: `|loss(A(S), z) - loss(A(S with z_i replaced), z)|` over points z.

    Each pair of runs has the same seed and differs in one sample z_i, which gives way to a fresh one. An algorithm is
    beta-stable if the difference is at most beta for all S, i and z; then its gap between training and test loss is at
    most beta in the mean. What is measured bounds beta from below.

    Kind: the maximum is a lower bound of uniform stability; means are estimates. Cost: pairs + 1 trainings, one more
    per comparison of seeds, and a forward pass over the points for each.

    Args:
        train: `train((inputs, targets), seed) -> model`, all randomness from the seed.
        data: the training set S.
        fresh: samples from the same source, which replace; at least `pairs` of them.
        loss: `loss(output, target)`, one value per sample.
        points: where losses are compared; the fresh samples and the training set when `None`.
        pairs: how many samples are replaced, one at a time.
        seeds: how many runs on S with another seed are compared with the first, to see what the seed does by itself.
        seed: which samples are replaced, and the seed of the paired runs.

    Examples:
        The mean of m numbers moves by (new - old)/m when one of them is replaced:

        >>> class Constant(torch.nn.Module):
        ...     def __init__(self, value):
        ...         super().__init__()
        ...         self.value = value
        ...
        ...     def forward(self, x):
        ...         return self.value.expand(len(x))
        >>> train = lambda data, seed: Constant(data[1].mean())
        >>> zeros, ones = torch.zeros(10, 1), torch.ones(10, 1)
        >>> away = lambda output, target: (output - target).abs()
        >>> found = stability(train, (zeros, torch.zeros(10)), (ones, torch.ones(10)), loss=away, pairs=3)
        >>> round(found.uniform, 6), round(found.mean, 6)
        (0.1, 0.1)

    References: bousquet2002, hardt2016
    """
    inputs, targets = data
    if not 1 <= pairs <= min(len(inputs), len(fresh[0])) or seeds < 0:
        rule = "pairs lies between 1 and the number of samples and of fresh ones, and seeds is not negative"
        got = f"pairs={pairs}, {len(inputs)} samples, {len(fresh[0])} fresh ones, seeds={seeds}"
        raise InputError("stability", rule, got, "Ask for fewer pairs, or give more fresh samples")
    where = (torch.cat([inputs, fresh[0]]), torch.cat([targets, fresh[1]])) if points is None else points
    order = torch.randperm(len(inputs), generator=generator(seed))[:pairs].tolist()
    first = train((inputs, targets), seed)
    at_points, at_data = _losses(first, loss, where), _losses(first, loss, (inputs, targets))
    replacements, compared = [], []
    for number, index in enumerate(order):
        changed = inputs.clone(), targets.clone()
        changed[0][index], changed[1][index] = fresh[0][number], fresh[1][number]
        other, own = train(changed, seed), slice(index, index + 1)
        away = (_losses(other, loss, where) - at_points).abs()
        out = (_losses(other, loss, (inputs[own], targets[own])) - at_data[index]).abs()
        replacements.append(Pair(index, seed, float(away.max()), float(away.mean()), float(out)))
    for number in range(seeds):
        away = (_losses(train((inputs, targets), seed + 1 + number), loss, where) - at_points).abs()
        compared.append(Pair(-1, seed, float(away.max()), float(away.mean()), math.nan))
    return Stability(tuple(replacements), tuple(compared), len(inputs), len(where[0]), mode="eval")


def _losses(model: torch.nn.Module, loss: Callable[[Any, Tensor], Tensor], points: Batch) -> Tensor:
    spend("forwards")
    with untouched(model, "eval", 0), torch.no_grad():
        values = loss(model(points[0]), points[1])
    if values.shape[:1] != points[1].shape[:1] or values.ndim != 1:
        rule = f"the loss must give one value for each of the {len(points[1])} points"
        step = "Pass a loss without its mean, for example reduction='none'"
        raise DataError("stability", rule, f"a result of shape {tuple(values.shape)}", step)
    return values.double()
