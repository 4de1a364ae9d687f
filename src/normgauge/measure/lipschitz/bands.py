"""Affine bands: a tensor on a ball is base + slope dx -+ err, entry by entry, with |dx| <= radius.

The range of slope dx is exact, radius |slope|, and slopes of sums and of linear maps are sums and images of slopes, so
that movements which cancel later are not counted: intervals add them up. What is not linear adds to err: a function of
every entry the gap to its chord, a product that of two movements, which are small of second order.
"""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor

_ROUND, _DIGITS = 1 + 1e-12, 4e-16


@dataclass(frozen=True)
class Band:
    """What a tensor stays near on the ball."""

    base: Tensor  # the affine function at the datum
    slope: Tensor  # its gradient, the columns on the last axis
    err: Tensor  # how far entries of the tensor may be from it

    def movement(self, radius: float) -> Tensor:
        """Return how far entries may be from the base."""
        return (radius * self.slope.norm(dim=-1) + self.err) * _ROUND

    def limits(self, radius: float) -> tuple[Tensor, Tensor]:
        """Return what entries are not below, and what they do not exceed."""
        movement = self.movement(radius)
        return self.base - movement, self.base + movement

    def map(self, of_values: Callable[[Tensor], Tensor], of_columns: Callable[[Tensor], Tensor]) -> "Band":
        """Return the band of entries that were moved to other places."""
        return Band(of_values(self.base), of_columns(self.slope), of_columns(self.err[..., None])[..., 0])

    def closer(self, other: "Band") -> "Band":
        """Return for every entry the band with the smaller error; of one that is not a number, this."""
        better = (other.err < self.err) & other.base.isfinite()
        slope = torch.where(better[..., None], other.slope, self.slope)
        return Band(torch.where(better, other.base, self.base), slope, torch.where(better, other.err, self.err))

    def centred(self) -> "Band":
        """Return the band of x - mean(x) along the last axis."""
        base, slope = self.base - self.base.mean(-1, keepdim=True), self.slope - self.slope.mean(-2, keepdim=True)
        return Band(base, slope, self.err + self.err.mean(-1, keepdim=True))

    def unsqueeze(self) -> "Band":
        """Return the band with one more axis of size 1 behind."""
        return Band(self.base[..., None], self.slope[..., None, :], self.err[..., None])


def chord(x: Band, limits: tuple[Tensor, Tensor], slopes: Tensor, values: Tensor) -> Band:
    """Return a function of every entry as its chord from one limit to the other.

    `slopes` are those at points from the lower limit to the upper, between which they rise or fall, `values` the
    function's there. Slopes between a and b leave a chord of slope t over a length w by at most w (t - a) (b - t) /
    (b - a), to one side alone if they only rise or only fall.
    """
    width = limits[1] - limits[0]
    flat, steep = slopes.amin(0), slopes.amax(0)
    tilt = torch.where(width > 0, (values[-1] - values[0]) / width, (flat + steep) / 2)
    tilt = torch.minimum(torch.maximum(tilt, flat), steep)
    gap = torch.where(steep > flat, width * (tilt - flat) * (steep - tilt) / (steep - flat), 0.0)
    growth = slopes.diff(dim=0)
    below = torch.where((growth <= 0).all(0), 0.0, gap)
    above = torch.where((growth >= 0).all(0), 0.0, gap)
    base = values[0] + tilt * (x.base - limits[0]) + (above - below) / 2
    rounding = _DIGITS * (values[0].abs() + values[-1].abs() + tilt.abs() * (limits[0].abs() + limits[1].abs()))
    err = tilt.abs() * x.err + (above + below) / 2 * _ROUND + rounding
    return Band(base, tilt[..., None] * x.slope, err)


def product_band(a: Band, b: Band, slope: Tensor, multiply: Callable[[Tensor, Tensor], Tensor], radius: float) -> Band:
    """Return a product, given its slope; it is off by what errors do to the bases, and by movement times movement."""
    err = multiply(a.base.abs(), b.err) + multiply(a.err, b.base.abs())
    err = err + multiply(a.movement(radius), b.movement(radius))
    return Band(multiply(a.base, b.base), slope, err * _ROUND)


def square_band(x: Band, radius: float, wide: int) -> Band:
    """Return the mean of squares along the last axis: mean((slope dx)^2) is at most radius^2 ||slope||^2 / size."""
    small, size = min(x.slope.shape[-2:]) <= wide, x.base.shape[-1]
    norm = torch.linalg.matrix_norm(x.slope, 2) if small else x.slope.norm(dim=(-2, -1))
    most = (radius * norm).square() / size * (1 + 1e-11)
    err = ((2 * (x.base.abs() + radius * x.slope.norm(dim=-1)) + x.err) * x.err).mean(-1) + most / 2
    slope = 2 * (x.base[..., None] * x.slope).mean(-2)
    return Band(x.base.square().mean(-1) + most / 2, slope, err * _ROUND)
