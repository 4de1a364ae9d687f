"""A step on spheres as one 2x2 map per row, read from row sums after a plain step of momentum SGD.

A plain step leaves `wt = w - lr bt` and `bt = mu b + g`. With `r = |w|` and `c = <w, bt> / r^2` the tangent momentum at
`w` is `bt - c w`, and `w = wt + lr bt`, so both the new point and the transported momentum are combinations of `wt` and
`bt` with one coefficient per row: no pass over the gradient. Row sums and coefficients are `Column`s (see `_sums`).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import NamedTuple

import torch
from torch import Tensor

from normgauge.optim._sums import Column, column, functions, largest, sums

#: Below this rate `<w, bt>` is summed; above it follows from the norms, with an error of eps r / (2 lr) in the radial
#: part of the momentum, which the next step removes and which moves the weights by less than their own rounding.
SMALL_RATE = 1e-3


class Map(NamedTuple):
    """`w' = ww w + wb b`, `b' = bw w + bb b`, a number per row each."""

    ww: Column
    wb: Column
    bw: Column
    bb: Column

    def apply_(self, w: Tensor, b: Tensor, scratch: Callable[[], Tensor] | None) -> None:
        """Change `w` and, where there is memory to do it, `b`; without, `b` is the user's gradient."""
        share = None if scratch is None else torch.mul(w, column(self.bw), out=scratch())
        w.mul_(column(self.ww)).addcmul_(b, column(self.wb))
        if share is not None:
            b.mul_(column(self.bb)).add_(share)


class Moments:
    """Row sums after a plain step, in units of the radius, and what follows from them.

    Args:
        w: the rows after the plain step.
        b: the momentum (the gradient where there is none).
        radius: of each row before the step.
        lr: of the step.
    """

    def __init__(self, w: Tensor, b: Tensor, radius: Column, lr: float) -> None:
        unit = 1 / (radius * radius)
        self.m = sums(w, w) * unit
        self.p = sums(w, b) * (lr * unit)
        self.q = sums(b, b) * (lr * lr * unit)
        self.w2 = self.m + 2 * self.p + self.q  # |w|^2 as it really was
        self.turn = (self.p + self.q) / self.w2
        self.b2 = abs(self.q - self.turn * self.turn * self.w2)  # |lr tangent momentum|^2


def retraction(moments: Moments, lr: float) -> Map:
    """Return the map to `r (w - lr b) / |w - lr b|` and to `b` projected there, from `wt` and `bt`."""
    turn = moments.turn
    a, rest = 1 + turn, 1 - turn
    v2 = a * a * moments.m + 2 * a * turn * moments.p + turn * turn * moments.q
    scale = 1 / functions(v2).sqrt(v2)
    back = moments.b2 / v2
    return Map(scale * a, scale * turn * lr, (back * a - turn) / lr, rest + back * turn)


def rotation(moments: Moments, lr: float) -> Map:
    """Return the map to the geodesic's end and to `b` carried along it, from `wt` and `bt`."""
    known = functions(moments.b2)
    angle = known.sqrt(moments.b2)
    cosine, sine = known.cos(angle), known.sinc(angle / torch.pi)
    on_sphere = 1 / known.sqrt(moments.w2)  # takes back the rounding of earlier steps
    lift = on_sphere * moments.b2 * sine
    straight = on_sphere * cosine
    rest = 1 - moments.turn
    return Map(
        straight + sine * moments.turn,
        (straight - sine * rest) * lr,
        (lift - cosine * moments.turn) / lr,
        cosine * rest + lift,
    )


def retract_(w: Tensor, b: Tensor, radius: Column, lr: float, *, momentum: bool) -> None:
    """Do what `retraction` does, from the norms alone and with as few passes as there are.

    In units of the radius, with `e = lr c`: `e = (1 - |wt|^2 + lr^2 |bt|^2) / 2`, `k = (1 + lr^2 |bt|^2 - e^2)^(-1/2)`,
    `w' = k (1 + e) wt + lr k e bt`, `b' = bt / (1 + e) + w' (1 - k^2 - e / (1 + e)) / (lr k)`. Where `e = -1` (a
    radial gradient as large as the weight) the momentum starts anew instead of dividing by zero. Where `e` is below
    the rounding of the sums in every row, as it is when the loss does not depend on the norms, `e = 0` saves two passes.
    """
    unit = 1 / (radius * radius)
    push = sums(b, b) * (lr * lr * unit)
    e = (1 + push - sums(w, w) * unit) * 0.5
    eps = torch.finfo(w.dtype).eps
    tangent = largest(e) <= 4 * eps  # False on a device that would have to wait for the answer
    k = 1 / functions(push).sqrt(1 + push if tangent else 1 + push - e * e)
    if tangent:
        w.mul_(column(k))
        if momentum:
            b.addcmul_(w, column((1 - k * k) / k), value=1 / lr)
        return
    a = 1 + e
    w.mul_(column(k * a)).addcmul_(b, column(k * e), value=lr)
    if momentum:
        x = a / (a * a + torch.finfo(w.dtype).tiny)
        b.mul_(column(x)).addcmul_(w, column((1 - k * k - e * x) / k), value=1 / lr)
