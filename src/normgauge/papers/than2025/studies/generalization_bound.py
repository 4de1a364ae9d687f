"""S2 Theorem 20 and Corollary 22: ingredients and bounds for BN, LN and plain nets, beside the measured gap."""

import math
from typing import Any

from normgauge.measure.generalization.generalization import Generalization, generalization
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.than2025.studies._printed_products import printed_products, train_network

DELTA = 0.05
HOLDOUT = 0.2  # share of the data the partitions are found on
LOSS_SLOPE = math.sqrt(2.0)  # of the ramp loss of margin 1 in the outputs
BOUNDS = {
    "S2 Theorem 20": "theorem_20",
    "S2 Corollary 22, as printed": "corollary_22",
    "S2 Corollary 22, folded": "corollary_22_folded",
    "HKK": "hkk",
    "LLA": "lla",
    "spectral (2,1) margin bound": "spectral_margin",
    "Frobenius margin bound": "frobenius_margin",
    "(2,1)/(2,inf) sketch of S0": "row_norm_sketch",
    "held-out test set": "held_out",
}


@register("generalization-bound")
def run(spec: Spec, record: Record) -> None:
    """Train, bound the expected loss on several partitions, and record the ingredients of the best of them.

    Each partition gets its share of delta, so that the best may be chosen after the fact.
    """
    training, last = train_network(spec, record), int(spec["steps"])
    most = HOLDOUT * len(training.dataset.train[1])  # k-means needs a sample per centre
    counts = [int(count) for count in str(spec["partitions"]).split(",") if int(count) <= most]
    data, tried = training.dataset, list[Generalization]()
    terms: dict[str, Any] = {"test": data.test, "holdout": HOLDOUT, "delta": DELTA / len(counts)}
    for count in counts:
        tried.append(generalization(training.end, data.train, partition=count, seed=int(spec["seed"]), **terms))
        for name, value in ingredients(tried[-1]).items():
            record(count, name, value, layer=f"{count} centres")
    best = min(tried, key=lambda one: one["S2 Theorem 20"].upper)
    for name, value in {**ingredients(best), **bounds(best)}.items():
        if math.isfinite(value):  # a bound that does not apply has no value; the page says so
            record(last, name, value)
    products = printed_products(training.end, training.dataset.train[0][:256])
    read = products.power if spec["norm"] == "batch" else products.bound
    record(last, "log10_weight_product", products.weight_product)
    record(last, "log10_product_read", read)
    omega = LOSS_SLOPE * 10**read * ingredients(best)["mean_distance"]
    record(last, "log10_corollary_22_read", math.log10(best.empirical + omega + best.slack))


def ingredients(result: Generalization) -> dict[str, float]:
    """Return the terms of Theorem 20 on one partition: as printed from slopes seen and proved, and cut at C."""
    inside = [cell for cell in result.cells if cell.center >= 0]
    terms_seen = [(c.share, 0.0 if math.isnan(c.distance_seen) else c.distance_seen, c.slope_lower) for c in inside]
    terms_proved = [(cell.share, cell.distance, cell.slope_upper) for cell in inside]
    return {
        "empirical_loss": result.empirical,
        "test_loss": result.test_loss,
        "gap": result.test_loss - result.empirical,
        "slack": result.slack,
        "occupied_cells": float(len(result.cells)),
        "mean_distance": sum(share * distance for share, distance, _ in terms_proved),
        "mean_distance_seen": sum(share * distance for share, distance, _ in terms_seen),
        "slope_seen": max((cell.slope_lower for cell in inside), default=0.0),
        "slope_proved": max((cell.slope_upper for cell in inside), default=math.inf),
        "sum_seen": sum(math.prod(factors) for factors in terms_seen),
        "sum_proved": sum(math.prod(factors) for factors in terms_proved),
        "capped_sum_seen": sum(cell.term_lower for cell in result.cells),
        "capped_sum_proved": sum(cell.term_upper for cell in result.cells),
        "outside": sum(cell.share for cell in result.cells if cell.center < 0),
    }


def bounds(result: Generalization) -> dict[str, float]:
    """Return log10 of the right-hand sides; that of Theorem 20 and HKK from below, from the slopes seen."""
    terms = ingredients(result)
    said = [result[title].verdict for title in BOUNDS if title != "held-out test set"]
    return {
        **{f"log10_{name}": _log(result[title].lower) for title, name in BOUNDS.items()},
        "log10_theorem_20_proved": _log(result["S2 Theorem 20"].upper),
        "log10_theorem_20_printed": _log(result.empirical + terms["sum_seen"] + terms["outside"] + result.slack),
        "bounds_that_apply": float(sum(verdict != "does not apply" for verdict in said)),
        "bounds_below_1": float(sum(verdict == "non-vacuous" for verdict in said)),
    }


def _log(value: float) -> float:
    return math.log10(value) if 0 < value < math.inf else math.nan
