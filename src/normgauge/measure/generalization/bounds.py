"""Generalization bounds of one model on one set of data, those of S2 and those it is compared with, with verdicts."""

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Literal

from normgauge.measure.generalization.network_copy import Chain
from normgauge.measure.generalization.partition import Piece
from normgauge.theory import generalization_bounds as theory
from normgauge.theory.partition_bound import partition_slack

BoundVerdict = Literal["non-vacuous", "vacuous", "undecided", "does not apply"]
BoundKind = Literal["upper", "estimate", "main terms"]
Ends = tuple[float, float]
NO_SLOPE = "the slope of the loss in the outputs is not known; pass loss_slope="


@dataclass(frozen=True, slots=True)
class Cell:
    """One occupied cell of the partition and its term in S2 Theorem 20.

    Args:
        center: index of its centre; -1 for the rest, where nothing but 0 <= f <= C is used.
        label: class of its samples; -1 where cells are not split by class.
        samples: m_i.
        share: m_i / m.
        radius: of the ball it lies in.
        distance: lambda_i, a bound: radius plus the mean distance of the samples from the centre.
        distance_seen: the mean distance between two of its samples, an estimate of lambda_i.
        slope_lower: the largest gradient norm of the loss met at its samples and on walks from them inside the cell:
            L_i is at least this.
        slope_upper: slope of the loss in the outputs times a bound of the network's on the ball; 0 where by it the
            loss is cut off all over the ball; inf if unknown.
        term_lower: share times distance_seen times slope_lower, at most share times C.
        term_upper: share times the least of distance times slope_upper, C, and what is certified by margin: the most
            the loss can be anywhere on the ball, less its mean at the samples.
    """

    center: int
    label: int
    samples: int
    share: float
    radius: float
    distance: float
    distance_seen: float
    slope_lower: float
    slope_upper: float
    term_lower: float
    term_upper: float


@dataclass(frozen=True, slots=True)
class Bound:
    """One bound of the expected loss.

    Args:
        name: of the bound.
        lower: what its right-hand side is at least, from what was seen; nan where it does not apply.
        upper: what it is at most.
        kind: "upper" (holds with probability 1 - delta), "estimate" (an ingredient was estimated), or "main terms"
            (constants the source does not give are left out or taken as 1).
        verdict: vacuous if it says no more than f <= C.
        needed: what would make it say more.
        sentence: what it rests on, or why it does not apply.
    """

    name: str
    lower: float
    upper: float
    kind: BoundKind
    verdict: BoundVerdict
    needed: str = ""
    sentence: str = ""


@dataclass(frozen=True)
class Ingredients:
    """What the bounds are made of."""

    empirical: float  # F(D, h), the mean loss on the m samples that were not used for the partition
    largest: float  # C
    samples: int  # m
    delta: float  # the probability of failure
    tried: int  # partitions the cells were chosen from; the bound on them fails with probability delta / tried each
    cells: tuple[Cell, ...]  # the occupied cells
    partition_cells: int  # N
    estimated: bool  # whether the cells' extent was estimated
    loss_slope: float  # of the loss in the outputs
    classes: int  # number of classes; 0 for real targets, which then move with the inputs
    outputs: int  # of the network
    inputs: float  # root of the sum of squared input norms
    chain: Chain | str  # the folded network as a chain, or why it is none
    network_slope: float  # bound of the network's Lipschitz constant on all inputs; inf if unknown
    printed: float  # product of the weights' norms and normalizers' constants as S2 prints them; nan if unknown
    sharpness: tuple[float, str]  # spherical sharpness of the cross-entropy, nan if unknown, and why
    last: float  # norm of the last layer's weights, where all others have Frobenius norm 1; nan otherwise

    @property
    def room(self) -> float:
        """How much a bound may add to the empirical loss and still say something."""
        return self.largest - self.empirical

    def slack(self, samples: float) -> float:
        """Return g(D, delta) as it would be with more samples in the same cells."""
        return partition_slack(len(self.cells), self.partition_cells, samples, self.delta / self.tried, self.largest)


def explicit_bound(name: str, of: Ingredients, penalty: Callable[[float], float], sentence: str) -> Bound:
    """Return a bound whose constants are all known, `penalty(m)` above the empirical loss."""
    value = of.empirical + penalty(of.samples)
    wanted = theory.samples_needed(penalty, of.room)
    needed = f"about {wanted:.2g} samples (now {of.samples})" if math.isfinite(wanted) else "smaller norms"
    return judge_bound(name, (value, value), "upper", of.largest, needed, sentence)


def order_bound(name: str, of: Ingredients, term: float, sentence: str) -> Bound:
    """Return a bound of which only the order is given: its constant is taken as 1."""
    value = of.empirical + term
    needed = f"a constant in O() below {of.room / term:.2g}" if 0 < term < math.inf else ""
    return judge_bound(name, (value, value), "main terms", of.largest, needed, sentence)


def judge_bound(name: str, ends: Ends, kind: BoundKind, largest: float, needed: str, sentence: str) -> Bound:
    """Return a bound between two ends with its verdict: non-vacuous only if it holds and is below C."""
    lower, upper = ends
    verdict: BoundVerdict = "vacuous" if lower >= largest else "undecided"
    if upper < largest and kind == "upper":
        verdict, needed = "non-vacuous", ""
    return Bound(name, lower, upper, kind, verdict, needed, sentence=sentence)


def inapplicable_bound(name: str, why: str) -> Bound:
    """Return a bound that does not apply, and why."""
    return Bound(name, math.nan, math.nan, "main terms", "does not apply", sentence=why)


def cell(piece: Piece, samples: int, slopes: tuple[float, float], rise: float) -> Cell:
    """Return a cell with its terms, from its samples among all, its slopes from below and above, and `rise`.

    `rise` bounds how much the loss can be above its mean at the samples anywhere in the cell, at most C.
    """
    count, seen = len(piece.members), piece.distance_seen
    share = count / samples
    low, high = 0.0, share * rise
    if piece.center >= 0:
        low = theory.cell_terms([share], [0.0 if math.isnan(seen) else seen], [slopes[0]], rise)[0]
        high = theory.cell_terms([share], [piece.distance], [slopes[1]], rise)[0]
    ends = {"slope_lower": slopes[0], "slope_upper": slopes[1], "term_lower": low, "term_upper": high}
    sizes = {"radius": piece.radius, "distance": piece.distance, "distance_seen": seen}
    return Cell(piece.center, piece.label, count, share, **sizes, **ends)


def bounds(of: Ingredients) -> list[Bound]:
    """Return every bound, those of S2 first."""
    local = _local_bound(of)
    jumps = "the same number: this loss is continuous, X_0 is empty; where it jumps no cell may reach across the jump"
    why = of.chain if isinstance(of.chain, str) else "a weight of the chain could not be read"
    unknown = "no bound of the network's Lipschitz constant on all inputs is known"
    return [
        local,
        replace(local, name="S2 Corollary 21", sentence=jumps),
        _product_bound("S2 Corollary 22, as printed", of, of.printed, why),
        _product_bound("S2 Corollary 22, folded", of, of.network_slope, unknown),
        _transport_bound(of),
        *_order_bounds(of),
        *_margin_bounds(of),
    ]


def held_out_bound(losses: Sequence[float], largest: float, delta: float) -> Bound:
    """Return Hoeffding's bound from test data: `mean + C sqrt(ln(1/delta)/(2n))`."""
    mean, n = sum(losses) / len(losses), len(losses)
    value = mean + largest * math.sqrt(math.log(1 / delta) / (2 * n))
    told = f"Hoeffding, {n} samples not used in training: what to beat"
    return judge_bound("held-out test set", (value, value), "upper", largest, "a larger test set", told)


def _local_bound(of: Ingredients) -> Bound:
    g = of.slack(of.samples)
    low, high = sum(cell.term_lower for cell in of.cells), sum(cell.term_upper for cell in of.cells)
    fixed = sum(cell.share for cell in of.cells if cell.center < 0) * of.largest
    free = sum(cell.share * cell.distance * cell.slope_upper for cell in of.cells if cell.center >= 0)
    room = of.room - fixed
    needed = ""
    if of.empirical + high + g >= of.largest:
        wanted = theory.samples_needed(lambda m: high + of.slack(m), of.room)
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
    ends = of.empirical + low + g, of.empirical + high + g
    return judge_bound("S2 Theorem 20", ends, kind, of.largest, needed, sentence)


def _product_bound(name: str, of: Ingredients, product: float, why: str) -> Bound:
    if math.isnan(of.loss_slope):
        return inapplicable_bound(name, NO_SLOPE)
    if math.isnan(product) or (product == math.inf and why.startswith("no bound")):
        return inapplicable_bound(name, why)
    distance = sum(cell.share * cell.distance for cell in of.cells if cell.center >= 0)
    rest = sum(cell.share for cell in of.cells if cell.center < 0) * of.largest
    g = of.slack(of.samples)
    slope = of.loss_slope * product if of.classes else of.loss_slope * math.hypot(product, 1.0)
    value = of.empirical + slope * distance + rest + g
    left = of.room - rest - g
    smaller = f"a norm product {slope * distance / left:.2g} times smaller" if left > 0 else ""
    needed = smaller or "more samples: g is too large"
    kind: BoundKind = "estimate" if of.estimated else "upper"
    sentence = f"product of norms and normalizers 10^{math.log10(product):.2f}" if product > 0 else "product 0"
    return judge_bound(name, (value, value), kind, of.largest, needed, sentence)


def _transport_bound(of: Ingredients) -> Bound:
    inside = [cell for cell in of.cells if cell.center >= 0]
    rest = sum(cell.share for cell in of.cells if cell.center < 0) * of.largest
    shares = [cell.share for cell in inside]

    def right_hand_side(distance: str, slope: str) -> float:
        distances = [0.0 if math.isnan(d) else d for d in (getattr(cell, distance) for cell in inside)]
        slopes = [getattr(cell, slope) for cell in inside]
        terms = theory.transport_terms(shares, distances, slopes, of.partition_cells, of.samples, of.delta)
        return of.empirical + terms + rest

    ends = right_hand_side("distance_seen", "slope_lower"), right_hand_side("distance", "slope_upper")
    need = "fewer cells, a smaller global Lipschitz constant; the additive constant is not given"
    return judge_bound("HKK", ends, "main terms", of.largest, need, "optimal transport; S2 prints it with '+ const'")


def _order_bounds(of: Ingredients) -> list[Bound]:
    sharpness, why = of.sharpness
    told = f"spherical sharpness {sharpness:.3g} of the cross-entropy; for the loss averaged over noise on the weights"
    not_unit = "for networks whose weights below the last layer have Frobenius norm 1; these have not"
    name, last = "weight normalization", f"last layer of norm {of.last:.3g}"
    return [
        inapplicable_bound("LLA", why)
        if math.isnan(sharpness)
        else order_bound("LLA", of, theory.sharpness_terms(sharpness, of.samples), told),
        inapplicable_bound(name, not_unit)
        if math.isnan(of.last)
        else order_bound(name, of, theory.weight_normalized_term(of.last, of.samples), last),
    ]


def _margin_bounds(of: Ingredients) -> list[Bound]:
    names = ("spectral (2,1) margin bound", "Frobenius margin bound", "(2,1)/(2,inf) sketch of S0")
    if isinstance(of.chain, str) or math.isnan(of.loss_slope):
        return [inapplicable_bound(name, of.chain if isinstance(of.chain, str) else NO_SLOPE) for name in names]
    chain, links = of.chain, of.chain.links
    last = len(links) - 1
    biased = chain.biased
    inputs = chain.before * math.sqrt(of.inputs**2 + (of.samples if biased else 0))
    spectral = [link.spectral_with_bias(i == last) if biased else link.spectral for i, link in enumerate(links)]
    slopes = [max(link.slope, 1.0) if biased else link.slope for link in links]

    def shared(samples: float) -> dict[str, float]:
        sizes = {"inputs": inputs * math.sqrt(samples / of.samples), "loss_slope": of.loss_slope / of.largest}
        return {**sizes, "samples": samples, "delta": of.delta}

    def spectral_penalty(samples: float) -> float:
        two_one = [link.two_one for link in links]
        terms = theory.spectral_margin_term(spectral, two_one, slopes, width=chain.width + biased, **shared(samples))
        return of.largest * terms

    def frobenius_penalty(samples: float) -> float:
        norms = [link.slope * link.frobenius_with_bias(i == last) for i, link in enumerate(links)]
        return of.largest * theory.frobenius_margin_term(norms, outputs=of.outputs, **shared(samples))

    told = "Bartlett et al., constants written out; biases as a column"
    bent = "for activations that are positively homogeneous, element by element, only"
    tops = [float(link.rows.max()) for link in links]
    sums = [link.positions * float(link.rows.sum()) for link in links]
    sketch = "no bound: equal unit rows stretch by sqrt(n) per layer and leave it as it is"
    return [
        explicit_bound(names[0], of, spectral_penalty, told),
        explicit_bound(names[1], of, frobenius_penalty, "Golowich et al., constants written out")
        if chain.homogeneous
        else inapplicable_bound(names[1], bent),
        order_bound(names[2], of, theory.row_norm_term(sums, tops, of.samples), sketch),
    ]
