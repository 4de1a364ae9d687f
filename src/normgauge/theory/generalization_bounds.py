"""Right-hand sides of generalization bounds, from numbers: what each adds to the empirical loss."""

from collections.abc import Callable, Sequence
from math import ceil, exp, inf, isfinite, log, sqrt


def cell_terms(
    shares: Sequence[float], distances: Sequence[float], slopes: Sequence[float], largest: float = 1.0
) -> list[float]:
    """Return `(m_i/m) min(lambda_i L_i, C)` per cell: how much the loss may rise from its samples to its points.

    `distances` are lambda_i, the mean distance of a sample and a point of the cell, or a bound of it, `slopes` are L_i,
    Lipschitz constants of the loss on the cells; the loss lies between 0 and C, the `largest`.

    Deviations: S2 Theorem 20 prints the terms without the minimum; a loss between 0 and C cannot rise by more than C.

    Examples:
        >>> cell_terms([0.5, 0.5], [0.1, 0.1], [2.0, 1e9])
        [0.1, 0.5]

    References: than2025
    """
    return [
        share * (min(distance * slope, largest) if distance else 0.0)
        for share, distance, slope in zip(shares, distances, slopes, strict=True)
    ]


def transport_terms(
    shares: Sequence[float],
    distances: Sequence[float],
    slopes: Sequence[float],
    cells: int,
    samples: float,
    delta: float,
) -> float:
    """Return the terms of (HKK) that S2 prints, without its constant.

    `sum (m_i/m) lambda_i max(1, L_i) + max_i lambda_i L_i sqrt(ln(4/delta)/m) + sqrt(N/m)`. The constant is not
    given, so this is a lower bound of that bound.

    Examples:
        >>> transport_terms([1.0], [0.5], [2.0], cells=1, samples=100, delta=4 / 2.718281828459045) < 1.2 + 1e-9
        True

    References: hou2023, than2025
    """
    mean = sum(s * d * max(1.0, slope) for s, d, slope in zip(shares, distances, slopes, strict=True) if d)
    worst = max((d * slope for d, slope in zip(distances, slopes, strict=True) if d), default=0.0)
    return mean + worst * sqrt(log(4 / delta) / samples) + sqrt(cells / samples)


def sharpness_terms(sharpness: float, samples: float) -> float:
    """Return the least `sharpness mu^2/2 + ln(m)/(mu sqrt(m))` over mu > 0: the terms of (LLA), constants as 1.

    The least value is `1.5 (sharpness ln(m)^2 / m)^(1/3)`. It is for the loss averaged over noise of size mu on the
    weights, and O() hides the number of parameters; `sharpness` is |theta|^2 times the Hessian's top eigenvalue.

    Examples:
        >>> round(sharpness_terms(8.0, samples=2.718281828459045**2), 4)  # (8 * 4 / e^2)^(1/3) * 1.5
        2.445

    References: lyu2022, than2025
    """
    return 1.5 * (max(sharpness, 0.0) * log(samples) ** 2 / samples) ** (1 / 3)


def weight_normalized_term(radius: float, samples: float) -> float:
    """Return `radius^2 / sqrt(m)`, the order of the bound for weight normalization that S2 compares with.

    For networks whose weight matrices below the last all have Frobenius norm 1; `radius` bounds the last layer.

    Examples:
        >>> weight_normalized_term(2.0, samples=16)
        1.0

    References: cisneros2025, than2025
    """
    return radius**2 / sqrt(samples)


def row_norm_term(sums: Sequence[float], largest: Sequence[float], samples: float) -> float:
    """Return `(1/N) sum_l |W_l|_{2,1}^2 prod_{j != l} |W_j|_{2,inf}^2`, the sketch of S0 section 7.2.

    `sums` are |W_l|_{2,1}, the sums of the row norms, `largest` are |W_l|_{2,inf}, the largest row norms.

    Deviations: no bound: layers of n equal unit rows stretch by sqrt(n) each while every |W|_{2,inf} stays 1, so the
        slope outgrows the term as the depth grows; neither the margin nor the size of the inputs enters.

    Examples:
        >>> row_norm_term([2.0, 3.0], [1.0, 2.0], samples=25)  # (4 * 4 + 9 * 1) / 25
        1.0

    References: akbar2025
    """
    logs = [2 * _log(s) + 2 * sum(_log(m) for j, m in enumerate(largest) if j != i) for i, s in enumerate(sums)]
    return sum(_exp(value) for value in logs) / samples


def spectral_margin_term(
    spectral: Sequence[float],
    two_one: Sequence[float],
    slopes: Sequence[float],
    *,
    inputs: float,
    width: int,
    loss_slope: float,
    samples: float,
    delta: float,
) -> float:
    """Return the margin bound with spectral and (2,1) norms, all constants written out.

    `2 R + 3 sqrt(ln(2/delta')/(2m))`, `R = 4/m^(3/2) + 18 ln(m) sqrt(c)/m`, where by the covering numbers of Bartlett
    et al. (Theorem 3.3) and Dudley's integral from 1/m
    `sqrt(c) = loss_slope |X| sqrt(ln(2 W^2)) prod s_i rho_i (sum (b_i/s_i)^(2/3))^(3/2)`. Norms are rounded up to
    multiples of 1/L and the grid is paid for: `delta' = delta / prod j_i (j_i + 1) k_i (k_i + 1)`. The margin and the
    reference matrices must be fixed before the data.

    Args:
        spectral: s_i, bounds of the spectral norms.
        two_one: b_i, sums of the row norms of the distances from the reference matrices.
        slopes: rho_i, Lipschitz constants of the nonlinearities, each 0 at 0.
        inputs: |X|, the root of the sum of the squared norms of all inputs.
        width: W, the largest number of units of a layer or input.
        loss_slope: of the loss in the outputs; sqrt(2)/margin for the ramp loss.
        samples: m.
        delta: the probability of failure.

    Deviations: the article's Lemma A.8 also pays for all margins and sizes of the inputs; its constants are larger.

    Examples:
        >>> one = dict(slopes=[1.0], inputs=10.0, width=4, loss_slope=1.0, samples=1e12, delta=0.1)
        >>> spectral_margin_term([1.0], [1.0], **one) < 1e-3 < spectral_margin_term([1e6], [1e6], **one)
        True

    References: bartlett2017
    """
    depth = len(spectral)
    s, paid_s = _round_up(spectral, depth)
    b, paid_b = _round_up(two_one, depth)
    logs = log(loss_slope * inputs * sqrt(log(2 * width**2))) + sum(_log(x) for x in s) + sum(_log(r) for r in slopes)
    root = _exp(logs) * sum((y / x) ** (2 / 3) for x, y in zip(s, b, strict=True)) ** 1.5
    complexity = 4 / samples**1.5 + 18 * log(samples) * root / samples
    return 2 * complexity + 3 * sqrt((log(2 / delta) + paid_s + paid_b) / (2 * samples))


def frobenius_margin_term(
    frobenius: Sequence[float], *, inputs: float, outputs: int, loss_slope: float, samples: float, delta: float
) -> float:
    """Return the margin bound with Frobenius norms, all constants written out.

    `2 R + 3 sqrt(ln(2/delta')/(2m))`, `R = loss_slope sqrt(2) K (sqrt(2 ln(2) L) + 1) |X| prod M_i / m` for K outputs
    (without sqrt(2) for one), activations positively homogeneous and 1-Lipschitz, element by element; norms rounded
    up and arguments as in `spectral_margin_term`. Of the last M_i, in `frobenius`, the largest row norm is enough.

    Examples:
        >>> one = dict(inputs=10.0, outputs=1, loss_slope=1.0, samples=1e6, delta=0.1)
        >>> frobenius_margin_term([1.0], **one) < 0.01 < frobenius_margin_term([1.0, 1e4], **one)
        True

    References: golowich2020
    """
    depth = len(frobenius)
    sizes, paid = _round_up(frobenius, depth)
    product = _exp(sum(_log(x) for x in sizes))
    contraction = sqrt(2) * outputs if outputs > 1 else 1.0
    complexity = loss_slope * contraction * (sqrt(2 * log(2) * depth) + 1) * inputs * product / samples
    return 2 * complexity + 3 * sqrt((log(2 / delta) + paid) / (2 * samples))


def samples_needed(penalty: Callable[[float], float], room: float) -> float:
    """Return the least number of samples (to 1 %) with `penalty(samples) < room`; inf where there is none below 1e300.

    Examples:
        >>> round(samples_needed(lambda m: 10 / m**0.5, room=0.1) / 1e4, 1)
        1.0
    """
    low, high = 2.0, 2.0
    while not penalty(high) < room:
        low, high = high, high * 16
        if high > 1e300 or room <= 0:
            return inf
    while high / low > 1.01:
        middle = exp((log(low) + log(high)) / 2)
        low, high = (low, middle) if penalty(middle) < room else (middle, high)
    return float(ceil(high))


def _round_up(values: Sequence[float], depth: int) -> tuple[list[float], float]:
    """Return the values rounded up to multiples of 1/depth, and the logarithm of what the union over them costs."""
    if not all(isfinite(value) for value in values):
        return [inf] * len(values), inf
    steps = [max(ceil(depth * value), 1) for value in values]
    return [step / depth for step in steps], sum(log(step) + log(step + 1) for step in steps)


def _log(value: float) -> float:
    return log(value) if value > 0 else -inf


def _exp(value: float) -> float:
    return exp(value) if value < 700 else inf
