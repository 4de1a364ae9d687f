"""`ng.generalization`: what bounds and complexity measures say of a model on its data, if they say anything."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, replace
from types import SimpleNamespace
from typing import TYPE_CHECKING, Any, Literal

import torch
from torch import Tensor, nn

from normgauge.charts import intervals
from normgauge.errors import DataError, InputError, NormgaugeError, require, unknown_name
from normgauge.measure.decisions.classes import cross_entropy, decisions, raw_margins
from normgauge.measure.generalization import network_copy
from normgauge.measure.generalization.bounds import Bound, Cell, Ingredients, bounds, cell, held_out_bound
from normgauge.measure.generalization.complexity import Complexity, Network, measures
from normgauge.measure.generalization.losses import (
    PerSample,
    ball_slopes,
    bounded_loss,
    climb,
    join_batches,
    values_and_slopes,
)
from normgauge.measure.generalization.network_copy import Chain, NotAChain, chain_of
from normgauge.measure.generalization.partition import Partition, Piece, partition_of, points_of, sizes_to_try
from normgauge.measure.landscape.flatness import spherical_sharpness
from normgauge.network import copy_model
from normgauge.objective import Objective, as_written, call_model
from normgauge.records import Chart, Reading, format_table
from normgauge.results import Result, instrument, spend
from normgauge.theory.partition_bound import partition_slack

if TYPE_CHECKING:
    import pandas

_ROUNDING = 1e-9  # relative, of a loss in float64
PARTS = ("bounds", "measures", "cells")
_CLOSE = 1e-2  # relative change of the outputs that eps may cause when weights are rescaled
_SAME = 1e-4  # the same for folding, where there is only rounding
_COMPARED = 64  # samples on which that is checked
_NOISED = 256  # samples for PAC-Bayes
_CURVED = 128  # samples for the Hessian
Act = Callable[[nn.Module, network_copy.LayerCalls], tuple[nn.Module, tuple[str, ...]]]


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
        for complexity in self.measures:
            if (complexity.name, complexity.weights) == (name, weights):
                return complexity
        raise unknown_name("measure", f"{name} ({weights})", [f"{m.name} ({m.weights})" for m in self.measures])

    def _title(self) -> str:
        tested = "" if self.test_loss != self.test_loss else f", {self.test_loss:.4g} on the test data"
        good = sum(bound.verdict == "non-vacuous" for bound in self.bounds)
        return (
            f"Generalization: {self.loss} {self.empirical:.4g} on {self.samples} samples{tested}; "
            f"{good} of {len(self.bounds)} bounds say more than f <= {self.loss_bound:g}"
        )

    def _rows(self) -> list[dict[str, Any]]:
        return [asdict(bound) for bound in self.bounds]

    def __str__(self) -> str:
        """Return the bounds, then the measures, then what the numbers mean and rest on."""
        table = format_table(self._rows(), title=self._title())
        measured = format_table([asdict(measure) for measure in self.measures], title=self._test_in_words())
        return "\n\n".join([table, measured, format_table([], footer=f"{self.meaning()}\n{self._footer()}")])

    def readings(self) -> tuple[Reading, ...]:
        """Return the bounds that apply, the smallest first, then the losses."""
        apply = sorted((bound for bound in self.bounds if bound.upper == bound.upper), key=lambda bound: bound.upper)
        bound_readings = [Reading(b.name, b.upper, "upper" if b.kind == "upper" else "estimate") for b in apply]
        return (
            *bound_readings,
            Reading("empirical loss", self.empirical),
            Reading.measured("test loss", self.test_loss, "unbiased", why="no test data"),
        )

    def _meaning(self) -> str:
        good = [b for b in self.bounds if b.verdict == "non-vacuous"]
        if good:
            best = min(good, key=lambda bound: bound.upper)
            how = f"with probability {1 - self.delta:g}" if best.kind == "upper" else f"if its {best.kind} is right"
            return (
                f"{best.name} says most: an expected {self.loss} of at most {best.upper:.3g} {how}, where "
                f"{self.loss_bound:g} would say nothing; {len(good)} of {len(self.bounds)} bounds say something."
            )
        near = min((b for b in self.bounds if b.verdict == "vacuous"), key=lambda bound: bound.upper, default=None)
        if near is None:
            return f"None of {len(self.bounds)} bounds applies to this model and loss: hold out test data instead."
        wanted = f" It would need {near.needed}." if near.needed else ""
        return (
            f"No bound stays below {self.loss_bound:g}, so none says anything about new data; the nearest is "
            f"{near.name} at {near.upper:.3g}.{wanted[:120]} Trust held-out data instead."
        )

    def _test_in_words(self) -> str:
        if not self.rescaled:
            return "Complexity measures (no layer stands before a normalizer, so there is nothing to rescale)"
        return (
            f"Complexity measures, before and after the weights before normalizers ({', '.join(self.rescaled[:6])}"
            f"{', ...' if len(self.rescaled) > 6 else ''}) were multiplied, which changed the outputs by "
            f"{self.rescaling_error:.2g}"
        )

    def _notes(self) -> str:
        return (
            f"bounds of kind 'upper' hold with probability {1 - self.delta:g} each; lower and upper bracket the "
            "right-hand side; an operator norm per layer besides"
        )

    def frame(self, of: Literal["bounds", "measures", "cells"] = "bounds") -> pandas.DataFrame:
        """Return the bounds, the measures or the cells as a pandas DataFrame (needs the `lab` extra)."""
        if of not in PARTS:
            raise unknown_name("part", of, PARTS)
        table = require("pandas", "lab", "Generalization.frame")
        return table.DataFrame([asdict(item) for item in getattr(self, of)])

    def chart(self) -> Chart:
        """Return the bounds that apply: a dot at the upper end, a bar down to the lower."""
        rows = [row for row in self._rows() if row["verdict"] != "does not apply"]
        title = f"bounds of the expected loss; above {self.loss_bound:g} they say nothing"
        named: Any = {"value": "upper", "low": "lower", "high": "upper", "series": "name", "x_title": "bound"}
        return intervals(rows, detail=["verdict", "kind"], title=title, **named)


@instrument
@as_written()
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
    forward: network_copy.Forward | None = None,
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
        partition: number of centres, found by k-means on `holdout` of the data, which the bound then leaves out: a
            partition must be fixed before the samples it is used with. By default up to four numbers are tried, from
            one centre to one per 100 samples and class, and delta is divided among them. Or centres `[k, ...]`, with
            `radius`. Or one cell number per sample, for which the cells' extent can only be estimated.
        radius: of the balls; by default each reaches the farthest sample k-means gave it.
        holdout: share of the data for k-means.
        delta: the probability of failure of each bound.
        seed: of the split, k-means and the noise.
        forward: `forward(model, inputs) -> output` for unusual calls.

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
    if not 0 < delta < 1 or not 0 < holdout < 1:
        rule, step = "delta and holdout lie between 0 and 1", "Pass delta=0.05 and holdout=0.2"
        raise InputError("generalization", rule, f"delta={delta!r}, holdout={holdout!r}", step)
    if radius is not None and not 0 < radius < math.inf:
        raise InputError("generalization", "radius must be positive", repr(radius), "Leave it out, or pass a number")
    return _Exam(SimpleNamespace(**{k: v for k, v in locals().items() if k not in ("data", "test")}), data).result(test)


class _Exam:
    """A model on its data, and what is read off the two: partitions, slopes on their cells, bounds and measures."""

    def __init__(self, settings: Any, data: Any) -> None:
        self.settings, self.model = settings, settings.model
        self.inputs, self.targets = join_batches(self.model, data)
        self.twin = network_copy.evaluation_copy(self.model)
        with torch.no_grad():
            first = self.call(self.twin, self.inputs[:2])
        options = settings.margin, settings.loss_bound, settings.loss_slope
        self.loss = bounded_loss(settings.loss, *options, first, self.targets[:2])
        points, classes = points_of(self.inputs, self.targets), max(self.loss.classes, 1)
        choices: Any = [settings.partition]
        if settings.partition is None:
            choices = sizes_to_try(len(points), classes, settings.holdout)
        fixed = {"radius": settings.radius, "holdout": settings.holdout, "seed": settings.seed}
        self.partitions = [partition_of(points, classes, choice, **fixed) for choice in choices]
        rows = self.partitions[0][1]  # the same split for all
        self.used, self.wanted = self.inputs[rows], self.targets[rows]
        if not len(self.used):
            step = "Give more, or a partition made before they were seen"
            raise DataError("generalization", "samples are left beside those held out", str(len(points)), step)

    def call(self, model: nn.Module, inputs: Any) -> Any:
        """Call a model, counted: a gradient where the inputs want one, else a forward."""
        spend("gradients" if inputs.requires_grad else "forwards", len(inputs) / len(self.inputs))
        return (self.settings.forward or call_model)(model, inputs.clone())  # it may write into what it is given

    def result(self, test: Any) -> Generalization:
        """Return bounds and measures."""
        twin, loss, settings = self.twin, self.loss, self.settings
        values, slopes = values_and_slopes(twin, self.call, loss, self.used, self.wanted)
        calls = network_copy.look(twin, self.call, self.inputs[:2])
        shaken = network_copy.perturb_normalizers(twin)
        foldable = self._keep_harmless(shaken, calls, network_copy.fold_normalizers, _SAME)
        free = self._keep_harmless(shaken, calls, network_copy.rescale_weights, _CLOSE)
        plain, flat_names = network_copy.fold_normalizers(twin, foldable)
        other, moved_names = network_copy.rescale_weights(twin, free)
        flat_other = network_copy.fold_normalizers(other, foldable)[0]
        error = self._change(twin, other)
        chain, stored_chain = self._chain(plain), self._chain(twin)
        partition, pieces, on_balls, losses, top = self._best_partition(plain, chain, values, slopes)
        if not partition.by_user:
            slopes = self._climb_in_cells(pieces, partition)
        cells = tuple(self._cells(pieces, on_balls, slopes, losses))
        norms = [float(call.module.weight.detach().double().norm()) for call in calls.affine]  # type: ignore[operator]
        of = Ingredients(
            empirical=float(values.mean()),
            largest=loss.largest,
            samples=len(self.used),
            delta=settings.delta,
            tried=len(self.partitions),
            cells=cells,
            partition_cells=partition.cells,
            estimated=partition.by_user,
            loss_slope=loss.slope,
            classes=loss.classes,
            outputs=loss.outputs,
            inputs=float(self.used.double().norm()),
            chain=chain,
            network_slope=top,
            printed=stored_chain.printed_slope if isinstance(stored_chain, Chain) else math.nan,
            sharpness=self._sharpness(moved_names),
            last=norms[-1] if len(norms) > 1 and all(abs(norm - 1) < 1e-3 for norm in norms[:-1]) else math.nan,
        )
        tested, test_loss = [], math.nan
        if test is not None:
            test_values = values_and_slopes(twin, self.call, loss, *join_batches(twin, test))[0]
            test_loss = float(test_values.mean())
            tested = [held_out_bound(test_values.tolist(), loss.largest, settings.delta)]
        others = [other if moved_names else None]
        others += [plain, flat_other if moved_names else None] if flat_names else [None, None]
        return Generalization(
            bounds=(*tested, *bounds(of)),
            measures=self._measures(others),
            cells=cells,
            loss=loss.name,
            loss_bound=loss.largest,
            empirical=of.empirical,
            test_loss=test_loss,
            samples=of.samples,
            partition_cells=of.partition_cells,
            slack=of.slack(of.samples),
            delta=settings.delta,
            slope_lower=float(slopes.max()),
            network_slope=top,
            folded=flat_names,
            rescaled=moved_names,
            rescaling_error=error if moved_names else math.nan,
            mode="eval",
        )

    def _keep_harmless(
        self, twin: nn.Module, calls: network_copy.LayerCalls, act: Act, most: float
    ) -> network_copy.LayerCalls:
        """Keep the pairs of layer and normalizer whose folding or rescaling leaves the outputs as they are."""
        if not calls.pairs or self._change(twin, act(twin, calls)[0]) <= most:
            return calls
        alone = [replace(calls, pairs=(pair,)) for pair in calls.pairs]
        good = [one.pairs[0] for one in alone if self._change(twin, act(twin, one)[0]) <= most]
        return replace(calls, pairs=tuple(good))

    @torch.no_grad()
    def _change(self, *models: nn.Module) -> float:
        outputs = [self.call(model, self.inputs[:_COMPARED]) for model in models]
        return network_copy.difference(*(getattr(output, "logits", output) for output in outputs))

    def _chain(self, model: nn.Module) -> Chain | str:
        if self.settings.forward is not None:
            return "the model is called in its own way (forward=)"
        try:
            return chain_of(model, self.inputs[:2])
        except NotAChain as reason:
            return f"for chains of layers only: {reason}"

    def _best_partition(self, plain: nn.Module, chain: Chain | str, values: Tensor, slopes: Tensor) -> Any:
        """Return, of the partition that adds least, its cells, slopes on their balls, losses and the largest slope."""
        labels = self.wanted.long().cpu() if self.loss.classes else None
        best: tuple[float, Any] = (math.inf, None)
        for partition, _, assignment in self.partitions:
            pieces = list(partition.pieces(points_of(self.used, self.wanted), labels, assignment))
            on_balls, top = self._slopes_on_balls(pieces, partition, plain, chain)
            losses = (self._losses_at_centers(pieces, partition, plain), values)
            rises = sum(item.term_upper for item in self._cells(pieces, on_balls, slopes, losses))
            share = self.settings.delta / len(self.partitions)
            added = rises + partition_slack(len(pieces), partition.cells, len(self.used), share, self.loss.largest)
            if best[1] is None or added < best[0]:
                best = added, (partition, pieces, on_balls, losses, top)
        return best[1]

    def _slopes_on_balls(
        self, pieces: Sequence[Piece], partition: Partition, model: nn.Module, chain: Chain | str
    ) -> tuple[dict[int, float], float]:
        """Return bounds of the network's slope on the ball of each occupied centre, and on all inputs."""
        top = chain.slope if isinstance(chain, Chain) else math.inf
        wanted = sorted({piece.center for piece in pieces if piece.center >= 0})
        if not wanted or self.settings.forward is not None:
            return dict.fromkeys(wanted, top), top
        size, shape = self.used[0].numel(), self.used.shape[1:]
        middles = partition.centers[wanted, :size].reshape(-1, *shape).to(self.used)
        slopes_on_balls, everywhere = ball_slopes(model, middles, partition.radii[wanted])
        top = min(top, everywhere)
        return {center: min(slope, top) for center, slope in zip(wanted, slopes_on_balls, strict=True)}, top

    def _climb_in_cells(self, pieces: Sequence[Piece], partition: Partition) -> Tensor:
        """Return the steepest slope met from each sample on, inside its cell."""
        cells = torch.full((len(self.used),), -1)
        for piece in pieces:
            cells[piece.members] = piece.center

        def stay(points: Tensor, before: Tensor) -> Tensor:
            moved = partition.stay(points_of(points, self.wanted), cells, points_of(before, self.wanted))
            return moved[:, : points[0].numel()].reshape(points.shape).to(points)

        return climb(self.twin, self.call, self.loss, self.used, self.wanted, stay)

    @torch.no_grad()
    def _losses_at_centers(self, pieces: Sequence[Piece], partition: Partition, model: nn.Module) -> list[float]:
        """Return the loss before it is cut at each cell's centre, in float64; nan for the rest and where none is."""
        middles, size = partition.centers[[piece.center for piece in pieces]], self.used[0].numel()
        inputs = middles[:, :size].reshape(-1, *self.used.shape[1:]).to(self.used.device)
        targets = middles[:, size:].reshape(-1, *self.wanted.shape[1:]).to(self.wanted.device)
        if self.loss.classes:
            targets = torch.tensor([max(piece.label, 0) for piece in pieces]).to(self.wanted)
        try:
            raw = self.loss.raw(self.call(copy_model(model).double(), inputs), targets).double()
        except (NormgaugeError, RuntimeError):  # a forward or loss that refuses float64 or points between samples
            return [math.nan] * len(pieces)
        return [float(value) if piece.center >= 0 else math.nan for piece, value in zip(pieces, raw, strict=True)]

    def _cells(
        self, pieces: Sequence[Piece], on_balls: dict[int, float], slopes: Tensor, losses: tuple[list[float], Tensor]
    ) -> list[Cell]:
        """Return the cells with bracketed slopes, from losses at centres before they are cut and at all samples.

        Where the loss before it is cut cannot come back from beyond 0 or C within the ball, it is constant: slope 0.
        """
        loss, cells = self.loss, []
        for piece, middle in zip(pieces, losses[0], strict=True):
            slope = on_balls.get(piece.center, math.inf)
            upper = loss.slope * (slope if loss.classes else math.hypot(slope, 1.0))
            upper = math.inf if math.isnan(upper) else upper
            change = upper * piece.radius * (1 + _ROUNDING) + _ROUNDING * abs(middle)
            if middle + change <= 0 or middle - change >= loss.largest:
                upper = 0.0
            most = loss.largest if math.isnan(middle + change) else min(max(middle + change, 0.0), loss.largest)
            rise = max(most - float(losses[1][piece.members].mean()), 0.0)
            cells.append(cell(piece, len(self.used), (float(slopes[piece.members].max()), upper), rise))
        return cells

    def _measures(self, others: Sequence[nn.Module | None]) -> tuple[Complexity, ...]:
        """Return the measures of the stored network and of the others: rescaled, folded, folded and rescaled."""
        loss, inputs, targets = self.loss, self.inputs[:_NOISED], self.targets[:_NOISED]

        def score(called: Callable[[Tensor], Any]) -> float:
            output = called(inputs)
            if loss.classes:
                logits, labels = decisions(output, targets)
                return float((logits.argmax(1) == labels).double().mean())
            return -float(loss(output, targets).mean()) / loss.largest

        def network(model: nn.Module) -> Network:
            calls = network_copy.look(model, self.call, inputs[:2])
            return Network(model, calls, self.call, inputs, score, margin=margin, seed=self.settings.seed)

        with torch.no_grad():
            output = self.call(self.twin, inputs)
        margin = float(raw_margins(*decisions(output, targets)).double().quantile(0.1)) if loss.classes else math.nan
        return measures(network(self.twin), *(None if model is None else network(model) for model in others))

    def _sharpness(self, layers: Sequence[str]) -> tuple[float, str]:
        """Return the spherical sharpness of the cross-entropy in the weights before normalizers, or why none."""
        if not self.loss.classes or not layers:
            return math.nan, "for classifiers with weights before a normalizer, whose scale does not matter"
        twin, names = network_copy.evaluation_copy(self.model), [f"{layer}.weight" for layer in layers]
        for name, parameter in twin.named_parameters():
            parameter.requires_grad_(name in names)
        batch, own = (self.inputs[:_CURVED], self.targets[:_CURVED]), self.settings.forward
        objective = Objective(twin, cross_entropy, batch, mode="train", forward=own, parameters=names)
        reading = spherical_sharpness(objective, float(objective.loss()), self.settings.seed)
        return reading.value, reading.sentence
