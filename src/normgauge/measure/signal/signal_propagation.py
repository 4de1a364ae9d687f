"""`ng.signal_propagation`: how activations and gradients change from layer to layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.linalg.norms import norm
from normgauge.measure.signal.layer_statistics import Ablation, Call, Recorder, fit_growth
from normgauge.measure.signal.mean_field_network import COVERED, NotCovered, Prediction, predict
from normgauge.network import owner_of, role_of, watched
from normgauge.objective import Objective
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument
from normgauge.rng import generator

EXPLAINED = 0.5  # share of the variance of log gradients below which depth is not what makes the difference
UNEVEN = 100.0  # of squared gradients, first to last layer: a decade in the norm, and so in the size of plain steps
RELIES = 0.1  # of all decisions: more than one in ten classes' worth of samples hangs on a single unit
MOST_DEAD = 0.5  # share of units that are zero on all of the data


@dataclass(frozen=True, slots=True)
class LayerSignal:
    """Signal and gradient at the output of one call of a layer.

    Args:
        layer: the module's name; `#2` and so on for further calls, `name.relu()` for functions.
        role: affine, normalizer, activation or recurrent.
        mean: of all output values.
        variance: of all output values.
        pre_variance: mean of the variances the normalizer divides by (its input's); nan for other layers.
        dead: share of units that are zero for every sample (ReLU and its kind only).
        saturated: share of values within 1 % of the range of a limit (tanh, sigmoid and their kind only).
        selectivity: how far single units stand for single classes, from 0 to 1 (ReLU and its kind, data with class
            labels): mean over units of (m - r) / (m + r), m the mean activity for its best class and r for the others.
        unit_lost: most accuracy lost by holding one unit at its mean, of the units tried (activations, if asked for).
        half_left: accuracy with random halves of the units held at their means, over the intact one, mean over draws.
        gradient: squared norm of dL / d output; for affine layers the pre-activations.
        weight_gradient: squared norm of dL / d weights (the module's own parameters of two or more axes).
        status: ok, skipped (not called, or no gradient reaches it) or diverged (not finite).
        sentence: why, where not ok.
    """

    layer: str
    role: str
    mean: float = math.nan
    variance: float = math.nan
    pre_variance: float = math.nan
    dead: float = math.nan
    saturated: float = math.nan
    selectivity: float = math.nan
    unit_lost: float = math.nan
    half_left: float = math.nan
    gradient: float = math.nan
    weight_gradient: float = math.nan
    status: Status = "ok"
    sentence: str = ""


@dataclass(frozen=True, slots=True)
class SignalPropagation(Result):
    """Activation moments and squared gradients per layer, and their fitted growth.

    Attributes:
        layers: in the order in which calls finish.
        growth: fitted factor per affine layer, towards the input, of the *squared* pre-activation gradient norm;
            above 1 gradients explode, below 1 they vanish. nan with fewer than two hidden affine layers.
        growth_low: lower end of the 95 % interval of the fit.
        growth_high: upper end.
        fitted: the layers the fit is on.
        theory: the prediction at infinite width, where asked for and where the theory covers the network.
        withheld: why there is no prediction, though asked for.
    """

    layers: tuple[LayerSignal, ...]
    growth: float
    growth_low: float
    growth_high: float
    fitted: tuple[str, ...]
    theory: Prediction | None = None
    withheld: str = ""

    @property
    def norm_growth(self) -> float:
        """Factor per layer of the gradient norm itself: the square root of `growth`."""
        return math.sqrt(self.growth)

    @property
    def _explained(self) -> float:
        """Share of the variance of the log gradients that the fitted line explains; 1 where they hardly differ."""
        logs = [math.log(entry.gradient) for entry in self.layers if entry.layer in self.fitted and entry.gradient > 0]
        mean, squares = sum(logs) / len(logs), (len(logs) ** 2 - 1) / 12 * math.log(self.growth) ** 2
        variance = sum((value - mean) ** 2 for value in logs) / len(logs)
        return squares / variance if variance > math.log(2) ** 2 else 1.0

    def _title(self) -> str:
        return f"Signal propagation through {len(self.layers)} layers"

    def _rows(self) -> list[dict[str, Any]]:
        return [{name: getattr(entry, name) for name in LayerSignal.__slots__} for entry in self.layers]

    def readings(self) -> tuple[Reading, ...]:
        """Return the growth of the squared gradient per layer, that gradient at every layer, ablated accuracies."""
        half = None if math.isnan(self.growth_high) else (self.growth_high - self.growth_low) / 2
        name, why = "growth of the squared gradient per layer", "fewer than two hidden affine layers"
        found = [Reading.measured(name, self.growth, "estimate", uncertainty=half, why=why)]
        for entry in self.layers:
            found.append(Reading.measured("squared gradient", entry.gradient, layer=entry.layer, why=entry.sentence))
        for entry in self._ablated():
            found.append(Reading("accuracy lost by one unit", entry.unit_lost, "lower", layer=entry.layer))
            found.append(Reading("accuracy left by half the units", entry.half_left, "estimate", layer=entry.layer))
        return tuple(found)

    def _ablated(self) -> list[LayerSignal]:
        """Return the layers of which units were ablated, the one that hangs most on a single unit first."""
        tried = [entry for entry in self.layers if not math.isnan(entry.unit_lost)]
        return sorted(tried, key=lambda entry: -entry.unit_lost)

    def _meaning(self) -> str:
        return " ".join(filter(None, (self._say_growth(), self._say_ablation())))

    def _say_ablation(self) -> str:
        if not (tried := self._ablated()):
            return ""
        worst = tried[0]
        said = f"Holding one unit of {worst.layer!r} at its mean costs {worst.unit_lost:.1%} of the decisions"
        if worst.unit_lost > RELIES:
            return f"{said} (over {RELIES:.0%}): they hang on single units; dropout or a normalizer spreads them."
        return f"{said}, the most of all units tried (within {RELIES:.0%}): none decides by itself."

    def _say_growth(self) -> str:
        dead = [entry for entry in self.layers if entry.dead > MOST_DEAD]
        lost = f" In {dead[0].layer!r} {dead[0].dead:.0%} of the units are dead (over {MOST_DEAD:.0%})." if dead else ""
        if math.isnan(self.growth):
            few = f"{len(self.fitted)} hidden affine layers with a gradient are too few to fit a growth (2 needed)"
            return f"{few}.{lost}"
        if self._explained < EXPLAINED:
            share = f"depth explains {self._explained:.0%} of it (under {EXPLAINED:.0%})"
            return (
                f"Squared gradients differ between layers, as between branches, but {share}: no growth is told.{lost}"
            )
        ends = self.growth ** (len(self.fitted) - 1)
        way, factor = ("grow", self.growth) if self.growth >= 1 else ("shrink", 1 / self.growth)
        depth = f"{max(ends, 1 / ends):.3g} over {len(self.fitted)} layers"
        said = f"Squared gradients {way} by a factor of {factor:.4g} per layer towards the input, {depth}"
        if 1 / UNEVEN <= ends <= UNEVEN:
            return f"{said}: they neither explode nor vanish (beyond a factor of {UNEVEN:g}) here.{lost}"
        end = f"they {'explode' if ends > 1 else 'vanish'} (beyond {UNEVEN:g})"
        return f"{said}: {end}; change the initial scale or normalizer, or add skips.{lost}"

    def _notes(self) -> str:
        said = f"no prediction: {self.withheld}; {COVERED}; " if self.withheld else ""
        if self.theory is not None:
            said = f"{self.theory.square_growth:.4g} predicted at infinite width; "
        interval = f"[{self.growth_low:.4g}, {self.growth_high:.4g}] (of the norm: {self.norm_growth:.4g})"
        return f"{said}growth by least squares on {len(self.fitted)} layers, 95 % interval {interval}"

    def chart(self) -> Chart:
        """Return squared pre-activation gradients over depth, measured and, where asked for, predicted."""
        points = {entry.layer: entry.gradient for entry in self.layers if entry.layer in self.fitted}
        t = self.theory
        return gradient_chart(points, {} if t is None else dict(zip(t.layers, t.gradients, strict=True)))


def gradient_chart(measured: Mapping[str, float], predicted: Mapping[str, float]) -> Chart:
    """Return squared gradients over depth by layer, and the predicted ones at the same mean level."""
    from normgauge.charts import curves

    rows: list[dict[str, Any]] = [
        {"depth": i, "value": value, "series": "measured", "layer": layer}
        for i, (layer, value) in enumerate(measured.items())
    ]
    both = [row for row in rows if row["layer"] in predicted]
    if both:
        level = math.exp(sum(math.log(row["value"] / predicted[row["layer"]]) for row in both) / len(both))
        rows += [{**row, "value": level * predicted[row["layer"]], "series": "infinite width"} for row in both]
    scale: Literal["log", "linear"] = "log" if all(row["value"] > 0 for row in rows) else "linear"
    title, x_title = "squared pre-activation gradient", "affine layer, from the input"
    return curves(
        rows, x="depth", detail=("layer",), title=title, x_title=x_title, y_scale=scale, places=list(measured)
    )


@instrument
def signal_propagation(
    objective: Objective, *, theory: bool = False, ablations: int = 0, seed: int = 0
) -> SignalPropagation:
    """Measure activation moments, dead and saturated shares and squared gradients at every layer.

    For each affine layer (a module with a weight of two or more axes) with output h: `gradient` = |dL / dh|^2. The
    logarithms of these over the hidden affine layers (all but the last) are fitted by a line against depth;
    `growth` = exp(-slope) is the factor per layer towards the input, of the square: the norm grows by its root.

    Kind: exact per layer; growth is an estimate with a 95 % interval that takes the residuals for independent.
    Ablated accuracies are a lower bound (the worst of the units tried) and an estimate (of random halves).
    Cost: one forward and one backward pass, plus sums over every output; with `theory` one more forward pass; with
    ablations one more, and two per ablation and activation.

    Args:
        objective: model, loss, data, mode; over several batches, moments are pooled and gradients are of the mean.
        theory: put the prediction of `theory.mean_field` for wide networks at initialization beside: linear maps and
            convolutions, batch, layer, group and RMS norms with their gains and shifts, activations by entry, residual
            sums. It is withheld, with the reason, where the theory does not speak of the network.
        ablations: per activation, so many units are held at their mean over the data one by one, and so many random
            halves of its units together, and the accuracy is read: networks that remember hang on single units.
        seed: of the units and halves.

    Raises:
        InputError: for ablations on data without class labels.

    Returns:
        One entry per call of a layer. Layers that are never called, whose output gets no gradient or is not finite
        have a status and a sentence.

    Deviations: S2 Fig. 2 does not say over which axes its variances are; `pre_variance` is the mean of the very
        variances that the normalizer divides by.

    Examples:
        Ten linear layers that double the signal, so that squared gradients grow by 4 per layer:

        >>> model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(10)))
        >>> for layer in model:
        ...     _ = nn.init.constant_(layer.weight, 2.0)
        >>> objective = Objective(model, lambda out, _: out.mean(), (torch.ones(4, 1), torch.ones(4, 1)), mode="eval")
        >>> round(signal_propagation(objective).growth, 6)
        4.0

    References: yang2019, than2025, batchnorm_article, morcos2018.
    """
    recorder, gradients = _record(objective)
    entries = [_entry(call, gradients) for call in recorder.calls.values()]
    entries += _never_called(objective.model, recorder)
    hidden = [entry for entry in entries if entry.role == "affine" and entry.status == "ok"][:-1]
    fitted = [entry for entry in hidden if entry.gradient > 0]
    growth, low, high = fit_growth([entry.gradient for entry in fitted])
    if ablations > 0:
        entries = _ablate(objective, entries, ablations, seed)
    diverged = [entry.layer for entry in entries if entry.status == "diverged"]
    prediction, withheld = None, ""
    if theory:
        try:
            prediction = predict(objective)
        except NotCovered as reason:
            withheld = str(reason)
    return SignalPropagation(
        layers=tuple(entries),
        growth=growth,
        growth_low=low,
        growth_high=high,
        fitted=tuple(entry.layer for entry in fitted),
        theory=prediction,
        withheld=withheld,
        status="diverged" if diverged else "ok",
        sentence=f"{len(diverged)} of {len(entries)} layers are not finite, first {diverged[0]!r}" if diverged else "",
    )


def _record(objective: Objective) -> tuple[Recorder, dict[str, Tensor]]:
    """Run forward and backward over all batches with a recorder; return it and the mean gradient of all weights."""
    total = sum(objective.weight(batch) for _, batch in objective.batches())
    recorder, gradients = Recorder(), dict[str, Tensor]()
    every = {n: p.detach() for n, p in objective.model.named_parameters() if p.is_floating_point()}
    every.update(objective.parameters)
    for number, batch in objective.batches():
        share = objective.weight(batch) / total
        leaves = {name: value.detach().requires_grad_() for name, value in every.items()}
        recorder.start_batch(share, batch)

        def body(model: nn.Module, number: int = number, batch: Any = batch, leaves: Any = leaves) -> Any:
            with watched(model, recorder.leave, recorder.enter), recorder:
                # a loss that is not finite is no reason to stop: the table shows at which layer it began
                total = torch.stack(list(objective.terms_of(model, number, batch).values())).sum()
            if not total.requires_grad:
                return [None] * len(leaves)
            objective.count_backward(batch)
            return torch.autograd.grad(total, list(leaves.values()), allow_unused=True)

        for name, slope in zip(leaves, objective.evaluate(number, body, leaves), strict=True):
            if slope is not None:
                gradients[name] = gradients[name] + share * slope if name in gradients else share * slope
    return recorder, gradients


def _ablate(objective: Objective, entries: list[LayerSignal], ablations: int, seed: int) -> list[LayerSignal]:
    """Return the entries with the accuracies that are lost and left by ablations."""
    held = Ablation()
    intact = held.accuracy(objective)
    if math.isnan(intact):
        got, step = "other data", "Pass batches (inputs, labels), or leave ablations out"
        raise InputError("signal_propagation(ablations)", "accuracy needs a class label per row of outputs", got, step)
    source, changed = generator(seed), []
    for entry in entries:
        if entry.layer in held.sums and intact > 0:
            held.layer, width = entry.layer, len(held.sums[entry.layer][1])
            left: dict[int, list[float]] = {1: [], max(1, width // 2): []}
            for size, found in left.items():
                orders = [torch.randperm(width, generator=source) for _ in range(ablations)]
                for units in orders if size > 1 else orders[0][:ablations, None]:
                    held.units = units[:size]
                    found.append(held.accuracy(objective))
            half = list(left.values())[-1]
            entry = replace(entry, unit_lost=intact - min(left[1]), half_left=sum(half) / len(half) / intact)
        changed.append(entry)
    return changed


def _entry(call: Call, gradients: Mapping[str, Tensor]) -> LayerSignal:
    owner = call.name.partition("#")[0]
    own = [norm(g) ** 2 for name, g in gradients.items() if (owner_of(name) or "(model)") == owner and g.ndim >= 2]
    status: Status = "ok"
    sentence = ""
    if not call.finite or not math.isfinite(call.gradient):
        status, sentence = "diverged", "its output or gradient is not finite"
    elif not call.reached:
        status, sentence = "skipped", "no gradient reaches its output"
    samples = sum(n for n, _ in call.variances)
    return LayerSignal(
        layer=call.name,
        role=call.role,
        mean=call.mean,
        variance=call.scatter / max(call.count, 1),
        pre_variance=sum(n * v for n, v in call.variances) / samples if samples else math.nan,
        dead=math.nan if call.zero_units is None else float(call.zero_units.double().mean()),
        saturated=call.saturated / call.count if call.saturates else math.nan,
        selectivity=call.selectivity,
        gradient=call.gradient if call.reached else math.nan,
        weight_gradient=sum(own) if own else math.nan,
        status=status,
        sentence=sentence,
    )


def _never_called(model: nn.Module, recorder: Recorder) -> list[LayerSignal]:
    return [
        LayerSignal(name, role_of(module), status="skipped", sentence="its forward is not called in this pass")
        for name, module in model.named_modules()
        if name and name not in recorder.called_names and role_of(module) in ("affine", "normalizer", "recurrent")
    ]
