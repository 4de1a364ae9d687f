"""The Jacobian on a ball, entry by entry between two numbers: interval arithmetic and the mean value theorem.

Every tensor y(x) of the network is kept with an enclosure M -+ R of its Jacobian that holds on the whole ball of
radius r around the datum. By the mean value theorem an entry moves by at most r (||M_i|| + ||R_i||), which bounds the
slopes of the next step, and so on. Where no activation changes its pattern on the ball R is 0 and M the Jacobian.
Beside R the norm of J - M is bounded as a whole: J' = T J with T = T0 + D has J' - T0 M = T (J - M) + D M, so it is
at most ||T|| times the one before plus ||D M||; absolute values of weights do not enter there.
"""

import math
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field, replace
from itertools import accumulate
from typing import Any

import torch
from torch import Tensor, fx
from torch.nn import functional

from normgauge.errors import ModelError
from normgauge.measure.lipschitz.bands import Band, chord, product_band
from normgauge.measure.lipschitz.entry_rules import COPIES, DROPOUTS, MOVES
from normgauge.measure.lipschitz.rules import Call
from normgauge.measure.lipschitz.trace import Walk, line_of
from normgauge.network.exports import operation_name
from normgauge.objective import tensors

LIMIT = 10_000_000  # entries of one Jacobian
TOTAL = 300_000_000  # over all data
_NEAR_KINK = 1e-10
ROUND = 1 + 1e-12
PATHS = 2_000_000  # entries of the paths to one tensor
WIDE = 400  # sides beyond which a norm on the way is bounded by sums
_MATRIX = 2_000_000  # entries up to which a linear map is written out for its norm
Product = Callable[[Tensor, Tensor], Tensor]


@dataclass(frozen=True)
class Enclosed:
    """A tensor on the ball."""

    centre: Tensor  # at the datum
    low: Tensor  # what its entries are not below
    high: Tensor  # what they do not exceed
    mid: Tensor  # middle of its Jacobian, the columns on the last axis
    rad: Tensor  # how far entries of the Jacobian may be from the middle
    band: Band  # affine functions of the input that its entries stay near
    off: float = math.inf  # bound on the norm of the Jacobian minus its middle
    paths: Tensor | None = None  # by which maps unknown matrices enter that difference, see `Step.track`

    def map(self, of_values: Callable[[Tensor], Tensor], of_columns: Callable[[Tensor], Tensor]) -> "Enclosed":
        """Return the tensor with its values, and the columns of its Jacobian, moved to other places."""
        centre, low, high = (of_values(t) for t in (self.centre, self.low, self.high))
        band = self.band.map(of_values, of_columns)
        paths = None if self.paths is None else of_columns(self.paths)
        moved = of_columns(self.mid), of_columns(self.rad)
        return Enclosed(centre, low, high, *moved, band=band, off=self.off, paths=paths)


@dataclass(frozen=True)
class Step(Call):
    """One operation on enclosures: arguments that move are `Enclosed`."""

    radius: float = 0.0
    gains: dict[str, float] = field(default_factory=dict, repr=False)
    layout: list[int] = field(default_factory=list, repr=False)  # columns of each of the unknown matrices so far

    def enclose(
        self,
        mid: Tensor,
        rad: Tensor,
        value: Tensor | None = None,
        limits: tuple[Tensor | None, Tensor | None] = (None, None),
        off: float = math.inf,
        band: Band | None = None,
    ) -> Enclosed:
        """Return a tensor by its Jacobian and, if known, by other limits of its entries and another band."""
        centre = self.value if value is None else value
        off = off * ROUND if off == off else math.inf
        own = Band(centre, mid, self.radius * rad.norm(dim=-1).clamp_max(off) * ROUND)  # by the mean value theorem
        lows, highs = own.limits(self.radius)
        if band is not None and self.radius:
            own = own.closer(band)
            lower, upper = own.limits(self.radius)
            lows, highs = torch.fmax(lows, lower), torch.fmin(highs, upper)
        lows = lows if limits[0] is None else torch.fmax(lows, limits[0])
        highs = highs if limits[1] is None else torch.fmin(highs, limits[1])
        # rounding must not leave the centre outside
        lows, highs = torch.minimum(lows, centre), torch.maximum(highs, centre)
        return Enclosed(centre, lows, highs, mid, rad, band=own, off=off)

    def track(self, x: Enclosed, paths: Tensor | None, fresh: Tensor | None = None) -> Enclosed:
        """Return a tensor whose J - M is known as a sum of maps U_k of unknown matrices E_k of norm at most 1.

        The next middle of T = T0 + D is T0 M, so J' - T0 M = T0 (J - M) + D J: the U_k become T0 U_k, in which signs of
        weights count, and D J is one matrix more, diag(fresh) E. Without paths J - M itself is that matrix.
        """
        if paths is None:
            paths, fresh = x.mid.new_zeros(*x.centre.shape, 1), torch.full_like(x.centre, x.off)
        count, total = 0 if fresh is None else int((fresh != 0).sum()), sum(self.layout)
        if x.centre.numel() * (total + count) > PATHS or (fresh is not None and not bool(fresh.isfinite().all())):
            return replace(x, paths=None)
        paths = functional.pad(paths, (0, total - paths.shape[-1]))
        if fresh is not None and count:
            columns, (places,) = paths.new_zeros(x.centre.numel(), count), fresh.flatten().nonzero(as_tuple=True)
            columns[places, torch.arange(count)] = fresh.flatten()[places]
            paths = torch.cat([paths, columns.reshape(*x.centre.shape, count)], -1)
            self.layout.append(count)
        rows, off = self.spread(paths)
        band = x.band.closer(Band(x.centre, x.mid, self.radius * rows * ROUND))
        limits = torch.fmax(x.low, band.limits(self.radius)[0]), torch.fmin(x.high, band.limits(self.radius)[1])
        low, high = torch.minimum(limits[0], x.centre), torch.maximum(limits[1], x.centre)
        return replace(x, low=low, high=high, band=band, off=min(x.off, off * ROUND), paths=paths)

    def spread(self, paths: Tensor) -> tuple[Tensor, float]:
        """Return bounds of the rows and of the norm of what paths lead to."""
        groups = paths.split(self.layout[: list(accumulate(self.layout)).index(paths.shape[-1]) + 1], -1)
        rows = torch.stack([group.norm(dim=-1) for group in groups])
        sizes = rows.flatten(1).norm(dim=1) * ROUND  # of Frobenius: enough where they are small
        large = (sizes > 1e-3 * sizes.sum()).tolist()
        norms = [norm_bound(group) if big else 0.0 for group, big in zip(groups, large, strict=True)]
        return rows.sum(0), sum(norms) + float(sizes[~torch.tensor(large)].sum())

    def through(
        self, x: Enclosed, linear: Callable[[Tensor], Any], absolute: Callable[[Tensor], Any] | None = None
    ) -> Any:
        """Return a linear map of a tensor, given the map and the one with absolute entries."""
        size = absolute or linear
        mids, slopes = (each_column(linear, columns) for columns in (x.mid, x.band.slope))
        off = 0.0
        if x.off:
            if self.name not in self.gains:
                self.gains[self.name] = _gain(linear, size, x.centre)
            off = self.gains[self.name] * x.off
        shifts = (linear(t - x.centre) for t in ((x.low + x.high) / 2, x.band.base))
        parts = mids, each_column(size, x.rad), slopes, *shifts, size((x.high - x.low) / 2), size(x.band.err)
        known = x.centre.new_zeros(*x.centre.shape, 1) if x.paths is None else x.paths
        parts = *parts, each_column(linear, known)

        def part(value: Tensor, *made: Tensor) -> Enclosed:
            mid, rad, slope, shift, drift, width, err, paths = made
            limits, band = (
                (value + shift - width * ROUND, value + shift + width * ROUND),
                Band(value + drift, slope, err),
            )
            y = self.enclose(mid, rad, value, limits, off, band)
            if absolute is None and value.numel() == x.centre.numel():  # entries are moved
                return replace(y, paths=None if x.paths is None else paths)
            return self.track(y, None if x.paths is None else paths)

        if isinstance(mids, (tuple, list)):
            return tuple(part(*made) for made in zip(self.value, *parts, strict=True))
        return part(self.value, *parts)


def padded(columns: list[Tensor | None]) -> list[Tensor] | None:
    """Return paths with the same columns; those that are not there yet are zero."""
    known = [part for part in columns if part is not None]
    total = max((part.shape[-1] for part in known), default=0)
    same = [functional.pad(part, (0, total - part.shape[-1])) for part in known]
    return same if len(known) == len(columns) else None


def _gain(linear: Callable[[Tensor], Any], absolute: Callable[[Tensor], Any], like: Tensor) -> float:
    """Return a bound of the norm of a linear map: by its matrix if small, else by sums of rows and columns."""
    with torch.enable_grad():
        ones = torch.ones_like(like).requires_grad_()
        sums = torch.cat([part.flatten() for part in tensors(absolute(ones))])
        (columns,) = torch.autograd.grad(sums.sum(), ones)
    bound = math.sqrt(float(sums.amax()) * float(columns.amax())) * ROUND if sums.numel() else 0.0
    if linear is absolute or len(sums) * like.numel() > _MATRIX:
        return bound
    eye = torch.eye(like.numel(), dtype=torch.float64).reshape(*like.shape, like.numel())
    return min(bound, _norm(each_column(linear, eye).reshape(-1, like.numel())))


Rule = Callable[[Step], Any]
_RULES: dict[str, Rule] = {}


def encloses(*names: str) -> Callable[[Rule], Rule]:
    """Register the enclosure of operations, by name."""

    def keep(rule: Rule) -> Rule:
        _RULES.update(dict.fromkeys(names, rule))
        return rule

    return keep


def each_column(function: Callable[[Tensor], Any], columns: Tensor) -> Any:
    """Return a function of every column of a Jacobian."""
    return torch.func.vmap(function, in_dims=-1, out_dims=-1)(columns)


@torch.no_grad()
def enclose_jacobian(walk: Walk, values: dict[fx.Node, Any], radius: float) -> tuple[float, str]:
    """Return a bound of the Jacobian's norm on the ball around a datum; infinite, with the reason, where none is had.

    The norm of what lies in M -+ R is at most ||M|| + ||R||.
    """
    source, moving = walk.source, walk.program.dependent([walk.source])
    inputs = values[source].numel()
    largest = max((t.numel() for node in moving for t in tensors(values[node])), default=0) * inputs
    if largest > LIMIT or largest * walk.domain.samples > TOTAL:
        return math.inf, f"a Jacobian of {largest:.2g} entries at {walk.domain.samples} data"
    eye = torch.eye(inputs, dtype=torch.float64).reshape(*values[source].shape, inputs)
    start = Step("", "", None, args=(), kwargs={}, value=values[source], norms={}, radius=radius, layout=[1])
    known: dict[fx.Node, Any] = {source: start.track(start.enclose(eye, torch.zeros_like(eye), off=0.0), None)}
    given = walk.program.dependent(walk.program.inputs) - moving
    left = Counter(parent for node in walk.program.nodes for parent in node.all_input_nodes)
    for node in walk.program.nodes:
        reading = [parent for parent in node.all_input_nodes if parent in known]
        used = node.users or node in walk.program.outputs
        if used and node is not source and reading and next(tensors(values[node]), None) is not None:
            kind, where = operation_name(node).strip("_"), line_of(node.meta.get("stack_trace"))
            args, kwargs = fx.node.map_arg((node.args, dict(node.kwargs)), lambda p: known.get(p, values[p]))
            made = {"value": values[node], "norms": {}, "function": node.target, "where": where}
            # weights that other inputs give are another matrix at every datum
            made["gains"] = {} if given.intersection(node.all_input_nodes) else walk.gains
            step = replace(start, name=node.name, kind=kind, args=tuple(args), kwargs=kwargs, **made)
            form, tried = walk.written.get(node), [step]
            if form is not None and not form[1].outside:
                tried.insert(0, replace(step, kind="written", args=(known[form[0]], form[1])))
            for step in tried:
                try:
                    known[node] = _RULES[step.kind](step)
                    if isinstance(known[node], Enclosed) and known[node].paths is None:
                        known[node] = step.track(known[node], None)
                    break
                except (KeyError, ModelError, RuntimeError, TypeError, AttributeError):
                    continue
            else:
                return math.inf, f"no enclosure of {kind}{where}"
        for parent in node.all_input_nodes:
            left[parent] -= 1
            if not left[parent] and parent not in walk.program.outputs:
                known.pop(parent, None)
    output = known.get(walk.program.outputs[0])
    if output is None:
        return math.inf, "an output that depends on shapes alone"
    bound = _norm(output.mid.reshape(-1, inputs)) + min(output.off, norm_bound(output.rad))
    return (bound, "") if math.isfinite(bound) else (math.inf, "slopes without limit on the ball")


def _norm(matrix: Tensor) -> float:
    size = float(matrix.abs().amax()) if matrix.numel() else 0.0
    if size == 0 or not math.isfinite(size):
        return 0.0 if size == 0 else math.inf
    matrix = matrix / size
    gram = matrix @ matrix.T if matrix.shape[0] <= matrix.shape[1] else matrix.T @ matrix
    return size * math.sqrt(max(0.0, float(torch.linalg.eigvalsh(gram)[-1]))) * (1 + 1e-11)


def norm_bound(columns: Tensor) -> float:
    """Return a bound of the norm of a Jacobian, or of any with entries of at most this size if none is negative."""
    matrix = columns.reshape(-1, columns.shape[-1])
    if min(matrix.shape) <= WIDE:
        return _norm(matrix)
    sizes = matrix.abs()
    return min(float(matrix.norm()), math.sqrt(float(sizes.sum(0).amax() * sizes.sum(1).amax()))) * ROUND


def double(constant: Any) -> Tensor:
    """Return a constant as a tensor."""
    return torch.as_tensor(constant, dtype=torch.float64)


def constant(value: Tensor, columns: int) -> Enclosed:
    """Return a tensor that does not move."""
    zeros = torch.zeros(*value.shape, columns, dtype=torch.float64)
    band = Band(value, zeros, torch.zeros_like(value))
    return Enclosed(value, value, value, zeros, zeros, band=band, off=0.0, paths=zeros[..., :1])


def fixed(step: Step, *arguments: Any) -> None:
    """Refuse arguments that depend on the input."""
    if any(isinstance(argument, Enclosed) for argument in arguments):
        raise step.refuse("these must not depend on the input", "some that do")


# -- maps that are linear with entries that are not negative ----------------------------------------------------------


encloses(*COPIES, *DROPOUTS)(lambda step: step.args[0])
encloses("getitem")(lambda step: step.args[0][step.args[1]])


@encloses(
    *MOVES,
    *("mean", "sum", "cumsum", "tril", "triu", "avg_pool1d", "avg_pool2d", "avg_pool3d", "adaptive_avg_pool1d"),
    *("adaptive_avg_pool2d", "adaptive_avg_pool3d", "upsample_nearest1d", "upsample_nearest2d", "upsample_nearest3d"),
    *("upsample_linear1d", "upsample_bilinear2d", "upsample_trilinear3d"),
)
def _nonnegative(step: Step) -> Any:
    if not isinstance(step.args[0], Enclosed):
        return step.value
    rest = [getattr(argument, "centre", argument) for argument in step.args[1:]]
    named = {name: getattr(argument, "centre", argument) for name, argument in step.kwargs.items()}
    return step.through(step.args[0], lambda t: step.function(t, *rest, **named))


@encloses("pad", "constant_pad_nd")
def _pad(step: Step) -> Any:
    place = 2 if step.kind == "constant_pad_nd" else 3
    return step.through(step.args[0], lambda t: step.function(t, *step.args[1:place]))


@encloses("cat", "stack", "hstack", "concat", "concatenate")
def _join(step: Step) -> Any:
    parts = step.args[0]
    width = next(part.mid.shape[-1] for part in parts if isinstance(part, Enclosed))
    known = [part if isinstance(part, Enclosed) else constant(part, width) for part in parts]
    join = torch.func.vmap(lambda *t: step.function(list(t), *step.args[1:], **step.kwargs), -1, -1)
    mid, rad = join(*(part.mid for part in known)), join(*(part.rad for part in known))
    bands = [(part.band.base, part.band.err) for part in known]
    bases, errs = (step.function(list(t), *step.args[1:], **step.kwargs) for t in zip(*bands, strict=True))
    band = Band(bases, join(*(part.band.slope for part in known)), errs)
    paths = padded([part.paths for part in known])
    outcome = step.enclose(mid, rad, off=math.hypot(*(part.off for part in known)), band=band)
    return step.track(outcome, None if paths is None else join(*paths))


@encloses("where", "masked_fill")
def _choose(step: Step) -> Any:
    a, b = (step.args[1], step.args[2]) if step.kind == "where" else (step.args[2], step.args[0])
    mask = step.args[0] if step.kind == "where" else step.args[1]
    fixed(step, mask)
    moving = [part for part in (a, b) if isinstance(part, Enclosed)]
    width = moving[0].mid.shape[-1]
    first, second = (p if isinstance(p, Enclosed) else constant(double(p), width) for p in (a, b))
    pairs = (first.mid, second.mid), (first.rad, second.rad)
    mid, rad = (torch.where(mask[..., None], *pair).expand(*step.value.shape, width) for pair in pairs)
    repeats = max(step.value.numel() / p.centre.numel() for p in moving)
    return step.enclose(mid, rad, off=math.hypot(*(p.off for p in moving)) * math.sqrt(repeats))


# -- linear maps with constant weights --------------------------------------------------------------------------------


def _weighted(step: Step, x: Enclosed, weight: Tensor, function: Callable[[Tensor, Tensor], Tensor]) -> Enclosed:
    fixed(step, weight)
    return step.through(x, lambda t: function(t, weight), lambda t: function(t, weight.abs()))


encloses("linear")(lambda step: _weighted(step, step.args[0], step.args[1], functional.linear))
encloses("neg")(lambda step: step.through(step.args[0], torch.neg, torch.clone))


@encloses("addmm")
def _addmm(step: Step) -> Any:
    fixed(step, step.args[0])
    return _weighted(step, step.args[1], step.args[2], torch.matmul)


@encloses("conv1d", "conv2d", "conv3d", "conv_transpose1d", "conv_transpose2d", "conv_transpose3d")
def _convolution(step: Step) -> Any:
    rest = step.args[3:]
    return _weighted(step, step.args[0], step.args[1], lambda t, w: step.function(t, w, None, *rest, **step.kwargs))


@encloses("batch_norm", "native_batch_norm_legit_no_training")
def _batch_norm(step: Step) -> Any:
    x, gain, _, _, variance = step.args[:5]
    several = isinstance(step.value, (tuple, list))
    factors = (variance + step.args[6 if several else 7]).rsqrt() * (1.0 if gain is None else gain)
    factors = factors.reshape(-1, *[1] * (x.centre.ndim - 2))
    alone = replace(step, value=step.value[0] if several else step.value)
    outcome = alone.through(x, lambda t: t * factors, lambda t: t * factors.abs())
    return (outcome, None, None) if several else outcome


@encloses("add", "sub", "rsub")
def _sum(step: Step) -> Any:
    a, b = step.args[:2]
    alpha = float(step.kwargs.get("alpha", 1.0))
    signs = {"add": (1.0, alpha), "sub": (1.0, -alpha), "rsub": (-alpha, 1.0)}[step.kind]
    parts = [(x, sign) for x, sign in zip((a, b), signs, strict=True) if isinstance(x, Enclosed)]
    shape = (*step.value.shape, parts[0][0].mid.shape[-1])
    zero = torch.zeros((), dtype=torch.float64)
    mid = sum((_line_up(x.mid, step.value) * sign for x, sign in parts), zero).expand(shape)
    rad = sum((_line_up(x.rad, step.value) * abs(sign) for x, sign in parts), zero).expand(shape)
    off = sum(x.off * abs(sign) * math.sqrt(step.value.numel() / x.centre.numel()) for x, sign in parts)
    lows = sum((sign * ((x.low if sign > 0 else x.high) - x.centre) for x, sign in parts), step.value)
    highs = sum((sign * ((x.high if sign > 0 else x.low) - x.centre) for x, sign in parts), step.value)
    base = sum((sign * (x.band.base - x.centre) for x, sign in parts), step.value)
    slope = sum((_line_up(x.band.slope, step.value) * sign for x, sign in parts), zero).expand(shape)
    band = Band(base, slope, sum((abs(sign) * x.band.err for x, sign in parts), zero).expand(step.value.shape))
    paths = padded([x.paths for x, _ in parts])
    outcome = step.enclose(mid, rad, None, (lows, highs), off, band)
    if paths is None:
        return outcome
    total = sum((_line_up(t, step.value) * sign for t, (_, sign) in zip(paths, parts, strict=True)), zero)
    return step.track(outcome, total.expand(*step.value.shape, -1))


def _line_up(columns: Tensor, value: Tensor) -> Tensor:
    """Give a Jacobian the axes of a value with more of them."""
    return columns.reshape(*[1] * (value.ndim + 1 - columns.ndim), *columns.shape)


# -- products ---------------------------------------------------------------------------------------------------------


def bilinear(
    step: Step, a: Enclosed, b: Enclosed, multiply: Product, gain: Callable[[Tensor, Tensor], float]
) -> Enclosed:
    """d(A B) = dA B + A dB, all four between limits; `gain` bounds the norm of a product with what lies in m -+ w."""
    middles = [(x.low + x.high) / 2 for x in (a, b)]
    widths = [(x.high - x.low) / 2 for x in (a, b)]
    sizes = [middle.abs() + width for middle, width in zip(middles, widths, strict=True)]

    def of_a(columns: Tensor, factor: Tensor) -> Tensor:
        return each_column(lambda t: multiply(t, factor), columns)

    def of_b(columns: Tensor, factor: Tensor) -> Tensor:
        return each_column(lambda t: multiply(factor, t), columns)

    mid = of_a(a.mid, middles[1]) + of_b(b.mid, middles[0])
    own = of_a(a.mid.abs(), widths[1]) + of_b(b.mid.abs(), widths[0])
    rad = own + of_a(a.rad, sizes[1]) + of_b(b.rad, sizes[0])
    value = multiply(a.centre, b.centre)
    off = fresh = norm_bound(own)
    for x, other in ((a, 1), (b, 0)):
        repeats = math.prod(value.shape) / max(1, x.centre.numel()) if multiply is torch.mul else 1.0
        seen = x.off * math.sqrt(max(1.0, repeats))
        off += seen * gain(middles[other], widths[other]) if x.off else 0.0
        fresh += seen * gain(torch.zeros_like(widths[other]), widths[other]) if x.off else 0.0
    slope = of_a(a.band.slope, b.band.base) + of_b(b.band.slope, a.band.base)
    band, paths = product_band(a.band, b.band, slope, multiply, step.radius), padded([a.paths, b.paths])
    outcome = step.enclose(mid, rad, value, off=off, band=band)
    if paths is None:
        return step.track(outcome, None)
    made = of_a(paths[0], middles[1]) + of_b(paths[1], middles[0])
    return step.track(outcome, made, torch.full_like(value, fresh * ROUND))


def largest_matrix(middle: Tensor, width: Tensor) -> float:
    """Return the norm of a product with matrices, each of them met by matrices of its own."""
    if middle.ndim < 2:
        return math.inf
    return sum(float(torch.linalg.matrix_norm(part, 2).amax()) for part in (middle, width)) * (1 + 1e-11)


def entrywise(
    step: Step, x: Enclosed, function: Callable[[Tensor], Tensor], turns: tuple[float, ...], *, positive: bool = False
) -> Enclosed:
    """Return a function of every entry; between `turns` its slope rises or falls."""
    if positive and not bool((x.low > 0).all()):
        raise step.refuse("only positive numbers have a slope", "others on the ball")
    points = [x.low]
    for turn in turns:
        met = (x.low <= turn + _NEAR_KINK) & (x.high >= turn - _NEAR_KINK)
        outside = torch.where(x.high < turn, x.high, x.low)  # so that points rise
        points += [torch.where(met, turn + side, outside) for side in (-_NEAR_KINK, _NEAR_KINK) if not positive]
    with torch.enable_grad():
        leaf = torch.stack([*points, x.high]).requires_grad_()
        values = function(leaf)
        (slopes,) = torch.autograd.grad(values.sum(), leaf)
    return _by_slope(step, x, slopes, values.detach(), function(x.centre))


def _by_slope(step: Step, x: Enclosed, slopes: Tensor, values: Tensor, value: Tensor) -> Enclosed:
    """Return a function of every entry by slopes and values from its lower limit to its upper one."""
    low, high = slopes.amin(0), slopes.amax(0)
    middle, width = ((high + low) / 2)[..., None], ((high - low) / 2)[..., None]
    mid = middle * x.mid
    rad = middle.abs() * x.rad + width * (x.mid.abs() + x.rad)
    ends = torch.stack([slope * (end - x.centre) for slope in (low, high) for end in (x.low, x.high)])
    # a diagonal of unknown numbers of at most these widths stretches no more than the widths themselves
    off = norm_bound(width * x.mid) + (float((middle.abs() + width).amax()) * x.off if x.off else 0.0)
    rises, falls = (low >= 0), (high <= 0)  # then no value is outside of those at the ends
    least = torch.where(rises, values[0], torch.where(falls, values[-1], -math.inf))
    most = torch.where(rises, values[-1], torch.where(falls, values[0], math.inf))
    limits = torch.fmax(value + ends.amin(0), least), torch.fmin(value + ends.amax(0), most)
    outcome = step.enclose(mid, rad, value, limits, off, chord(x.band, (x.low, x.high), slopes, values))
    if x.paths is None:
        return outcome
    # of a diagonal that is not known one half is taken by the path and one by what it is applied to
    half = width.sqrt()
    far = min(float(half.amax()) * x.off if x.off else 0.0, step.spread(half * x.paths)[1])
    return step.track(outcome, middle * x.paths, half[..., 0] * (norm_bound(half * x.mid) + far) * ROUND)


@encloses("mul", "multiply", "div", "divide")
def _times(step: Step) -> Any:
    a, b = step.args[:2]
    if step.kind not in ("mul", "multiply"):
        if step.kwargs.get("rounding_mode") is not None:
            raise step.refuse("no rounding", "some")
        b = entrywise(step, b, torch.reciprocal, (), positive=True) if isinstance(b, Enclosed) else 1 / double(b)
    if isinstance(a, Enclosed) and isinstance(b, Enclosed):
        return bilinear(step, a, b, torch.mul, lambda middle, width: float((middle.abs() + width).amax()))
    x, factor = (a, double(b)) if isinstance(a, Enclosed) else (b, double(a))
    return step.through(x, lambda t: t * factor, lambda t: t * factor.abs())


@encloses("matmul", "bmm", "mm")
def _matmul(step: Step) -> Any:
    a, b = step.args[:2]
    if isinstance(a, Enclosed) and isinstance(b, Enclosed):
        same = a.centre.shape[:-2] == b.centre.shape[:-2]
        return bilinear(step, a, b, torch.matmul, largest_matrix if same else lambda *_: math.inf)
    if isinstance(a, Enclosed):
        return _weighted(step, a, b, torch.matmul)
    return _weighted(step, b, a, lambda t, w: torch.matmul(w, t))
