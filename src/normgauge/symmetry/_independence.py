"""Which generators are new, and how many directions they span together."""

from collections.abc import Iterator, Mapping, Sequence

import torch
from torch import Tensor

from normgauge.rng import generator
from normgauge.symmetry._family import Family
from normgauge.symmetry._matrix import MatrixFamily
from normgauge.symmetry._terms import Scale, Shift, Term
from normgauge.symmetry._values import Point

_DENSE = 1500  # generators up to which the rank is taken from the vectors themselves
_LARGEST = 3e7  # numbers written out for it
_SAME = 1e-7
_COMPARED = 2**18


def is_implied(
    family: Family,
    families: Sequence[Family],
    point: Point,
    *,
    centred: bool = False,
    hops: int = 2,
    unused: Mapping[str, Tensor] | None = None,
) -> bool:
    """Tell whether the generators of a family are combinations of known families' on the entries that data touch.

    A random combination of the family's vectors is compared with the combinations of the known families that
    agree with it on a tensor they share. `unused` masks entries that no data touch: what moves these alone is no news.
    """
    chi = torch.randn(len(family), generator=generator(1234), dtype=torch.float64)
    if centred:
        chi = chi - chi.mean()
    alive = _alive(families, point)
    for name, silent in (unused or {}).items():
        alive[name] = alive[name] & ~silent if name in alive else ~silent
    target = _mask_dead(family.field(point, chi), alive)
    touched = {key for other in families for key in _keys(other)}
    if not {key for key in _keys(family) if key[0] in target} <= touched:
        return False
    if not target:
        return True
    target, candidates = _thin(target), []
    frontier, used = [(family, chi)], set()  # vectors are made again when needed: all of them together are large
    for _ in range(hops):
        fresh: list[tuple[Family, Tensor]] = []
        for source, given in frontier:
            vector = _mask_dead(source.field(point, given), alive)
            for position, other in enumerate(families):
                for term in other.terms:
                    if term.parameter not in vector or (position, term.parameter) in used:
                        continue
                    amounts = _projection(term, other, point, vector[term.parameter])
                    if amounts is None or not bool(amounts.abs().max() > 0):
                        continue
                    used.add((position, term.parameter))
                    candidates.append(_thin(_mask_dead(other.field(point, amounts), alive)))
                    fresh.append((other, amounts))
        frontier = fresh
        if candidates and _residual(target, candidates) < _SAME:
            return True
    return False


def _alive(families: Sequence[Family], point: Point) -> dict[str, Tensor]:
    """Return masks of the entries that are not dead, for parameters that have dead ones: dead entries move freely."""
    masks: dict[str, Tensor] = {}
    for family in families:
        if family.kind == "dead" and family.counted:
            value = point[family.parameters[0]]
            mask = torch.ones(value.numel(), dtype=torch.bool)
            mask[list(family.items)] = False
            masks[family.parameters[0]] = mask.reshape(value.shape)
    return masks


def _mask_dead(vector: dict[str, Tensor], alive: dict[str, Tensor]) -> dict[str, Tensor]:
    """Drop what moves dead entries only, and the tensors where nothing is left."""
    kept = {name: value * alive[name] if name in alive else value for name, value in vector.items()}
    return {name: value for name, value in kept.items() if name not in alive or bool(value.abs().max() > 0)}


def _projection(term: Term, family: Family, point: Point, vector: Tensor) -> Tensor | None:
    """Return, per generator, the component of a tangent vector along the term's field."""
    if not isinstance(term, (Scale, Shift)):
        return None
    value = point[term.parameter]
    squares = value.square() if isinstance(term, Scale) else value.new_ones(()).expand_as(value)
    norms = term.coefficient**2 * term.slot.gather(squares)
    amounts = (term.gather(point, {term.parameter: vector}) / norms.clamp_min(1e-300)).double()
    return amounts if family.indices is None else amounts[list(family.indices)]


def _thin(vector: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return some entries of large tensors, for comparisons."""
    large = {value.numel() for value in vector.values() if value.numel() > _COMPARED}
    some = {size: torch.randint(size, (_COMPARED,), generator=generator(size)) for size in large}
    return {name: v.reshape(-1)[some[v.numel()]] if v.numel() in some else v for name, v in vector.items()}


def dot(a: dict[str, Tensor], b: dict[str, Tensor]) -> float:
    return sum(float((a[name] * b[name]).sum()) for name in a if name in b)


def _residual(target: dict[str, Tensor], others: list[dict[str, Tensor]]) -> float:
    norms = [dot(o, o) ** 0.5 or 1.0 for o in others]
    gram = torch.tensor(
        [
            [dot(a, b) / (na * nb) for b, nb in zip(others, norms, strict=True)]
            for a, na in zip(others, norms, strict=True)
        ],
        dtype=torch.float64,
    )
    right = torch.tensor([dot(target, o) / n for o, n in zip(others, norms, strict=True)], dtype=torch.float64)
    weights = torch.linalg.pinv(gram, hermitian=True, rtol=1e-12) @ right
    rest = {name: value.clone() for name, value in target.items()}
    for weight, other, norm in zip(weights.tolist(), others, norms, strict=True):
        for name, value in other.items():
            part = weight / norm * value
            rest[name] = rest[name] - part if name in rest else -part
    return (dot(rest, rest) / max(dot(target, target), 1e-300)) ** 0.5


def dimensions(families: Sequence[Family], point: Point) -> tuple[int, int]:
    """Return the rank of all generator vectors but those of changes of basis, and what these add to it.

    Up to `_DENSE` generators both are ranks of the matrix of vectors. Beyond, the first is the number of generators
    less the relations between families: a family's vectors split into their sum and its complement, and by the
    exchangeability of the index a relation holds for all of a part or for none of it; the second is a sum over blocks.
    """
    plain = [family for family in families if family.kind != "matrix"]
    bases = [family for family in families if isinstance(family, MatrixFamily)]
    count = sum(len(family) for family in plain)
    more = sum(len(family) * family.block_dimension for family in bases)
    entries = sum(point[name].numel() for name in {p for family in families for p in family.parameters})
    rows = list(_vectors(plain, point)) if count <= _DENSE and count * entries <= _LARGEST else None
    alone = count - relations(plain, point) if rows is None else _rank(rows, families, point)
    if rows is None or count + more > _DENSE or (count + more) * entries > _LARGEST:
        return alone, more
    tangents = [tangent for family in bases for tangent in family.tangents(point)]
    return alone, _rank([*rows, *tangents], families, point) - alone


def _vectors(families: Sequence[Family], point: Point) -> Iterator[dict[str, Tensor]]:
    for family in families:
        for position in range(len(family)):
            unit = torch.zeros(len(family), dtype=torch.float64)
            unit[position] = 1.0
            yield family.field(point, unit)


def _rank(vectors: Sequence[Mapping[str, Tensor]], families: Sequence[Family], point: Point) -> int:
    if not vectors:
        return 0
    matrix = _unit_rows(vectors, point, list(dict.fromkeys(name for family in families for name in family.parameters)))
    wide = matrix.shape[0] < matrix.shape[1]
    sigma = torch.linalg.svdvals(matrix @ matrix.T if wide else matrix)
    return int((sigma > (1e-11 if wide else 1e-7) * sigma[0]).sum())


def written_out(families: Sequence[Family], point: Point, names: Sequence[str]) -> Tensor:
    """Return the generators' vectors at a point, each of length one, as rows over these parameters."""
    plain = _vectors([family for family in families if family.kind != "matrix"], point)
    bases = (tangent for family in families if isinstance(family, MatrixFamily) for tangent in family.tangents(point))
    return _unit_rows([*plain, *bases], point, names)


def _unit_rows(vectors: Sequence[Mapping[str, Tensor]], point: Point, names: Sequence[str]) -> Tensor:
    rows = [torch.zeros(0, sum(point[n].numel() for n in names), dtype=torch.float64)]
    for vector in vectors:
        parts = [(vector[n] if n in vector else torch.zeros_like(point[n])).reshape(-1).double() for n in names]
        rows.append(torch.nn.functional.normalize(torch.cat(parts), dim=0, eps=1e-300)[None])
    return torch.cat(rows)


def _keys(family: Family) -> set[tuple[str, str]]:
    """Return where a family acts: on a tensor, by scaling, by 1/gamma, or by constants.

    On generic values the three are independent of each other, so a relation must cancel within each.
    """
    kinds = {"scale": "scale", "centred": "centred"}
    return {(term.parameter, kinds.get(term.role, "shift")) for term in family.terms}


def entangled_families(families: Sequence[Family]) -> list[Family]:
    """Return the families that may take part in a relation: each acts nowhere alone.

    A family that acts alone somewhere is independent of the others and can be put aside; then the next one may be.
    """
    left = list(families)
    while True:
        counts: dict[tuple[str, str], int] = {}
        for family in left:
            for key in _keys(family):
                counts[key] = counts.get(key, 0) + 1
        rest = [family for family in left if all(counts[key] > 1 for key in _keys(family))]
        if len(rest) == len(left):
            return rest
        left = rest


def relations(families: Sequence[Family], point: Point) -> int:
    """Count linear relations between the generators of different families."""
    alive = _alive(families, point)
    families = entangled_families([family for family in families if family.kind != "dead"])
    if not families:
        return 0
    total = 0
    for position, family in enumerate(families):
        if len(family) > 1 and is_implied(family, families[:position], point, centred=True):
            total += len(family) - 1
    ones = (family.field(point, torch.ones(len(family), dtype=torch.float64)) for family in families)
    sums = [_thin(_mask_dead(vector, alive)) for vector in ones]
    norms = [dot(s, s) ** 0.5 or 1.0 for s in sums]
    gram = torch.eye(len(sums), dtype=torch.float64)
    for i in range(len(sums)):
        for j in range(i):
            gram[i, j] = gram[j, i] = dot(sums[i], sums[j]) / (norms[i] * norms[j])
    spectrum = torch.linalg.eigvalsh(gram)
    return total + int((spectrum < 1e-10 * spectrum[-1]).sum())
