"""`ng.sample_sharpness`: how much of lambda_max is the sample it was measured on."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

import torch

from normgauge.errors import InputError, explain
from normgauge.measure.curvature.spectrum import spectrum
from normgauge.objective import Objective, join_batches, sample_count, take_rows
from normgauge.records import Reading
from normgauge.results import Result, instrument

if TYPE_CHECKING:
    import altair

MOSTLY_SAMPLE = 0.2  # of lambda_max: more than the factor by which an edge of stability is known


@dataclass(frozen=True, slots=True)
class SampleSharpness(Result):
    """lambda_max on some samples, and the curvature of others along the same direction.

    Attributes:
        own: mean of lambda_max(H_A) over the splits, v its eigenvector.
        other: mean of v^T H_B v, on samples that v was not chosen by.
        share: 1 - other / own: what is the sample; 0 where v is as curved on others.
        share_error: its standard error over the splits; nan for one.
        samples: behind `own`.
    """

    own: float
    other: float
    share: float
    share_error: float
    samples: int

    def _title(self) -> str:
        return f"lambda_max {self.own:.4g} on {self.samples} samples, {self.other:.4g} on others"

    def _rows(self) -> list[dict[str, Any]]:
        return [{"curvature": name, "value": getattr(self, name)} for name in ("own", "other")]

    def readings(self) -> tuple[Reading, ...]:
        """Return the share that is the sample, then both curvatures."""
        error = None if math.isnan(self.share_error) else self.share_error
        share = Reading.measured("share of lambda_max that is the sample", self.share, "estimate", uncertainty=error)
        named = (("lambda_max", self.own), ("curvature of other samples", self.other))
        return share, *(Reading(name, value, "estimate") for name, value in named)

    def _meaning(self) -> str:
        said = f"Along the sharpest direction of {self.samples} samples, {self.own:.3g}, others have {self.other:.3g}"
        advice = "measure on more before comparing" if self.share > MOSTLY_SAMPLE else "it is the network's"
        return f"{said}: {self.share:.0%} of lambda_max is the sample (limit: {MOSTLY_SAMPLE:.0%}), {advice}."

    def chart(self) -> altair.TopLevelMixin:
        """Return both curvatures as bars."""
        from normgauge.charts import bars

        return bars(self._rows(), x="curvature", title=self._title())


@instrument
def sample_sharpness(
    objective: Objective, *, held_out: Any = None, splits: int = 4, tol: float = 1e-2, seed: int = 0
) -> SampleSharpness:
    """Compare lambda_max with the curvature that other samples have along its direction.

    lambda_max(H_A) = max_v v^T H_A v is chosen by the sample A, so it exceeds what v has on samples B it did not see:
    the difference is the sample's. A and B are halves of the data, split at random, or the data and `held_out`.

    Kind: estimate. Cost: a largest eigenvalue, a gradient and a product for every split.

    Args:
        objective: model, loss, data and mode; its batches are joined.
        held_out: other data of the same kind, as one batch.
        splits: random halvings, where nothing is held out.
        tol: relative residual of the eigenvalue.
        seed: of the splits and of the eigenvalue search.

    Raises:
        InputError: fewer than four samples to split, or no split.

    References: lyu2022.
    """
    pool = join_batches([batch for _, batch in objective.batches()])
    count = sample_count(pool)
    if splits < 1 or (held_out is None and count < 4):
        rule = "there are four samples or more, and a split"
        raise InputError(explain("sample_sharpness", rule, f"{count}, splits={splits}", "Give more data, or held_out="))
    draw, half = torch.Generator().manual_seed(seed), count // 2
    owns, others = [], []
    for _ in range(splits if held_out is None else 1):
        order = torch.randperm(count, generator=draw)
        parts = (
            (pool, held_out) if held_out is not None else (take_rows(pool, order[:half]), take_rows(pool, order[half:]))
        )
        mine, theirs = (objective.replace(data=part) for part in parts)
        top = spectrum(mine, top=1, tol=tol, seed=seed)
        with theirs.hessian() as hessian:
            others.append(float(top.vectors[0] @ (hessian @ top.vectors[0])))
        owns.append(top.top[0])
    own, other = (torch.tensor(values, dtype=torch.float64) for values in (owns, others))
    share = 1 - float(other.sum() / own.sum()) if float(own.sum()) else math.nan
    off = (other - (1 - share) * own) / own.mean()
    error = float(off.std()) / math.sqrt(len(off)) if len(off) > 1 else math.nan
    samples = count if held_out is not None else half
    return SampleSharpness(float(own.mean()), float(other.mean()), share, error, samples)
