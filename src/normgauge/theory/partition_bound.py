"""A generalization bound over the cells of a partition, uniform over models (S2 Theorem 20)."""

from math import log, sqrt


def partition_slack(occupied: float, cells: int, samples: float, delta: float, largest: float = 1.0) -> float:
    """Return `C (sqrt(2) + 1) sqrt(T ln(2N/delta) / m) + 2 C T ln(2N/delta) / m`.

    With probability 1 - delta the cell frequencies of m samples differ from their probabilities by at most this in the
    sum against any weights between 0 and C, all at once; the loss must lie between 0 and C, the `largest`. T counts the
    cells `occupied` by samples, N all `cells`, before the data are seen. Where samples hardly share cells, T is near m
    and the slack above C.

    Examples:
        >>> partition_slack(occupied=10, cells=100, samples=10, delta=0.1) > 1
        True

    References: than2025, kawaguchi2022
    """
    share = occupied * log(2 * cells / delta) / samples
    return largest * ((sqrt(2) + 1) * sqrt(share) + 2 * share)
