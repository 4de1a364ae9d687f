"""Adam on spheres: `SphereAdam` steps and normalizes, `GeodesicAdam` (Adam-G) has one second moment per row."""

from typing import Any

import torch
from torch import Tensor
from torch.optim.adamw import adamw as torch_adamw
from torch.optim.optimizer import ParamsT

from normgauge.errors import InputError
from normgauge.optim._base import GeometricOptimizer, rate_of
from normgauge.optim._rows import Block, adjacent_rows, column, functions, lay_side_by_side, numbers, sums
from normgauge.optim._turns import Map, adam_, cosine_and_sinc


class AdamGroups(GeometricOptimizer):
    """What the Adams share: betas, eps, a step count per parameter, AdamW on flat parameters."""

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
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

    def _step_flat(self, group: dict[str, Any], params: list[Tensor]) -> None:
        """Do a step of torch's own AdamW on the parameters that are not on spheres, bit for bit."""
        state = self.state
        for param in params:
            if not state[param]:
                state[param]["step"] = torch.zeros((), dtype=torch.float32)
                state[param]["exp_avg"] = torch.zeros_like(param, memory_format=torch.preserve_format)
                state[param]["exp_avg_sq"] = torch.zeros_like(param, memory_format=torch.preserve_format)
        means, squares, steps = ([state[param][key] for param in params] for key in ("exp_avg", "exp_avg_sq", "step"))
        grads: list[Any] = [param.grad for param in params]
        options = {key: group[key] for key in ("foreach", "fused", "lr", "weight_decay", "eps", "maximize")}
        beta1, beta2 = group["betas"]
        torch_adamw(params, grads, means, squares, [], steps, amsgrad=False, beta1=beta1, beta2=beta2, **options)

    def _count_steps(self, params: list[Tensor]) -> dict[float, list[Tensor]]:
        """Advance every step count and return the parameters by it: those skipped before are at another one."""
        states = [self.state[param] for param in params]
        new = [state for state in states if "step" not in state]
        for state, zero in zip(new, lay_side_by_side([torch.zeros((), dtype=torch.float32) for _ in new]), strict=True):
            state["step"] = zero
        steps = [state["step"] for state in states]
        together = adjacent_rows(steps, 1)
        if together is None:
            torch._foreach_add_(steps, 1)
            together = torch.stack(steps)
        else:
            together.add_(1)
        by_step: dict[float, list[Tensor]] = {}
        for param, step in zip(params, together.view(-1).tolist(), strict=True):
            by_step.setdefault(step, []).append(param)
        return by_step


class SphereAdam(AdamGroups):
    """Adam, then every row brought back to its norm.

    `w' = r u / |u|` with `u = w - lr mhat / (sqrt(vhat) + eps)`, moments as in torch's Adam and left where they are:
    the radial part of a step is removed by the normalization. Parameters of a Euclidean geometry get torch's AdamW,
    bit for bit. Arguments are those of `SphereSGD`, with `betas` and `eps` as in torch's Adam and decoupled decay.

    Examples:
        The first step of Adam moves every entry by lr, here across the weights; then the row is normalized:

        >>> weight = torch.nn.Parameter(torch.tensor([[1.0, 1.0]]))
        >>> optimizer = SphereAdam([weight], lr=0.5)
        >>> weight.grad = torch.tensor([[1.0, -1.0]])
        >>> optimizer.step()
        >>> [round(x, 4) for x in (weight[0] / weight[0, 0]).tolist()], round(weight.norm().item() ** 2, 4)
        ([1.0, 3.0], 2.0)

    References: loshchilov2019, heo2021
    """

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for step, chosen in self._count_steps(params).items():
            count = torch.tensor(step, device=chosen[0].device)
            for block in self._blocks(group, chosen, ("exp_avg", "exp_avg_sq"), ("radius",)):
                adam_(block, count, group)
                rows = block.rows("w")
                w2 = sums(rows, rows)
                block.w.mul_(column(block.radius / functions(w2).sqrt(w2)))
                block.write()


class GeodesicAdam(AdamGroups):
    """Adam-G: one second moment per row, steps along great circles, the first moment carried by parallel transport.

    Per row `w` of radius `r`, with the tangent gradient `h`: `m = beta1 m + (1 - beta1) h`,
    `v = beta2 v + (1 - beta2) |h|^2`, `d = mhat / (sqrt(vhat) + eps)`, `w' = exp_w(-lr d)` and `m` transported along.
    Because a row's direction is only scaled, the step is tangent (an elementwise one is not). The angle of a step is at
    most about `lr / r`. Arguments are those of `SphereAdam`; there is no fused kernel, so `fused=True` is refused.

    Deviations: Cho and Lee clip the gradient and regularize towards orthogonality; neither is done here. Their columns
        are rows here, of any radius.

    Examples:
        The first step turns by lr / r, whatever the size of the gradient:

        >>> weight = torch.nn.Parameter(torch.tensor([[2.0, 0.0]]))
        >>> optimizer = GeodesicAdam([weight], lr=0.1)
        >>> weight.grad = torch.tensor([[5.0, 1e-3]])
        >>> optimizer.step()
        >>> round(torch.atan2(-weight[0, 1], weight[0, 0]).item(), 4)
        0.05

    References: cho2017
    """

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        if group["fused"] and any(self.is_curved(param, group) for param in group["params"]):
            raise InputError("GeodesicAdam", "there is no fused kernel of Adam-G", "fused=True", "Pass fused=None")

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for step, chosen in self._count_steps(params).items():
            for block in self._blocks(group, chosen, ("exp_avg",), ("radius", "exp_avg_sq")):
                _geodesic_adam(block, rate_of(group), group["betas"], group["eps"], step)
                block.write()


def _geodesic_adam(block: Block, lr: float, betas: tuple[float, float], eps: float, step: float) -> None:
    """Do one step of Adam-G on rows, as a 2x2 map of `w` and the first moment."""
    w, grad, mean, radius = block.w, block.grad, block.state["exp_avg"], block.radius
    rows, moment, square = block.rows("w"), block.rows("exp_avg"), block.rows("exp_avg_sq")
    first, second = betas
    w2 = sums(rows, rows)
    # subtracted, not taken from norms: where the gradient is mostly radial, |g|^2 - <w, g>^2 / r^2 would cancel
    slope = torch.addcmul(grad, w, column(sums(rows, numbers(grad)) / w2), value=-1, out=block.scratch())
    flat = numbers(slope)
    square *= second
    square += (1 - second) * sums(flat, flat)
    mean.lerp_(slope, 1 - first)
    mean2 = sums(moment, moment)
    length = (lr / (1 - first**step)) / (functions(w2).sqrt(square / (1 - second**step)) + eps)  # per unit of moment
    r2 = radius * radius
    pull = mean2 / r2
    cosine, sine = cosine_and_sinc(pull * length * length)
    sine *= length
    on_sphere = functions(w2).sqrt(r2 / w2)
    pull *= on_sphere
    pull *= sine
    on_sphere *= cosine
    Map(on_sphere, -sine, pull, cosine).apply_(w, mean, block.scratch)
