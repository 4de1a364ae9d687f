"""Symmetries of one tensor: free scales and shifts, entries without effect, shifts that something hides.

A centring normalization hides a shift behind its gain (W + t / gamma), a reader's kernel what it does not read.
"""

from collections.abc import Iterator, Mapping, Sequence
from itertools import permutations

import torch
from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import Hints, Slot, element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._probe import Columns, Signatures
from normgauge.symmetry._terms import Centred, Offset, Scale, Shift, Term, Undone, Unread, Values

CANDIDATE = 1e-3  # an eps that could not be removed gives less; certification removes what only looks null
MOST_LISTED = 100_000  # entries of one tensor that are named one by one
WIDEST = 4096  # of a reader whose kernel is written out
LOUDEST = 8  # slices on which a hidden shift is tried first
HIDDEN = 1e-5


def unused_entries(signatures: Signatures) -> dict[str, Tensor]:
    """Return the masks of entries without any gradient: unobserved in this data, not known to be dead.

    A vector (a bias) without any gradient whose layer has one is dead, not unobserved.
    """
    masks: dict[str, Tensor] = {}
    for name, largest in signatures.largest.items():
        silent = largest == 0
        if bool(silent.any()) and not (bool(silent.all()) and _layer_peak(signatures, name) > 0):
            masks[name] = silent
    return masks


def _layer_peak(signatures: Signatures, name: str) -> float:
    """Return the largest gradient in the layer of a parameter, itself excluded."""
    layer = owner_of(name)
    return max((signatures.peak(n) for n in signatures.largest if n != name and owner_of(n) == layer), default=0.0)


def dead_entries(signatures: Signatures, precision: float) -> list[Family]:
    """Return families of single entries whose gradient vanishes to rounding while their layer's does not.

    Only vectors are asked: a bias before a normalization, a key's bias in attention.
    """
    families = []
    for name, largest in signatures.largest.items():
        shape = tuple(largest.shape)
        if sum(s > 1 for s in shape) > 1 or largest.numel() == 0:
            continue
        reference = max(_layer_peak(signatures, name), float(largest.max()))
        quiet = largest.reshape(-1) <= precision * reference
        if float(largest.max()) > precision * reference:
            quiet &= largest.reshape(-1) > 0  # exact zeros among live entries were not observed
        if reference > 0 and bool(quiet.any()):
            slot = element_slot(name, shape)
            chosen = tuple(int(i) for i in quiet.nonzero().flatten())
            whole = len(chosen) == slot.size
            residual = tuple(float(x) / reference for x in largest.reshape(-1)[quiet])
            families.append(Family("dead", (Shift(slot),), slot.size, None if whole else chosen, residuals=residual))
    return families


def free_families(signatures: Signatures, terms: list[Term], precision: float) -> list[Family]:
    """Return a family for every column (or part of it) whose inner products vanish in every probe."""
    families = []
    for term in terms:
        ratio = signatures.ratio(term)
        limit = CANDIDATE if term.finite_scale else precision
        null = ratio < limit
        if (
            bool(null.any()) and term.slot.name == term.parameter
        ):  # silent at this point, not elsewhere: certified there
            null |= ratio.isnan() & (term.slot.gather(signatures.largest[term.parameter]) > 0)
        if not bool(null.any()) or float(null.double().sum()) < 0.5 * float((~ratio.isnan()).sum()):
            continue
        chosen = tuple(int(i) for i in null.nonzero().flatten())
        whole = len(chosen) == term.size
        residual = tuple(float(x) for x in ratio[null].nan_to_num(0.0))
        kind = "scale" if term.finite_scale else "shift"
        families.append(Family(kind, (term,), term.size, None if whole else chosen, residuals=residual))  # type: ignore[arg-type]
    return families


def single_block(signatures: Signatures, columns: Columns, precision: float) -> list[Family]:
    order = sorted([*columns.scales, *columns.averages], key=lambda term: -term.size)
    return free_families(signatures, order, precision)


def null_everywhere(signatures: Signatures, term: Term, precision: float) -> bool:
    """Tell whether a column vanishes on every index that was seen, so that it belongs to no coupling."""
    largest = signatures.largest[term.parameter]
    layer = max(_layer_peak(signatures, term.parameter), signatures.peak(term.parameter))
    if term.slot.name == term.parameter and float(term.slot.view_of(largest).max()) <= precision * layer:
        return True
    if not term.finite_scale:
        return bool(signatures.values_of(term).abs().amax() <= precision * max(layer, 1e-300))
    ratio = signatures.ratio(term)
    ratios = ratio[~ratio.isnan()]
    return ratios.numel() == 0 or bool((ratios < CANDIDATE).all())


def drop_unobserved(family: Family, signatures: Signatures) -> list[Family]:
    """Return a family without the indices of which a slice had no gradient at all: nothing is known about them."""
    silent = torch.zeros(family.size, dtype=torch.bool)
    for term in family.terms:
        plain = term.slot.name == term.parameter and term.slot.size == family.size
        if plain and not _dead_tensor(signatures, term.parameter):
            silent |= term.slot.gather(signatures.largest[term.parameter] > 0) == 0
    kept = [position for position, item in enumerate(family.items) if not bool(silent[item])]
    if len(kept) == len(family):
        return [family]
    return [family.subset(kept)] if kept else []


def _dead_tensor(signatures: Signatures, name: str) -> bool:
    """Tell whether a tensor has no gradient anywhere though its layer has: it is dead, not unobserved."""
    return not bool(signatures.largest[name].any()) and _layer_peak(signatures, name) > 0


def dead_units(families: list[Family], alive: dict[str, Tensor]) -> list[Family]:
    """Return units that nothing passes at the user's values: writers and readers of a rescaling without gradient."""
    units = []
    for family in families:
        if family.kind != "rescale" or family.size < 2:
            continue
        silent = torch.ones(family.size, dtype=torch.bool)
        for term in family.terms:
            if term.slot.name == term.parameter:
                mask = alive.get(term.parameter)
                silent &= torch.zeros_like(silent) if mask is None else term.slot.gather(mask) == 0
        if bool(silent.any()) and not bool(silent.all()):
            chosen = tuple(int(i) for i in silent.nonzero().flatten())
            units.append(_only_here(family.terms, family.size, chosen, "never active on this data"))
    return units


def dead_here(units: Sequence[Family], signatures: Signatures, alive: dict[str, Tensor]) -> list[Family]:
    """Return entries without gradient at the user's values though they have one elsewhere: behind a gain of zero.

    Entries of units that are reported already are left out.
    """
    told = {name for family in units for name in family.parameters}
    families = []
    for name, active in alive.items():
        silent = (~active & (signatures.largest[name] > 0)).reshape(-1)
        count = int(silent.sum())
        if name in told or not count or (count < silent.numel() and count > MOST_LISTED):
            continue
        slot = element_slot(name, tuple(active.shape))
        chosen = None if count == silent.numel() else tuple(int(i) for i in silent.nonzero().flatten())
        families.append(_only_here((Shift(slot),), slot.size, chosen, "without effect at these values"))
    return families


def _only_here(terms: tuple[Term, ...], size: int, chosen: tuple[int, ...] | None, note: str) -> Family:
    count = size if chosen is None else len(chosen)
    return Family("dead", terms, size, chosen, status="exact_here", residuals=(0.0,) * count, note=note, counted=False)


def centred_candidates(
    families: Sequence[Family], point: Mapping[str, Tensor], gradient: Mapping[str, Tensor]
) -> Iterator[tuple[Term, ...]]:
    """Yield terms that may cancel because the input of a gain sums to zero over its index.

    A layer W reading gamma * z + beta with sum(z) = 0 (LayerNorm) does not see W + t 1/gamma^T, up to
    t <beta, 1/gamma> in its bias; a writer behind a layer scale before a LayerNorm does not show u/gamma.
    Every gain is tried with every weight of its width, on the slices with the largest gradients first.
    """
    gains = [name for name, value in point.items() if sum(s > 1 for s in value.shape) == 1]
    for name, value in point.items():
        for axis in range(value.ndim if name not in gains else 0):
            matching = [gain for gain in gains if point[gain].numel() == value.shape[axis]]
            loudest = _loudest(gradient[name], axis) if matching else None
            for gamma in matching:
                yield from _centred_terms(name, axis, gamma, loudest, point, gradient)  # type: ignore[arg-type]
    for family in families:
        scales = [term for term in family.terms if isinstance(term, Scale) and term.slot.narrow is None]
        yield from _undone_terms(family, [term for term in scales if term.parameter in gains], point)


def _undone_terms(family: Family, vectors: Sequence[Term], point: Mapping[str, Tensor]) -> Iterator[tuple[Term, ...]]:
    """Yield a shift beside a gain, undone by all who read it, where they have no biases for that."""
    readers = [term for term in family.terms if term.coefficient < 0 and term not in vectors]
    plain = all(t.slot.narrow is None and t.slot.view == tuple(point[t.parameter].shape) for t in readers)
    plain &= not any(_biases(t.parameter, point) for t in readers)
    if (
        family.kind == "rescale"
        and family.size > 1
        and readers
        and plain
        and len(vectors) + len(readers) == len(family.terms)
    ):
        for gamma, beta in permutations([t for t in vectors if t.coefficient > 0], 2):
            names = gamma.parameter, beta.parameter
            yield (Shift(beta.slot), *(Undone(t.slot, -1.0, *names) for t in readers))


def unread_candidates(
    point: Mapping[str, Tensor], gradient: Mapping[str, Tensor], hints: Hints
) -> Iterator[tuple[Term, ...]]:
    """Yield shifts of writers along what a narrower reader maps to zero: the last layers before a small head.

    Every writer of the reader's width is tried, on the slices with the largest gradients first.
    """
    for reader, matrix in point.items():
        for along, width in enumerate(matrix.shape):
            outputs = matrix.numel() // max(1, width)
            if matrix.ndim != 2 or not 0 < outputs < width or width > WIDEST:
                continue
            seen = torch.linalg.qr(matrix.detach().movedim(along, 0).reshape(width, -1).double()).Q
            for name, value in point.items():
                for axis, size in enumerate(value.shape):
                    if size == width and name != reader and axis not in hints.kernel_axes(tuple(value.shape)):
                        slopes = _loudest(gradient[name], axis)[0].double()
                        if float((slopes - slopes @ seen @ seen.mT).norm()) < HIDDEN * float(slopes.norm()):
                            rest = tuple(a for a in range(value.ndim) if a != axis)
                            slot = Slot(name, tuple(value.shape), rest)
                            yield (Unread(slot, 1.0, reader, along, axis, width - outputs),)


def _loudest(slope: Tensor, axis: int) -> tuple[Tensor, Tensor]:
    """Return the slices along an axis with the largest gradients, and their numbers."""
    slices = slope.movedim(axis, -1).reshape(-1, slope.shape[axis])
    rows = torch.linalg.vector_norm(slices, dim=1).topk(min(LOUDEST, len(slices))).indices
    return slices[rows], rows


def _centred_terms(
    name: str, axis: int, gamma: str, loudest: tuple[Tensor, Tensor], point: Values, gradient: Values
) -> Iterator[tuple[Term, ...]]:
    """Yield a weight's shift by 1/gamma, alone or with its bias, if some rows of the gradient allow it."""
    shape = tuple(point[name].shape)
    centred = Centred(Slot(name, shape, tuple(a for a in range(len(shape)) if a != axis)), 1.0, gamma)
    inverse, (slopes, rows) = 1 / point[gamma].reshape(-1), loudest
    sums, sizes = slopes @ inverse, (slopes * inverse).norm(dim=1).clamp_min(1e-300)
    if float((sums.abs() / sizes).max()) < HIDDEN:
        yield (centred,)
        return
    for bias in [other for other in _biases(name, point) if point[other].numel() == centred.size]:
        for beta in [other for other in _biases(gamma, point) if other != gamma and len(point[other]) == len(inverse)]:
            offset = Offset(element_slot(bias, tuple(point[bias].shape)), -1.0, gamma, beta)
            rest = sums + offset.gather(point, gradient)[rows]
            if float((rest.abs() / sizes).max()) < HIDDEN:
                yield (centred, offset)


def _biases(name: str, point: Mapping[str, Tensor]) -> list[str]:
    owner = owner_of(name)
    return [other for other, value in point.items() if value.ndim == 1 and owner_of(other) == owner]
