"""Symmetries of one tensor alone: free scales, free shifts, entries without any effect."""

from __future__ import annotations

import torch
from torch import Tensor

from normgauge.network import owner_of
from normgauge.symmetry._axes import element_slot
from normgauge.symmetry._family import Family
from normgauge.symmetry._probe import Columns, Signatures
from normgauge.symmetry._terms import Shift, Term

CANDIDATE = 0.05  # eps alone gives about 1e-3; certification removes what only looks null


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
        if not bool(null.any()) or float(null.double().sum()) < 0.5 * float((~ratio.isnan()).sum()):
            continue
        chosen = tuple(int(i) for i in null.nonzero().flatten())
        whole = len(chosen) == term.size
        residual = tuple(float(x) for x in ratio[null])
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


def dead_units(families: list[Family], signatures: Signatures, at_user: dict[str, Tensor]) -> list[Family]:
    """Return units without any gradient at both points: writers and readers of a rescaling that nothing passes."""
    units = []
    for family in families:
        if family.kind != "rescale" or family.size < 2:
            continue
        silent = torch.ones(family.size, dtype=torch.bool)
        for term in family.terms:
            if term.slot.name != term.parameter:
                continue
            for largest in (signatures.largest[term.parameter], at_user[term.parameter].abs()):
                silent &= term.slot.gather(largest) == 0
        if bool(silent.any()) and not bool(silent.all()):
            chosen = tuple(int(i) for i in silent.nonzero().flatten())
            note = "never active on this data"
            units.append(
                Family(
                    "dead",
                    family.terms,
                    family.size,
                    chosen,
                    status=family.status,
                    certificate=family.certificate,
                    residuals=(0.0,) * len(chosen),
                    note=note,
                    counted=False,
                )
            )
    return units
