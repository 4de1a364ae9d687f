"""`ng.translate`: rate, decay and momentum of one optimizer as another one's, by equal angular updates per layer."""

import math
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, NonFiniteError, unknown_name
from normgauge.lab.runs.recipe import Joined
from normgauge.measure.signal.updates import copy_optimizer
from normgauge.objective import Objective
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument

KINDS: dict[str, type[torch.optim.Optimizer]] = {
    "sgd": torch.optim.SGD, "momentum": torch.optim.SGD, "adam": torch.optim.Adam, "adamw": torch.optim.AdamW,
}  # fmt: skip
WINDOW = 10  # steps whose displacement is compared: the memory of a momentum of 0.9
EQUIVALENT = 0.25  # of the progress in loss: how far the two may part in the steps that are tried
TURNED = 2.0  # factor between the angles of a layer under both
OFF = 0.1  # share of all entries whose layers may turn by another factor
ROUNDING = 1e-6  # of the largest gradient: below, a tensor is dead and its steps are rounding errors


@dataclass(frozen=True)
class LayerRate:
    """What one tensor is trained with."""

    parameter: str  # its name
    optimizer: str  # of the translation: for "muon" matrices get Muon, the rest AdamW
    rate: float
    decay: float
    angle: float  # rms angle in radians by which ten steps turn it, before
    shrink: float  # share by which decay shrinks it per step, before and after
    ratio: float  # angle of ten steps after over before the translation, over the steps tried; nan for a dead tensor


@dataclass(frozen=True)
class Translation(Result):
    """Another optimizer's equivalent settings, and how they fared beside the first in the steps that were tried.

    Attributes:
        layers: one per tensor.
        source: the class translated from.
        to: "sgd", "momentum", "adam", "adamw" or "muon".
        momentum: memory of the translation.
        first_loss: at the start.
        source_loss: mean over the last quarter of the steps.
        loss: the same, of the translation.
        steps: that were tried.
        optimizer: ready to train the objective's model.
    """

    layers: tuple[LayerRate, ...]
    source: str
    to: str
    momentum: float
    first_loss: float
    source_loss: float
    loss: float
    steps: int
    optimizer: Any = field(repr=False, compare=False)

    @property
    def rate(self) -> float:
        """The learning rate: median over the tensors."""
        return sorted(layer.rate for layer in self.layers)[len(self.layers) // 2]

    @property
    def equivalent(self) -> bool:
        """Whether both made the same progress, to 25 %, in the steps that were tried."""
        return self.status == "ok"

    @property
    def code(self) -> str:
        """Python that makes the optimizer for a `model` of the same parameters."""
        lines = [f"settings = {{  # {self.to}, momentum {self.momentum:g}: parameter -> lr, weight_decay"]
        lines += [f"    {item.parameter!r}: ({item.rate:.4g}, {item.decay:.4g})," for item in self.layers]
        lines += ["}", "groups = [", "    {'params': [p], 'lr': settings[n][0], 'weight_decay': settings[n][1]}"]
        lines += ["    for n, p in model.named_parameters() if n in settings", "]"]
        if self.to != "muon":
            word = f"betas=({self.momentum:g}, 0.999)" if "adam" in self.to else f"momentum={self.momentum:g}"
            return "\n".join([*lines, f"optimizer = torch.optim.{KINDS[self.to].__name__}(groups, {word})"])
        how = next((g["adjust_lr_fn"] for g in self.optimizer.param_groups if "adjust_lr_fn" in g), None)
        words = f"momentum={self.momentum:g}" + (f", adjust_lr_fn={how!r}" if how else "")
        lines += [f"muon = torch.optim.Muon([g for g in groups if g['params'][0].ndim == 2], {words})"]
        return "\n".join([*lines, "adamw = torch.optim.AdamW([g for g in groups if g['params'][0].ndim != 2])"])

    def readings(self) -> tuple[Reading, ...]:
        """Return the median rate, both losses, and every layer's rate."""
        return (
            Reading("learning rate", self.rate, "estimate"),
            Reading("loss before", self.source_loss, "estimate"),
            Reading.measured("loss translated", self.loss, "estimate", why="the translated run broke"),
            *(Reading("learning rate", item.rate, "estimate", layer=item.parameter) for item in self.layers),
        )

    def _title(self) -> str:
        return f"{self.source} as {self.to}: learning rate {self.rate:.3g} (median over {len(self.layers)} tensors)"

    def _rows(self) -> list[dict[str, Any]]:
        return [vars(item) for item in self.layers]

    def _meaning(self) -> str:
        rates = [item.rate for item in self.layers]
        spread = f"rates {min(rates):.2g} to {max(rates):.2g} by layer, momentum {self.momentum:g}"
        went = f"from {self.first_loss:.4g} to {self.source_loss:.4g} before, {self.loss:.4g} translated"
        far = f"within {EQUIVALENT:.0%} of the progress" if self.equivalent else "so check it on a whole run"
        return f"{self.to} with {spread} turns every layer as {self.source} does; in {self.steps} steps {went}, {far}."

    def _notes(self) -> str:
        return "angles of this point and these batches: gradients that shrink slow SGD and not Adam or Muon"

    def chart(self) -> Chart:
        """Return bars of the rates."""
        from normgauge.charts import bars

        rows = [{"label": item.parameter, "value": item.rate, "series": item.optimizer} for item in self.layers]
        return bars(rows, x="label", series="series", title="learning rate", x_title="")


@instrument
def translate(
    optimizer: torch.optim.Optimizer, *, to: str | type, objective: Objective, iterations: int = 40, **options: Any
) -> Translation:
    """Return settings of another optimizer that turn every layer as far per step, and shrink it as much by decay.

    A copy of the optimizer takes `iterations` steps on copies of the parameters, batch by batch. The other one is fed
    the same gradients at rate 1 beside it; a layer's rate is the ratio of how far ten steps of each move it across the
    weights. Moved that far, and shrunk by decay by the same share s per step (SGD: `lr decay / (1 - momentum)`, AdamW
    and Muon: `lr decay`, Adam: `lr decay sqrt(size) / |g|`), a scale-invariant weight ends at the same angle per
    gradient, `sqrt(2 s)` with its later effects by momentum. Then the translation is tried on the same batches; where
    it falls behind, breaks or turns layers by other angles, status is "nonconverged" and the sentence says so.

    Kind: estimate. Cost: `2 iterations` gradients.

    Args:
        optimizer: with its settings and state; it is copied, not stepped.
        to: "sgd", "momentum", "adam", "adamw", "muon" (matrices to Muon, the rest to AdamW), or torch's class.
        objective: of the model it trains, with batches of the size you train with: eight or more.
        iterations: steps that are tried.
        options: of the other optimizer, such as `momentum=0.95`, `betas=...` or `adjust_lr_fn="match_rms_adamw"`; by
            default its memory (momentum, beta1) is the first one's.

    Raises:
        UnknownNameError: for an optimizer that is not among these.
        InputError: for one of another model, or options it does not take.
        NonFiniteError: where the optimizer itself breaks in these steps.

    Examples:
        Momentum of 0.9 sums ten gradients, so plain SGD needs nearly ten times its rate:

        >>> _ = torch.manual_seed(0)
        >>> model = nn.Sequential(nn.Linear(4, 8), nn.Tanh(), nn.Linear(8, 2))
        >>> data = [(torch.randn(16, 4), torch.randn(16, 2)) for _ in range(8)]
        >>> o = Objective(model, nn.functional.mse_loss, data, mode="train")
        >>> found = translate(torch.optim.SGD(model.parameters(), lr=0.01, momentum=0.9), to="sgd", objective=o)
        >>> 0.05 < found.rate < 0.11, found.equivalent
        (True, True)

    References: kosson2024, wan2021
    """
    kind = _kind_of(to)
    if not isinstance(optimizer, torch.optim.Optimizer) or iterations < 2 * WINDOW:
        rule = f"a torch optimizer, and {2 * WINDOW} steps or more"
        got, step = f"{type(optimizer).__name__}, {iterations} steps", "Pass the one you train with"
        raise InputError("translate", rule, got, step)
    groups = _groups_of(optimizer, objective)
    memory = max(float(group.get("momentum") or group.get("betas", (0.0,))[0]) for group in groups.values())
    memory = {"sgd": 0.0, "momentum": memory or 0.9}.get(kind, memory)
    memory = float(options.pop("momentum", options.get("betas", (memory,))[0]))
    single = [objective.replace(data=batch) for _, batch in objective.batches()]
    before = _Walk(objective, optimizer)
    shadows = {name: nn.Parameter(before.copies[name].detach().clone()) for name in groups}
    try:
        shadow = _make(kind, {name: (p, 1.0, 0.0) for name, p in shadows.items()}, memory, options)
    except (TypeError, ValueError) as error:
        raise InputError("translate", f"options are those of {kind}", str(error), "Correct them") from error
    pushed = _walk_beside(before, shadow, shadows, single, iterations)
    layers: dict[str, dict[str, float]] = {}
    rates = {name: _ratio(before.windows(name), pushed.windows(name)) for name in groups}
    alive = [name for name in rates if before.slopes[name] > ROUNDING * max(before.slopes.values()) and rates[name] > 0]
    usual = sorted(rates[name] for name in alive)[len(alive) // 2] if alive else 0.0
    for name, group in groups.items():
        moved, rate = before.windows(name), rates[name] if name in alive else usual
        size, slope = shadows[name].numel(), before.slopes[name]
        shrink = _shrink(type(optimizer).__name__, group, size, slope)
        decay = _decay(_part(kind, shadows[name]), shrink, rate, memory, size, slope)
        layers[name] = {"rate": rate, "decay": decay, "angle": _rms(moved), "shrink": shrink}
    named = dict(objective.model.named_parameters())
    held = {name: (named[name], own["rate"], own["decay"]) for name, own in layers.items()}
    made = _make(kind, held, memory, options)
    after = _Walk(objective, made)
    sentence = after.run(single, iterations)
    turned = dict.fromkeys(layers, math.nan)
    turned |= {name: _rms(after.windows(name)) / _rms(before.windows(name)) for name in alive}
    tail = max(1, iterations // 4)
    first, ends = before.losses[0], [sum(walk.losses[-tail:]) / tail for walk in (before, after)]
    gap = abs(ends[1] - ends[0]) / max(abs(first - ends[0]), 1e-12)
    off = [name for name in alive if not 1 / TURNED <= turned[name] <= TURNED]
    entries = [sum(shadows[name].numel() for name in some) for some in (off, shadows)]
    if not sentence and gap > EQUIVALENT:
        sentence = f"its loss is {ends[1]:.3g} and not {ends[0]:.3g} after {iterations} steps, "
        sentence += f"{gap:.0%} of the progress off"
    elif not sentence and entries[0] > OFF * entries[1]:
        sentence = f"{off[0]} turns {turned[off[0]]:.2g} times as far, and {len(off) - 1} tensors more over {TURNED:g}"
    rows = tuple(LayerRate(name, _part(kind, shadows[name]), **layers[name], ratio=turned[name]) for name in layers)
    return Translation(
        layers=rows, source=type(optimizer).__name__, to=kind, momentum=memory, first_loss=first, source_loss=ends[0],
        loss=ends[1], steps=iterations, optimizer=made, status="nonconverged" if sentence else "ok", sentence=sentence,
    )  # fmt: skip


def _kind_of(to: str | type) -> str:
    names = {"SGD": "momentum", "Adam": "adam", "AdamW": "adamw", "Muon": "muon"}
    kind = names.get(to.__name__, to.__name__) if isinstance(to, type) else str(to).lower()
    if kind not in (*KINDS, "muon"):
        raise unknown_name("optimizer", kind, (*KINDS, "muon"))
    return kind


def _part(kind: str, parameter: Tensor) -> str:
    """Return which optimizer a tensor gets."""
    return kind if kind != "muon" or parameter.ndim == 2 else "adamw"


def _make(
    kind: str, named: Mapping[str, tuple[Tensor, float, float]], memory: float, options: Mapping[str, Any]
) -> torch.optim.Optimizer:
    """Return the optimizer of tensors with a rate and decay each."""
    groups: dict[str, list[dict[str, Any]]] = {}
    for name, (tensor, rate, decay) in named.items():
        group = {"params": [tensor], "lr": rate, "weight_decay": decay, "name": name}
        groups.setdefault(_part(kind, tensor), []).append(group)
    parts = []
    for part, some in groups.items():
        own = dict(options) if part == kind else {}
        if part in ("adam", "adamw"):
            own.setdefault("betas", (memory if part == kind else 0.9, 0.999))
        else:
            own["momentum"] = memory
        parts.append((torch.optim.Muon if part == "muon" else KINDS[part])(some, **own))
    return parts[0] if len(parts) == 1 else Joined(*parts)


def _groups_of(optimizer: torch.optim.Optimizer, objective: Objective) -> dict[str, dict[str, Any]]:
    """Return the options of every variable the optimizer holds."""
    by_id = {id(p): group for group in optimizer.param_groups for p in group["params"]}
    named = dict(objective.model.named_parameters())
    groups = {name: by_id[id(named[name])] for name in objective.names if id(named[name]) in by_id}
    if not groups:
        step = "Make it from objective.model"
        raise InputError("translate", "the optimizer holds the model's parameters", "another model's", step)
    return groups


def _shrink(name: str, group: Mapping[str, Any], size: int, slope: float) -> float:
    """Return the share by which weight decay shrinks a tensor per step."""
    step = float(group["lr"]) * float(group.get("weight_decay") or 0.0)
    if name == "SGD":
        return step * (1 - float(group["dampening"])) / (1 - float(group["momentum"]))
    coupled = name == "Adam" and not group.get("decoupled_weight_decay")
    return step * math.sqrt(size) / slope if coupled and slope else step


def _decay(part: str, shrink: float, rate: float, memory: float, size: int, slope: float) -> float:
    """Return the weight decay by which `part` shrinks a tensor by that share."""
    if not rate:
        return 0.0
    if part in ("sgd", "momentum"):
        return shrink * (1 - memory) / rate
    return shrink * slope / (rate * math.sqrt(size)) if part == "adam" else shrink / rate


def _ratio(moved: list[float], other: list[float]) -> float:
    """Return the geometric mean over windows of how much farther the first moves; 0 where one of them does not."""
    ratios = [math.log(a / b) for a, b in zip(moved, other, strict=True) if a > 0 and b > 0]
    return math.exp(sum(ratios) / len(ratios)) if ratios else 0.0


def _rms(values: list[float]) -> float:
    return math.sqrt(sum(value * value for value in values) / len(values)) if values else 0.0


class _Walk:
    """A copy of an optimizer that walks from the objective's parameters; keeps losses and moves across the weights."""

    def __init__(self, objective: Objective, optimizer: Any) -> None:
        self.twin, self.copies = copy_optimizer(objective, optimizer)
        self.names, self.losses = objective.names, list[float]()
        self.moves: dict[str, list[Tensor]] = {name: [] for name in self.names}
        self.squares = dict.fromkeys(self.names, 0.0)

    @property
    def slopes(self) -> dict[str, float]:
        """Root mean squares over steps of the gradients' norms."""
        return {name: math.sqrt(value / max(len(self.losses), 1)) for name, value in self.squares.items()}

    def step(self, objective: Objective) -> dict[str, Tensor]:
        """Take a step on one batch and return the gradient before it."""
        start = {name: self.copies[name].detach().clone() for name in self.names}
        loss, gradient = objective.at(start).loss_and_gradient()
        self.losses.append(float(loss))
        for name in self.names:
            self.copies[name].grad = gradient[name].clone()
            self.squares[name] += float(gradient[name].double().square().sum())
        type(self.twin).step(self.twin)
        for name in self.names:
            self.keep(name, start[name], self.copies[name].detach())
        return gradient

    def keep(self, name: str, start: Tensor, end: Tensor) -> None:
        """Keep the part of a move across the weights, relative to their norm."""
        w, move = start.double(), (end - start).double()
        square = float(w.square().sum())
        across = move - (w * move).sum() / square * w if square and w.numel() > 1 else move
        self.moves[name].append(across / (math.sqrt(square) or 1.0))

    def windows(self, name: str) -> list[float]:
        """Return how far ten steps together move a tensor, window by window."""
        moves = self.moves[name]
        starts = range(0, len(moves) - WINDOW + 1, WINDOW)
        return [float(torch.stack(moves[at : at + WINDOW]).sum(0).norm()) for at in starts]

    def run(self, batches: list[Objective], steps: int) -> str:
        """Take the steps; a sentence where they break."""
        try:
            for step in range(steps):
                self.step(batches[step % len(batches)])
        except NonFiniteError as error:
            self.losses.append(math.inf)
            return f"it breaks at step {len(self.losses)}: {error}"
        return ""


def _walk_beside(
    walk: _Walk, shadow: Any, shadows: Mapping[str, nn.Parameter], batches: list[Objective], steps: int
) -> _Walk:
    """Walk, and feed the same gradients to the shadow at the same places; return the shadow's moves."""
    beside = object.__new__(_Walk)
    beside.moves = {name: [] for name in shadows}
    for step in range(steps):
        places = {name: walk.copies[name].detach().clone() for name in shadows}
        gradient = walk.step(batches[step % len(batches)])
        for name, parameter in shadows.items():
            parameter.data.copy_(places[name])
            parameter.grad = gradient[name].clone()
        shadow.step()
        for name, parameter in shadows.items():
            beside.keep(name, places[name], parameter.detach())
    return beside
