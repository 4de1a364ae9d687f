"""Coupled symmetries: coefficients shared along an index, found as the null space of one matrix per index size."""

import re
from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import Slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._probe import Signatures, independent_positions
from normgauge.symmetry._terms import Term

Bundle = tuple[Term, ...]
EQUATIONS = 1.3  # rows per column before a null space is believed
SPARE = 6  # and rows beyond
LARGEST_NULL = 1e-3  # relative singular value; an eps that could not be removed gives less
GAP = 30.0
DENOMINATORS = (1, 2, 3, 4, 6)  # of coefficients
MOST_COLUMNS = 40  # of a window; more needs more probes than it finds


def probes_wanted(terms: Sequence[Term]) -> dict[Term, int]:
    """Return how many probes each column needs so that the null space of its index size is decided."""
    counts: dict[int, int] = {}
    for term in terms:
        counts[term.size] = counts.get(term.size, 0) + 1
    return {term: -(-int(EQUATIONS * min(counts[term.size], MOST_COLUMNS) + SPARE) // term.size) + 1 for term in terms}


def split_by_probes(signatures: Signatures, terms: Sequence[Term]) -> tuple[list[Term], list[Term]]:
    """Split columns into those whose index size has rows enough for one null space, and the others."""
    wanted = probes_wanted(terms)
    ready = [term for term in terms if len(signatures.values[term]) >= wanted[term]]
    return ready, [term for term in terms if len(signatures.values[term]) < wanted[term]]


def coupled_families(signatures: Signatures, terms: Sequence[Term], precision: float) -> list[Family]:
    """Return families of two or more terms, finest index first.

    For every index size d, each column gives a vector of length d * probes; a combination of columns that
    vanishes on all of them is a symmetry for every index at once.
    """
    sizes: dict[int, list[Term]] = {}
    for term in terms:
        sizes.setdefault(term.size, []).append(term)
    families: list[Family] = []
    for size in sorted(sizes, reverse=True):
        here = [
            _family(signatures, bundles, coefficients, size)
            for bundles in _arrangements(sizes[size], size * len(signatures.values[sizes[size][0]]))
            for coefficients in null_vectors(signatures, bundles, precision)
        ]
        families.extend(sorted(here, key=lambda family: len(family.terms)))  # the simplest explanation first
    return families


def drop_known_writers(terms: list[Term], families: Sequence[Family]) -> list[Term]:
    """Drop one writer per family already found: whole-tensor scales then come out modulo the finer ones.

    A stream's free scale is thus written with the tensors that write into the stream, not with those before them.
    """
    dropped: set[str] = set()
    for family in families:
        slots = [term.slot for term in family.terms]
        if family.kind != "rescale" or any(slot.narrow is not None for slot in slots):
            continue
        pivot = next((t.parameter for t in family.terms if t.coefficient > 0 and t.parameter not in dropped), None)
        if pivot is not None and all(term.role == "scale" for term in family.terms):
            dropped.add(pivot)
    return [t for t in terms if not (t.finite_scale and t.size == 1 and t.parameter in dropped)]


def _arrangements(terms: list[Term], rows: int) -> list[list[Bundle]]:
    """Return the sets of columns to look at together: all of them, or windows and repeated blocks if too many."""
    if rows >= EQUATIONS * len(terms) + SPARE:
        return [[(term,) for term in terms]]
    plain = [term for term in terms if term.slot.narrow is None and len(term.slot.keep) <= 1]
    result: list[list[Bundle]] = []
    if rows >= EQUATIONS * len(plain) + SPARE:
        result.append([(term,) for term in plain])
    patterns: dict[tuple[object, ...], list[Term]] = {}
    for term in plain:
        key = (re.sub(r"\d+", "#", term.parameter), term.role, term.slot.view, term.slot.keep)
        patterns.setdefault(key, []).append(term)
    if len(patterns) < len(plain) and rows >= EQUATIONS * len(patterns) + SPARE:
        result.append([tuple(group) for group in patterns.values()])
    return result + [[(term,) for term in window] for window in _windows(terms, int((rows - SPARE) / EQUATIONS))]


def _windows(terms: list[Term], most: int) -> list[list[Term]]:
    """Return overlapping runs of neighbouring modules, each with at most `most` columns."""
    modules: dict[str, list[Term]] = {}
    for term in terms:
        modules.setdefault(owner_of(term.parameter), []).append(term)
    runs, names = [], list(modules)
    last = -1
    for start in range(len(names)):
        stop, count = start, 0
        while stop < len(names) and count + len(modules[names[stop]]) <= most and stop - start < 12:
            count += len(modules[names[stop]])
            stop += 1
        if stop > max(last, start):
            runs.append([term for name in names[start:stop] for term in modules[name]])
            last = stop
    return runs


def _matrix(signatures: Signatures, bundles: Sequence[Bundle]) -> Tensor:
    return torch.stack([sum(signatures.values_of(t) for t in bundle).reshape(-1) for bundle in bundles], dim=1)  # type: ignore[union-attr]


def null_vectors(signatures: Signatures, bundles: list[Bundle], precision: float) -> list[dict[int, float]]:
    """Return integer null combinations of the bundles' columns as {column: coefficient}."""
    if len(bundles) < 2:
        return []
    chosen = independent_positions(signatures, [bundle[0] for bundle in bundles])
    matrix = _matrix(signatures, [bundles[k] for k in chosen])
    cube = matrix.reshape(bundles[0][0].size, -1, matrix.shape[1])
    loud = cube.square().sum((0, 2)).sqrt()
    cube = cube / loud.clamp_min(1e-300)[None, :, None]  # every probe weighs the same
    matrix = cube.reshape(matrix.shape)
    norms = matrix.norm(dim=0)
    live = norms > 0
    if int(live.sum()) < 2:
        return []
    matrix, norms = matrix[:, live] / norms[live], norms[live]
    chosen = [k for k, alive in zip(chosen, live.tolist(), strict=True) if alive]
    _, sigma, right = torch.linalg.svd(matrix, full_matrices=matrix.shape[0] < matrix.shape[1])
    sigma = torch.cat([sigma, sigma.new_zeros(right.shape[0] - sigma.shape[0])])
    count = null_count(sigma / sigma[0], precision)
    if count == 0:
        return []
    basis = right[-count:] / norms
    rows = sparsify(row_reduce(basis))
    result = []
    for row in rows:
        parts = next((n for n in DENOMINATORS if float((n * row - (n * row).round()).abs().max()) < 0.05), 0)
        if parts and int((row.abs() > 0.02).sum()) > 1:
            result.append({chosen[k]: c / parts for k, c in enumerate((parts * row).round().tolist()) if c})
    return result


def null_count(relative: Tensor, precision: float) -> int:
    """Return how many of the descending relative singular values are null.

    Those below `precision` are; those up to `LARGEST_NULL` are if a gap of `GAP` separates them from the rest.
    """
    count = 0
    for k in range(len(relative) - 1, 0, -1):
        value, above = float(relative[k]), float(relative[k - 1])
        if value > LARGEST_NULL:
            break
        if above > GAP * max(value, precision / GAP):
            count = len(relative) - k
        elif value > precision and above > LARGEST_NULL:
            break
    return count


def row_reduce(basis: Tensor) -> Tensor:
    """Return the row-reduced form: each row has a pivot 1 where the other rows have 0."""
    rows = (basis / basis.abs().amax(dim=1, keepdim=True)).clone()
    used: list[int] = []
    for k in range(rows.shape[0]):
        rest = rows[k:].abs()
        if used:
            rest[:, used] = 0
        place = int(rest.argmax())
        row, column = k + place // rows.shape[1], place % rows.shape[1]
        rows[[k, row]] = rows[[row, k]]
        rows[k] = rows[k] / rows[k, column].clone()
        others = [i for i in range(rows.shape[0]) if i != k]
        rows[others] = rows[others] - rows[others, column][:, None] * rows[k][None, :]
        used.append(column)
    return torch.where(rows.abs() < 0.02, torch.zeros_like(rows), rows)


def sparsify(rows: Tensor) -> Tensor:
    """Shorten rows by adding or subtracting others while that removes entries: a natural basis reads better."""
    rows = rows.clone()
    improved = True
    while improved:
        improved = False
        for i in range(len(rows)):
            start = 0
            while start < 2 * len(rows):
                trials = torch.stack([rows[i] + rows, rows[i] - rows], 1).flatten(0, 1)
                shorter = (trials.abs() > 0.02).sum(1) < (rows[i].abs() > 0.02).sum()
                shorter[2 * i : 2 * i + 2] = shorter[:start] = False
                if not bool(shorter.any()):
                    break
                place = int(shorter.nonzero()[0])
                rows[i] = torch.where(trials[place].abs() < 0.02, 0.0, trials[place])
                start, improved = place + 1, True
    return rows


def _family(signatures: Signatures, bundles: list[Bundle], coefficients: dict[int, float], size: int) -> Family:
    terms = [term.with_coefficient(c) for k, c in coefficients.items() for term in bundles[k]]
    sign = _orientation(terms)
    terms = merge_parts([term.with_coefficient(sign * term.coefficient) for term in terms])
    total = sum(c * signatures.values_of(t) for k, c in coefficients.items() for t in bundles[k])
    scale = sum((c * signatures.sizes_of(t)).square() for k, c in coefficients.items() for t in bundles[k])
    loud = scale > 1e-20 * scale.max()  # type: ignore[union-attr]
    ratio = torch.where(loud, total.abs() / scale.sqrt().clamp_min(1e-300), 0.0).amax(dim=1)  # type: ignore[union-attr]
    kind = "rescale" if all(term.finite_scale for term in terms) else "shift"
    if kind == "rescale" and all(term.coefficient > 0 for term in terms):
        kind = "scale"
    return Family(kind, tuple(terms), size, residuals=tuple(float(x) for x in ratio))  # type: ignore[arg-type]


def _orientation(terms: list[Term]) -> float:
    """Return the sign that makes writers positive: vectors (gamma, beta, biases) write, else the first tensor does."""
    vectors = [term for term in terms if len(term.slot.view) == 1 and term.role != "pull"]
    return 1.0 if (vectors or terms)[0].coefficient > 0 else -1.0


def merge_parts(terms: list[Term]) -> list[Term]:
    """Write terms that cover every part of a packed axis with one coefficient as one term over the whole axis."""
    groups: dict[tuple[object, ...], list[Term]] = {}
    for term in terms:
        slot = term.slot
        place = None if slot.first is None or slot.narrow is None else slot.narrow[0]
        key = (term,) if place is None else (slot.name, slot.first, place, slot.keep, term.role, term.coefficient)
        groups.setdefault(key, []).append(term)
    result = []
    for group in groups.values():
        slot = group[0].slot
        if slot.first is None or slot.narrow is None or len(group) < slot.first[slot.narrow[0]]:
            result.extend(group)
            continue
        place = slot.narrow[0]
        keep = tuple(axis + (axis >= place) for axis in slot.keep)
        result.append(replace(group[0], slot=Slot(slot.name, slot.first, keep)))
    return result
