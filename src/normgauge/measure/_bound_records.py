"""Records of generalization bounds: cells, ingredients, and a bound with its verdict and what would be needed."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from normgauge.measure._layer_chain import Chain
from normgauge.theory.generalization_bounds import cell_terms, samples_needed
from normgauge.theory.partition_bound import partition_slack

BoundVerdict = Literal["non-vacuous", "vacuous", "undecided", "does not apply"]
BoundKind = Literal["upper", "estimate", "main terms"]
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
        slope_upper: slope of the loss in the outputs times a bound of the network's on the ball; inf if unknown.
        term_lower: share times distance_seen times slope_lower, at most share times C.
        term_upper: share times distance times slope_upper, at most share times C.
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
    """What the bounds are made of.

    Attributes:
        empirical: F(D, h), the mean loss on the m samples that were not used for the partition.
        largest: C.
        samples: m.
        delta: the probability of failure.
        cells: the occupied cells.
        partition_cells: N.
        estimated: whether the cells' extent was estimated.
        loss_slope: of the loss in the outputs.
        classes: number of classes; 0 for real targets, which then move with the inputs.
        outputs: of the network.
        inputs: root of the sum of squared input norms.
        chain: the folded network as a chain, or why it is none.
        network_slope: bound of the network's Lipschitz constant on all inputs; inf if unknown.
        printed: the product of the weights' norms and of the normalizers' constants as S2 prints them; nan if unknown.
        sharpness: spherical sharpness of the cross-entropy, nan if unknown, and why.
        last: norm of the last layer's weights, where all others have Frobenius norm 1; nan otherwise.
    """

    empirical: float
    largest: float
    samples: int
    delta: float
    cells: tuple[Cell, ...]
    partition_cells: int
    estimated: bool
    loss_slope: float
    classes: int
    outputs: int
    inputs: float
    chain: Chain | str
    network_slope: float
    printed: float
    sharpness: tuple[float, str]
    last: float

    @property
    def room(self) -> float:
        """How much a bound may add to the empirical loss and still say something."""
        return self.largest - self.empirical

    def slack(self, samples: float) -> float:
        """Return g(D, delta) as it would be with more samples in the same cells."""
        return partition_slack(len(self.cells), self.partition_cells, samples, self.delta, self.largest)


def counted(name: str, of: Ingredients, penalty: Callable[[float], float], sentence: str) -> Bound:
    """Return a bound whose constants are all known, `penalty(m)` above the empirical loss."""
    value = of.empirical + penalty(of.samples)
    wanted = samples_needed(penalty, of.room)
    needed = f"about {wanted:.2g} samples (now {of.samples})" if math.isfinite(wanted) else "smaller norms"
    return judged(name, (value, value), "upper", of.largest, needed, sentence)


def order(name: str, of: Ingredients, term: float, sentence: str) -> Bound:
    """Return a bound of which only the order is given: its constant is taken as 1."""
    value = of.empirical + term
    needed = f"a constant in O() below {of.room / term:.2g}" if 0 < term < math.inf else ""
    return judged(name, (value, value), "main terms", of.largest, needed, sentence)


def judged(name: str, ends: tuple[float, float], kind: BoundKind, largest: float, needed: str, sentence: str) -> Bound:
    """Return a bound between two ends with its verdict: non-vacuous only if it holds and is below C."""
    lower, upper = ends
    verdict: BoundVerdict = "vacuous" if lower >= largest else "undecided"
    if upper < largest and kind == "upper":
        verdict, needed = "non-vacuous", ""
    return Bound(name=name, lower=lower, upper=upper, kind=kind, verdict=verdict, needed=needed, sentence=sentence)


def lost(name: str, why: str) -> Bound:
    """Return a bound that does not apply, and why."""
    return Bound(
        name=name, lower=math.nan, upper=math.nan, kind="main terms", verdict="does not apply", needed="", sentence=why
    )


def cell(
    piece: tuple[int, int, int, float, float, float], samples: int, lower: float, upper: float, largest: float
) -> Cell:
    """Return a cell with its terms, from (centre, label, m_i, radius, distance, distance seen) and its slopes."""
    center, label, count, radius, distance, seen = piece
    share = count / samples
    low, high = 0.0, share * largest
    if center >= 0:
        low = cell_terms([share], [0.0 if math.isnan(seen) else seen], [lower], largest)[0]
        high = cell_terms([share], [distance], [upper], largest)[0]
    return Cell(
        center=center,
        label=label,
        samples=count,
        share=share,
        radius=radius,
        distance=distance,
        distance_seen=seen,
        slope_lower=lower,
        slope_upper=upper,
        term_lower=low,
        term_upper=high,
    )
