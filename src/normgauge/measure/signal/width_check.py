"""`ng.width_check`: do activations, updates and logits keep their size as a network grows wider, and who spoils it."""

import math
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from statistics import fmean
from typing import Any, Literal

import torch
from torch import Tensor, nn

from normgauge.charts import intervals
from normgauge.errors import InputError, NonFiniteError
from normgauge.network import ModuleCall, first_tensor, watched
from normgauge.objective import call_model, guess_loss, pairs
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument, spend
from normgauge.stats import CONFIDENCE, student_quantile

LIMIT = 0.25  # of a slope: half of 1/2, the smallest power by which a parametrization can be wrong
ROUNDING = 1e-6  # of the largest gradient: a parameter below is dead, and Adam makes steps of its rounding errors
Quantity = Literal["input", "activation", "update", "logits", "logit change"]
Verdict = Literal["ok", "grows", "vanishes", "undecided", "zero"]
Sizes = dict[tuple[str, Quantity], float]


@dataclass(frozen=True)
class WidthSlope:
    """How one size changes with the width: `size ~ width^slope`.

    "input" and "activation" are a layer's before training, "update" is what a step's change of one parameter does to
    the output of its layer, "logits" are those before training and "logit change" theirs by all steps.
    """

    name: str  # of the layer (input, activation), of the parameter (update), "(model)" for logits
    quantity: Quantity
    slope: float  # of log size over log width
    low: float  # end of its 95 % interval
    high: float  # the other end
    verdict: Verdict  # ok inside +-0.25, grows or vanishes by the whole interval, else undecided; zero at every width
    cause: bool  # whether this is where it begins: what comes in is ok, or changes the other way
    sizes: tuple[float, ...]  # root mean squares, per width the mean over seeds


@dataclass(frozen=True)
class WidthCheck(Result):
    """The slopes of all layers.

    Attributes:
        slopes: in the order in which layers are called, logits last.
        widths: that were built.
        offenders: names of layers and parameters where a size that grows or vanishes begins, activations first.
        unseen: parameters that no layer reads alone.
        steps: of training.
        optimizer: its class.
    """

    slopes: tuple[WidthSlope, ...]
    widths: tuple[int, ...]
    offenders: tuple[str, ...]
    unseen: tuple[str, ...]
    steps: int
    optimizer: str

    @property
    def passes(self) -> bool:
        """Whether no size grows or vanishes with the width."""
        return not self.offenders

    def readings(self) -> tuple[Reading, ...]:
        """Return the number of offenders and every slope."""
        slopes = (
            Reading.measured(
                f"slope of {item.quantity}", item.slope, "estimate", layer=item.name, why="zero at some width",
                uncertainty=None if math.isnan(item.high) else (item.high - item.low) / 2,
            )
            for item in self.slopes
        )  # fmt: skip
        return (Reading("offenders", len(self.offenders), "estimate"), *slopes)

    def _title(self) -> str:
        return f"Sizes over widths {self.widths[0]} to {self.widths[-1]}, {self.steps} steps of {self.optimizer}"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {**{k: v for k, v in asdict(s).items() if k != "sizes"}, "first_size": s.sizes[0], "last_size": s.sizes[-1]}
            for s in self.slopes
        ]

    def _meaning(self) -> str:
        open_ones = sum(item.verdict == "undecided" for item in self.slopes)
        rest = f" {open_ones} slopes are undecided: more widths or seeds decide." if open_ones else ""
        if not self.offenders:
            said = f"None of {len(self.slopes)} sizes leaves width^+-{LIMIT:g} (logits may shrink)"
            return f"{said}: the best rate stays where it is as the network grows wider.{rest}"
        item = next(s for s in self.slopes if s.cause and s.name == self.offenders[0])
        more = f" and {len(self.offenders) - 1} more" if len(self.offenders) > 1 else ""
        what = "initial scale (or a factor in the forward)" if item.quantity != "update" else "learning rate"
        return (
            f"The {item.quantity} of {item.name}{more} {item.verdict} as width^{item.slope:.2g} (limit +-{LIMIT:g}): "
            f"its {what} must change with the width, or the best rate will.{rest}"
        )

    def _notes(self) -> str:
        unseen = f"; not seen (read outside of a layer): {', '.join(self.unseen[:3])}" if self.unseen else ""
        return f"95 % intervals over widths and seeds; under SGD a wrong activation spoils updates too{unseen}"

    def chart(self) -> Chart:
        """Return the slopes with their intervals."""
        rows = [
            {"name": f"{s.name} {s.quantity}", "slope": s.slope, "low": s.low, "high": s.high}
            for s in self.slopes
            if math.isfinite(s.slope)
        ]
        return intervals(rows, value="slope", series="name", title="slope of log size over log width")


@instrument
def width_check(
    factory: Callable[[int], Any],
    *,
    widths: Sequence[int],
    data: Any,
    loss: Callable[[Any, Any], Tensor] | None = None,
    optimizer: Callable[[nn.Module], torch.optim.Optimizer] | None = None,
    iterations: int = 3,
    seeds: int = 3,
) -> WidthCheck:
    """Fit `size ~ width^slope` to activations, updates and logits, and name the layers where a slope begins.

    A rate that is right at one width is right at all of them if, as the width grows, activations and what each
    parameter's update does to its layer's output keep their size, and logits do not grow. The update of a parameter
    is measured alone: its layer's output with the new value minus that with the old one, on the same inputs; of all
    steps the largest. A layer is an offender where its slope leaves +-0.25 by its whole interval although that of its
    inputs does not.

    Kind: estimate. Cost: `iterations` gradients for each width and seed.

    Args:
        factory: `factory(width)` returns a model, or a model and its optimizer.
        widths: at least three, far apart: 64, 128, 256, 512.
        data: one batch `(inputs, targets)`, or a re-iterable of batches, taken in turn.
        loss: `loss(output, target)`; cross entropy for labels and squares otherwise if left out.
        optimizer: `optimizer(model)` where the factory does not give one; Adam with lr=1e-3 by default.
        iterations: steps of training; the second one shows what a read-out that starts at zero hides.
        seeds: weights drawn anew.

    Examples:
        With one rate for all layers the update of a wide layer under Adam grows with the width:

        >>> net = lambda n: nn.Sequential(nn.Linear(4, n), nn.ReLU(), nn.Linear(n, n), nn.ReLU(), nn.Linear(n, 2))
        >>> batch = torch.randn(16, 4, generator=torch.Generator().manual_seed(0)), torch.arange(16) % 2
        >>> width_check(net, widths=[32, 64, 128], data=batch).offenders
        ('2.weight', '4.weight')

    References: yang2022, yang2023
    """
    widths = tuple(sorted(dict.fromkeys(widths)))
    if len(widths) < 3 or widths[0] < 1 or iterations < 1 or seeds < 1:
        got = f"{len(widths)} widths, iterations={iterations}, seeds={seeds}"
        rule = "three widths, one step and one seed at least"
        raise InputError("width_check", rule, got, "Pass widths=(64, 128, 256)")
    batches = [batch for _, batch in pairs(data)]
    tables, name, counts = [], "", set()
    unseen: tuple[str, ...] = ()
    for width in widths:
        for seed in range(seeds):
            torch.manual_seed(seed)
            built = factory(width)
            model, own = built if isinstance(built, tuple) and len(built) == 2 else (built, None)
            if not isinstance(model, nn.Module):
                step = "Return nn.Module, or (module, optimizer)"
                raise InputError("width_check", "factory(width) returns a model", type(model).__name__, step)
            own = own or (optimizer or (lambda m: torch.optim.Adam(m.parameters(), lr=1e-3)))(model)
            counts.add(sum(p.numel() for p in model.parameters()))
            sizes, unseen = _sizes(model, own, batches, loss or guess_loss, iterations)
            broken = next((key for key, size in sizes.items() if not math.isfinite(size)), None)
            if broken:
                raise NonFiniteError(f"width_check: at width {width} the {broken[1]} of {broken[0]} is not finite")
            tables.append((width, sizes))
            name = type(own).__name__
    if len(counts) == 1:
        rule, got = "the factory builds wider networks for larger widths", f"{counts.pop()} parameters at every width"
        raise InputError("width_check", rule, got, "Use the argument")
    slopes = _judge(widths, tables)
    order = {"activation": 0, "input": 0, "logits": 0, "update": 1, "logit change": 1}
    causes = sorted((item for item in slopes if item.cause), key=lambda item: order[item.quantity])
    return WidthCheck(slopes, widths, tuple(dict.fromkeys(c.name for c in causes)), unseen, iterations, name)


def _rms(value: Tensor | None) -> float:
    return 0.0 if value is None or not value.numel() else float(value.detach().double().square().mean().sqrt())


def _sizes(
    model: nn.Module, optimizer: torch.optim.Optimizer, batches: list[Any], loss: Callable[..., Tensor], steps: int
) -> tuple[Sizes, tuple[str, ...]]:
    """Train, and return the sizes of every layer that owns parameters; of its updates the largest, with its input."""
    model.train()
    sizes: Sizes = {}
    parameters = dict(model.named_parameters())
    slopes = dict.fromkeys(parameters, 0.0)
    calls, first_output = _calls(model, batches[0])
    for layer, call in calls.items():
        sizes[layer, "input"], sizes[layer, "activation"] = _rms_given(call), _rms(call.made)
    for step in range(steps):
        inputs, targets = batches[step % len(batches)]
        calls, _ = _calls(model, batches[step % len(batches)])
        starts = {name: value.detach().clone() for name, value in parameters.items()}
        optimizer.zero_grad()
        loss(call_model(model, inputs), targets).backward()
        optimizer.step()
        spend("gradients")
        slopes |= {k: max(slopes[k], _rms(v.grad)) for k, v in parameters.items() if v.grad is not None}
        for layer, call in calls.items():
            for name in _trainable(call.module):
                whole, old = f"{layer}.{name}", {key: starts[f"{layer}.{key}"] for key in _trainable(call.module)}
                moved = _rms(_replay(call, {**old, name: parameters[whole].detach()}) - _replay(call, old))
                if moved >= sizes.get((whole, "update"), 0.0) or math.isnan(moved):
                    sizes[whole, "update"], sizes[whole, "input"] = moved, _rms_given(call)
    for name, slope in slopes.items():
        if slope <= ROUNDING * max(slopes.values()) and (name, "update") in sizes:
            sizes[name, "update"] = 0.0
    last_output = _calls(model, batches[0])[1]
    assert first_output is not None and last_output is not None
    sizes["(model)", "logits"], sizes["(model)", "logit change"] = _rms(first_output), _rms(last_output - first_output)
    return sizes, tuple(name for name in parameters if (name, "update") not in sizes)


def _rms_given(call: ModuleCall) -> float:
    """Return the size of what a layer reads; 1 for indices."""
    return _rms(call.given) if call.given is not None and call.given.is_floating_point() else 1.0


def _calls(model: nn.Module, batch: Any) -> tuple[dict[str, ModuleCall], Tensor | None]:
    """Return the first call of every layer that owns parameters, in order, and the model's output."""
    calls: dict[str, ModuleCall] = {}

    def keep(call: ModuleCall) -> None:
        if call.leaf and call.name != "(model)" and _trainable(call.module):
            calls.setdefault(call.name, call)

    torch.manual_seed(0)  # dropout draws the same mask before and after
    with torch.no_grad(), watched(model, keep):
        output = first_tensor(call_model(model, batch[0]))
    return calls, output


def _trainable(module: nn.Module) -> list[str]:
    return [name for name, p in module.named_parameters() if p.requires_grad]


def _replay(call: ModuleCall, values: dict[str, Tensor]) -> Tensor:
    torch.manual_seed(0)
    with torch.no_grad():
        made = first_tensor(torch.func.functional_call(call.module, values, call.args, call.kwargs))
    assert made is not None
    return made.double()


def _judge(widths: Sequence[int], tables: Sequence[tuple[int, Sizes]]) -> tuple[WidthSlope, ...]:
    keys = [key for key in tables[0][1] if all(key in sizes for _, sizes in tables)]
    last = [name for name, quantity in keys if quantity == "activation"][-1:]
    fits = {key: _fit([(width, sizes[key]) for width, sizes in tables]) for key in keys}
    slopes: list[WidthSlope] = []
    spoilt = False  # an activation that grows or vanishes on the way explains the inputs behind it
    for (name, quantity), (slope, low, high, verdict) in fits.items():
        if quantity == "input" and (name, "update") in fits:
            continue
        may_vanish = quantity == "logits" or (quantity == "activation" and [name] == last)
        verdict = "ok" if may_vanish and high <= LIMIT else verdict
        bad = verdict in ("grows", "vanishes")
        arrives = fits.get((name, "input"))
        if quantity == "input":
            cause = bad and not spoilt
        elif quantity in ("logits", "logit change"):  # blamed on the model where no layer explains it
            cause = bad and not any(item.cause for item in slopes)
        else:
            same = arrives is not None and arrives[3] == verdict and abs(slope - arrives[0]) <= LIMIT
            cause = bad and not same
        spoilt |= bad and quantity in ("input", "activation")
        sizes = tuple(fmean(table[name, quantity] for w, table in tables if w == width) for width in widths)
        slopes.append(WidthSlope(name, quantity, slope, low, high, verdict=verdict, cause=cause, sizes=sizes))
    return tuple(slopes)


def _fit(points: list[tuple[int, float]]) -> tuple[float, float, float, Verdict]:
    """Return slope, ends and verdict of log size over log width by least squares."""
    if all(size == 0 for _, size in points):
        return math.nan, math.nan, math.nan, "zero"
    if any(not size > 0 for _, size in points):
        return math.nan, math.nan, math.nan, "undecided"
    x, y = (torch.tensor([math.log(p[k]) for p in points], dtype=torch.float64) for k in (0, 1))
    x, y = x - x.mean(), y - y.mean()
    slope = float(x @ y / (x @ x))
    error = math.sqrt(float((y - slope * x).square().sum()) / (len(points) - 2) / float(x @ x))
    half = student_quantile(CONFIDENCE, len(points) - 1) * error
    low, high = slope - half, slope + half
    if low > LIMIT or high < -LIMIT:
        return slope, low, high, "grows" if slope > 0 else "vanishes"
    return slope, low, high, "ok" if low >= -LIMIT and high <= LIMIT else "undecided"
