"""Lipschitz constant of a network between two numbers that hold, layer by layer."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm
from torch.nn.modules.dropout import _DropoutNd

from normgauge.charts import bars
from normgauge.errors import CertificateError, InputError, ModelError, NotDifferentiableError
from normgauge.measure.lipschitz import enclosure_rules, entry_rules, layer_rules  # noqa: F401 (they register rules)
from normgauge.measure.lipschitz.enclosure import enclose_jacobian
from normgauge.measure.lipschitz.rules import Reach
from normgauge.measure.lipschitz.trace import Domain, Step, Walk, check_agreement, private_copy
from normgauge.objective import as_written, twice_differentiable
from normgauge.records import Chart, Reading
from normgauge.results import Result, instrument, spend
from normgauge.rng import generator

SLACK = 1e-9  # relative, added to the upper bounds for float64 rounding on the way
_LN10 = math.log(10.0)
VACUOUS = 1e3  # upper / lower: beyond it the bound says nothing about what the network does
TIGHT = 10.0  # upper / lower: within a decade the bound still orders networks of one family
FEW_OUTPUTS = 50  # up to here all rows of the Jacobian are taken, and its norm is exact
_POWER_STEPS = 15
_JITTER = 1e-7  # relative; away from kinks, where automatic differentiation may give no derivative of the function
_SCALES = (0.03, 0.3, 1.0)
_STARTS = 3  # the steepest data
LARGE = 20_000_000  # parameters: one start and fewer candidates
Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class LayerGain:
    """What one layer does to the bound."""

    name: str  # of the layer
    kind: str  # type of the module or name of the function
    normalizer: bool  # whether it is a normalizer
    log10: float  # of the factor by which the bound grows here, in the sense the bracket is about
    log10_at_data: float  # the same at the steepest datum
    log10_global: float  # the same on all inputs
    total: float  # log10 of the bound from the input to here


@dataclass(frozen=True)
class LipschitzBracket(Result):
    """The Lipschitz constant of a network, Euclidean norm per sample, lies between `lower` and `upper`.

    Attributes:
        log10_lower: of the norm of a Jacobian at a point of the domain.
        log10_upper: of what the constant does not exceed; `inf` where no bound exists.
        log10_at_data: of a bound on the Jacobian's norm at the data themselves, by the same rules.
        log10_on_ball: of the bound on the balls around the data; `None` without a radius.
        log10_global: of the bound on all inputs.
        per_datum: log10 of the bound at each datum (without radius) or on each ball.
        jacobian: log10 of the norm of the Jacobian at each datum; a kink has none, `log10_at_data` holds
            there too.
        jacobian_exact: whether those are exact; else lower bounds, by power iterations (large networks with
            over 50 outputs) or from one side of a kink.
        layers: what each layer does to the bound.
        radius: of the balls, or `None`.
        samples: number of data.
        respect_to: what varies.
        shape: of one datum of it; bounds hold for this shape, the masks given and the way export took.
        fallback: why the bound on the balls is a product over layers; empty where it encloses the Jacobian.
        model: the model in words.
    """

    log10_lower: float
    log10_upper: float
    log10_at_data: float
    log10_on_ball: float | None
    log10_global: float
    per_datum: Tensor = field(repr=False, compare=False)
    jacobian: Tensor = field(repr=False, compare=False)
    jacobian_exact: bool
    layers: tuple[LayerGain, ...] = field(repr=False)
    radius: float | None
    samples: int
    respect_to: str
    shape: tuple[int, ...]
    fallback: str
    model: str

    @property
    def lower(self) -> float:
        """Norm of the Jacobian at the steepest point found."""
        return _power(self.log10_lower)

    @property
    def upper(self) -> float:
        """Certified bound: on the balls with a radius, else on all inputs; infinite where there is none."""
        return _power(self.log10_upper)

    @property
    def at_data(self) -> float:
        """Certified bound on the Jacobian's norm at the data."""
        return _power(self.log10_at_data)

    @property
    def on_ball(self) -> float | None:
        """Certified bound on the balls around the data; `None` without a radius."""
        return None if self.log10_on_ball is None else _power(self.log10_on_ball)

    @property
    def everywhere(self) -> float:
        """Certified bound on all inputs."""
        return _power(self.log10_global)

    @property
    def vacuous(self) -> bool:
        """Whether the upper bound is infinite or over 1000 times the steepest slope found."""
        return self.log10_upper != self.log10_lower and self.log10_upper - self.log10_lower > math.log10(VACUOUS)

    @property
    def normalizers_log10(self) -> float:
        """Sum of log10 over the normalizers: negative where they shrink the bound."""
        return sum(layer.log10 for layer in self.layers if layer.normalizer)

    @property
    def normalizers_share(self) -> float:
        """Share of the normalizers in the sum of sizes |log10| over all layers, between 0 and 1."""
        own, total = (sum(abs(x.log10) for x in self.layers if x.normalizer or every) for every in (False, True))
        return own / total if 0 < total < math.inf else math.nan if total else 0.0

    def _title(self) -> str:
        where = "on all inputs" if self.radius is None else f"within {self.radius:g} of {self.samples} data"
        low, high = _format_log(self.log10_lower), _format_log(self.log10_upper)
        aside = f" (vacuous; at the data {_format_log(self.log10_at_data)})" if self.vacuous else ""
        return f"Lipschitz constant of {self.model} {where}: between {low} and {high}{aside}"

    def _rows(self) -> list[dict[str, Any]]:
        total = sum(abs(layer.log10) for layer in self.layers)
        total = total if 0 < total < math.inf else math.nan
        rows = [(layer, asdict(layer)) for layer in self.layers]
        return [{"layer": row.pop("name"), **row, "share": abs(layer.log10) / total} for layer, row in rows]

    def readings(self) -> tuple[Reading, ...]:
        """Return log10 of the upper and the lower bound, of the bounds in other senses, and of each layer's factor."""
        return (
            Reading("log10 upper", self.log10_upper, "upper"),
            Reading("log10 lower", self.log10_lower, "lower"),
            Reading("log10 upper at the data", self.log10_at_data, "upper"),
            Reading("log10 upper on all inputs", self.log10_global, "upper"),
            *(Reading("log10 factor", layer.log10, "upper", layer=layer.name) for layer in self.layers),
        )

    def _meaning(self) -> str:
        low, high, at = (_format_log(log) for log in (self.log10_lower, self.log10_upper, self.log10_at_data))
        steep = max(self.layers, key=lambda layer: layer.log10, default=None)
        if self.log10_upper == -math.inf:
            return "Outputs do not move with the inputs: the constant is 0."
        if self.vacuous:
            cause = "a product over layers"
            if steep is not None and math.isinf(steep.log10):
                cause = f"{steep.name!r} ({steep.kind}) has no constant on all inputs"
            elif self.radius is None and self.normalizers_share > 0.5:
                cause = f"each normalizer may add 1 / sqrt(eps), together 10^{self.normalizers_log10:.2f}"
            step = "pass a radius=" if self.radius is None else "pass a smaller radius="
            return (
                f"Outputs move {low} times as far as inputs somewhere; the upper bound {high} is vacuous (over "
                f"{VACUOUS:g} times that: {cause}). At the data it is {at}: {step} for a bound that holds near them."
            )
        gap = self.log10_upper - self.log10_lower
        said = f"Outputs move at most {high} times as far as inputs, and {low} times as far somewhere"
        if gap <= math.log10(TIGHT):
            return f"{said}: known within a factor of {TIGHT:g}, so a margin divided by {high} is a safe radius."
        name = "" if steep is None else f" {steep.name!r} adds most to the product, 10^{steep.log10:.2f}."
        return f"{said}, 10^{gap:.2f} apart (over {TIGHT:g}): radii from the bound are safe and far too small.{name}"

    def _notes(self) -> str:
        norms = self.jacobian[torch.isfinite(self.jacobian)]
        span = f"{_format_log(float(norms.min()))} to {_format_log(float(norms.max()))}" if norms.numel() else "0"
        ball = ""
        if self.log10_on_ball is not None:
            way = f"product over layers: {self.fallback}" if self.fallback else "Jacobian enclosed entry by entry"
            ball = f", on the balls {_format_log(self.log10_on_ball)} ({way})"
        return (
            f"with respect to {self.respect_to} of shape {self.shape}, valid for this shape, the masks given and the "
            f"branch export took; norm of the Jacobian at the data {span} "
            f"({'exact' if self.jacobian_exact else 'lower bounds'}), upper {_format_log(self.log10_at_data)}{ball}, "
            f"on all inputs {_format_log(self.log10_global)}; normalizers 10^{self.normalizers_log10:.2f}, "
            f"{self.normalizers_share:.0%} of all |log10| of the product; certified in float64, slack {SLACK:g}"
        )

    def chart(self) -> Chart:
        """Return the bound from the input to each layer, in log10, normalizers coloured."""
        rows = [{**row, "what": "normalizer" if row["normalizer"] else "other layer"} for row in self._rows()]
        return bars(rows, x="layer", y="total", series="what", title="log10 of the bound from the input to each layer")


@instrument
@as_written()
def lipschitz(
    model: nn.Module,
    inputs: Any,
    *,
    radius: float | None = None,
    forward: Callable[[nn.Module, Any], Any] | None = None,
    batch_axis: int = 0,
    climbs: int = 6,
    seed: int = 0,
) -> LipschitzBracket:
    """Bracket the Lipschitz constant of a network between a Jacobian's norm and a certified bound.

    The constant is sup ||model(x) - model(y)|| / ||x - y|| in the Euclidean norm of one sample: over all x and y
    without a `radius`, else over the balls of that radius around the data (the largest over the data). The model is
    exported once (torch.export, on one sample), and every step bounded by a rule: series multiply, sums add, joined
    tensors add their squares; linear layers that meet, BatchNorm in evaluation mode among them, are folded and their
    common norm taken. Normalizers that use the sample's own statistics, also those written by hand, have three
    constants: gain / sqrt(var + eps) at the data, with the smallest variance the ball allows on the ball,
    gain / sqrt(eps) on all inputs. Attention is bounded at the data and on the ball; on all inputs only behind a
    normalizer. A step without a rule is an error with its module and line.

    On balls of small networks the Jacobian itself is enclosed besides: every entry of J(x) lies in M -+ R on the whole
    ball, by interval arithmetic and the mean value theorem, and the constant is at most ||M|| + ||R||. Where no
    activation changes its pattern R is 0.

    Kind: `upper` is certified, up to float64 rounding covered by a relative slack of 1e-9, for inputs of this shape,
    the masks given and the branch taken; `lower` is the norm of the Jacobian at one point, in float64; `jacobian` is
    its norm at each datum, exact up to 50 outputs or where the enclosure was possible, else a lower bound.
    Cost: the norm of every linear layer (`operator_norm`), one forward pass in float64, and for `lower` one backward
    pass per output (up to 50 outputs; else 30 products) over the batch, and `climbs` times that over 15 candidates
    from each of three starts; each enclosure (at the data, on the balls): forwards with as many columns as the input
    has numbers, up to 10^7 numbers in one Jacobian.

    Args:
        model: returns one tensor; BatchNorm and dropout in evaluation mode.
        inputs: the data, `[samples, ...]`: a tensor, a tuple (positional arguments) or a mapping (keyword arguments).
            The first floating-point tensor varies; where there are only ids, what their embedding gives.
        radius: of the balls around the data; `None` for the constant on all inputs.
        forward: `forward(model, inputs) -> tensor` for unusual calls, such as `lambda m, x: m(**x).logits`.
        batch_axis: of the samples, 1 for layers with batch_first=False.
        climbs: rounds of the search for a steeper point than the data.
        seed: of that search.

    Deviations: than2025 multiplies norms of reshaped weights and constants of normalizers (Theorem 9, Corollaries 10
    and 11) and takes the Euclidean norm of a BatchNorm's factors; here convolutions count with their norm as
    operators, BatchNorm is folded, and LayerNorm's constant 1 / sigma is the one at the data, not on all inputs.

    Examples:
        >>> model = nn.Sequential(nn.Linear(2, 2, bias=False), nn.ReLU(), nn.Linear(2, 1, bias=False))
        >>> _ = model[0].weight.data.copy_(torch.diag(torch.tensor([3.0, 1.0])))
        >>> _ = model[2].weight.data.copy_(torch.tensor([[2.0, 0.0]]))
        >>> bracket = lipschitz(model, torch.ones(1, 2))
        >>> round(bracket.lower, 6), round(bracket.upper, 6)  # the steepest path is open at the datum
        (6.0, 6.0)

    References:
        than2025, sedghi2019.
    """
    if radius is not None and (isinstance(radius, bool) or not 0 < radius < math.inf):
        raise InputError("lipschitz", "radius is positive and finite", repr(radius), "Leave it out for all inputs")
    if isinstance(climbs, bool) or not isinstance(climbs, int) or climbs < 0:
        raise InputError("lipschitz", "climbs is a whole number >= 0", repr(climbs), "Try climbs=6")
    for name, module in model.named_modules():
        if module.training and isinstance(module, (_BatchNorm, _DropoutNd)) and getattr(module, "p", 1.0) > 0:
            rule, got = "BatchNorm and dropout must be in evaluation mode", f"{type(module).__name__} in training mode"
            raise ModelError(f"lipschitz of {name!r}", rule, got, "Call model.eval() first")
    domain = Domain(inputs, forward, batch_axis)
    single, double = private_copy(model), private_copy(model).double()
    walk = Walk(double, domain)
    near = [_look_near(walk, datum, radius) for datum in range(domain.samples)]
    check_agreement(double, walk)
    if any(p.dtype in (torch.float16, torch.bfloat16) for p in single.parameters()):
        single = single.float()
    low = find_steepest(domain, single, double, radius, climbs, seed)
    spend("forwards", 2)  # the walk, and what it is compared with
    spend("gradients", low.gradients)
    return _assemble(model, walk, near, low, radius)


@dataclass(frozen=True)
class _Near:
    """What is known near one datum: by rules, step by step, and by an enclosure of the Jacobian on the ball."""

    steps: tuple[Step, ...]
    output: Reach
    enclosed: float
    why: str
    at_datum: float


def _look_near(walk: Walk, datum: int, radius: float | None) -> _Near:
    values = walk.values(datum)
    output = walk.run(values, radius or 0.0)
    enclosed, why = (math.inf, "") if radius is None else enclose_jacobian(walk, values, radius)
    at_datum = enclose_jacobian(walk, values, 0.0)[0]  # at a kink it has both sides, automatic differentiation one
    return _Near(tuple(walk.steps), output.drop_value(), enclosed, why, at_datum)


def _assemble(model: nn.Module, walk: Walk, near: list[_Near], low: Steepest, radius: float | None) -> LipschitzBracket:
    slack = math.log10(1 + SLACK)
    at, ball = (torch.cat([getattr(x.output, name) for x in near]) / _LN10 + slack for name in ("at", "ball"))
    everywhere = max(float(datum.output.everywhere) for datum in near) / _LN10 + slack
    enclosed, at_datum = (
        torch.tensor([getattr(datum, name) for datum in near], dtype=torch.float64).log10()
        for name in ("enclosed", "at_datum")
    )
    worst_at, jacobian = int(at.argmax()), low.at_data.log10()
    # a bound on all inputs holds at the data, and one on the balls too
    ball = torch.minimum(ball, enclosed + slack).clamp_max(everywhere)
    at = at.clamp_max(everywhere) if radius is None else torch.minimum(at, ball)
    at = torch.minimum(at, at_datum + slack)
    exact = low.exact or bool((at_datum < math.inf).all())
    jacobian = at_datum if exact and not low.exact else jacobian
    exact &= not bool((at_datum.isfinite() & (at_datum > jacobian + 1e-3)).any())  # autograd takes one side of a kink
    lower = math.log10(low.value) if low.value > 0 else -math.inf
    upper = everywhere if radius is None else float(ball.max())
    if lower > upper:
        rule = "no slope exceeds a certified bound, so the rule of a step is wrong and there is no bracket"
        names = ", ".join(f"{step.name!r} ({step.kind})" for step in near[0].steps)
        got = f"slope 10^{lower:.6g} and bound 10^{upper:.6g} over the steps {names}"
        step = "Drop steps until it holds to see which, and check the rules you registered"
        raise CertificateError(f"lipschitz of {type(model).__name__}", rule, got, step)
    worst = worst_at if radius is None else int(ball.argmax())
    fallback = next((datum.why for datum in near if datum.why), "")
    if radius is not None and not fallback and float(enclosed[worst]) + slack > upper:
        fallback = "it is below the enclosure's bound"
    return LipschitzBracket(
        log10_lower=lower,
        log10_upper=upper,
        log10_at_data=float(at.max()),
        log10_on_ball=None if radius is None else upper,
        log10_global=everywhere,
        per_datum=at if radius is None else ball,
        jacobian=jacobian,
        jacobian_exact=exact,
        layers=_layers(near[worst_at].steps, near[worst].steps, "everywhere" if radius is None else "ball"),
        radius=radius,
        samples=len(near),
        respect_to=walk.domain.name,
        shape=tuple(int(size) for size in walk.source.meta["val"].shape),
        fallback=fallback,
        mode="eval",
        model=type(model).__name__,
    )


def _layers(at: tuple[Step, ...], near: tuple[Step, ...], main: str) -> tuple[LayerGain, ...]:
    reaches, at_reaches = [step.reach() for step in near], [step.reach() for step in at]
    sides = {"at": at_reaches, "everywhere": reaches, "ball": reaches}
    senses = {name: [float(getattr(reach, name)) / _LN10 for reach in side] for name, side in sides.items()}

    def factor(sense: str, place: int) -> float:
        totals = senses[sense]
        before = max((totals[i] if i >= 0 else 0.0 for i in near[place].sources), default=0.0)
        gain = totals[place] - before if math.isfinite(before) else 0.0
        return 0.0 if abs(gain) < SLACK else gain  # rounding is no contribution

    def gain(place: int, step: Step) -> LayerGain:
        total = 0.0 if abs(senses[main][place]) < SLACK else senses[main][place]
        own, at_data, everywhere = (factor(sense, place) for sense in (main, "at", "everywhere"))
        return LayerGain(step.name, step.kind, step.normalizer, own, at_data, log10_global=everywhere, total=total)

    return tuple(gain(place, step) for place, step in enumerate(near))


def _power(log: float) -> float:
    return 10.0**log if log < 308 else math.inf


def _format_log(log: float) -> str:
    if not math.isfinite(log):
        return "infinity" if log > 0 else "0"
    return f"{10.0**log:.4g}" if abs(log) < 6 else f"10^{log:.2f}"


@dataclass(frozen=True)
class Steepest:
    """The steepest point found."""

    value: float  # norm of the Jacobian there, in float64
    at_data: Tensor  # norm of the Jacobian at each datum
    exact: bool  # whether those are exact; else lower bounds by power iterations
    gradients: int  # vector-Jacobian products over a batch that were spent


def jacobian_norms(model: Model, inputs: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of the Jacobian at each input, and the top right and left singular vectors.

    Exact up to `FEW_OUTPUTS` outputs (one backward pass per output over the whole batch, then a small Gram matrix
    per input), else a lower bound by power iterations that reuse one graph.
    """
    x = inputs.detach().clone().requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        outputs = model(x.clone()).flatten(1)
        if not outputs.requires_grad:
            rule = "the output must depend on the input differentiably"
            raise NotDifferentiableError("lipschitz", rule, "no gradient", "Look for detach")
        return _all_rows(outputs, x) if outputs.shape[1] <= FEW_OUTPUTS else _power_iterations(outputs, x, seed)


def _all_rows(outputs: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = outputs.shape[1]
    rows = [
        torch.autograd.grad(outputs[:, k].sum(), x, retain_graph=k + 1 < count, materialize_grads=True)[0].flatten(1)
        for k in range(count)
    ]
    jacobians = torch.nan_to_num(torch.stack(rows, 1), 0.0, 0.0, 0.0)
    sizes = jacobians.abs().amax((1, 2), keepdim=True)
    jacobians = torch.where(sizes > 0, jacobians / sizes, 0.0)  # squares of large and small slopes have no room
    values, vectors = torch.linalg.eigh(jacobians @ jacobians.transpose(1, 2))
    right = (jacobians * vectors[:, :, -1:]).sum(1)
    norms = values[:, -1].clamp_min(0.0).sqrt() * sizes[:, 0, 0]
    return norms, _unit(right).view_as(x), vectors[:, :, -1]


def _power_iterations(outputs: Tensor, x: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    u = torch.randn(outputs.shape, generator=generator(seed), dtype=x.dtype).to(x.device)
    u = _unit(u).requires_grad_()
    (pulled,) = torch.autograd.grad(outputs, x, u, create_graph=True)
    weights = u.detach()
    for _ in range(_POWER_STEPS):
        (back,) = torch.autograd.grad(outputs, x, weights, retain_graph=True)
        # d <J^T u, v> / du = J v: the second product reuses the graph of the first
        (forward,) = torch.autograd.grad(pulled, u, _unit(back.flatten(1)).view_as(x), retain_graph=True)
        weights = _unit(forward)
    (back,) = torch.autograd.grad(outputs, x, weights)
    flat = torch.nan_to_num(back.flatten(1), 0.0, 0.0, 0.0)
    return _lengths(flat)[:, 0], _unit(flat).view_as(x), weights


def uphill_direction(model: Model, point: Tensor, left: Tensor) -> Tensor:
    """Return the direction in which ||J(x)^T left|| grows fastest, of length 1; zero where J is locally constant.

    By Danskin that is the direction for the norm of J itself, if its top singular value is simple.
    """
    x = point.detach().clone()[None].requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        outputs = model(x.clone()).flatten(1)
        (pulled,) = torch.autograd.grad(outputs, x, left[None], create_graph=True)
        if not pulled.requires_grad:  # linear, or linear between kinks
            return torch.zeros_like(point)
        (slope,) = torch.autograd.grad(pulled.square().sum(), x, materialize_grads=True)
    return _unit(torch.nan_to_num(slope.flatten(1), 0.0, 0.0, 0.0)).view_as(point)


def _lengths(rows: Tensor) -> Tensor:
    """Return lengths of rows whose squares may have no room."""
    sizes = rows.abs().amax(-1, keepdim=True)
    return sizes * torch.where(sizes > 0, rows / sizes, 0.0).norm(dim=-1, keepdim=True)


def _unit(rows: Tensor) -> Tensor:
    return rows / _lengths(rows).clamp_min(torch.finfo(rows.dtype).tiny)


def find_steepest(
    domain: Domain, single: nn.Module, double: nn.Module, radius: float | None, climbs: int, seed: int
) -> Steepest:
    """Find the steepest point near the data, from several starts, and certify it in float64.

    `single` is the model in its own precision, for the search, `double` the one in float64; `radius`: of the ball
    around each datum, `None` lets the search go anywhere; `climbs`: rounds of the search, 0 for the data alone.
    """
    dtype = next((p.dtype for p in single.parameters() if p.is_floating_point()), torch.float64)
    inputs, everyone = domain.points(single, dtype), range(domain.samples)
    norms, rights, lefts = jacobian_norms(domain.function(single, everyone), inputs, seed)
    norms = torch.nan_to_num(norms, 0.0, 0.0, 0.0)
    if not bool(norms.any()) and dtype != torch.float64:  # slopes this dtype cannot hold
        return find_steepest(domain, double, double, radius, climbs, seed)
    few = lefts.shape[1] <= FEW_OUTPUTS
    outputs = lefts.shape[1] if few else 2 * _POWER_STEPS + 2
    exact = norms
    if few and dtype != torch.float64:
        exact = jacobian_norms(domain.function(double, everyone), domain.points(double, torch.float64))[0]
    spent, random, best = outputs * (2 if few else 1), generator(seed), (0.0, inputs[0], 0)
    large = sum(p.numel() for p in single.parameters()) > LARGE
    for datum in norms.argsort(descending=True)[: 1 if large else _STARTS].tolist():
        point, value, direction, left = inputs[datum], float(norms[datum]), rights[datum], lefts[datum]
        length = radius if radius is not None else 0.3 * float(point.norm()) or 1.0
        for _ in range(climbs):
            moves = _moves(direction, uphill_direction(domain.function(single, [datum]), point, left), length, random)
            moves = moves[::5] if large else moves
            candidates = _pull_inside(point + moves, inputs[datum], radius)
            near = domain.function(single, [datum] * len(candidates))
            found, right, leftmost = jacobian_norms(near, candidates, seed)
            found = torch.nan_to_num(found, 0.0, 0.0, 0.0)
            top = int(found.argmax())
            spent += outputs + 2
            if float(found[top]) > value:
                value, point, direction, left = float(found[top]), candidates[top], right[top], leftmost[top]
            else:
                length /= 3
        best = max(best, (value, point, datum), key=lambda entry: entry[0])
    certified = _certify_norm(domain.function(double, [best[2]] * 3), best[1], inputs[best[2]], radius, random)
    return Steepest(certified, torch.nan_to_num(exact.double(), 0.0, 0.0, 0.0), few, spent)


def _moves(direction: Tensor, gradient: Tensor, length: float, random: torch.Generator) -> Tensor:
    """Return steps uphill, along the top singular vector, both ways, and at random, of several lengths.

    A network of ReLUs has no uphill: its Jacobian is constant between kinks, and only the other steps find new ones.
    """
    noise = torch.randn((2, *direction.shape), generator=random, dtype=direction.dtype).to(direction.device)
    noise = _unit(noise.flatten(1)).view_as(noise)
    ways = torch.cat([gradient[None], direction[None], -direction[None], noise])
    return torch.cat([ways * (length * scale) for scale in _SCALES])


def _pull_inside(points: Tensor, home: Tensor, radius: float | None) -> Tensor:
    if radius is None:
        return points
    offsets = (points - home).flatten(1)
    lengths = offsets.norm(dim=1, keepdim=True)
    limit = radius * (1 - 1e-6)  # rounding must not lead out of the ball
    shrunk = offsets * (limit / lengths.clamp_min(torch.finfo(points.dtype).tiny)).clamp_max(1.0)
    return home + shrunk.view_as(points)


def _certify_norm(double: Model, point: Tensor, home: Tensor, radius: float | None, random: torch.Generator) -> float:
    """Return the norm at a point a hair away, where the function is differentiable with probability one."""
    centre, start = home.double(), point.double()
    jitter = torch.randn((3, *point.shape), generator=random, dtype=torch.float64).to(point.device)
    scale = _JITTER * (float(start.abs().max()) or 1.0)
    scale = scale if radius is None else min(scale, 1e-3 * radius / jitter[0].numel() ** 0.5)
    near = _pull_inside(start + scale * jitter, centre, radius)
    norms, _, _ = jacobian_norms(double, near)
    return float(torch.nan_to_num(norms, 0.0, 0.0, 0.0).max()) * (1 - SLACK)
