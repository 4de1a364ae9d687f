"""Probing: gradients of random output combinations at a generic point, reduced to one number per slice."""

import math
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.rng import generator
from normgauge.symmetry._axes import (
    Hints,
    Slot,
    element_slot,
    parameter_slots,
    refinements,
    shift_slots,
    whole_slot,
)
from normgauge.symmetry._effective import Coordinates, StoredAffine
from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Pull, Scale, Shift, Term, Through, Values
from normgauge.symmetry._values import Function, Point

VECTOR_SPREAD = 0.25  # of redrawn gains and biases; more makes units that never fire
PIECE = 2**22  # numbers of a large gradient that are multiplied out at a time
TRIES = 4  # redraws, of which the one with the least noise is kept


def redraw(
    point: Values,
    source: torch.Generator,
    *,
    dtype: torch.dtype,
    spread: float,
    biases: float | None = VECTOR_SPREAD,
    signs: bool = False,
) -> Point:
    """Draw parameters at which activations are of order one, whatever the size of the given ones.

    Tensors with several axes are drawn by their fan-in, gains about one and biases about zero. A symmetry of the
    architecture holds there as everywhere; what holds at the given values alone (uniform attention of small weights,
    gains of zero) does not. `spread` is that of tensors with several axes, `biases` that of vectors about zero (None:
    all vectors are about zero, whatever they look like); with `signs` the given values are multiplied instead, for
    parameters that must keep their sign.
    """
    result = {}
    for name, given in point.items():
        value = given.to(dtype)
        noise = torch.randn(value.shape, generator=source, dtype=torch.float64).to(value)
        rms = float(torch.linalg.vector_norm(value)) / math.sqrt(max(1, value.numel()))
        matrix = sum(s > 1 for s in value.shape) > 1
        if signs and rms > 0:
            result[name] = value * torch.exp2(noise)
        elif matrix:
            result[name] = noise.mul_(spread / math.sqrt(value[0].numel()))
        elif value.numel() == 1:
            result[name] = (value if 0.2 < rms < 5.0 or rms == 0.0 else value / rms) + VECTOR_SPREAD * noise
        else:  # gains are about one, biases about zero: trained ones may hold units that never fire
            gain = biases is not None and not name.endswith("bias") and bool(value.mean() > 0.5 * rms)
            result[name] = gain + (VECTOR_SPREAD if gain or biases is None else biases) * noise
    return result


def generic_point(function: Function, seed: int, spread: float = 1.0, biases: float | None = VECTOR_SPREAD) -> Point:
    """Return a redrawn point with finite outputs; where there is none, one that keeps signs, or one near the user's.

    A point is drawn again whenever it is wanted, and tried once: `function.drawn_points` holds which draw it was.
    """
    key = seed, spread, biases
    source, (known, _) = generator(seed), function.drawn_points.get(key, (None, None))
    user = function.user if function.coordinates.frames else function.objective.parameters  # one tensor in float64 each
    for number in range(2 * TRIES + 3):
        if number < 2 * TRIES:
            point = redraw(user, source, dtype=function.dtype, spread=spread, biases=biases, signs=number >= TRIES)
        else:
            size = (0.1, 0.01, 0.0)[number - 2 * TRIES]
            values = {name: value.to(function.dtype) for name, value in user.items()}
            noise = {name: torch.randn(value.shape, generator=source).to(value) for name, value in values.items()}
            point = {name: value + size * (value.abs() + size) * noise[name] for name, value in values.items()}
        if known is None:
            try:
                function.drawn_points[key] = number, function.outputs(point)
            except NonFiniteError:
                continue
            break
        if number == known:
            break
    return point


@dataclass
class Columns:
    """The elementary families that are probed, by role.

    Attributes:
        scales: slices whose scale may be free or coupled.
        shifts: slices (and pull-backs) whose shift may be coupled.
        averages: slices along which a constant may be added freely.
    """

    scales: list[Term] = field(default_factory=list)
    shifts: list[Term] = field(default_factory=list)
    averages: list[Term] = field(default_factory=list)

    def all_terms(self) -> list[Term]:
        return list(dict.fromkeys([*self.scales, *self.shifts, *self.averages]))


def list_columns(
    point: Mapping[str, Tensor], hints: Hints, coordinates: Coordinates, homes: Mapping[str, set[str]]
) -> Columns:
    """List what is to be probed for these parameters; a tied one has several modules for homes."""
    columns = Columns()
    for name, value in point.items():
        shape = tuple(value.shape)
        if value.numel() == 0:
            continue
        slots = list(dict.fromkeys(parameter_slots(name, shape, hints)))
        columns.scales.extend(Scale(slot) for slot in [*slots, whole_slot(name, shape)])
        columns.shifts.append(Shift(whole_slot(name, shape)))
        if sum(s > 1 for s in shape) <= 1:
            columns.shifts.extend(Shift(slot) for slot in slots)
        else:
            columns.shifts.extend(Shift(slot) for slot in slots if slot.narrow is None and len(slot.keep) == 1)
            columns.shifts.extend(Shift(slot) for slot in _rows_of_pieces(name, shape, hints))
            columns.averages.extend(Shift(slot) for slot in shift_slots(name, shape, hints))
        if value.numel() > 1 and sum(s > 1 for s in shape) == 1:
            columns.averages.extend(Shift(slot) for slot in [*shift_slots(name, shape, hints), whole_slot(name, shape)])
    columns.shifts.extend(pulls(point, hints, homes))
    for frame in coordinates.frames:
        if isinstance(frame, StoredAffine):
            gain = element_slot(frame.gain, tuple(point[frame.gain].shape))
            columns.shifts.append(Through(gain, 1.0, frame.bias))
    return columns


def _rows_of_pieces(name: str, shape: tuple[int, ...], hints: Hints) -> Iterator[Slot]:
    """Yield e.g. one position of a position embedding: narrowed along one axis, indexed by another."""
    for axis, size in enumerate(shape):
        for start, length in sorted(hints.pieces.get(size, ())):
            inner = (*shape[:axis], length, *shape[axis + 1 :])
            for other, count in enumerate(shape):
                if other != axis and count > 1 and len(shape) <= 3 and other not in hints.kernel_axes(shape):
                    yield Slot(name, inner, (other,), (axis, start, length))


def pulls(point: Mapping[str, Tensor], hints: Hints, homes: Mapping[str, set[str]]) -> Iterator[Pull]:
    """Yield what a shift of a layer's input does to its bias, for every weight and bias of one module."""
    modules: dict[str, list[str]] = {}
    for name in point:
        for home in sorted(homes[name]):
            modules.setdefault(home, []).append(name)
    for names in modules.values():
        for bias in names:
            weights = [w for w in names if point[w].ndim >= 2 and point[bias].ndim == 1]
            partner = bias.replace("bias", "weight")
            for weight in [partner] if partner in weights else weights:
                yield from _pulls_of(weight, bias, tuple(point[weight].shape), point[bias].numel(), hints)


def _pulls_of(weight: str, bias: str, shape: tuple[int, ...], count: int, hints: Hints) -> Iterator[Pull]:
    groups = hints.conv_groups(shape)
    if groups > 1:
        view = (groups, shape[0] // groups, *shape[1:])
        for inputs, outputs in (((0, 2), (0, 1)), ((0, 1), (0, 2))):
            if view[outputs[0]] * view[outputs[1]] == count:
                yield Pull(Slot(weight, view, inputs), 1.0, bias, outputs)
        return
    channel = [axis for axis in range(len(shape)) if axis not in hints.kernel_axes(shape)]
    for out in channel:
        for keep in channel:
            if out != keep and shape[out] == count and shape[keep] > 1:
                yield Pull(Slot(weight, shape, (keep,)), 1.0, bias, (out,))
                for factors in refinements(shape[keep], hints):  # a flattened input: channels and positions
                    view = (*shape[:keep], *factors, *shape[keep + 1 :])
                    moved = out if out < keep else out + len(factors) - 1
                    yield Pull(Slot(weight, view, (keep,)), 1.0, bias, (moved,))
                    yield Pull(Slot(weight, view, (keep + len(factors) - 1,)), 1.0, bias, (moved,))


@dataclass
class Signatures:
    """Per column, the inner products of its fields with the probing gradients: tensors of [size, probes].

    Attributes:
        values: the inner products.
        sizes: what they would be if their summands had random signs.
        largest: per parameter, the largest absolute gradient of each entry over the probes.
        averages: columns of which only the largest ratio is kept, in `ratios`.
        spanning: sets of columns, and which of each span it.
    """

    point: Point
    averages: frozenset[Term] = frozenset()
    ratios: dict[Term, Tensor] = field(default_factory=dict)
    values: dict[Term, list[Tensor]] = field(default_factory=dict)
    sizes: dict[Term, list[Tensor]] = field(default_factory=dict)
    largest: dict[str, Tensor] = field(default_factory=dict)
    spanning: dict[tuple[Term, ...], list[int]] = field(default_factory=dict)
    _peaks: dict[str, float] = field(default_factory=dict)

    def add(self, terms: Iterable[Term], ask: Callable[..., object], *, observe: bool = False) -> None:
        """Add one gradient, which `ask(point, visit=...)` hands over by parameter: each is reduced and freed."""
        by_name: dict[str, list[Term]] = {}
        fresh: list[tuple[Term, Tensor, Tensor]] = []
        for term in terms:
            by_name.setdefault(term.parameter, []).append(term)

        def visit(name: str, slope: Tensor) -> None:
            if observe:
                self._observe(name, slope)
            self._reduce(name, by_name.get(name, []), {name: slope}, fresh)

        ask(self.point, visit=visit)
        self._keep(fresh)

    def _observe(self, name: str, slope: Tensor) -> None:
        """Note which entries have a gradient, and how large; it may come from another point."""
        # what float64 still sees must not become zero; of a table of tokens, the order of magnitude is enough
        magnitude = slope.float().abs_().clamp_min_(1e-37).mul_(slope != 0)
        magnitude = magnitude.bfloat16() if slope.ndim > 1 else magnitude
        self.largest[name] = torch.maximum(self.largest[name], magnitude) if name in self.largest else magnitude
        self._peaks.clear()

    def peak(self, name: str) -> float:
        """Return the largest gradient of a parameter, looked for once: a table of tokens is large."""
        if name not in self._peaks:
            self._peaks[name] = float(self.largest[name].max()) if self.largest[name].numel() else 0.0
        return self._peaks[name]

    def admit(self, alive: Mapping[str, Tensor]) -> None:
        """Count as observed what has a gradient at the user's values, though none at the redrawn points."""
        for name, largest in self.largest.items():
            largest[(largest == 0) & alive.get(name, True)] = self.peak(name) or 1.0

    def _reduce(
        self, name: str, terms: Sequence[Term], gradient: Point, fresh: list[tuple[Term, Tensor, Tensor]]
    ) -> None:
        """Reduce one parameter's gradient, before the next parameter's is made."""
        sums: dict[tuple[type[Term], int], tuple[Tensor, Tensor]] = {}
        for term in terms:
            kind, place = type(term), term.slot.along(tuple(gradient[name].shape))
            if kind not in (Scale, Shift) or place is None:
                value, size = term.gather(self.point, gradient), term.magnitude(self.point, gradient)
            else:  # most slots run over one axis: the others are summed over once
                axis, slot = place
                if (kind, axis) not in sums:
                    sums[kind, axis] = _sums(gradient[name], self.point[name] if kind is Scale else None, axis)
                value, size = (slot.gather(part) for part in sums[kind, axis])
                size = size.sqrt()
            if term in self.averages:
                self._compare(term, value, size)
            else:
                fresh.append((term, value.double(), size.double()))

    def _keep(self, fresh: list[tuple[Term, Tensor, Tensor]]) -> None:
        """Store one probe's numbers as pieces of one tensor: thousands of small ones would fragment the memory."""
        if not fresh:
            return
        flat = torch.cat([value for _, value, _ in fresh] + [size for _, _, size in fresh])
        pieces = flat.split([term.size for term, _, _ in fresh] * 2)
        for (term, _, _), value, size in zip(fresh, pieces, pieces[len(fresh) :], strict=False):
            self.values.setdefault(term, []).append(value)
            self.sizes.setdefault(term, []).append(size)

    def _compare(self, term: Term, value: Tensor, size: Tensor) -> None:
        """Keep the largest ratio only: free shifts are many, and no null space is taken over them."""
        share = torch.where(size > 1e-12 * size.max(), value.abs() / size.clamp_min(1e-300), -torch.ones_like(size))
        before = self.ratios.get(term)
        self.ratios[term] = share.float() if before is None else torch.maximum(before, share.float())

    def departure(self, family: Family) -> float:
        """Return how far the loudest of a family's inner products are from zero, relative to their summands."""
        pairs = [(term.coefficient, term.with_coefficient(1.0)) for term in family.terms]
        total = torch.stack([c * self.values[term][0] for c, term in pairs]).sum(0)[list(family.items)]
        size = torch.stack([c * self.sizes[term][0] for c, term in pairs]).norm(dim=0)[list(family.items)]
        return float((total.abs() / size.clamp_min(1e-300))[size >= 1e-3 * size.max()].max())

    def values_of(self, term: Term) -> Tensor:
        return torch.stack(self.values[term], dim=1)

    def sizes_of(self, term: Term) -> Tensor:
        return torch.stack(self.sizes[term], dim=1)

    def ratio(self, term: Term) -> Tensor:
        """Return, per index, the largest |inner product| / magnitude over the probes; nan where nothing was seen."""
        if term in self.ratios:
            kept = self.ratios[term].double()
            return torch.where(kept < 0, torch.full_like(kept, float("nan")), kept)
        value, size = self.values_of(term).abs(), self.sizes_of(term)
        peak = size.amax(dim=1, keepdim=True)
        live = size > 1e-3 * peak  # a probe that hardly sees a slice cannot judge it
        share = torch.where(live & (peak > 0), value / size.clamp_min(1e-300), torch.full_like(value, -1.0))
        largest = share.amax(dim=1)
        return torch.where(largest < 0, torch.full_like(largest, float("nan")), largest)


def _sums(slope: Tensor, factor: Tensor | None, axis: int) -> tuple[Tensor, Tensor]:
    """Return the sums of slope * factor and of its square over all axes but one, made in pieces of `PIECE` numbers."""
    rest, pieces = [a for a in range(slope.ndim) if a != axis], []
    rows = max(1, PIECE * len(slope) // slope.numel())
    for k in range(0, len(slope), rows):
        part = slope[k : k + rows] if factor is None else slope[k : k + rows] * factor[k : k + rows]
        pieces.append([p.sum(rest) if rest else p for p in (part, part.square())])
    total, square = (torch.cat(p) if axis == 0 else torch.stack(p).sum(0) for p in zip(*pieces, strict=True))
    return total, square


def independent_positions(signatures: Signatures, terms: Sequence[Term], seed: int = 99) -> list[int]:
    """Return the positions of terms, earlier ones preferred, whose fields are linearly independent.

    Sums of parts, and parts of parts, are trivially dependent. Random gradients that no model made show it; they
    are drawn only for tensors that carry refined slots, since whole rows and columns never depend on each other,
    and once for the same terms: windows overlap, and a table of tokens is large.
    """
    point = signatures.point
    refined = {
        t.parameter for t in terms if t.slot.narrow is not None or t.slot.view != tuple(point[t.slot.name].shape)
    }
    chosen = [k for k, term in enumerate(terms) if term.parameter not in refined]
    for name in refined:
        places = [k for k, term in enumerate(terms) if term.parameter == name]
        here = tuple(terms[k] for k in places)
        if here not in signatures.spanning:
            source, drawn = generator(seed), Signatures(point)
            for _ in range(len(places) // max(1, here[0].size) + 2):
                noise = torch.randn(point[name].shape, generator=source, dtype=torch.float64).to(point[name])
                drawn.add(here, lambda _, visit, name=name, noise=noise: visit(name, noise))
            matrix = torch.stack([drawn.values_of(term).reshape(-1) for term in here], dim=1)
            signatures.spanning[here] = _spanning_columns(matrix)
        chosen.extend(places[k] for k in signatures.spanning[here])
    return sorted(chosen)


def _spanning_columns(matrix: Tensor) -> list[int]:
    chosen: list[int] = []
    basis = matrix.new_zeros(matrix.shape[0], 0)
    for k in range(matrix.shape[1]):
        norm = matrix[:, k].norm()
        if norm == 0:
            continue
        rest = matrix[:, k] / norm
        for _ in range(2):
            rest = rest - basis @ (basis.T @ rest)
        if float(rest.norm()) > 1e-9:
            chosen.append(k)
            basis = torch.cat([basis, (rest / rest.norm())[:, None]], dim=1)
    return chosen
