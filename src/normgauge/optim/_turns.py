"""Plain steps by torch's fused kernels, and a step on spheres as one 2x2 map per row, read from row sums after one.

A plain step leaves `wt = w - lr bt` and `bt = mu b + g`. With `r = |w|` and `c = <w, bt> / r^2` the tangent momentum at
`w` is `bt - c w`, and `w = wt + lr bt`, so both the new point and the transported momentum are combinations of `wt` and
`bt` with one coefficient per row: no pass over the gradient. Row sums and coefficients are `Column`s (see `_sums`).
"""

from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from normgauge.errors import InputError
from normgauge.optim._rows import Block, Column, column, functions, sums, vanishes

#: Below this rate `<w, bt>` is summed; above it follows from the norms, with an error of eps r / (2 lr) in the radial
#: part of the momentum, which the next step removes and which moves the weights by less than their own rounding.
SMALL_RATE = 1e-3
_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")
TINY = 2.0**-126  # the smallest normal float32


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
    """Row sums of weights w and momentum (or gradient) b after a plain step, in units of the radius before it."""

    def __init__(self, w: Any, b: Any, radius: Column, lr: float) -> None:
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
    cosine, sine = cosine_and_sinc(moments.b2)
    on_sphere = 1 / functions(sine).sqrt(moments.w2)  # takes back the rounding of earlier steps
    lift = on_sphere * moments.b2 * sine
    on_sphere *= cosine
    rest = 1 - moments.turn
    return Map(
        on_sphere + sine * moments.turn,
        (on_sphere - sine * rest) * lr,
        (lift - cosine * moments.turn) / lr,
        cosine * rest + lift,
    )


def cosine_and_sinc(square: Column) -> tuple[Column, Column]:
    """Return `cos(a)` and `sin(a) / a` of angles of given squares."""
    module = functions(square)
    angle = module.sqrt(square + TINY)  # so that zero needs no case of its own
    return module.cos(angle), module.sin(angle) / angle


def retract_(block: Block, b: Tensor, rows: Any, lr: float, *, momentum: bool) -> None:
    """Do what `retraction` does, from the norms alone and with as few passes as there are.

    In units of the radius, with `e = lr c`: `e = (1 - |wt|^2 + lr^2 |bt|^2) / 2`, `s^2 = 1 + lr^2 |bt|^2 - e^2`,
    `w' = ((1 + e) wt + lr e bt) / s`, `b' = bt / (1 + e) + w' (s - 1 / s - s e / (1 + e)) / lr`. Where `e = -1` (a
    radial gradient as large as the weight) the momentum starts anew instead of dividing by zero. Where `e` is below
    the rounding of the sums in every row, as it is when the loss does not depend on the norms, `w' = r wt / |wt|` and
    `b' = bt - w' <w', bt> / r^2` are the same to rounding and save two passes. Without `momentum` b is the gradient,
    which is not ours to change; `rows` is b as `numbers` gives it.
    """
    w, radius, flat = block.w, block.radius, block.rows("w")
    r2 = radius * radius
    push = sums(rows, rows)
    push *= lr * lr
    e = push - sums(flat, flat)
    e /= r2
    e += 1
    e *= 0.5
    push /= r2
    if vanishes(e, 8 * torch.finfo(w.dtype).eps):
        push -= e
        k = 1 / functions(e).sqrt(1 + push - e)
        w.mul_(column(k))
        if momentum:
            push *= k
            b.addcmul_(w, column(push), value=1 / lr)
        return
    push += 1
    s = functions(e).sqrt(push - e * e)
    k = 1 / s
    a = e + 1
    w.mul_(column(k * a)).addcmul_(b, column(k * e), value=lr)
    w.mul_(column(radius / functions(e).sqrt(sums(flat, flat))))  # else radial gradients amplify the rounding of |w|
    if momentum:
        a /= a * a + TINY
        e *= a
        e *= s
        s -= k
        s -= e
        b.mul_(column(a)).addcmul_(w, column(s), value=1 / lr)


def choose(name: str, fused: bool | None, tensor: Tensor) -> bool:
    """Decide between the fused kernel and the plain form; `fused=True` that cannot be honoured is refused."""
    works = hasattr(torch, f"_fused_{name}_") and tensor.device.type in _FUSED_DEVICES and tensor.is_floating_point()
    if fused and not works:
        rule, got = f"torch must have a fused {name} kernel for the parameters", f"{tensor.dtype} on {tensor.device}"
        raise InputError("fused=True", rule, got, "Pass fused=None to use it where it exists")
    return fused is not False and works


def sgd_(w: Tensor, grad: Tensor, buffer: Tensor | None, *, lr: float, mu: float, keep: float, fused: bool) -> None:
    """Set `buffer = mu buffer + keep grad` and `w -= lr buffer` (`w -= lr grad` without a buffer)."""
    if fused:
        flags: dict[str, Any] = {"nesterov": False, "maximize": False, "is_first_step": False}
        buffers = [] if buffer is None else [buffer]
        torch._fused_sgd_([w], [grad], buffers, weight_decay=0.0, momentum=mu, lr=lr, dampening=1 - keep, **flags)
    elif buffer is None:
        w.add_(grad, alpha=-lr)
    else:
        w.add_(buffer.mul_(mu).add_(grad, alpha=keep), alpha=-lr)


def adam_(block: Block, step: Tensor, group: dict[str, Any]) -> None:
    """Do one step of Adam without weight decay; `step` counts this one already."""
    w, grad, mean, square = block.w, block.grad, block.state["exp_avg"], block.state["exp_avg_sq"]
    (first, second), lr, eps = group["betas"], float(group["lr"]), group["eps"]
    if choose("adam", group["fused"], w):
        rates = {"lr": lr, "beta1": first, "beta2": second, "weight_decay": 0.0, "eps": eps}
        torch._fused_adam_([w], [grad], [mean], [square], [], [step], **rates, amsgrad=False, maximize=False)
        return
    t = step.item()
    mean.lerp_(grad, 1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    scale = (square / (1 - second**t)).sqrt_().add_(eps)
    w.addcdiv_(mean, scale, value=-lr / (1 - first**t))
