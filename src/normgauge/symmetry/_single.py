"""Symmetries of one tensor alone: free scales, free shifts, entries without any effect."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._probe import Columns, Signatures
from normgauge.symmetry._terms import Shift, Term

CANDIDATE = 1e-3  # an eps that could not be removed gives less; certification removes what only looks null
MOST_LISTED = 100_000  # entries of one tensor that are named one by one


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
    peaks = [float(v.max()) for n, v in signatures.largest.items() if n != name and owner_of(n) == layer]
    return max(peaks, default=0.0)


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
    """Return free scales and free shifts, finest index first."""
    order = sorted([*columns.scales, *columns.averages], key=lambda term: -term.size)
    return free_families(signatures, order, precision)


def null_everywhere(signatures: Signatures, term: Term, precision: float) -> bool:
    """Tell whether a column vanishes on every index that was seen, so that it belongs to no coupling."""
    largest = signatures.largest[term.parameter]
    layer = max(_layer_peak(signatures, term.parameter), float(largest.max()))
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
            silent |= term.slot.gather((signatures.largest[term.parameter] > 0).double()) == 0
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
                silent &= term.slot.gather(alive[term.parameter].double()) == 0
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
