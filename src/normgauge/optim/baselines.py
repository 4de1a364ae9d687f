"""Baselines to compare with: `NormalizedSGD` and a damped Gauss-Newton step."""

import math
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.optim.optimizer import ParamsT

from normgauge.errors import InputError
from normgauge.manifolds import sphere
from normgauge.optim._base import GeometricOptimizer, rate_of


class NormalizedSGD(GeometricOptimizer):
    """SGD on normalized gradients: `b = momentum b + g / |g|`, `w' = w - lr b`, one norm per tensor (or row).

    The length of a step does not depend on the gradient's, so it neither explodes nor vanishes, and does not shrink
    near a minimum either: it needs a schedule. A zero gradient moves nothing. Arguments are those of `SphereSGD` as far
    as they are here: `lr` is the length of a step, `eps` the smallest norm divided by, `geometry="euclidean"` torch's
    SGD, and `granularity` says what has one norm.

    Examples:
        >>> weight = torch.nn.Parameter(torch.zeros(2))
        >>> optimizer = NormalizedSGD([weight], lr=1.0)
        >>> weight.grad = torch.tensor([300.0, -400.0])
        >>> optimizer.step()
        >>> weight.data
        tensor([-0.6000,  0.8000])

    References: akbar2025
    """

    row_numbers = ()

    def __init__(
        self,
        params: ParamsT,
        lr: float | Tensor = 1e-3,
        momentum: float = 0,
        eps: float = 1e-12,
        *,
        geometry: str | None = None,
        granularity: str | int = "tensor",
        maximize: bool = False,
        foreach: bool | None = None,
        capturable: bool = False,
        differentiable: bool = False,
    ) -> None:
        defaults = {name: value for name, value in locals().items() if name not in ("self", "params", "__class__")}
        defaults |= {"fused": None, "dampening": 0, "nesterov": False, "weight_decay": 0}
        super().__init__(params, defaults)

    def is_curved(self, param: Tensor, group: dict[str, Any]) -> bool:
        """Tell whether the gradient is normalized."""
        return group["geometry"] != "euclidean"

    def _check(self, group: dict[str, Any]) -> None:
        super()._check(group)
        for key, neutral in (("fused", None), ("dampening", 0), ("nesterov", False), ("weight_decay", 0)):
            if group[key] != neutral:
                raise InputError("NormalizedSGD", f"there is no {key} here", f"{key}={group[key]}", "Leave it out")

    def _step_curved(self, group: dict[str, Any], params: list[Tensor]) -> None:
        lr, mu = rate_of(group), float(group["momentum"])
        for block in self._blocks(group, params, ("momentum_buffer",) if mu else (), ()):
            unit = block.grad / sphere.norm(block.grad).clamp_min_(group["eps"])
            if mu:
                unit = block.state["momentum_buffer"].mul_(mu).add_(unit)
            block.w.sub_(unit, alpha=lr)
            block.write()


class _Measured(Protocol):
    """What the Gauss-Newton step asks of an objective."""

    def loss(self) -> Tensor: ...
    def gradient(self) -> dict[str, Tensor]: ...
    def gauss_newton(self) -> Any: ...
    def flatten(self, values: Any) -> Tensor: ...
    def unflatten(self, vector: Tensor) -> dict[str, Tensor]: ...
    @property
    def parameters(self) -> dict[str, Tensor]: ...


@dataclass(frozen=True)
class GaussNewtonStep:
    """A damped Gauss-Newton step and how well it was solved.

    Attributes:
        step: by parameter name; add it to the parameters.
        parameters: the parameters after the step.
        residual: `|(G + damping I) step + g| / |g|`, the true one.
        products: matrix-vector products used.
        predicted: the decrease the quadratic model promises.
    """

    step: dict[str, Tensor]
    parameters: dict[str, Tensor]
    residual: float
    products: int
    predicted: float


def damped_gauss_newton(
    objective: _Measured, *, damping: float = 1.0, tol: float = 1e-6, max_products: int = 200
) -> GaussNewtonStep:
    """Solve `(G + damping I) step = -g` by conjugate gradients, G the generalized Gauss-Newton matrix.

    Without damping G is singular along every symmetry; `tol` is that of the relative residual. The model is left as it
    was: apply the step with `objective.at(result.parameters)` or by copying.

    Cost: one gradient and one Gauss-Newton product per iteration.

    Examples:
        On least squares one undamped step is the solution (here w = 2), whatever the start:

        >>> from normgauge.objective import Objective
        >>> x = torch.tensor([[1.0], [3.0]])
        >>> model = torch.nn.Linear(1, 1, bias=False)
        >>> o = Objective(model, torch.nn.functional.mse_loss, (x, 2 * x), mode="eval")
        >>> round(damped_gauss_newton(o, damping=1e-9).parameters["weight"].item(), 4)
        2.0

    References: martens2020
    """
    if not damping > 0:
        raise InputError("damped_gauss_newton", "damping must be positive", str(damping), "Pass damping=1e-3 or more")
    matrix, slope = objective.gauss_newton(), objective.flatten(objective.gradient())
    x = torch.zeros_like(slope)
    r = -slope
    p, products = r.clone(), 0
    rr, goal = float(r @ r), tol**2 * float(slope @ slope)
    while rr > goal and products < max_products:
        q = (matrix @ p) + damping * p
        products += 1
        a = rr / float(p @ q)
        x, r = x + a * p, r - a * q
        new = float(r @ r)
        p, rr = r + (new / rr) * p, new
    applied = matrix @ x + damping * x
    residual = float((applied + slope).norm() / slope.norm()) if float(slope.norm()) else 0.0
    step = objective.unflatten(x)
    moved = {name: value + step[name] for name, value in objective.parameters.items()}
    predicted = -float(slope @ x + 0.5 * (x @ applied))
    return GaussNewtonStep(step, moved, residual, products + 1, predicted if math.isfinite(predicted) else math.nan)
