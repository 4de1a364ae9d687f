"""`ng.generalization`: what bounds and complexity measures say of a model on its data, if they say anything."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Literal

from torch import Tensor, nn

from normgauge.errors import unknown_name
from normgauge.measure._bound_records import Bound, Cell
from normgauge.measure._bounded_loss import PerSample
from normgauge.measure._complexity import Complexity
from normgauge.measure._network_copy import Forward
from normgauge.records import Result, format_table

if TYPE_CHECKING:
    import altair
    import pandas

PARTS = ("bounds", "measures", "cells")


@dataclass(frozen=True)
class Generalization(Result):
    """Bounds and complexity measures of one model on one set of data.

    Attributes:
        bounds: one `Bound` per theorem, with verdict and what would be needed.
        measures: one `Complexity` per measure and kind of weights.
        cells: the occupied cells of the partition, with every ingredient of S2 Theorem 20.
        loss: the loss in words.
        loss_bound: C.
        empirical: its mean over the m samples the bounds use.
        test_loss: its mean over the test data; nan without.
        samples: m.
        partition_cells: N.
        slack: g(D, delta).
        delta: the probability of failure.
        slope_lower: the largest gradient norm of the loss met, at samples and inside their cells.
        network_slope: bound of the network's Lipschitz constant over all inputs; inf if unknown.
        folded: names of the BatchNorms that were multiplied into the layer before.
        rescaled: names of the layers whose weights were multiplied in the test of the measures.
        rescaling_error: how much that changed the outputs, relative to the largest.
        seed: of the partition and the noise.
    """

    bounds: tuple[Bound, ...]
    measures: tuple[Complexity, ...]
    cells: tuple[Cell, ...]
    loss: str
    loss_bound: float
    empirical: float
    test_loss: float
    samples: int
    partition_cells: int
    slack: float
    delta: float
    slope_lower: float
    network_slope: float
    folded: tuple[str, ...]
    rescaled: tuple[str, ...]
    rescaling_error: float
    seed: int

    def __getitem__(self, name: str) -> Bound:
        """Return a bound by its name."""
        for bound in self.bounds:
            if bound.name == name:
                return bound
        raise unknown_name("bound", name, [bound.name for bound in self.bounds])

    @property
    def verdicts(self) -> dict[str, str]:
        """The verdict of every bound, by name."""
        return {bound.name: bound.verdict for bound in self.bounds}

    def measure(self, name: str, weights: str = "stored") -> Complexity:
        """Return a complexity measure by its name, on the stored or the folded weights."""
        for found in self.measures:
            if (found.name, found.weights) == (name, weights):
                return found
        raise unknown_name("measure", f"{name} ({weights})", [f"{m.name} ({m.weights})" for m in self.measures])

    def _title(self) -> str:
        tested = "" if self.test_loss != self.test_loss else f", {self.test_loss:.4g} on the test data"
        good = sum(bound.verdict == "non-vacuous" for bound in self.bounds)
        return (
            f"Generalization: {self.loss} {self.empirical:.4g} on {self.samples} samples{tested}; "
            f"{good} of {len(self.bounds)} bounds say more than f <= {self.loss_bound:g}"
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [_fields(bound) for bound in self.bounds]

    def __str__(self) -> str:
        """Return the bounds, then the measures, then what the numbers rest on."""
        table = format_table(self._rows(), title=self._title())
        measured = format_table([_fields(measure) for measure in self.measures], title=self._test_in_words())
        return "\n\n".join([table, measured, self._footer()])

    def _test_in_words(self) -> str:
        if not self.rescaled:
            return "Complexity measures (no layer stands before a normalizer, so there is nothing to rescale)"
        return (
            f"Complexity measures, before and after the weights before normalizers ({', '.join(self.rescaled[:6])}"
            f"{', ...' if len(self.rescaled) > 6 else ''}) were multiplied, which changed the outputs by "
            f"{self.rescaling_error:.2g}"
        )

    def _footer(self) -> str:
        return (
            f"kind: bounds of kind 'upper' hold with probability {1 - self.delta:g} each; lower and upper bracket the "
            f"right-hand side; mode eval, seed {self.seed}, cost 6 backwards to the inputs, an operator norm per "
            "layer, the noise of PAC-Bayes"
        )

    def frame(self, of: Literal["bounds", "measures", "cells"] = "bounds") -> pandas.DataFrame:
        """Return the bounds, the measures or the cells as a pandas DataFrame (needs the `lab` extra)."""
        from normgauge.errors import require

        if of not in PARTS:
            raise unknown_name("part", of, PARTS)
        table = require("pandas", "lab", "Generalization.frame")
        return table.DataFrame([_fields(item) for item in getattr(self, of)])

    def chart(self) -> altair.TopLevelMixin:
        """Return the bounds that apply: a dot at the upper end, a bar down to the lower."""
        from normgauge.charts import intervals

        rows = [row for row in self._rows() if row["verdict"] != "does not apply"]
        return intervals(
            rows,
            value="upper",
            low="lower",
            high="upper",
            series="name",
            detail=["verdict", "kind"],
            title=f"bounds of the expected loss; above {self.loss_bound:g} they say nothing",
            x_title="bound",
        )


def generalization(
    model: nn.Module,
    data: Any,
    *,
    test: Any = None,
    loss: PerSample | None = None,
    loss_bound: float = 1.0,
    loss_slope: float | None = None,
    margin: float = 1.0,
    partition: int | Tensor | Sequence[int] | None = None,
    radius: float | None = None,
    holdout: float = 0.2,
    delta: float = 0.05,
    seed: int = 0,
    forward: Forward | None = None,
) -> Generalization:
    """Bound the expected loss of a trained model by the theorems at hand, and say which bounds say anything.

    S2 Theorem 20: `F(P, h) <= F(D, h) + sum (m_i/m) lambda_i L_i + g(D, delta)` with every ingredient computed. Cells
    are the points nearest to one of k centres, within its ball, of one class; one more cell holds the rest, where the
    loss may rise to C. Beside it S2 Corollaries 21 and 22, the bounds S2 compares with (HKK, LLA, weight
    normalization), margin bounds by spectral, Frobenius and row norms and, with test data, Hoeffding's. Then complexity
    measures on stored and folded weights, each computed again after weights before normalizers were multiplied: a
    measure that moves while the network does not is "meaningless here".

    Kind: per bound, see `Bound`. Slopes L_i are bracketed: gradients met inside the cell from below, a bound on the
    ball from above. Cost: six backward passes to the inputs, an operator norm per layer, about 8 x 14 forwards for
    PAC-Bayes per kind of weights, one top eigenvalue of the Hessian for LLA; nothing is left on the model, a copy is
    taken apart.

    Args:
        model: measured in evaluation mode.
        data: training data, `(inputs, targets)` or a re-iterable of such batches; inputs are one real tensor.
        test: data not used in training, for comparison.
        loss: `loss(output, target)`, one value >= 0 per sample; clipped at `loss_bound`. By default the ramp loss of
            the margin, an upper bound of the share of wrong decisions.
        loss_bound: C.
        loss_slope: Lipschitz constant of `loss` in the outputs (and in real targets).
        margin: of the ramp loss; to be chosen before the data are seen.
        partition: number of centres (by default one per 100 samples and class), found by k-means on `holdout` of the
            data, which the bound then leaves out: a partition must be fixed before the samples it is used with. Or
            centres `[k, ...]`, with `radius`. Or one cell number per sample, for which the cells' extent can only be
            estimated.
        radius: of the balls; by default each reaches the farthest sample k-means gave it.
        holdout: share of the data for k-means.
        delta: the probability of failure of each bound.
        seed: of the split, k-means and the noise.
        forward: `forward(model, inputs) -> output` for unusual calls.

    Returns:
        A `Generalization`: `print(r)`, `r["S2 Theorem 20"]`, `r.measure(...)`, `r.frame("cells")`, `r.chart()`.

    Raises:
        InputError: options out of range, or a partition that does not fit the data.
        DataError: inputs that are not one real tensor, a loss that is not one value per sample.
        ModelError: a model that cannot be copied, or whose outputs depend on the batch.

    Deviations: S2 takes cells as given and lambda_i as known; here lambda_i is bounded on the ball. The label must not
        vary within a cell (S2 Corollary 22 forgets it, ledger S2-C22), so cells are split by class; for real targets
        they lie in inputs and targets together. Terms are cut at C. Scale and shift of normalizers, which S2 leaves
        out, count.

    Examples:
        A linear classifier on two clusters; with 2,000 samples the bound says something:

        >>> import torch
        >>> source = torch.Generator().manual_seed(0)
        >>> labels = torch.randint(2, (2000,), generator=source)
        >>> inputs = (2.0 * labels - 1)[:, None] + 0.01 * torch.randn(2000, 1, generator=source)
        >>> model = nn.Linear(1, 2, bias=False)
        >>> _ = model.weight.data.copy_(torch.tensor([[-1.0], [1.0]]))
        >>> found = generalization(model, (inputs, labels), partition=2)
        >>> found["S2 Theorem 20"].verdict, round(found.network_slope, 4)  # |W| = sqrt(2)
        ('non-vacuous', 1.4142)

    References: than2025, kawaguchi2022, hou2023, lyu2022, cisneros2025, bartlett2017, golowich2020, akbar2025
    """
    from normgauge.measure._generalization_data import Settings
    from normgauge.measure._generalization_parts import assemble

    settings = Settings(loss, loss_bound, loss_slope, margin, partition, radius, holdout, delta, seed, forward or _call)
    return assemble(model, data, test, settings)


def _call(model: nn.Module, inputs: Any) -> Any:
    return model(inputs)


def _fields(item: Bound | Complexity | Cell) -> dict[str, Any]:
    return {name: getattr(item, name) for name in type(item).__dataclass_fields__}
