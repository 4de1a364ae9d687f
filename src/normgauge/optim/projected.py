"""SGD and Adam without the radial part of a step (the AdamP family): `ProjectedSGD`, `ProjectedAdam`."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from normgauge.optim._base import GeometricOptimizer, rate_of
from normgauge.optim._rows import Block, Column, column, functions, numbers, sums
from normgauge.optim._turns import TINY, adam_, choose, sgd_
from normgauge.optim.sphere_adam import AdamGroups


class _Sweep:
    """A block before and after the plain step, with its row sums."""

    def __init__(self, block: Block, number: int, *, on_sphere: bool) -> None:
        self.block, self.before = block, block.scratch(f"before {number}").copy_(block.w)
        self.rows = block.rows("w")
        self.ww = sums(self.rows, self.rows)
        self.wg = self.gg = self.wu = self.ww
        if not on_sphere:
            grad = numbers(block.grad)
            self.wg, self.gg = sums(self.rows, grad), sums(grad, grad)

    def measure_step(self) -> _Sweep:
        self.wu = self.ww - sums(numbers(self.before), self.rows)  # <w, step>
        return self


def _remove_radial(sweeps: list[_Sweep], group: dict[str, Any]) -> None:
    """Take the radial part out of the steps already made, where the rule says so, and decay the weights.

    The rule is evaluated on the device with `where`: no value is read back, so nothing waits.
    """
    block, lr, on_sphere = sweeps[0].block, rate_of(group), group["geometry"] == "sphere"
    module = functions(sweeps[0].ww)
    keys = ("ww", "wu") if on_sphere else ("ww", "wg", "gg", "wu")
    joined = [module.concatenate([getattr(s, key) for s in sweeps]) for key in keys]
    if on_sphere:
        coefficient = joined[1] / (joined[0] + TINY) - lr * group["weight_decay"] * group["wd_ratio"]
    else:
        joined = [value.reshape(block.owners, -1) for value in joined]
        ww, wg, gg, wu = joined
        total = [value.sum(1)[:, None] for value in joined]
        width = block.w.shape[1]
        by_row = (_cosine2(wg, ww, gg) < group["delta"] ** 2 / width).all(1)[:, None]
        by_tensor = _cosine2(total[1], total[0], total[2]) < group["delta"] ** 2 / (width * ww.shape[1])
        whole = total[3] / (total[0] + TINY)
        coefficient = module.where(by_row, wu / (ww + TINY), module.where(by_tensor, whole, module.zeros_like(whole)))
        decay = module.full_like(whole, lr * group["weight_decay"])
        coefficient = coefficient - module.where(by_row | by_tensor, group["wd_ratio"] * decay, decay)
        coefficient = coefficient.reshape(-1, 1)
    start = 0
    for sweep in sweeps:
        stop = start + sweep.block.w.shape[0]
        sweep.block.w.addcmul_(sweep.before, column(coefficient[start:stop]))
        sweep.block.write()
        start = stop


def _cosine2(wg: Column, ww: Column, gg: Column) -> Column:
    """Return the square of `cos(w, g)`, zero where one of them is zero."""
    return wg * wg / (ww * gg + TINY)


def _group_by_tensor(blocks: Iterator[Block]) -> Iterator[list[Block]]:
    parts: list[Block] = []
    for block in blocks:
        parts.append(block)
        if block.last:  # told by the block itself: looking ahead would overwrite packed memory
            yield parts
            parts = []


class ProjectedSGD(GeometricOptimizer):
    """SGD with momentum whose steps have no radial part on weights whose scale does not matter.

    `u = b` (or `g + momentum b` with `nesterov`), `b = momentum b + (1 - dampening) g`; where the weights are found
    scale-invariant, `u = u - w <w, u> / <w, w>` per row (or tensor); `w' = (1 - lr weight_decay f) w - lr u` with
    `f = wd_ratio` there and 1 elsewhere. The norm still grows, by `lr^2 |u|^2` a step instead of momentum's more.
    Geometry `None` asks of every tensor of two or more dimensions, each step and without waiting for the device,
    whether all rows have `|cos(w, g)| < delta / sqrt(width)`, then the same of the whole tensor; "sphere" (as from
    `ng.param_groups`) takes it as known; "euclidean" gets torch's SGD, bit for bit.

    Arguments are those of `SphereSGD` without radius; weight decay is decoupled; `geometry` is None for the rule;
    `delta` says how near to orthogonal counts as scale-invariant, `wd_ratio` what share of the decay such weights keep.

    Deviations: Heo et al. divide SGD's decay by `1 - momentum`; here it is decoupled as in AdamW.

    Examples:
        A radial step is taken out:

        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = ProjectedSGD([weight], lr=1.0, geometry="sphere")
        >>> weight.grad = torch.tensor([[3.0, 4.0]])
        >>> optimizer.step()
        >>> weight.data
        tensor([[3., 4.]])

    References: heo2021
    """

    row_numbers = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        dampening: float = 0,
        weight_decay: float = 0,
        nesterov: bool = False,
        *,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        geometry: str | None = None,
        granularity: str | int = "row",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        super().__init__(params, defaults)

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, mu = rate_of(group), float(group["momentum"])
        tensors = ("momentum_buffer",) if mu else ()
        for chosen, keep in self._split_by_age(group, params, tensors, ()):
            for parts in _group_by_tensor(self._blocks(group, chosen, tensors, ())):
                sweeps = []
                for number, block in enumerate(parts):
                    sweep = _Sweep(block, number, on_sphere=group["geometry"] == "sphere")
                    buffer = block.state.get("momentum_buffer")
                    if group["nesterov"] and buffer is not None:
                        buffer.mul_(mu).add_(block.grad, alpha=keep)
                        block.w.sub_(torch.add(block.grad, buffer, alpha=mu), alpha=lr)
                    else:
                        fused = choose("sgd", group["fused"], block.w)
                        sgd_(block.w, block.grad, buffer, lr=lr, mu=mu, keep=keep, fused=fused)
                    sweeps.append(sweep.measure_step())
                _remove_radial(sweeps, group)


class ProjectedAdam(AdamGroups):
    """Adam whose steps have no radial part on weights whose scale does not matter (AdamP).

    `u = mhat / (sqrt(vhat) + eps)`; where the weights are found scale-invariant, `u = u - w <w, u> / <w, w>` per row
    (or tensor); `w' = (1 - lr weight_decay f) w - lr u` with `f = wd_ratio` there and 1 elsewhere. The rule and the
    geometries are those of `ProjectedSGD`; Euclidean parameters get torch's AdamW, bit for bit.

    Arguments are those of `ProjectedSGD`, with `betas` and `eps` as in torch's Adam.

    Examples:
        The step of Adam is (lr, lr); across the weights (3, 4) it has no radial part left:

        >>> weight = torch.nn.Parameter(torch.tensor([[3.0, 4.0]]))
        >>> optimizer = ProjectedAdam([weight], lr=0.1, geometry="sphere")
        >>> weight.grad = torch.tensor([[1.0, 1.0]])
        >>> optimizer.step()
        >>> moved = weight.data - torch.tensor([[3.0, 4.0]])
        >>> bool((moved @ torch.tensor([3.0, 4.0])).abs() < 1e-6)
        True

    References: heo2021
    """

    row_numbers = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        betas: tuple[float, float] = (0.9, 0.999),
        eps: float = 1e-8,
        weight_decay: float = 0,
        *,
        delta: float = 0.1,
        wd_ratio: float = 0.1,
        geometry: str | None = None,
        granularity: str | int = "row",
        maximize: bool = False,
        foreach: bool | None = None,
        fused: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        GeometricOptimizer.__init__(self, params, defaults)

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        for step, chosen in self._count_steps(params).items():
            count = torch.tensor(step, device=chosen[0].device)
            for parts in _group_by_tensor(self._blocks(group, chosen, ("exp_avg", "exp_avg_sq"), ())):
                sweeps = []
                for number, block in enumerate(parts):
                    sweep = _Sweep(block, number, on_sphere=group["geometry"] == "sphere")
                    adam_(block, count, group)
                    sweeps.append(sweep.measure_step())
                _remove_radial(sweeps, group)
