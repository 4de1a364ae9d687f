"""`ng.signal_propagation`, `ng.trainable_depth`: how activations and gradients change with depth, and its limit."""

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.charts import curves
from normgauge.errors import InputError
from normgauge.linalg.norms import norm
from normgauge.measure.signal.layer_statistics import HUGE, Ablation, Call, Recorder, fit_growth
from normgauge.measure.signal.mean_field_network import COVERED, NotCovered, Prediction, predict
from normgauge.network import first_tensor, owner_of, role_of, watched
from normgauge.objective import Mode, Objective, tensors
from normgauge.records import Chart, Reading, Status
from normgauge.results import Result, instrument
from normgauge.rng import generator

EXPLAINED = 0.5  # share of the variance of log gradients below which depth is not what makes the difference
UNEVEN = 100.0  # of squared gradients, first to last layer: a decade in the norm, and so in the size of plain steps
RELIES = 0.1  # of all decisions: more than one in ten classes' worth of samples hangs on a single unit
MOST_DEAD = 0.5  # share of units that are zero on all of the data
# Of squared gradients, end to end: ReLU networks with BatchNorm learn digits at 10 layers (54) and not at 30 (2e5)
LIMIT = 1000.0
NEARBY = 0.01  # of the inputs' size: how far the neighbours lie
SHATTERED = 0.1  # correlation of neighbours' gradients under which they say nothing of each other


@dataclass(frozen=True, slots=True)
class LayerSignal:
    """Signal and gradient at the output of one call of a layer.

    Selectivity says how far single units stand for single classes, from 0 to 1: m is the mean activity of a unit for
    its best class, r that for the others.

    Attributes:
        layer: the module's name; `#2` and so on for further calls, `name.relu()` for functions.
        role: affine, normalizer, activation or recurrent.
        mean: of all output values.
        variance: of all output values.
        pre_variance: mean of the variances the normalizer divides by, its input's; nan for other layers.
        dead: share of units that are zero for every sample (ReLU and its kind only).
        saturated: share of values within 1 % of the range of a limit (tanh, sigmoid and their kind).
        selectivity: mean over units of (m - r) / (m + r) (ReLU and its kind, data with labels).
        unit_lost: most accuracy lost by holding one unit at its mean, of those tried (activations).
        half_left: accuracy with random halves of the units at their means, over the intact one; mean.
        gradient: squared norm of dL / d output; for affine layers the pre-activations.
        weight_gradient: squared norm of dL / d weights (its own parameters of two or more axes).
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
        return [asdict(entry) for entry in self.layers]

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
        return " ".join(filter(None, (self._say_size(), self._say_growth(), self._say_ablation())))

    def _say_size(self) -> str:
        sizes = [(math.hypot(entry.mean, math.sqrt(entry.variance)), entry.layer) for entry in self.layers]
        huge = [(size, layer) for size, layer in sizes if size > HUGE]
        if not huge:
            return ""
        said = f"Outputs of {huge[0][1]!r} have a size of {huge[0][0]:.2g} (over {HUGE:g}, the most float16 holds)"
        return f"{said}, {len(huge)} layers' in all: this is no healthy signal; scale the inputs or weights down."

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
            share = f"depth explains {self._explained:.0%} of it (under {EXPLAINED:.0%}): no growth is told"
            return f"Squared gradients differ between layers, as between branches, but {share}.{lost}"
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
            halves of its units together, and the accuracy is read (data with class labels): networks that remember
            hang on single units.
        seed: of the units and halves.

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
    entries += [
        LayerSignal(name, role_of(module), status="skipped", sentence="its forward is not called in this pass")
        for name, module in objective.model.named_modules()
        if name and name not in recorder.called_names and role_of(module) in ("affine", "normalizer", "recurrent")
    ]
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
    status: Status = "ok" if call.reached else "skipped"
    sentence = "" if call.reached else "no gradient reaches its output"
    if not call.finite or not math.isfinite(call.gradient):
        status, sentence = "diverged", "its output or gradient is not finite"
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


@dataclass(frozen=True)
class TrainableDepth(Result):
    """The depth at which squared gradients differ by `limit` from end to end.

    Attributes:
        depth: in affine layers; inf where gradients do not change with depth, nan where branches differ more.
        layers: hidden affine layers of the network.
        law: how squared gradients change with depth: by a factor per layer, or as a power of the depth (residual).
        rate: that factor, or that power; towards the input.
        growth: measured factor per layer over this network.
        predicted: the theory's factor per layer; nan where it does not speak of the network.
        gradients: squared gradients at the hidden affine layers, as measured.
        theory: as predicted, up to one factor; empty where there is none.
        correlation: mean cosine of the gradients, of one direction of each output, at inputs and at neighbours.
        limit: of the ratio of squared gradients.
        withheld: why there is no prediction; `depth` then follows the measured gradients.
        explained: share of the differences that depth explains; 1 where they hardly differ.
    """

    depth: float
    layers: int
    law: Literal["exponential", "power"]
    rate: float
    growth: float
    predicted: float
    gradients: tuple[float, ...]
    theory: tuple[float, ...]
    correlation: float
    limit: float
    withheld: str = ""
    explained: float = 1.0

    def readings(self) -> tuple[Reading, ...]:
        """Return the depth, growth predicted and measured, and the correlation of neighbours' gradients."""
        why = self.withheld or "gradients do not change with depth"
        untold = "depth does not explain the gradients" if math.isnan(self.depth) else why
        depth = self.depth if math.isfinite(self.depth) else math.nan
        return (
            Reading.measured("trainable depth", depth, "estimate", why=untold),
            Reading.measured("predicted growth of the squared gradient", self.predicted, "estimate", why=why),
            Reading("measured growth of the squared gradient", self.growth, "estimate"),
            Reading.measured("correlation of neighbours' gradients", self.correlation, why="no gradient at the inputs"),
        )

    def _title(self) -> str:
        said = "not told" if math.isnan(self.depth) else f"{self.depth:.3g} layers"
        return f"Trainable depth {said}; this network has {self.layers}"

    def _rows(self) -> list[dict[str, Any]]:
        theory = self.theory or (math.nan,) * len(self.gradients)
        pairs = zip(self.gradients, theory, strict=True)
        return [{"layer": i, "gradient": value, "theory": said} for i, (value, said) in enumerate(pairs)]

    def _meaning(self) -> str:
        if math.isnan(self.depth):
            said = f"Squared gradients differ between {self.layers} layers, as between branches, but depth explains "
            return f"{said}{self.explained:.0%} of it (under {EXPLAINED:.0%}): no depth is told; compare like layers."
        way = f"by {self.rate:.4g} per layer" if self.law == "exponential" else f"as depth^{self.rate:.3g}"
        said = f"Squared gradients change {way} towards the input"
        if math.isfinite(self.depth):
            said += f"; beyond {self.depth:.3g} layers they differ by over {self.limit:g}"
        torn = f" Gradients of neighbours have correlation {self.correlation:.2g}"
        torn = f"{torn} (under {SHATTERED:g}): they are shattered." if self.correlation < SHATTERED else ""
        if self.layers > self.depth:
            advice = "skip connections, an activation nearer to linear, other initial scales, or fewer layers"
            return f"{said}. This network has {self.layers}: too deep for plain steps; try {advice}.{torn}"
        return f"{said}. This network has {self.layers}: depth is no obstacle here.{torn}"

    def _notes(self) -> str:
        if self.withheld:
            return f"measured, no prediction: {self.withheld}; {COVERED}"
        return f"predicted at infinite width ({self.predicted:.4g} per layer; measured {self.growth:.4g})"

    def chart(self) -> Chart:
        """Return squared gradients over depth, measured and predicted."""
        names = [str(i) for i in range(len(self.gradients))]
        theory = dict(zip(names, self.theory, strict=True)) if self.theory else {}
        return gradient_chart(dict(zip(names, self.gradients, strict=True)), theory)


@instrument
def trainable_depth(
    model: nn.Module,
    inputs: Any,
    *,
    mode: Mode = "train",
    limit: float = LIMIT,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    seed: int = 0,
) -> TrainableDepth:
    """Say how deep a network like `model` may be, from the growth of its squared gradients with depth.

    With squared gradients `g_l` at the affine layers (of a random direction of each output), predicted at infinite
    width where the theory covers the network and measured elsewhere: `g ~ rate^-l` or, in residual networks,
    `g ~ l^-rate`, whichever fits better. `depth` is where the ends differ by `limit`: `ln(limit) / |ln rate|` or
    `limit^(1 / |rate|)`; nan where measured gradients differ for other reasons, as in the branches of attention.

    Beside it the correlation of gradients at neighbouring inputs, which falls with depth where gradients shatter.

    Kind: estimate. Cost: three gradients and, for the prediction, one forward pass.

    Args:
        model: at initialization; for trained weights read the measured growth.
        inputs: one batch.
        mode: "train" or "eval".
        limit: of the ratio of squared gradients between the ends.
        forward: `forward(model, inputs) -> output` for unusual calls.
        seed: of the direction and the neighbours.

    Examples:
        ReLU after BatchNorm multiplies squared gradients by nearly pi / (pi - 1) per layer:

        >>> _ = torch.manual_seed(0)
        >>> blocks = [m for _ in range(12) for m in (nn.Linear(64, 64), nn.BatchNorm1d(64), nn.ReLU())]
        >>> found = trainable_depth(nn.Sequential(*blocks, nn.Linear(64, 10)), torch.randn(64, 64))
        >>> 1.4 < found.predicted < 1.6, round(found.depth) in range(15, 20)
        (True, True)

    References: schoenholz2017, yang2019, balduzzi2017
    """
    if not limit > 1:
        raise InputError("trainable_depth", "limit is above 1", str(limit), "Leave it out")

    def loss(output: Any, _: Any) -> Tensor:
        out = first_tensor(output)
        if out is None:
            raise InputError("trainable_depth", "the model returns a tensor", type(output).__name__, "Pass forward=")
        direction = torch.randn(out.shape, generator=generator(seed), dtype=torch.float64).to(out)
        return (out * direction).sum() / max(len(out), 1)

    first = next(iter(tensors(inputs)))
    objective = Objective(model, loss, (inputs, torch.zeros(len(first))), mode=mode, forward=forward)
    signal = signal_propagation(objective, theory=True)
    found = {entry.layer: entry.gradient for entry in signal.layers}
    squares = [found[name] for name in signal.fitted]
    if len(squares) < 2:
        rule = "gradients reach three affine layers"
        raise InputError("trainable_depth", rule, f"{len(squares) + 1}", "Measure a deeper one")
    theory = signal.theory if signal.theory and signal.theory.layers == signal.fitted else None
    law, rate, depth = depth_of(theory.gradients if theory else squares, limit)
    explained = 1.0 if theory else signal._explained
    return TrainableDepth(
        depth=depth if explained >= EXPLAINED else math.nan,
        layers=len(squares),
        law=law,
        rate=rate,
        growth=signal.growth,
        predicted=theory.square_growth if theory else math.nan,
        gradients=tuple(squares),
        theory=theory.gradients if theory else (),
        correlation=_neighbour_correlation(objective, inputs, seed),
        limit=limit,
        withheld="" if theory else signal.withheld or "other layers than the theory's get a gradient",
        explained=explained,
        mode=mode,
    )


def depth_of(squares: Sequence[float], limit: float) -> tuple[Literal["exponential", "power"], float, float]:
    """Return the law that fits better, its rate towards the input and the depth at which the ends differ by `limit`.

    Examples:
        >>> for squares in ([2.0**-l for l in range(20)], [1 / (l + 1) for l in range(20)]):
        ...     law, rate, depth = depth_of(squares, 1024.0)
        ...     print(law, round(rate, 6), round(depth))
        exponential 2.0 10
        power 1.0 1024
    """
    y = torch.tensor(squares, dtype=torch.float64).log()
    depths = torch.arange(1, len(squares) + 1, dtype=torch.float64)
    fits = []
    for x in (depths, depths.log()):
        x, centred = x - x.mean(), y - y.mean()
        slope = float((x @ centred) / (x @ x))
        fits.append((float((centred - slope * x).square().sum()), -slope))
    if fits[1][0] < fits[0][0]:
        power = fits[1][1]
        return "power", power, limit ** min(1 / abs(power), 300 / math.log10(limit)) if power else math.inf
    return "exponential", math.exp(fits[0][1]), math.log(limit) / abs(fits[0][1]) if fits[0][1] else math.inf


def _neighbour_correlation(objective: Objective, inputs: Any, seed: int) -> float:
    """Return the mean cosine over samples between the gradients at the inputs and at neighbours; nan without them."""
    if not isinstance(inputs, Tensor) or not inputs.is_floating_point():
        return math.nan
    noise = torch.randn(inputs.shape, generator=generator(seed + 1), dtype=torch.float64).to(inputs)
    size = NEARBY * float(inputs.detach().norm()) / max(float(noise.norm()), 1e-300)
    number, batch = next(iter(objective.batches()))
    slopes: list[Tensor | None] = []
    for place in (inputs.detach(), inputs.detach() + size * noise):
        leaf = place.clone().requires_grad_()

        def body(model: nn.Module, leaf: Tensor = leaf) -> Tensor | None:
            value = torch.stack(list(objective.terms_of(model, number, (leaf, batch[1]), copied=False).values())).sum()
            objective.count_backward(batch)
            return torch.autograd.grad(value, leaf, allow_unused=True)[0] if value.requires_grad else None

        slopes.append(objective.evaluate(number, body))
    if slopes[0] is None or slopes[1] is None:
        return math.nan
    a, b = slopes[0].double().flatten(1), slopes[1].double().flatten(1)
    cosines = (a * b).sum(1) / (a.norm(dim=1) * b.norm(dim=1))
    return float(cosines.mean())
