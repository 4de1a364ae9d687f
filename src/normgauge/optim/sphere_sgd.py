"""Momentum SGD on spheres: `SphereSGD` steps and normalizes, `GeodesicSGD` follows the great circle exactly."""

from collections.abc import Callable, Iterable
from typing import Any

from torch import Tensor
from torch.optim.optimizer import ParamsT

from normgauge.errors import InputError
from normgauge.manifolds import sphere
from normgauge.optim._base import GeometricOptimizer, rate_of
from normgauge.optim._rows import Block, numbers
from normgauge.optim._turns import SMALL_RATE, Map, Moments, choose, retract_, retraction, rotation, sgd_

Turn = Callable[[Moments, float], Map]


def unit_sphere_rate(lr: float, weights: Iterable[Tensor]) -> float:
    """Return `lr` times the mean of `1 / |w|^2` over all rows: the rate on unit spheres that turns as far as SGD does.

    A scale-invariant loss has gradients `g / |w|` at norm |w|, g that on the unit sphere, so SGD turns a row by
    `lr |g| / |w|^2` per step and `SphereSGD(radius=1)` by `lr |g|`. Take the weights SGD's rate was chosen for, as they
    are at initialization; the result then serves whatever the scale of the weights (torch's default for Linear and
    convolutions has `|w|^2 = 1/3`, so `3 lr`). The same momentum; no weight decay.

    Examples:
        >>> import torch
        >>> unit_sphere_rate(0.1, [torch.tensor([[3.0, 4.0], [0.0, 5.0]])])
        0.004

    References: cho2017, akbar2025
    """
    squares = [row.detach().double().flatten(1).square().sum(1) for row in weights]
    if not squares or not all(bool((part > 0).all()) for part in squares):
        got = f"{len(squares)} tensors"
        raise InputError("unit_sphere_rate", "weights have rows, none of them zero", got, "Leave it out")
    return lr * sum(float((1 / part).sum()) for part in squares) / sum(len(part) for part in squares)


class SphereSGD(GeometricOptimizer):
    """SGD with momentum on spheres: tangent gradient, step, normalize; momentum projected to the new point.

    Per row `w` of radius `r`: `h = g - w <w, g> / r^2`; `b = momentum b + (1 - dampening) h` (`b = h` at first);
    `w' = r (w - lr b) / |w - lr b|`; `b = b - w' <w', b> / r^2`. With `nesterov` the step is along `h + momentum b`.
    Parameters of a Euclidean geometry get torch's SGD, bit for bit. Step sizes are lengths: the angle of a step is
    about `lr |b| / r`, and on a scale-invariant loss `lr` means what it means for torch's SGD at that norm.

    Args:
        params: parameters, named parameters or groups, as in torch.optim.
        lr: learning rate, a number or a tensor of one element.
        momentum: of the buffer.
        dampening: of the gradient's share in the buffer, from the second step on.
        weight_decay: of Euclidean parameters; left out on spheres, with a warning.
        nesterov: look ahead along the momentum.
        geometry: "sphere", "euclidean", or `None`: two and more dimensions on spheres, fewer flat.
        granularity: what is one sphere: "row", "column", "tensor", or a number of equal blocks of the first axis.
        radius: of the spheres; 1 is recommended (`unit_sphere_rate` gives the rate): training then does not depend on
            the scale of the initial weights, which are put there at once. `None` keeps the norms rows have at the first
            step.
        maximize: go up.
        foreach: `False` handles tensors one by one instead of gathering small ones.
        fused: `True` insists on torch's fused kernel, `False` avoids it, `None` uses it where it exists.
        capturable: refused if true: steps read the learning rate and count on the host.
        differentiable: refused if true: steps change weights in place, outside autograd.

    Examples:
        The norm stays, while torch's SGD lets it grow:

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = SphereSGD([weight], lr=1.0)
        >>> weight.grad = torch.tensor([[-4.0, 3.0]])
        >>> optimizer.step()
        >>> round(weight.norm().item(), 4)
        5.0

    References: cho2017, akbar2025
    """

    turn: Turn = staticmethod(retraction)
    summed = False

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        geometry: str | None = None,
        granularity: str | int = "row",
        radius: float | None = None,
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, defaults)

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        tensors = ("momentum_buffer",) if group["momentum"] else ()
        lr, mu, nesterov = rate_of(group), float(group["momentum"]), bool(group["nesterov"])
        for chosen, keep in self._split_by_age(group, params, tensors, ("radius",)):
            for block in self._blocks(group, chosen, tensors, ("radius",)):
                if nesterov or (lr == 0 and mu):
                    self._step_explicitly(block, lr, mu, keep, nesterov=nesterov)
                else:
                    fused = choose("sgd", group["fused"], block.w)
                    sgd_(block.w, block.grad, block.state.get("momentum_buffer"), lr=lr, mu=mu, keep=keep, fused=fused)
                    self._turn(block, lr)
                if block.copies:
                    block.write()

    def _turn(self, block: Block, lr: float) -> None:
        """Make the plain step that was done the step on the sphere."""
        buffer = block.state.get("momentum_buffer")
        moving = block.grad if buffer is None else buffer
        rows = numbers(moving) if buffer is None else block.rows("momentum_buffer")
        if not self.summed and lr >= SMALL_RATE:
            retract_(block, moving, rows, lr, momentum=buffer is not None)
            return
        turn = type(self).turn(Moments(block.rows("w"), rows, block.radius, lr), lr)
        turn.apply_(block.w, moving, None if buffer is None else block.scratch)

    def _step_explicitly(self, block: Block, lr: float, mu: float, keep: float, *, nesterov: bool) -> None:
        """Do the step in the words of the definition, where the short form does not apply."""
        w, radius, buffer = block.w, block.numbers["radius"], block.state["momentum_buffer"]
        slope = sphere.tangent(w, block.grad)
        buffer.mul_(mu).add_(slope, alpha=keep)
        move = (slope + mu * buffer if nesterov else buffer) * -lr
        self._move(w, sphere.project(w, radius), move, radius, buffer)

    def _move(self, w: Tensor, start: Tensor, move: Tensor, radius: Tensor, buffer: Tensor) -> None:
        w.copy_(sphere.project(start + move, radius))
        buffer.copy_(sphere.tangent(w, buffer))


class GeodesicSGD(SphereSGD):
    """SGD with momentum along great circles, with the momentum carried by parallel transport.

    Per row `w` of radius `r`: `h = g - w <w, g> / r^2`; `b = momentum b + (1 - dampening) h` (`b = h` at first);
    `w' = w cos(a) - r sin(a) b / |b|` with `a = lr |b| / r`; `b = b cos(a) + w |b| sin(a) / r`, which keeps its length.
    Arguments are those of `SphereSGD`.

    Examples:
        A quarter turn lands on the other axis exactly:

        >>> import torch
        >>> weight = torch.nn.Parameter(torch.tensor([[2.0, 0.0]]))
        >>> optimizer = GeodesicSGD([weight], lr=torch.pi / 2)
        >>> weight.grad = torch.tensor([[0.0, -2.0]])
        >>> optimizer.step()
        >>> bool((weight - torch.tensor([[0.0, 2.0]])).abs().max() < 1e-6)
        True

    References: cho2017
    """

    turn: Turn = staticmethod(rotation)
    summed = True

    def _move(self, w: Tensor, start: Tensor, move: Tensor, radius: Tensor, buffer: Tensor) -> None:
        w.copy_(sphere.project(sphere.exp(start, move), radius))
        buffer.copy_(sphere.transport(start, move, buffer))
