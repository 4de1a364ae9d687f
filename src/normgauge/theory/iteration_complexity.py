"""How the Lipschitz constant of the loss enters the number of iterations: S2 section 5.1, with the conditions."""

from collections.abc import Sequence
from math import ceil, prod

from normgauge.errors import InputError
from normgauge.theory.stationarity import goldstein_evaluations


def weight_slope_bound(
    norms: Sequence[float], layer: int, reach: float, *, normalizers: Sequence[float] | None = None, outer: float = 1.0
) -> float:
    """Return `outer reach s_{i+1} ... s_K |NO_i| ... |NO_K|`, a bound of the slope of the loss in the weights W_i.

    For `h_k = g(NO_k(W_k h_{k-1}))` with 1-Lipschitz g, the Frobenius norm on W_i, and normalizers that are fixed maps
    (S2 Theorem 12): BN with its statistics held fixed, LN with its constant 1/sqrt(eps). `norms` are s_1, ..., s_K or
    bounds of them, `layer` is i, counted from 1, `reach` the largest `|h_{i-1}(x)|` over the data; `normalizers` are
    Lipschitz constants of NO_1, ..., NO_K (all 1 if left out), `outer` that of last layer, output function and loss.

    Deviations: S2 Remark 17 prints O(s_K ... s_{i+1}); `reach`, which contains the layers below, and `outer`, which
        the family leaves free, are part of the constant.

    Examples:
        >>> weight_slope_bound([9.0, 2.0, 3.0], layer=1, reach=5.0)
        30.0
        >>> weight_slope_bound([9.0, 2.0, 3.0], layer=1, reach=5.0, normalizers=[0.1, 0.1, 0.1])
        0.03

    References: than2025
    """
    constants = _constants(norms, normalizers, layer)
    return round_off(outer * reach * prod(norms[layer:]) * prod(constants[layer - 1 :]))


def printed_iterations(norms: Sequence[float], layer: int, accuracy: float) -> float:
    """Return `s_{i+1} ... s_K / accuracy`, what S2 Corollary 18 prints as a lower bound for every method.

    Deviations: it bounds nothing. A lower bound over all Lipschitz functions says nothing about one of them: for every
        value of it there are a network, data and a start from which one gradient step reaches a point with gradient 0
        (ledger S2-C18). Nor is there such a bound for the class: no method finds points of small gradient of every
        Lipschitz function in bounded time. Use it to see what the sentence claims, not to plan a run.

    Examples:
        >>> printed_iterations([9.0, 2.0, 3.0], layer=1, accuracy=0.5)
        12.0

    References: than2025, zhang2020
    """
    _constants(norms, None, layer)
    return prod(norms[layer:]) / accuracy


def stationary_evaluations(
    norms: Sequence[float],
    layer: int,
    reach: float,
    drop: float,
    radius: float,
    accuracy: float,
    *,
    normalizers: Sequence[float] | None = None,
    outer: float = 1.0,
    failure: float = 0.1,
) -> int:
    """Return a number of evaluations after which W_i is (radius, accuracy)-stationary in the sense of Goldstein.

    `goldstein_evaluations` with the slope bound of `weight_slope_bound`, so of order
    `drop (outer reach s_{i+1} ... s_K |NO_i| ... |NO_K|)^2 / (radius accuracy^3)`, the other weights held fixed.
    Normalization changes it by the square of `normalizer_saving`, at equal `reach`, which it changes too: it saves
    where the constants are below 1, and costs where they are above 1. Arguments as there, and `drop`, how far the loss
    at the start lies above its infimum, `radius` of the ball whose gradients may be combined, `accuracy`, the length
    of the combination, and `failure`, the accepted probability that the random method needs longer.

    Deviations: S2 Corollary 19 prints `s_{i+1} ... s_K sigma^(-K+i-1) / alpha^2`. Its units do not match: measuring the
        weights in other units changes it, and no method's work (ledger S2-C19). The slope enters squared, the accuracy
        cubed, and D and the radius are missing. What the articles cited find is not a point of small gradient.

    Examples:
        Ten times steeper is a hundred times the work:

        >>> one = stationary_evaluations([1.0, 4.0], 1, reach=1.0, drop=1.0, radius=1.0, accuracy=1.0)
        >>> steep = stationary_evaluations([1.0, 40.0], 1, reach=1.0, drop=1.0, radius=1.0, accuracy=1.0)
        >>> round(steep / one)
        100

    References: than2025, zhang2020, davis2022
    """
    slope = weight_slope_bound(norms, layer, reach, normalizers=normalizers, outer=outer)
    return goldstein_evaluations(drop, slope, radius, accuracy, failure)


def normalizer_saving(normalizers: Sequence[float], layer: int) -> float:
    """Return `|NO_i| ... |NO_K|`, the factor by which fixed normalizers change the slope bound in W_i.

    With all constants at most 1/sigma it is at most sigma^(-(K - i + 1)). BN's constant max_k 1/sigma_k falls as the
    weights below it grow, so that `s_k |NO_k|` does not change when W_k is multiplied: what is saved above is what the
    weights cost. LN's constant over all inputs is 1/sqrt(eps), far above 1.

    Examples:
        >>> normalizer_saving([0.5, 0.5, 0.5], layer=2)
        0.25

    References: than2025
    """
    return prod(_constants(normalizers, normalizers, layer)[layer - 1 :])


def convex_iterations(lipschitz: float, radius: float, accuracy: float) -> int:
    """Return how many iterations some convex function needs: `ceil((L R / (2 accuracy) - 1)^2)`.

    For every method that moves in the span of the subgradients seen, from 0, there is a convex L-Lipschitz function on
    the ball of radius R (in at least that many dimensions) that is above its minimum by `accuracy` until then. Other
    functions may be easier.

    Deviations: S2 section 5.1 prints L^2 / alpha^2, without the radius.

    Examples:
        >>> convex_iterations(lipschitz=2.0, radius=1.0, accuracy=0.1)
        81

    References: bubeck2015
    """
    return ceil(round(max(lipschitz * radius / (2 * accuracy) - 1, 0.0) ** 2, 9))


def strongly_convex_iterations(lipschitz: float, convexity: float, accuracy: float) -> int:
    """Return how many iterations some strongly convex function needs: `ceil(L^2 / (8 convexity accuracy))`.

    Conditions as for `convex_iterations`, on the ball of radius L / (2 convexity).

    Deviations: S2 section 5.1 prints L / alpha; the constant of strong convexity and the square are missing.

    Examples:
        >>> strongly_convex_iterations(lipschitz=2.0, convexity=0.5, accuracy=0.01)
        100

    References: bubeck2015
    """
    return ceil(round(lipschitz**2 / (8 * convexity * accuracy), 9))


def round_off(value: float) -> float:
    """Return the value without the last digits of a long product, so that equal products are equal."""
    return float(f"{value:.14g}")


def _constants(norms: Sequence[float], normalizers: Sequence[float] | None, layer: int) -> list[float]:
    constants = [1.0] * len(norms) if normalizers is None else list(normalizers)
    if len(constants) != len(norms) or not 1 <= layer <= len(norms):
        rule = "norms and normalizers have one entry per layer, and layer is one of 1, ..., K"
        got = f"{len(norms)} norms, {len(constants)} normalizers, layer {layer}"
        step = "Pass normalizers=None for a network without, and count layers from 1"
        raise InputError("iteration complexity", rule, got, step)
    return constants
