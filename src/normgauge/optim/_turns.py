"""A step on spheres as one 2x2 map per row, read from row norms after a plain step of momentum SGD.

A plain step leaves `wt = w - lr bt` and `bt = mu b + g`. With `r = |w|` and `c = <w, bt> / r^2` the tangent momentum at
`w` is `bt - c w`, and `w = wt + lr bt`, so both the new point and the transported momentum are combinations of `wt` and
`bt` with one coefficient per row: no pass over the gradient, and no dot product where the norms already tell it.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normgauge.manifolds import sphere

#: Below this rate `<w, bt>` is summed; above it follows from the norms, with an error of eps r / (2 lr) in the radial
#: part of the momentum, which the next step removes and which moves the weights by less than their own rounding.
SMALL_RATE = 1e-3


class Moments:
    """Row sums after a plain step: `m = |wt|^2`, `p = <wt, bt>`, `q = |bt|^2`, and what follows from them.

    Args:
        w: the rows after the plain step.
        b: the momentum (the gradient where there is none).
        radius: of each row before the step.
        lr: of the step.
        dot: `<wt, bt>`.
    """

    def __init__(self, w: Tensor, b: Tensor, radius: Tensor, lr: float, dot: Tensor) -> None:
        self.r2 = radius.square()
        self.m = sphere.norm(w).square_()
        self.q = sphere.norm(b).square_()
        self.p = dot
        self.w2 = self.m + 2 * lr * self.p + lr**2 * self.q  # |w|^2 as it really was
        self.c = (self.p + lr * self.q) / self.w2
        self.turn = lr * self.c
        self.b2 = (self.q - self.c.square() * self.w2).clamp_min(0)  # |tangent momentum|^2


def retraction(moments: Moments, radius: Tensor, lr: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the coefficients of `r (w - lr b) / |w - lr b|` and of `b` projected there, in terms of `wt` and `bt`."""
    a = 1 + moments.turn
    d = lr * moments.turn
    v2 = a.square() * moments.m + 2 * a * d * moments.p + d.square() * moments.q
    scale = radius * v2.rsqrt()
    back = (lr * moments.b2).div_(v2)
    return scale * a, scale * d, back * a - moments.c, (1 - moments.turn).add_(back * d)


def rotation(moments: Moments, radius: Tensor, lr: float) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Return the coefficients of the geodesic's end and of `b` carried along it, in terms of `wt` and `bt`."""
    angle = lr * moments.b2.sqrt() / radius
    cosine, sine = angle.cos(), torch.sinc(angle / torch.pi)
    on_sphere = radius * moments.w2.rsqrt()  # takes back the rounding of earlier steps
    pull = lr * sine
    lift = on_sphere * (lr * moments.b2 / moments.r2) * sine
    straight = on_sphere * cosine
    rest = 1 - moments.turn
    return (
        straight + pull * moments.c,
        lr * straight - pull * rest,
        lift - cosine * moments.c,
        cosine * rest + lr * lift,
    )


def apply_(
    w: Tensor, b: Tensor, coefficients: tuple[Tensor, Tensor, Tensor, Tensor], scratch: Callable[[], Tensor] | None
) -> None:
    """Set `w = alpha w + beta b` and, with momentum, `b = gamma w + delta b` of the old values."""
    alpha, beta, gamma, delta = coefficients
    if scratch is None:  # b is the user's gradient
        w.mul_(alpha).addcmul_(b, beta)
        return
    share = torch.mul(w, gamma, out=scratch())
    w.mul_(alpha).addcmul_(b, beta)
    b.mul_(delta).add_(share)


def retract_(w: Tensor, b: Tensor, radius: Tensor, lr: float, *, momentum: bool) -> None:
    """Do what `retraction` and `apply_` do, from the norms alone and with as few passes and row sums as there are.

    In units of the radius, with `e = lr c`: `e = (1 - |wt|^2 + lr^2 |bt|^2) / 2`, `k = (1 + lr^2 |bt|^2 - e^2)^(-1/2)`,
    `w' = k (1 + e) wt + lr k e bt`, `b' = bt / (1 + e) + w' (1 - k^2 - e / (1 + e)) / (lr k)`. Where `e = -1` (a
    radial gradient as large as the weight) the momentum starts anew instead of dividing by zero.
    """
    size = sphere.norm(w).div_(radius).square_()
    push = sphere.norm(b).mul_(lr).div_(radius).square_()
    e = push.sub(size).add_(1).mul_(0.5)
    k = torch.addcmul(push, e, e, value=-1).add_(1).rsqrt_()
    a = e + 1
    w.mul_(k * a).addcmul_(b, (k * e).mul_(lr))
    if momentum:
        x = a.div(a.square().add_(torch.finfo(a.dtype).tiny))
        back = torch.addcmul(k.square(), e, x).neg_().add_(1).div_(k).div_(lr)
        b.mul_(x).addcmul_(w, back)
