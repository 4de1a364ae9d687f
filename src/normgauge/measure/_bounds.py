"""Generalization bounds of one model on one set of data, those of S2 and those it is compared with."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import replace

from normgauge.measure._bound_records import NO_SLOPE, Bound, BoundKind, Ingredients, counted, judged, lost, order
from normgauge.theory.generalization_bounds import (
    frobenius_margin_term,
    row_norm_term,
    samples_needed,
    sharpness_terms,
    spectral_margin_term,
    transport_terms,
    weight_normalized_term,
)


def bounds(of: Ingredients) -> list[Bound]:
    """Return every bound, those of S2 first."""
    local = _local(of)
    jumps = "the same number: this loss is continuous, X_0 is empty; where it jumps no cell may reach across the jump"
    same = replace(local, name="S2 Corollary 21", sentence=jumps)
    return [local, same, *_products(of), _transport(of), _sharp(of), _normalized(of), *_margins(of)]


def held_out(losses: Sequence[float], largest: float, delta: float) -> Bound:
    """Return Hoeffding's bound from test data: `mean + C sqrt(ln(1/delta)/(2n))`."""
    mean, n = sum(losses) / len(losses), len(losses)
    value = mean + largest * math.sqrt(math.log(1 / delta) / (2 * n))
    return judged(
        "held-out test set",
        (value, value),
        "upper",
        largest,
        "a larger test set",
        f"Hoeffding, {n} samples not used in training: what to beat",
    )


def _local(of: Ingredients) -> Bound:
    g = of.slack(of.samples)
    low, high = sum(cell.term_lower for cell in of.cells), sum(cell.term_upper for cell in of.cells)
    fixed = sum(cell.share for cell in of.cells if cell.center < 0) * of.largest
    free = sum(cell.share * cell.distance * cell.slope_upper for cell in of.cells if cell.center >= 0)
    room = of.room - fixed
    needed = ""
    if of.empirical + high + g >= of.largest:
        wanted = samples_needed(lambda m: high + of.slack(m), of.room)
        if math.isfinite(wanted):
            needed = f"about {wanted:.2g} samples in the same cells (now {of.samples})"
        elif room > 0 and math.isfinite(free):
            enough = room - g > 0
            factor = free / (room - g if enough else room)
            needed = f"local constants {factor:.2g} times smaller" + ("" if enough else ", and more samples")
        else:
            needed = "a smaller empirical loss, a rule for every layer, or balls that hold more of the samples"
    elif of.estimated:
        needed = "cells of a known extent: pass centres and radius="
    sentence = f"sum {low:.3g} (slopes seen) to {high:.3g}, g {g:.3g}, |T| {len(of.cells)}, N {of.partition_cells}"
    kind: BoundKind = "estimate" if of.estimated else "upper"
    return judged(
        "S2 Theorem 20", (of.empirical + low + g, of.empirical + high + g), kind, of.largest, needed, sentence
    )


def _products(of: Ingredients) -> list[Bound]:
    why = of.chain if isinstance(of.chain, str) else "a weight of the chain could not be read"
    unknown = "no bound of the network's Lipschitz constant on all inputs is known"
    return [
        _product("S2 Corollary 22, as printed", of, of.printed, why),
        _product("S2 Corollary 22, folded", of, of.network_slope, unknown),
    ]


def _product(name: str, of: Ingredients, product: float, why: str) -> Bound:
    if math.isnan(of.loss_slope):
        return lost(name, NO_SLOPE)
    if math.isnan(product) or (product == math.inf and why.startswith("no bound")):
        return lost(name, why)
    distance = sum(cell.share * cell.distance for cell in of.cells if cell.center >= 0)
    rest = sum(cell.share for cell in of.cells if cell.center < 0) * of.largest
    g = of.slack(of.samples)
    slope = of.loss_slope * product if of.classes else of.loss_slope * math.hypot(product, 1.0)
    value = of.empirical + slope * distance + rest + g
    left = of.room - rest - g
    needed = (
        f"a norm product {slope * distance / left:.2g} times smaller" if left > 0 else "more samples: g is too large"
    )
    kind: BoundKind = "estimate" if of.estimated else "upper"
    sentence = f"product of norms and normalizers 10^{math.log10(product):.2f}" if product > 0 else "product 0"
    return judged(name, (value, value), kind, of.largest, needed, sentence)


def _transport(of: Ingredients) -> Bound:
    inside = [cell for cell in of.cells if cell.center >= 0]
    rest = sum(cell.share for cell in of.cells if cell.center < 0) * of.largest
    ends = []
    for distance, slope in (("distance_seen", "slope_lower"), ("distance", "slope_upper")):
        distances = [getattr(cell, distance) for cell in inside]
        distances = [0.0 if math.isnan(d) else d for d in distances]
        slopes = [getattr(cell, slope) for cell in inside]
        shares = [cell.share for cell in inside]
        ends.append(transport_terms(shares, distances, slopes, of.partition_cells, of.samples, of.delta) + rest)
    low, high = (of.empirical + end for end in ends)
    need = "fewer cells, a smaller global Lipschitz constant; the additive constant is not given"
    return judged("HKK", (low, high), "main terms", of.largest, need, "optimal transport; S2 prints it with '+ const'")


def _sharp(of: Ingredients) -> Bound:
    sharpness, why = of.sharpness
    if math.isnan(sharpness):
        return lost("LLA", why)
    term = sharpness_terms(sharpness, of.samples)
    told = f"spherical sharpness {sharpness:.3g} of the cross-entropy; for the loss averaged over noise on the weights"
    return order("LLA", of, term, told)


def _normalized(of: Ingredients) -> Bound:
    name = "weight normalization"
    if math.isnan(of.last):
        return lost(name, "for networks whose weights below the last layer have Frobenius norm 1; these have not")
    return order(name, of, weight_normalized_term(of.last, of.samples), f"last layer of norm {of.last:.3g}")


def _margins(of: Ingredients) -> list[Bound]:
    names = ("spectral (2,1) margin bound", "Frobenius margin bound", "(2,1)/(2,inf) sketch of S0")
    if isinstance(of.chain, str) or math.isnan(of.loss_slope):
        return [lost(name, of.chain if isinstance(of.chain, str) else NO_SLOPE) for name in names]
    chain, links = of.chain, of.chain.links
    last = len(links) - 1
    biased = chain.biased
    inputs = chain.before * math.sqrt(of.inputs**2 + (of.samples if biased else 0))
    spectral = [link.spectral_with_bias(i == last) if biased else link.spectral for i, link in enumerate(links)]
    slopes = [max(link.slope, 1.0) if biased else link.slope for link in links]

    def by_spectral(samples: float) -> float:
        return of.largest * spectral_margin_term(
            spectral,
            [link.two_one for link in links],
            slopes,
            inputs=inputs * math.sqrt(samples / of.samples),
            width=chain.width + biased,
            loss_slope=of.loss_slope / of.largest,
            samples=samples,
            delta=of.delta,
        )

    def by_frobenius(samples: float) -> float:
        return of.largest * frobenius_margin_term(
            [link.slope * link.frobenius_with_bias(i == last) for i, link in enumerate(links)],
            inputs=inputs * math.sqrt(samples / of.samples),
            outputs=of.outputs,
            loss_slope=of.loss_slope / of.largest,
            samples=samples,
            delta=of.delta,
        )

    found = [counted(names[0], of, by_spectral, "Bartlett et al., constants written out; biases as a column")]
    if chain.homogeneous:
        found.append(counted(names[1], of, by_frobenius, "Golowich et al., constants written out"))
    else:
        found.append(lost(names[1], "for activations that are positively homogeneous, element by element, only"))
    tops = [float(link.rows.max()) for link in links]
    sums = [link.positions * float(link.rows.sum()) for link in links]
    told = "no bound: equal unit rows stretch by sqrt(n) per layer and leave it as it is"
    found.append(order(names[2], of, row_norm_term(sums, tops, of.samples), told))
    return found
