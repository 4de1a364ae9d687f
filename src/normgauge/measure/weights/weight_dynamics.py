"""Where the norms of scale-invariant weights are heading under an optimizer, and how fast their directions turn."""

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.measure.signal.updates import apply_update
from normgauge.measure.weights.laws import Law, law_of
from normgauge.measure.weights.record import UpdateRecord
from normgauge.objective import Objective
from normgauge.records import Chart, Kind, Reading
from normgauge.results import Result, instrument
from normgauge.symmetry import Family, Symmetries
from normgauge.symmetry import symmetries as find_symmetries
from normgauge.theory.weight_dynamics import recorded_equilibrium, steps_to_equilibrium

SETTLED = 0.05  # relative distance from the equilibrium norm: the effective rate is then within ten percent
Values = Mapping[str, Tensor]


@dataclass(frozen=True)
class WeightBlock:
    """One family of blocks (the rows of a layer, a whole tensor, tensors that scale together), medians over its rows.

    Attributes:
        parameters: the tensors.
        blocks: how many rows.
        size: entries of one row.
        scale_invariant: whether the function ignores the norm.
        norm: now.
        next_norm: after the optimizer's next step with this gradient, exactly (nan without an optimizer).
        gradient: root of the mean squared gradient norm over the batches.
        radial: largest `|<w, g>| / (|w| |g|)`: zero where the scale really is free.
        effective_rate: of the direction `w / |w|`.
        angle: of the next step, exactly.
        relative_update: |w' - w| / |w| of the next step, exactly; decay is part of it.
        equilibrium_norm: where the norm settles.
        equilibrium_angle: rms angle of a step there.
        steps: until the norm is within 5 % of it.
        heading: growing, shrinking, settled, fixed or unknown.
        law: the sentence behind the prediction.
        norms: of every row that is not zero.
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
    """

    blocks: tuple[WeightBlock, ...]
    optimizer: str

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
        settled = f"; {laws}; equilibria assume isotropic gradients of today's size" if laws else ""
        return f"medians over rows{settled}"

    def chart(self) -> Chart:
        """Return bars of the norm now and at equilibrium, per block."""
        from normgauge.charts import bars

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
        record: an `UpdateRecord` of steps of this optimizer, such as the first tenth of a training.
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

    Raises:
        InputError: for an optimizer of another model's parameters.

    References: sun2020, heo2021, wan2021, kosson2024, akbar2025
    """
    groups = _groups(objective, optimizer)
    symmetries = find_symmetries(objective, seed=seed) if symmetries is None else symmetries
    squares, slopes = _gradients(objective)
    state = _State(
        {name: value.double() for name, value in objective.parameters.items()},
        squares,
        slopes,
        None if optimizer is None else _next_point(objective, optimizer, slopes),
        {} if record is None else record.of(objective),
    )
    blocks = []
    for family in symmetries.families:
        free = family.kind == "scale" and family.status != "undecided" and _plain(family)
        if free and bool(family.gather(state.point, state.point).any()):
            laws = {law_of(optimizer, groups.get(name)).name for name in family.parameters}
            law = law_of(optimizer, groups.get(family.parameters[0]))
            if len(laws) > 1:
                law = Law("unknown", {}, 4.0, "its tensors have different optimizers' laws; none is known for all")
            blocks.append(_block(family, law, state))
    covered = {name for block in blocks for name in block.parameters}
    blocks += [_ordinary_block(name, state) for name in state.point if name not in covered]
    return WeightDynamics(tuple(blocks), "gradient flow" if optimizer is None else type(optimizer).__name__)


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


def _plain(family: Family) -> bool:
    return all(term.role == "scale" and term.coefficient == 1 for term in family.terms)


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


def _groups(objective: Objective, optimizer: torch.optim.Optimizer | None) -> dict[str, dict[str, Any]]:
    if optimizer is None:
        return {}
    rule, step = "optimizer is a torch.optim.Optimizer", "Pass torch.optim.SGD(model.parameters(), lr=...)"
    if not isinstance(optimizer, torch.optim.Optimizer):
        raise InputError("weight_dynamics", f"{rule} of the model's parameters", type(optimizer).__name__, step)
    by_id = {id(param): group for group in optimizer.param_groups for param in group["params"]}
    named = dict(objective.model.named_parameters())
    groups = {name: by_id[id(named[name])] for name in objective.names if id(named[name]) in by_id}
    if not groups:
        rule = "the optimizer must hold parameters of the objective's model"
        got = f"{type(optimizer).__name__} of {len(by_id)} others"
        step = "Make it from the same model; moving or copying a model makes new parameters"
        raise InputError("weight_dynamics", rule, got, step)
    return groups


def _next_point(objective: Objective, optimizer: torch.optim.Optimizer, slopes: Values) -> Values:
    """Step a copy of the optimizer on copies of the parameters: exact for any optimizer, and leaves no trace."""
    own = objective.parameters
    moved = apply_update(objective, optimizer, {name: value.to(own[name]) for name, value in slopes.items()})
    return {name: value.double() for name, value in moved.items()}


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
