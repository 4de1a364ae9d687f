"""Dividing out: projection off the generators, the canonical point of an orbit, distances between orbits."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor

from normgauge.symmetry._family import Family
from normgauge.symmetry._terms import Centred, Scale, Shift, Term

Point = dict[str, Tensor]
_ROUNDS = 200


def divisible_families(families: Sequence[Family]) -> list[Family]:
    """Return the families that can be divided out: certified, no changes of basis, and with a closed form."""
    return [f for f in families if f.kind not in ("matrix", "fibre") and f.status != "undecided" and f.counted]


def project(vector: Point, families: Sequence[Family], point: Point) -> Point:
    """Return the part of a tangent vector orthogonal to every generator at `point`.

    Least squares on the generators' span by conjugate gradients; generators are normalized first, so that a few
    dozen steps reach rounding. Relations between generators do no harm.
    """
    norms = [_norms(family, point) for family in families]
    target = [family.gather(point, vector).double() / n for family, n in zip(families, norms, strict=True)]
    if not target:
        return dict(vector)

    def combine(weights: Sequence[Tensor]) -> Point:
        total = {name: torch.zeros_like(value) for name, value in vector.items()}
        for family, n, w in zip(families, norms, weights, strict=True):
            for name, part in family.field(point, w / n).items():
                total[name] += part
        return total

    def normal(weights: Sequence[Tensor]) -> list[Tensor]:
        image = combine(weights)
        return [f.gather(point, image).double() / n for f, n in zip(families, norms, strict=True)]

    weights = [torch.zeros_like(part) for part in target]
    rest = [part.clone() for part in target]
    step = [part.clone() for part in rest]
    size = start = _dot(rest, rest)
    for _ in range(4 * _ROUNDS):
        if size <= 1e-30 * start or size == 0:
            break
        image = normal(step)
        length = size / max(_dot(step, image), 1e-300)
        weights = [w + length * s for w, s in zip(weights, step, strict=True)]
        rest = [r - length * i for r, i in zip(rest, image, strict=True)]
        new = _dot(rest, rest)
        step = [r + new / size * s for r, s in zip(rest, step, strict=True)]
        size = new
    span = combine(weights)
    return {name: value - span[name] for name, value in vector.items()}


def _dot(a: Sequence[Tensor], b: Sequence[Tensor]) -> float:
    return sum(float((x * y).sum()) for x, y in zip(a, b, strict=True))


def _norms(family: Family, point: Point) -> Tensor:
    """Return an estimate of the generators' norms, one if a generator vanishes here."""
    total, point = torch.zeros(family.size, dtype=torch.float64), family.coordinates.effective(point)
    for term in family.terms:
        value = point[term.parameter]
        if isinstance(term, Scale):
            total += term.coefficient**2 * term.slot.gather(value.square()).double()
        else:
            total += term.coefficient**2
    kept = total if family.indices is None else total[list(family.indices)]
    return torch.where(kept > 0, kept.sqrt(), torch.ones_like(kept))


def canonical(parameters: Mapping[str, Tensor], families: Sequence[Family], order: Sequence[str]) -> Point:
    """Return the canonical point of the orbit of `parameters`: gauge "unit-writer".

    Free shifts are centred, coupled shifts folded into their reader, dead entries set to zero; then, in the
    order of the parameters, every generator's writers are scaled to joint norm 1 and its readers against it.
    Repeated until nothing moves: with overlapping generators one sweep disturbs another.
    """
    point = {name: value.to(torch.float64).clone() for name, value in parameters.items()}
    place = {name: number for number, name in enumerate(order)}
    shifts = [family for family in families if not family.scaling]
    scales = sorted(
        (family for family in families if family.scaling),
        key=lambda f: (min(place[t.parameter] for t in f.terms if t.coefficient > 0), -f.size),
    )
    for _ in range(_ROUNDS):
        before = point
        for family in scales:
            point = family.act(point, _unit_writers(family, family.coordinates.effective(point)))
        for family in shifts:
            point = family.act(point, _centring(family, family.coordinates.effective(point)))
        if all(_close(point[name], before[name]) for name in point):
            break
    return point


def _close(a: Tensor, b: Tensor) -> bool:
    return a.numel() == 0 or bool((a - b).abs().max() <= 1e-14 * (1 + b.abs().max()))


def _unit_writers(family: Family, point: Point) -> Tensor:
    """Return the exponents that bring the writers of every generator to joint norm 1."""
    writers = [t for t in family.terms if isinstance(t, Scale) and t.coefficient > 0]
    exponent = max(t.coefficient for t in writers)
    squares = torch.zeros(family.size, dtype=torch.float64)
    for term in [t for t in writers if t.coefficient == exponent]:
        squares += term.slot.gather(point[term.parameter].square()).double()
    amounts = torch.where(squares > 0, -0.5 * torch.log2(squares.clamp_min(1e-300)) / exponent, squares)
    return amounts if family.indices is None else amounts[list(family.indices)]


def _centring(family: Family, point: Point) -> Tensor:
    """Return the lengths that bring the first shifted tensor of every generator to mean zero."""
    anchor: Term = next((t for t in family.terms if isinstance(t, (Shift, Centred))), family.terms[0])
    unit = anchor.with_coefficient(1.0)
    ones = {anchor.parameter: point[anchor.parameter]}
    along = unit.gather(point, ones).double()
    field = unit.field(point, torch.ones(family.size, dtype=torch.float64))
    length = unit.gather(point, {anchor.parameter: field}).double()
    amounts = -along / length.clamp_min(1e-300) / anchor.coefficient
    return amounts if family.indices is None else amounts[list(family.indices)]
