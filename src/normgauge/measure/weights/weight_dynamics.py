"""Where the norms of scale-invariant weights are heading under an optimizer, and how fast their directions turn."""

from __future__ import annotations

import math
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from normgauge.charts import bars
from normgauge.errors import InputError
from normgauge.measure.signal.updates import apply_update, groups_by_name
from normgauge.objective import Objective
from normgauge.records import Chart, Kind, Reading
from normgauge.results import Result, instrument
from normgauge.symmetry import Family, Symmetries
from normgauge.symmetry import symmetries as find_symmetries
from normgauge.theory import weight_dynamics as theory
from normgauge.theory.weight_dynamics import Equilibrium, recorded_equilibrium, steps_to_equilibrium

SETTLED = 0.05  # relative distance from the equilibrium norm: the effective rate is then within ten percent
Values = Mapping[str, Tensor]
# Steps weigh as the cube of their number: half of a mean comes from the last sixth of the steps, little from the start.
FORGETTING = 3
FEW = 50  # fewer squared gradients, as scattered as large, may leave an error over 5% in the norm, their fourth root
_HYPERBALL = re.compile("Hyperball|(Adam|Muon)H$")  # as their authors and Emerging-Optimizers call these classes


@dataclass(frozen=True)
class WeightBlock:
    """One family of blocks (rows of a layer, a whole tensor, tensors that scale together), medians over its rows.

    Attributes:
        parameters: the tensors.
        blocks: how many rows.
        size: entries of one row.
        scale_invariant: whether the function ignores the norm.
        norm: now.
        next_norm: after the optimizer's next step with this gradient, exactly (nan without an optimizer).
        gradient: root of the mean squared gradient norm over the batches.
        radial: largest `|<w, g>| / (|w| |g|)`: zero where the scale really is free.
        angle: of the next step, exactly.
        relative_update: |w' - w| / |w| of the next step, exactly; decay is part of it.
        norms: of every row that is not zero.
        effective_rate: of the direction `w / |w|`.
        equilibrium_norm: where the norm settles.
        equilibrium_angle: rms angle of a step there.
        steps: until the norm is within 5 % of it.
        heading: growing, shrinking, settled, fixed or unknown.
        law: the sentence behind the prediction.
        equilibria: of the same rows.
    """

    parameters: tuple[str, ...]
    blocks: int
    size: int
    scale_invariant: bool
    norm: float
    next_norm: float
    gradient: float
    radial: float
    angle: float
    relative_update: float
    norms: tuple[float, ...]
    effective_rate: float = math.nan
    equilibrium_norm: float = math.nan
    equilibrium_angle: float = math.nan
    steps: float = math.nan
    heading: str = "unknown"
    law: str = "its scale matters to the function; no law predicts its norm"
    equilibria: tuple[float, ...] = ()


@dataclass(frozen=True)
class WeightDynamics(Result):
    """The blocks of a model with their laws.

    Attributes:
        blocks: one item per family of scale-invariant blocks, then the parameters that are not.
        optimizer: its class.
        basis: what the size of gradients was taken from.
    """

    blocks: tuple[WeightBlock, ...]
    optimizer: str
    basis: str

    def __getitem__(self, parameter: str) -> WeightBlock:
        """Return the block that has a parameter."""
        return next(block for block in self.blocks if parameter in block.parameters)

    def _title(self) -> str:
        free = sum(block.blocks for block in self.blocks if block.scale_invariant)
        return f"Weight dynamics under {self.optimizer}: {free} scale-invariant blocks"

    def _rows(self) -> list[dict[str, Any]]:
        names = "blocks size scale_invariant norm next_norm gradient effective_rate angle relative_update"
        names += " equilibrium_norm equilibrium_angle steps heading"
        return [
            {"parameters": _name_block(block.parameters), **{name: getattr(block, name) for name in names.split()}}
            for block in self.blocks
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return norm, angle and relative size of the next step, and where the scale is free the equilibrium."""
        kinds: dict[str, Kind] = {"norm": "exact", "angle": "exact", "relative_update": "exact"}
        kinds |= {"equilibrium_norm": "estimate", "steps": "estimate"}
        found = []
        for block in self.blocks:
            why, layer = "no optimizer was given, or no law is known", ", ".join(block.parameters)
            for name, kind in kinds.items():
                if block.scale_invariant or kind == "exact":
                    value = getattr(block, name)
                    found.append(Reading.measured(name.replace("_", " "), value, kind, layer=layer, why=why))
        return tuple(found)

    def _meaning(self) -> str:
        free = [block for block in self.blocks if block.scale_invariant]
        if not free:
            told = f"None of {len(self.blocks)} tensors has a free scale"
            return f"{told}: weight decay limits the function, not the rate."
        moving = [block for block in free if block.heading in ("growing", "shrinking")]
        if not moving:
            words = ", ".join(dict.fromkeys(block.heading for block in free))
            return f"The norms of {len(free)} scale-invariant groups are {words} ({SETTLED:.0%} counts as settled)."
        last = max(moving, key=lambda block: block.steps)
        span = f"about {last.steps:.2g} steps" if math.isfinite(last.steps) else "no end"
        told = f"{len(moving)} of {len(free)} scale-invariant groups are over {SETTLED:.0%} from equilibrium"
        way = f"{last.heading} from {last.norm:.3g} to {last.equilibrium_norm:.3g} with {span} to go"
        return f"{told}: {_name_block(last.parameters)} is {way}, and until then its effective rate changes by itself."

    def _notes(self) -> str:
        laws = "; ".join(dict.fromkeys(block.law for block in self.blocks if block.scale_invariant))
        keep = f"equilibria assume isotropic gradients that keep their size, seen in {self.basis}"
        rough = "norms are rough while it still changes, as early in training, angles less so"
        return "; ".join(
            ["medians over rows", *([laws] if laws else []), *([f"{keep}: {rough}"] if "settles" in laws else [])]
        )

    def chart(self) -> Chart:
        """Return bars of the norm now and at equilibrium, per block."""
        rows = [
            {"label": ", ".join(block.parameters), "value": value, "series": series}
            for block in self.blocks
            if block.scale_invariant
            for series, value in (("now", block.norm), ("equilibrium", block.equilibrium_norm))
            if math.isfinite(value)
        ]
        return bars(rows, x="label", series="series", title="norm of scale-invariant blocks", x_title="")


@instrument
def weight_dynamics(
    objective: Objective,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    symmetries: Symmetries | None = None,
    record: UpdateRecord | None = None,
    seed: int = 0,
) -> WeightDynamics:
    """Tell for every block whether its scale is free, and where the optimizer is taking its norm and direction.

    For scale-invariant w the gradient is orthogonal to w and falls as 1 / |w|, so steps make the norm grow and weight
    decay makes it shrink until both balance; `theory.weight_dynamics` has the laws for SGD, momentum, Nesterov, AdamW,
    Adam with L2 and Muon as torch implements them, and for hyperball optimizers. `G`, the mean of |w|^2 |g|^2, is taken
    over the objective's batches: pass batches of the size you train with, since their noise is part of it. With a
    record of real steps the size of SGD's updates is the recorded one; the laws of AdamW and Muon do not ask for it.
    Angle and relative size of the next step are given for all blocks, scale-invariant or not.

    Kind: norms and the next step are exact; equilibria are estimates: they assume gradients that are isotropic and
        independent between steps, and updates that stay of today's (or the record's) size. Cost: one gradient per
        batch, and `ng.symmetries`.

    Args:
        objective: what is trained; the model is left as it was.
        optimizer: torch's or ours, with its state; `None` for norms and gradients only. It is copied, not stepped.
        symmetries: from `ng.symmetries`, if at hand.
        record: an `UpdateRecord` of steps of this optimizer, such as the first tenth of a training; what it predicts
            is rough while gradients still change (see the page), and is said to rest on few steps below 50.
        seed: of the symmetries otherwise.

    Examples:
        Without weight decay the squared norm grows by lr^2 |g|^2, exactly:

        >>> net = torch.nn.Sequential(torch.nn.Linear(3, 1, bias=False), torch.nn.BatchNorm1d(1, eps=1e-12))
        >>> x = torch.randn(16, 3, generator=torch.Generator().manual_seed(0))
        >>> o = Objective(net, torch.nn.functional.mse_loss, (x, x[:, :1] ** 2), mode="train")
        >>> block = weight_dynamics(o, torch.optim.SGD(net.parameters(), lr=0.5))["0.weight"]
        >>> grown = block.norm**2 + 0.25 * block.gradient**2
        >>> block.scale_invariant, block.heading, abs(block.next_norm**2 - grown) < 1e-5
        (True, 'growing', True)

    References: sun2020, heo2021, wan2021, kosson2024, akbar2025
    """
    groups = {} if optimizer is None else groups_by_name(objective, optimizer)
    symmetries = find_symmetries(objective, seed=seed) if symmetries is None else symmetries
    squares, slopes = _gradients(objective)
    own, moved = objective.parameters, None
    if optimizer is not None:  # the step of a copy: exact for any optimizer, and leaves no trace
        after = apply_update(objective, optimizer, {name: value.to(own[name]) for name, value in slopes.items()})
        moved = {name: value.double() for name, value in after.items()}
    point = {name: value.double() for name, value in own.items()}
    state = _State(point, squares, slopes, moved, {} if record is None else record.of(objective))
    blocks = []
    for family in symmetries.families:
        plain = all(term.role == "scale" and term.coefficient == 1 for term in family.terms)
        free = family.kind == "scale" and family.status != "undecided" and plain
        if free and bool(family.gather(state.point, state.point).any()):
            laws = {law_of(optimizer, groups.get(name)).name for name in family.parameters}
            law = law_of(optimizer, groups.get(family.parameters[0]))
            if len(laws) > 1:
                law = Law("unknown", {}, 4.0, "its tensors have different optimizers' laws; none is known for all")
            blocks.append(_block(family, law, state))
    covered = {name for block in blocks for name in block.parameters}
    blocks += [_ordinary_block(name, state) for name in state.point if name not in covered]
    kept = record is not None and bool(state.recorded) and any(block.law.startswith("SGD") for block in blocks)
    count = record.steps if record is not None and kept else sum(1 for _ in objective.batches())
    basis = f"{count} {'recorded step' if kept else 'batch'}{('s' if kept else 'es') if count > 1 else ''}"
    basis += f" (few: under {FEW})" if count < FEW else ""
    return WeightDynamics(tuple(blocks), "gradient flow" if optimizer is None else type(optimizer).__name__, basis)


@dataclass(frozen=True)
class _State:
    """Weights, their gradients, where they go next and what a record says of them, by name."""

    point: Values
    squares: Values
    slopes: Values
    moved: Values | None
    recorded: Mapping[str, tuple[Tensor, Tensor]]


def _name_block(parameters: Sequence[str]) -> str:
    """Name tensors that scale together by the first of them and how many more there are."""
    return parameters[0] + (f" and {len(parameters) - 1} more" if len(parameters) > 1 else "")


def _gradients(objective: Objective) -> tuple[Values, Values]:
    """Return per entry the mean over batches of the squared gradient, and the mean gradient."""
    squares: dict[str, Tensor] = {}
    slopes: dict[str, Tensor] = {}
    total = 0.0
    for _, batch in objective.batches():
        share = objective.weight(batch)
        for name, value in objective.replace(data=batch).gradient().items():
            wide = value.double()
            squares[name] = squares.get(name, 0) + share * wide.square()
            slopes[name] = slopes.get(name, 0) + share * wide
        total += share
    return {k: v / total for k, v in squares.items()}, {k: v / total for k, v in slopes.items()}


def _block(family: Family, law: Law, state: _State) -> WeightBlock:
    ones = {name: torch.ones_like(value) for name, value in state.point.items()}
    there = family.gather(state.point, state.point) > 0  # a row of zeros has no direction

    def gather(left: Values, right: Values) -> Tensor:
        return family.gather(left, right)[there]

    sizes, w2 = gather(ones, ones), gather(state.point, state.point)
    g2, slopes = gather(ones, state.squares), state.slopes
    along = gather(state.point, slopes).abs() / (w2 * gather(slopes, slopes)).clamp_min(1e-300).sqrt()
    norms = w2.sqrt().tolist()
    shape = tuple(state.point[family.parameters[0]].shape) if len(family.parameters) == 1 else ()
    if law.name == "sgd" and all(name in state.recorded for name in family.parameters):
        means = [{name: pair[i] for name, pair in state.recorded.items()} for i in range(2)]
        pairs = zip(*(gather(ones, mean).tolist() for mean in means), strict=True)
        settled = [recorded_equilibrium(law.rate, law.keep, pair, law.memory, law.power) for pair in pairs]
    else:
        settled = [
            law.equilibrium(int(n), float(a * b), math.sqrt(float(a)), shape)
            for n, a, b in zip(sizes.tolist(), w2.tolist(), g2.tolist(), strict=True)
        ]
    steps = [
        steps_to_equilibrium(norm, s.norm, s.relaxation, law.power) if s.norm > 0 else math.inf
        for norm, s in zip(norms, settled, strict=True)
    ]
    new = state.moved
    after, angle, relative = _next_step(w2, *((gather(new, new), gather(state.point, new)) if new else ()))
    norm, goal = median(norms), median(s.norm for s in settled)
    return WeightBlock(
        parameters=family.parameters,
        blocks=len(family),
        size=int(median(sizes.tolist())),
        scale_invariant=True,
        norm=norm,
        next_norm=after,
        gradient=median(g2.sqrt().tolist()),
        radial=float(along.max()),
        effective_rate=median(law.effective_rate(value) for value in norms),
        angle=angle,
        relative_update=relative,
        equilibrium_norm=goal,
        equilibrium_angle=median(s.angle for s in settled),
        steps=median(steps),
        heading=_heading(law, norm, goal),
        law=law.sentence,
        norms=tuple(norms),
        equilibria=tuple(s.norm for s in settled),
    )


def _heading(law: Law, norm: float, goal: float) -> str:
    if law.name in ("sphere", "hyperball", "gradient flow", "frozen"):
        return "fixed"
    if math.isnan(goal):
        return "unknown"
    if abs(norm - goal) <= SETTLED * goal < math.inf:
        return "settled"
    return "growing" if norm < goal else "shrinking"


def _next_step(w2: Tensor, moved: Tensor | None = None, cross: Tensor | None = None) -> tuple[float, float, float]:
    """Return medians of norm, angle and relative size of a step from `|w|^2`, `|w'|^2` and `<w, w'>`."""
    if moved is None or cross is None:
        return math.nan, math.nan, math.nan
    angle = torch.atan2((w2 * moved - cross.square()).clamp_min(0).sqrt(), cross)
    relative = ((w2 + moved - 2 * cross).clamp_min(0) / w2).sqrt()
    return median(moved.sqrt().tolist()), median(angle.tolist()), median(relative.tolist())


def _ordinary_block(name: str, state: _State) -> WeightBlock:
    w, g = state.point[name], state.slopes[name]
    norm, slope = float(w.norm()), float(g.norm())
    new = state.moved[name] if state.moved is not None else None
    moved = () if new is None else (new.square().sum()[None], (w * new).sum()[None])
    after, angle, relative = _next_step(w.square().sum()[None], *moved)
    return WeightBlock(
        parameters=(name,),
        blocks=1,
        size=w.numel(),
        scale_invariant=False,
        norm=norm,
        next_norm=after,
        gradient=slope,
        radial=abs(float((w * g).sum())) / (norm * slope) if norm * slope else 0.0,
        angle=angle if norm else math.nan,
        relative_update=relative if norm else math.nan,
        norms=(norm,),
    )


class UpdateRecord:
    """Means of `w^2` and `u^2 |w|^2` per entry over the steps taken inside `with UpdateRecord(optimizer) as record:`.

    The update is `u = (a w - w') / lr`, a the share of the weight that decay leaves, and `|w|` the norm of the tensor:
    their product does not change while the norm relaxes. Later steps weigh more. Give the record to
    `ng.weight_dynamics` after the first tenth of a training, which it does not change.

    Cost: a copy of the parameters during a step, two kept, all in float64, and a few passes over them a step.

    Examples:
        >>> w = torch.nn.Parameter(torch.tensor([2.0]))
        >>> optimizer = torch.optim.SGD([w], lr=0.5, weight_decay=0.1)
        >>> with UpdateRecord(optimizer) as record:
        ...     w.grad = torch.tensor([3.0])
        ...     _ = optimizer.step()
        >>> record.steps, [round(float(mean), 4) for mean in record.means[w]]
        (1, [4.0, 36.0])
    """

    def __init__(self, optimizer: torch.optim.Optimizer) -> None:
        if not isinstance(optimizer, torch.optim.Optimizer):
            remedy = "Pass the optimizer that is stepped"
            raise InputError("UpdateRecord", "it records a torch.optim.Optimizer", type(optimizer).__name__, remedy)
        self.optimizer, self.steps = optimizer, 0
        self.means: dict[Tensor, tuple[Tensor, Tensor]] = {}
        self._before: dict[Tensor, Tensor] = {}
        self._hooks: list[Any] = []

    def __enter__(self) -> UpdateRecord:
        """Begin to record."""
        before, after = self.optimizer.register_step_pre_hook, self.optimizer.register_step_post_hook
        self._hooks = [before(self._remember), after(self._add)]
        return self

    def __exit__(self, *_: object) -> None:
        """Take the hooks off."""
        for hook in self._hooks:
            hook.remove()
        self._before = {}

    def of(self, objective: Objective) -> dict[str, tuple[Tensor, Tensor]]:
        """Return, by the names of the objective's parameters, mean squares of weights and of updates at that norm."""
        named = [(name, self.means.get(parameter)) for name, parameter in objective.model.named_parameters()]
        return {name: (means[0], means[1] / means[0].sum()) for name, means in named if means is not None}

    def _remember(self, *_: Any) -> None:
        moving = [p for group in self.optimizer.param_groups for p in group["params"] if p.grad is not None]
        self._before = {parameter: parameter.detach().to(torch.float64, copy=True) for parameter in moving}

    @torch.no_grad()
    def _add(self, *_: Any) -> None:
        self.steps += 1
        share = (FORGETTING + 1) / (self.steps + FORGETTING)
        for group in self.optimizer.param_groups:
            law = law_of(self.optimizer, group)
            for parameter in group["params"]:
                if parameter not in self._before or not law.rate > 0:
                    continue
                weight = self._before[parameter]
                update = (law.keep * weight - parameter.detach().double()) / law.rate
                values = weight.square(), update.square() * weight.square().sum()
                for mean, new in zip(self.means.setdefault(parameter, values), values, strict=True):
                    mean.lerp_(new, share)
        self._before = {}


@dataclass(frozen=True)
class Law:
    """How a scale-invariant block moves under one parameter group."""

    name: str  # of the law
    group: dict[str, Any]  # the options of the optimizer for this block
    power: float  # the power of the norm that relaxes exponentially
    sentence: str  # what the law says

    @property
    def rate(self) -> float:
        """The learning rate."""
        return float(self.group.get("lr", math.nan))

    @property
    def decay(self) -> float:
        """The weight decay."""
        return float(self.group.get("weight_decay", 0.0))

    @property
    def momentum(self) -> float:
        """The momentum, beta1 for Adam."""
        return float(self.group["betas"][0] if "betas" in self.group else self.group.get("momentum", 0.0))

    @property
    def _passed(self) -> float:
        """The share of a gradient that enters SGD's buffer."""
        return 1 - float(self.group["dampening"]) if self.momentum else 1.0

    @property
    def keep(self) -> float:
        """The share of the weight that decay leaves in a step; SGD's goes through the buffer, all of it in the end."""
        if self.name in ("sphere", "hyperball"):
            return 1.0
        return 1 - self.rate * self.decay * (self._passed / (1 - self.momentum) if self.name == "sgd" else 1.0)

    def effective_rate(self, norm: float) -> float:
        """Return the rate for the direction `w / |w|`."""
        if self.name == "sgd":
            return theory.sgd_effective_rate(self.rate, norm, self.momentum, 1 - self._passed)
        if self.name in ("adamw", "adam_l2", "muon"):
            return self.rate / norm
        if self.name == "hyperball":
            return self.rate
        return self.rate / norm**2 if self.name in ("sphere", "gradient descent") else math.nan

    @property
    def memory(self) -> float:
        """`sum_k rho_k a^k` of SGD's updates made of independent gradients."""
        first = theory.momentum_filter(self.momentum, bool(self.group.get("nesterov", False)))[1]
        return theory.filtered_memory(first, self.momentum, self.keep)

    def equilibrium(self, size: int, G: float, norm: float, shape: tuple[int, ...] = ()) -> Equilibrium:
        """Return where the norm of a block is heading, `shape` that of the one matrix it belongs to."""
        nesterov = bool(self.group.get("nesterov", False))
        if self.name == "sgd":
            return theory.sgd_equilibrium(self.rate, self.decay, G, self.momentum, 1 - self._passed, nesterov)
        if self.name == "adamw":
            return theory.adamw_equilibrium(self.rate, self.decay, size, self.momentum)
        if self.name == "adam_l2":
            return theory.adam_l2_equilibrium(self.rate, self.decay, size, G, self.momentum)
        if self.name == "muon" and len(shape) == 2:
            scale = 0.2 * math.sqrt(max(shape)) if self.group.get("adjust_lr_fn") == "match_rms_adamw" else None
            own: dict[str, Any] = {
                "coefficients": tuple(self.group["ns_coefficients"]),
                "iterations": int(self.group["ns_steps"]),
            }
            whole = theory.muon_equilibrium(
                self.rate, self.decay, (shape[0], shape[1]), self.momentum, nesterov, scale=scale, **own
            )
            return whole._replace(norm=whole.norm * math.sqrt(size / math.prod(shape)))
        if self.name == "hyperball":
            return theory.hyperball_equilibrium(self.rate, norm, self.momentum, nesterov)
        if self.name == "sphere":
            return Equilibrium(norm, math.nan, 0.0)
        return Equilibrium(math.nan, math.nan, math.nan)


def law_of(optimizer: torch.optim.Optimizer | None, group: dict[str, Any] | None) -> Law:
    """Return the law; an optimizer that is not known has none, and says so."""
    if optimizer is None:
        return Law("gradient flow", {}, 4.0, "no optimizer given: under gradient flow the norm stays")
    if group is None:
        return Law("frozen", {}, 4.0, "not among the optimizer's parameters: it does not move")
    if "radius" in group and group.get("geometry") != "euclidean":
        return Law("sphere", group, 4.0, "on a sphere: the norm is fixed")
    if _HYPERBALL.search(type(optimizer).__name__):
        return Law("hyperball", group, 2.0, "hyperball: the norm is fixed and the angle of a step nearly atan(lr)")
    if isinstance(optimizer, torch.optim.AdamW) or (
        isinstance(optimizer, torch.optim.Adam) and group.get("decoupled_weight_decay")
    ):
        return Law("adamw", group, 2.0, "AdamW: |w|^2 settles near lr size / (2 weight_decay), whatever the gradients")
    if isinstance(optimizer, torch.optim.Adam):
        return Law("adam_l2", group, 3.0, "Adam with L2: |w|^3 settles at lr sqrt(size G) / (2 weight_decay)")
    if isinstance(optimizer, torch.optim.SGD):
        return Law("sgd", group, 4.0, "SGD: |w|^4 settles at lr G / (2 weight_decay (1 - momentum))")
    if isinstance(optimizer, getattr(torch.optim, "Muon", ())):
        law = "|w|^2 settles at lr |u|^2 (1 + 2 memory) / (2 weight_decay - lr weight_decay^2)"
        return Law("muon", group, 2.0, f"Muon: {law}")
    return Law("unknown", group, 4.0, f"no law is known for {type(optimizer).__name__}; the next norm is exact")
