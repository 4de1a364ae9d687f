"""S4 (Sun et al. 2020), tables: what its own numbers say."""

from collections.abc import Iterator

import torch
from scipy.special import betaincinv

from normgauge.papers.court.checks import Check, broken, conclusion, corrected, fact, printed
from normgauge.papers.court.registry import bibliographic

IMAGES = 32
# BN, BN+WD, GN, GN+WD, LN, LN+WD, WN, WN+WD, as printed; Table 2 has "4327" for the Gaussian noise of GN+WD
CLEAN = (
    (0.9687, 0.9375, 0.9687, 0.9375, 0.8711, 0.9687, 0.8679, 0.9062),
    (0.6875, 0.6563, 0.6257, 0.6063, 0.6358, 0.6279, 0.6147, 0.6072),
)
NOISE = (
    (0.8125, 0.7812, 0.9062, 0.8437, 0.8437, 0.8002, 0.7060, 0.7187),
    (0.4596, 0.4953, 0.4098, 4327, 0.3983, 0.4278, 0.3476, 0.3874),
)
NOISE_GAP = (
    (0.1562, 0.1563, 0.0625, 0.0938, 0.0274, 0.1685, 0.1619, 0.1875),
    (0.2279, 0.1610, 0.2159, 0.1736, 0.2375, 0.2001, 0.2671, 0.2198),
)
ATTACK = (
    (0.5380, 0.6000, 0.5793, 0.5815, 0.5253, 0.5333, 0.5031, 0.4687),
    (0.1397, 0.1558, 0.2366, 0.2813, 0.2354, 0.2531, 0.1647, 0.1965),
)
ATTACK_GAP = (
    (0.4307, 0.3375, 0.3894, 0.3560, 0.3458, 0.4354, 0.3648, 0.4375),
    (0.5478, 0.5005, 0.3891, 0.3250, 0.4004, 0.3748, 0.4500, 0.4077),
)
MISPRINTS = {("noise", 1, 3): 0.4327, ("attack gap", 1, 7): 0.4107}
ROUNDED = 1.1e-4  # four digits, differences of rounded numbers


@bibliographic("S4-tab")
def _differences(generator: torch.Generator) -> Iterator[Check]:
    right = 0
    for table in (0, 1):
        for column in range(8):
            for name, attacked, gaps in (("noise", NOISE, NOISE_GAP), ("attack", ATTACK, ATTACK_GAP)):
                clean, value, told = CLEAN[table][column], attacked[table][column], gaps[table][column]
                off = abs(clean - value - told)
                right += off < ROUNDED
                yield printed("clean minus attacked is the printed difference", off, tolerance=ROUNDED)
                value = MISPRINTS.get((name, table, column), value)
                told = MISPRINTS.get((f"{name} gap", table, column), told)
                yield corrected("the same with two entries corrected", abs(clean - value - told), tolerance=ROUNDED)
    small = sum(abs(value - round(IMAGES * value) / IMAGES) < ROUNDED for value in (*CLEAN[0], *NOISE[0]))
    yield corrected("Table 1: twelve accuracies are multiples of 1/32", broken(small == 12))
    for row in (CLEAN[0], NOISE[0]):
        for pair in zip(row[::2], row[1::2], strict=True):
            low, high = zip(*(_exact_interval(round(IMAGES * value)) for value in pair), strict=True)
            yield corrected("Table 1: intervals with and without decay overlap", broken(max(low) < min(high)))
    yield fact("Table 1: lower end of the interval of 31 of 32", _exact_interval(31)[0])
    yield conclusion("all but two of 32 entries agree", broken(right >= 30))
    yield fact("entries that agree", right)


def _exact_interval(right: int) -> tuple[float, float]:
    """Return the exact 95 % interval of a share, by Clopper and Pearson, from `right` of 32 images."""
    low = betaincinv(right, IMAGES - right + 1, 0.025) if right else 0.0
    high = betaincinv(right + 1, IMAGES - right, 0.975) if right < IMAGES else 1.0
    return float(low), float(high)
