"""`ng.covariate_shift`: how much a layer's gradient turns when the layers before it have moved."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.charts import panels
from normgauge.errors import NonFiniteError, NotDifferentiableError, unknown_name
from normgauge.measure.signal.layer_statistics import Groups, Layer, execution_order, per_unit, run_watched, unit_axis
from normgauge.measure.signal.updates import Update, apply_update
from normgauge.network import ModuleCall, owner_of
from normgauge.objective import Objective
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument

Values = Mapping[str, Tensor]
TURNED = 0.5  # cosine of 60 degrees: less than half of the old step is then along the new gradient


@dataclass(frozen=True, slots=True)
class LayerShift:
    """Internal covariate shift of one layer."""

    layer: str  # its name
    l2: float  # |G' - G|, with G the layer's gradient and G' the one after all layers before it have been updated
    cosine: float  # <G, G'> / (|G| |G'|)
    gradient_norm: float  # |G|
    mean_change: float = math.nan  # root mean square over units of the change of its output's mean in the full update
    variance_change: float = math.nan  # the same of the variance; both nan where its module is not called itself
    uses: int = 1  # how many operations read the layer's parameters; above 1 for shared layers
    status: Status = "ok"  # ok; skipped (no gradient there); diverged (loss not finite once earlier layers have moved)
    sentence: str = ""  # why, where not ok


@dataclass(frozen=True, slots=True)
class CovariateShift(Result):
    """Internal covariate shift per layer, in the order of execution.

    Attributes:
        layers: one `LayerShift` each.
        update: what the step was, in words.
    """

    layers: tuple[LayerShift, ...]
    update: str

    @property
    def l2(self) -> dict[str, float]:
        """Layer -> |G' - G|."""
        return {entry.layer: entry.l2 for entry in self.layers}

    @property
    def cosine(self) -> dict[str, float]:
        """Layer -> cosine of the angle between G and G'."""
        return {entry.layer: entry.cosine for entry in self.layers}

    def __getitem__(self, layer: str) -> LayerShift:
        """Return one layer's entry by name."""
        if layer not in self.l2:
            raise unknown_name("layer", layer, self.l2)
        return next(entry for entry in self.layers if entry.layer == layer)

    def _title(self) -> str:
        return f"Internal covariate shift of {len(self.layers)} layers after {self.update}"

    def _rows(self) -> list[dict[str, Any]]:
        return [{"position": i, **asdict(entry)} for i, entry in enumerate(self.layers)]

    def readings(self) -> tuple[Reading, ...]:
        """Return the smallest cosine, then cosine and l2 of every layer."""
        least = min((entry.cosine for entry in self._turning()), default=math.nan)
        each = [
            Reading.measured(name, getattr(entry, name), layer=entry.layer, why=entry.sentence)
            for entry in self.layers
            for name in ("cosine", "l2")
        ]
        return Reading.measured("smallest cosine", least, why="no layer has one before it and a gradient"), *each

    def _turning(self) -> list[LayerShift]:
        """Return the layers that have a cosine and another layer before them."""
        return [entry for entry in self.layers[1:] if not math.isnan(entry.cosine)]

    def _meaning(self) -> str:
        turning = self._turning()
        if not turning:
            return f"None of {len(self.layers)} layers has a gradient and a layer before it, so nothing can shift."
        worst = min(turning, key=lambda entry: entry.cosine)
        said = f"After {self.update} the gradient of {worst.layer!r} turns most, to a cosine of {worst.cosine:.3g}"
        if worst.cosine < TURNED:
            return f"{said} (under {TURNED:g}, 60 degrees): the earlier layers' step spoils its own; use a smaller one."
        return f"{said} (at least {TURNED:g}): each layer's step still points where it should."

    def _notes(self) -> str:
        return "S1 Definition 2.1, layers in the order of execution"

    def chart(self) -> Chart:
        """Return l2 and cosine against the layer's position, side by side."""
        ys = {"l2": "|G' - G|", "cosine": "cosine of G and G'"}
        places = [entry.layer for entry in self.layers]
        return panels(self._rows(), x="position", ys=ys, x_title="layer, in order of execution", places=places)


@instrument
def covariate_shift(objective: Objective, update: Update, *, groups: Groups | None = None) -> CovariateShift:
    """Measure, per layer i, the change of its gradient caused by updating all layers before it.

    With W the parameters now and V those after `update`, G_i = grad_i L(W_1..W_k) and
    G'_i = grad_i L(V_1..V_{i-1}, W_i..W_k), on the same data: `l2` = |G_i - G'_i| and `cosine` =
    <G_i, G'_i> / (|G_i| |G'_i|).
    A layer is one module's own parameters, or a group; "before" means used earlier in the forward pass.

    Kind: exact. Cost: one gradient per layer, each back to that layer only, and three forwards.

    Args:
        objective: model, loss, data, mode; several batches are averaged.
        update: a learning rate (one step of SGD), a torch optimizer (one step with its state, taken by a copy; its
            step hooks do not run), or a dict of new parameters.
        groups: layer name -> globs or names of parameters, where a layer is more than a module.

    Returns:
        One entry per layer. A layer without gradient, or beyond a loss that stops being finite, has a status and a
        sentence; the others stand.

    Deviations: S1 leaves open what a layer is and what "previous" means where layers are shared or run side by side:
        here the first use decides, and layers used by one operation keep their order of registration.

    Examples:
        For L = (v w x)^2 / 2 with x = 1, one step on w by rate r moves it to w - r v^2 w, so the gradient of v,
        v w^2, becomes v (w - r v^2 w)^2:

        >>> from torch import nn
        >>> model = nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False))
        >>> for layer, value in zip(model, (3.0, 2.0)):
        ...     _ = nn.init.constant_(layer.weight, value)
        >>> loss = lambda out, _: out.square().mean() / 2
        >>> objective = Objective(model, loss, (torch.ones(4, 1), torch.ones(4, 1)), mode="eval")
        >>> shift = covariate_shift(objective, 0.1)
        >>> [round(value, 4) for value in shift.l2.values()]
        [0.0, 11.52]

    References: santurkar2018.
    """
    layers = execution_order(objective, groups)
    try:
        gradient = objective.gradient()
    except NotDifferentiableError as error:
        lost = (math.nan, math.nan, math.nan, math.nan, math.nan)
        holes = tuple(LayerShift(layer.name, *lost, layer.uses, "skipped", str(error)) for layer in layers)
        return CovariateShift(holes, _words(update), status="skipped", sentence="the loss has no gradient")
    new = apply_update(objective, update, gradient)
    moments = _moment_changes(objective, new, layers)
    mixed: dict[str, Tensor] = {}
    entries = []
    for layer in layers:
        entries.append(_shift(objective, layer, gradient, mixed, moments.get(layer.name, (math.nan, math.nan))))
        mixed.update({name: new[name] for name in layer.parameters})
    diverged = [entry.layer for entry in entries if entry.status == "diverged"]
    return CovariateShift(
        tuple(entries),
        _words(update),
        status="diverged" if diverged else "ok",
        sentence=f"{len(diverged)} of {len(layers)} layers have no finite gradient afterwards" if diverged else "",
    )


def _shift(
    objective: Objective, layer: Layer, gradient: Values, earlier: Values, moments: tuple[float, float]
) -> LayerShift:
    """Return the entry of one layer, with `earlier` layers already at their new values."""
    before = _flatten(gradient, layer.parameters)
    norm = float(before.norm())

    def entry(l2: float, cosine: float, status: Status = "ok", sentence: str = "") -> LayerShift:
        rest = {"uses": layer.uses, "status": status, "sentence": sentence}
        return LayerShift(layer.name, l2, cosine, norm, *moments, **rest)  # type: ignore[arg-type]

    if layer.uses == 0:
        return entry(math.nan, math.nan, "skipped", "its parameters are not used in the forward pass")
    if not earlier:
        return entry(0.0, 1.0 if norm else math.nan)
    try:
        after = _flatten(objective.at(earlier).replace(parameters=list(layer.parameters)).gradient(), layer.parameters)
    except NonFiniteError:
        return entry(math.nan, math.nan, "diverged", "the loss is not finite once the layers before it have moved")
    except NotDifferentiableError:
        return entry(math.nan, math.nan, "skipped", "the loss does not depend on it by differentiable operations")
    if not bool(torch.isfinite(after).all() and torch.isfinite(before).all()):
        return entry(math.nan, math.nan, "diverged", "its gradient is not finite")
    product = norm * float(after.norm())
    l2 = float((after - before).norm())
    if product == 0:
        return entry(l2, math.nan, "skipped", "its gradient is zero, so it has no direction")
    return entry(l2, min(1.0, max(-1.0, float(before @ after) / product)))


def _flatten(values: Values, names: Sequence[str]) -> Tensor:
    return torch.cat([values[name].detach().reshape(-1).to(torch.float64) for name in names])


def _moment_changes(objective: Objective, new: Values, layers: Sequence[Layer]) -> dict[str, tuple[float, float]]:
    """Return layer -> root mean square change over units of mean and variance of its module's output."""
    owners = {layer.name: owner_of(layer.parameters[-1]) or "(model)" for layer in layers}
    before = _moments(objective, set(owners.values()))
    after = _moments(objective.at(new), set(owners.values()))
    changes = {}
    for layer, owner in owners.items():
        if owner in before and owner in after and before[owner][0].shape == after[owner][0].shape:
            by_unit = [now - was for now, was in zip(after[owner], before[owner], strict=True)]
            changes[layer] = tuple(float(change.square().mean().sqrt()) for change in by_unit)
    return changes  # type: ignore[return-value]


def _moments(objective: Objective, wanted: set[str]) -> dict[str, tuple[Tensor, Tensor]]:
    """Return module -> mean and biased variance per unit of its outputs over the data."""
    sums: dict[str, tuple[int, Tensor, Tensor]] = {}

    def add_moments(call: ModuleCall) -> None:
        name, tensor = call.name, call.made
        if name not in wanted or tensor is None or not tensor.is_floating_point():
            return
        values = per_unit(tensor, unit_axis(call.module, tensor))
        count, total, squares = sums.get(name, (0, torch.zeros_like(values[0]), torch.zeros_like(values[0])))
        if total.shape == values.shape[1:]:
            sums[name] = count + values.shape[0], total + values.sum(0), squares + values.square().sum(0)

    run_watched(objective, add_moments)
    return {
        name: (total / count, squares / count - (total / count).square())
        for name, (count, total, squares) in sums.items()
    }


def _words(update: Update) -> str:
    if isinstance(update, (int, float)):
        return f"one SGD step of rate {update:g}"
    return "a given update" if isinstance(update, Mapping) else f"one {type(update).__name__} step"
