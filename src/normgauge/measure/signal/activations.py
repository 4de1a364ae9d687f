"""`ng.activations`: how single activations are distributed, at one point and over training."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from itertools import pairwise
from typing import Any

import torch
from torch import Tensor

from normgauge.charts import heatmap, histogram
from normgauge.errors import InputError, unknown_name
from normgauge.measure.signal.layer_statistics import HUGE, per_unit, run_watched, unit_axis
from normgauge.network import ModuleCall
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Cost, Result, instrument
from normgauge.rng import generator

FAR = 3.0  # deviations: beyond, under one value in a hundred of a normal distribution has the other sign
MOVED = 0.25  # of the range over all steps: a quarter is more than the deviation of an evenly spread unit
LEVELS = (0.05, 0.25, 0.5, 0.75, 0.95)


@dataclass(frozen=True)
class Activations(Result):
    """Values of randomly chosen units over the data."""

    values: dict[tuple[str, int], Tensor]  # (layer, unit) -> its values over samples and space, in float64

    def _title(self) -> str:
        return f"Activations of {len(self.values)} units"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "layer": layer,
                "unit": unit,
                "count": values.numel(),
                "mean": float(values.mean()),
                "deviation": float(values.std(unbiased=False)),
                **{f"q{round(100 * level):02d}": _quantile(values, level) for level in LEVELS},
            }
            for (layer, unit), values in self.values.items()
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return the largest |mean| / deviation over the units, then mean and deviation of each."""
        each = [(f"{row['layer']}[{row['unit']}]", row) for row in self._rows()]
        named = [Reading.measured(name, row[name], layer=unit) for unit, row in each for name in ("mean", "deviation")]
        largest = self._offsets()[0][0]
        return Reading.measured("largest |mean| / deviation", largest, why="every unit is constant"), *named

    def _offsets(self) -> list[tuple[float, str]]:
        """Return |mean| / deviation and name of the units that vary, the largest first."""
        rows = [row for row in self._rows() if row["deviation"] > 0]
        offsets = [(abs(row["mean"]) / row["deviation"], f"{row['layer']}[{row['unit']}]") for row in rows]
        return sorted(offsets, reverse=True) or [(math.nan, "")]

    def _meaning(self) -> str:
        rows = self._rows()
        still = [f"{row['layer']}[{row['unit']}]" for row in rows if not row["deviation"] > 0]
        dead = f" {len(still)} of {len(rows)} units do not vary over the data, {still[0]} among them." if still else ""
        size, unit = max((math.hypot(row["mean"], row["deviation"]), f"{row['layer']}[{row['unit']}]") for row in rows)
        if size > HUGE:
            said = f"{unit} has a size of {size:.2g} (over {HUGE:g}, the most float16 holds)"
            return f"{said}: this is no healthy signal; scale the inputs or weights down.{dead}"
        offset, unit = self._offsets()[0]
        if math.isnan(offset):
            return f"None of the {len(rows)} units chosen varies over the data: they tell the layers behind nothing."
        said = f"{unit} is farthest from zero mean, by {offset:.3g} deviations"
        if offset > FAR:
            return f"{said} (over {FAR:g}): what reads it sees almost a constant; normalize or centre it.{dead}"
        return f"{said} (within {FAR:g}): no unit is off centre.{dead}"

    def chart(self) -> Chart:
        """Return the histogram of each unit's values."""
        rows = [
            {"value": value, "unit": f"{layer}[{unit}]"}
            for (layer, unit), values in self.values.items()
            for value in values.tolist()
        ]
        return histogram(rows, value="value", series="unit", title="activations")


@dataclass(frozen=True)
class ActivationHistory(Result):
    """Histograms of the same units at several steps of training, in bins shared by all steps."""

    steps: tuple[int, ...]  # ascending
    counts: dict[tuple[str, int], tuple[tuple[int, ...], ...]]  # (layer, unit) -> per step the counts per bin
    edges: dict[tuple[str, int], tuple[float, ...]]  # (layer, unit) -> the edges of the bins

    def _title(self) -> str:
        return f"Activations of {len(self.counts)} units over {len(self.steps)} steps"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"layer": layer, "unit": unit, "step": step, "left": left, "right": right, "count": count}
            for (layer, unit), table in self.counts.items()
            for step, counts in zip(self.steps, table, strict=True)
            for (left, right), count in zip(pairwise(self.edges[layer, unit]), counts, strict=True)
        ]

    def _moves(self) -> list[tuple[float, str]]:
        """Return how far the mean of each unit moved, as a share of its range, and its name, the largest first."""
        moves = []
        for (layer, unit), edges in self.edges.items():
            middles = [(left + right) / 2 for left, right in pairwise(edges)]
            tables = [row for row in self.counts[layer, unit] if sum(row)]  # at the other steps nothing was finite
            centres = [sum(n * at for n, at in zip(row, middles, strict=True)) / sum(row) for row in tables]
            if centres:
                moves.append(((max(centres) - min(centres)) / (edges[-1] - edges[0]), f"{layer}[{unit}]"))
        return sorted(moves, reverse=True) or [(math.nan, "")]

    def readings(self) -> tuple[Reading, ...]:
        """Return per unit how far its mean moved over training, as a share of its range, the largest first."""
        return tuple(
            Reading.measured("move of the mean over its range", move, "estimate", layer=unit, why="nothing was finite")
            for move, unit in self._moves()
        )

    def _meaning(self) -> str:
        move, unit = self._moves()[0]
        if math.isnan(move):
            return f"No unit had a finite value in {len(self.steps)} steps: look for the layer that diverged first."
        said = f"Over {len(self.steps)} steps the mean of {unit} moved most, by {move:.0%} of its range"
        if move > MOVED:
            return f"{said} (over {MOVED:.0%}): its distribution drifts, and the layers behind must follow."
        return f"{said} (within {MOVED:.0%}): the distributions keep their place."

    def _notes(self) -> str:
        return f"means from bins of a {len(next(iter(self.edges.values()))) - 1}th of the range"

    def chart(self, layer: str | None = None) -> Chart:
        """Return one unit's distribution over training as a heat map: of `layer`, by default the first."""
        keys = list(self.counts)
        chosen = keys[0] if layer is None else next((key for key in keys if key[0] == layer), None)
        if chosen is None:
            raise unknown_name("layer", str(layer), {key[0] for key in keys})
        rows = [
            {"step": row["step"], "value": (row["left"] + row["right"]) / 2, "count": row["count"]}
            for row in self._rows()
            if (row["layer"], row["unit"]) == chosen
        ]
        title = f"activation {chosen[1]} of {chosen[0]}"
        return heatmap(rows, x="step", y="value", value="count", title=title)


@instrument
def activations(
    objective: Objective, *, layers: str | Sequence[str] = "*", units: int = 1, seed: int = 0
) -> Activations:
    """Collect all values of `units` random units of each layer, over samples and, for convolutions, space.

    Kind: exact for the units chosen. Cost: one forward pass.

    Args:
        objective: model, loss, data, mode.
        layers: globs of module names; modules that call no other module.
        units: how many units per layer.
        seed: of the choice; the same units are chosen at every step of training.

    Examples:
        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.ReLU())
        >>> _ = nn.init.ones_(model[0].weight)
        >>> data = (torch.tensor([[-1.0], [2.0]]), torch.zeros(2, 1))
        >>> found = activations(Objective(model, nn.functional.mse_loss, data, mode="eval"), layers="1")
        >>> found.values["1", 0].tolist()
        [0.0, 2.0]

    References: santurkar2018.
    """
    patterns = [layers] if isinstance(layers, str) else list(layers)
    parts: dict[tuple[str, int], list[Tensor]] = {}
    source = generator(seed)
    chosen: dict[str, list[int]] = {}

    def collect_values(call: ModuleCall) -> None:
        name, tensor = call.name, call.made
        wanted = call.leaf and any(fnmatchcase(name, pattern) for pattern in patterns)
        if not wanted or tensor is None or not tensor.is_floating_point() or tensor.ndim == 0:
            return
        table = per_unit(tensor, 1 if tensor.ndim == 4 else unit_axis(call.module, tensor))
        if name not in chosen:
            chosen[name] = sorted(torch.randperm(table.shape[1], generator=source)[:units].tolist())
        for unit in chosen[name]:
            if unit < table.shape[1]:
                parts.setdefault((name, unit), []).append(table[:, unit].clone())

    run_watched(objective, collect_values)
    if not parts:
        rule, step = "layers must match a called module", "Use names of model.named_modules()"
        raise InputError("activations", rule, str(layers), step)
    return Activations({key: torch.cat(chunks) for key, chunks in parts.items()})


@instrument
def activation_history(history: Mapping[int, Activations], *, bins: int = 30) -> ActivationHistory:
    """Put the activations of several steps of training into common bins (S1 Fig. 1c, 2, 6, 9).

    Kind: exact. Cost: none beyond that of the activations.

    Args:
        history: training step -> what `ng.activations` gave there, with the same seed.
        bins: how many per unit, from the smallest to the largest finite value met.
    """
    steps = tuple(sorted(history))
    shared = [key for key in history[steps[0]].values if all(key in history[s].values for s in steps)] if steps else []
    if not shared or bins < 1:
        rule = "at least one step, one common unit and one bin are needed"
        got = f"{len(steps)} steps, {len(shared)} units, {bins} bins"
        raise InputError("activation_history", rule, got, "Measure ng.activations with one seed")
    counts, edges = {}, {}
    for key in shared:
        finite = [history[step].values[key] for step in steps]
        finite = [values[values.isfinite()] for values in finite]
        joined = torch.cat(finite)
        low, high = (float(joined.min()), float(joined.max())) if joined.numel() else (0.0, 1.0)
        high = high if high > low else low + 1.0
        cells = [torch.histc(values, bins, low, high).long().tolist() for values in finite]
        counts[key] = tuple(tuple(row) for row in cells)
        edges[key] = tuple(torch.linspace(low, high, bins + 1, dtype=torch.float64).tolist())
    first = history[steps[0]]
    spent = sum((item.cost for item in history.values()), Cost())
    return ActivationHistory(steps, counts, edges, mode=first.mode, seed=first.seed, cost=spent)


def _quantile(values: Tensor, level: float) -> float:
    """Return a quantile; torch.quantile refuses more than 16 million values, sorting does not."""
    ordered = values.sort().values
    return float(ordered[min(int(level * ordered.numel()), ordered.numel() - 1)])
