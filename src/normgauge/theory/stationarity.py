"""How many gradients it takes to find a nearly stationary point of a Lipschitz function."""

from math import ceil, log


def goldstein_evaluations(drop: float, lipschitz: float, radius: float, slope: float, failure: float = 0.1) -> int:
    """Return a bound on the evaluations that find a (radius, slope)-stationary point in the sense of Goldstein.

    `ceil(4 D / (r a)) ceil(64 L^2 log(4 D / (p r a)) / a^2)`, of order `D L^2 / (r a^3)`: D how far the start lies
    above the infimum, L the Lipschitz constant, and some convex combination of gradients within distance r is at most
    a long. It does not change when the function or its argument is measured in other units. Points where the gradient
    itself is small cannot be found in bounded time where the function is not smooth.

    Deviations: S2 Corollary 19 prints L / a^2, without D and r.

    Examples:
        >>> in_metres = goldstein_evaluations(1.0, lipschitz=2.0, radius=0.1, slope=0.5)
        >>> in_metres == goldstein_evaluations(1.0, lipschitz=0.002, radius=100.0, slope=0.0005)
        True

    References: zhang2020, davis2022
    """
    steps = 4 * drop / (radius * slope)
    return ceil(round(steps, 9)) * ceil(round(64 * (lipschitz / slope) ** 2 * max(log(steps / failure), 1.0), 9))
