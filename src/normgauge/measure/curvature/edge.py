"""The edge of stability: the curvature an optimizer's rate allows, and the rate its own next step allows."""

import math
from collections.abc import Callable, Mapping
from contextlib import closing
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import NonFiniteError
from normgauge.linalg import Eigenpairs, Operator, eigenpairs
from normgauge.measure.signal.updates import apply_update, groups_by_name
from normgauge.objective import HessianOperator, Objective

DOUBLINGS = 20  # of the rate, either way: six decades
FULL_BATCH = "the threshold is that of full-batch steps; mini-batches leave the edge earlier"


@dataclass(frozen=True, slots=True)
class Edge:
    """The linear stability of an optimizer: it is stable on a quadratic while lambda_max(S (H + D)) < multiple / rate.

    With x' = x - rate b', per eigenvalue l of S (H + D), Jury's conditions on the 2 x 2 recursion give

    * gradient descent: multiple 2;
    * heavy ball, b' = m b + (1 - d) l x: 2 (1 + m) / (1 - d);
    * Nesterov as torch writes it, x' = x - rate (l x + m b'): 2 (1 + m) / (1 + 2 m);
    * Adam, b' = b1 b + (1 - b1) l x with S = 1 / ((1 - b1^t) (sqrt(v / (1 - b2^t)) + eps)) held fixed:
      2 (1 + b1) / (1 - b1), 38 for b1 = 0.9; decoupled decay w, x' = (1 - rate w) x - rate b', makes the 2 a 2 - rate w
      (the largest of the groups');
    * RMSprop: S = 1 / (sqrt(v) + eps), and heavy ball's.

    S also holds the groups' rates over the largest, D the decay that is added to the gradient.

    Attributes:
        name: of the optimizer.
        rate: the largest of its groups' rates.
        multiple: of 1 / rate; nan where there is no theory.
        scale: the diagonal of S, or `None` for the identity.
        shift: the diagonal of D, or `None` for zero.
        why: there is no theory, or empty.

    References: cohen2021, cohen2022.
    """

    name: str
    rate: float
    multiple: float
    scale: Tensor | None = None
    shift: Tensor | None = None
    why: str = ""

    @property
    def threshold(self) -> float:
        """The largest curvature that is stable at the rate."""
        return self.multiple / self.rate if self.rate else math.inf


def edge_of(objective: Objective, optimizer: torch.optim.Optimizer | None) -> Edge:
    """Return the edge of an optimizer in its present state; plain gradient descent at rate 1 for `None`."""
    if optimizer is None:
        return Edge("gradient descent", 1.0, 2.0)
    groups = groups_by_name(objective, optimizer)
    name = type(optimizer).__name__
    rate = max((float(group["lr"]) for group in groups.values()), default=0.0)
    if type(optimizer) not in (torch.optim.SGD, torch.optim.Adam, torch.optim.AdamW, torch.optim.RMSprop):
        return Edge(name, rate, math.nan, why=f"no threshold is known for {name}")
    multiples = {_multiple(group) for group in groups.values()}
    if len(multiples) != 1 or any(group.get("maximize") or group.get("centered") for group in groups.values()):
        why = f"no threshold is known for {name} with groups of other momentum or betas, maximize or centered"
        return Edge(name, rate, math.nan, why=why)
    named, scales, shifts = dict(objective.model.named_parameters()), {}, {}
    for key, value in objective.parameters.items():
        group = groups.get(key)
        if group is None:  # it does not move
            scales[key] = shifts[key] = torch.zeros_like(value)
            continue
        steps = 1.0 if name == "SGD" else _inverse_root(group, optimizer.state.get(named[key], {}))
        if steps is None:
            why = f"{name} has taken no step yet, so it has no preconditioner: take a few"
            return Edge(name, rate, math.nan, why=why)
        scales[key] = torch.ones_like(value) * steps * (float(group["lr"]) / rate if rate else 1.0)
        coupled = not group.get("decoupled_weight_decay")
        shifts[key] = torch.full_like(value, float(group["weight_decay"]) if coupled else 0.0)
    scale, shift = objective.flatten(scales), objective.flatten(shifts)
    plain, bare = bool((scale == 1).all()), not bool(shift.any())
    decays = [float(g["lr"]) * float(g["weight_decay"]) for g in groups.values() if g.get("decoupled_weight_decay")]
    multiple = multiples.pop() * (1 - max(decays, default=0.0) / 2)
    return Edge(name, rate, multiple, None if plain else scale, None if bare else shift)


def _multiple(group: Mapping[str, Any]) -> float:
    if "betas" in group:
        return 2 * (1 + float(group["betas"][0])) / (1 - float(group["betas"][0]))
    momentum = float(group["momentum"])
    if group.get("nesterov"):
        return 2 * (1 + momentum) / (1 + 2 * momentum)
    return 2 * (1 + momentum) / (1 - float(group.get("dampening", 0.0)) if momentum else 1.0)  # torch's dampening


def _inverse_root(group: Mapping[str, Any], state: Mapping[str, Any]) -> Tensor | None:
    """Return what Adam or RMSprop multiply a parameter's steps by; `None` before the first step."""
    if "betas" not in group:
        return 1 / (state["square_avg"].sqrt() + group["eps"]) if "square_avg" in state else None
    if "exp_avg_sq" not in state:
        return None
    time, (first, second) = float(state["step"]), map(float, group["betas"])
    squares = state["max_exp_avg_sq" if group["amsgrad"] else "exp_avg_sq"]
    return 1 / ((1 - first**time) * ((squares / (1 - second**time)).sqrt() + group["eps"]))


class EdgeOperator(Operator):
    """A = S^1/2 (H + D) S^1/2, which has the eigenvalues of S (H + D); with symmetries P A P, P their complement.

    Kind: exact. Cost: one Hessian product.
    """

    self_adjoint = True

    def __init__(self, objective: Objective, edge: Edge, symmetries: Any = None) -> None:
        self.hessian = HessianOperator(objective)
        self.shape, self.dtype, self.device = self.hessian.shape, self.hessian.dtype, self.hessian.device
        self.root = None if edge.scale is None else edge.scale.sqrt()
        self.shift, self.symmetries = edge.shift, symmetries
        self.point = objective.flatten(objective.parameters)

    def _matvec(self, vector: Tensor) -> Tensor:
        inside = vector if self.symmetries is None else self.symmetries.project(vector, self.point)
        inside = inside if self.root is None else self.root * inside
        image = self.hessian.matvec(inside)
        image = image if self.shift is None else image + self.shift * inside
        image = image if self.root is None else self.root * image
        return image if self.symmetries is None else self.symmetries.project(image, self.point)

    def largest(self, *, tol: float = 1e-2, seed: int = 0, start: Tensor | None = None) -> Eigenpairs:
        """Return the largest eigenpair of A; times the root of S its vector is a change of the parameters."""
        return eigenpairs(self, top=1, tol=tol, seed=seed, start=start)

    def close(self) -> None:
        """Free the graphs."""
        self.hessian.close()


def top_eigenvalues(
    objective: Objective, edge: Edge, symmetries: Any = None, seed: int = 0
) -> tuple[float, float, Tensor]:
    """Return lambda_max of the edge's matrix, the same without symmetry directions, and the first's displacement.

    The second is nan where not asked. Symmetries are divided out of the plain Hessian alone: a preconditioner does
    not keep their complement.
    """
    quotient = math.nan
    with closing(EdgeOperator(objective, edge)) as operator:
        pairs = operator.largest(seed=seed)
        vector = pairs.vectors[0] if operator.root is None else operator.root * pairs.vectors[0]
        vector = vector / vector.norm()
        if symmetries is not None and operator.root is None:
            operator.symmetries = symmetries
            quotient = operator.largest(seed=seed, start=vector).top[0]
    return pairs.top[0] if math.isfinite(edge.multiple) else math.nan, quotient, vector


def bracket(
    below: Callable[[float], bool], start: float, doublings: int = DOUBLINGS
) -> tuple[float | None, float | None]:
    """Return numbers a factor of two apart, the first below an edge and the second not; `None` where none was met."""
    first, number = below(start), start
    for _ in range(doublings):
        following = number * 2 if first else number / 2
        if below(following) != first:
            return (number, following) if first else (following, number)
        number = following
    return (number, None) if first else (None, number)


def bisect(below: Callable[[float], bool], low: float, high: float, tol: float) -> tuple[float, float]:
    """Return a bracket of an edge that is `tol` wide, by geometric bisection."""
    while high / low > 1 + tol:
        middle = math.sqrt(low * high)
        low, high = (middle, high) if below(middle) else (low, middle)
    return low, high


def critical_factor(loss_at: Callable[[float], float], base: float, start: float = 1.0, tol: float = 0.1) -> float:
    """Return the factor s > 0 of a step at which loss_at(s) comes to exceed `base`, to a relative `tol`.

    From `start` it is doubled or halved until the side changes, then bisected: about six evaluations. 0 where even
    the smallest factor is above, inf where not even the largest is. What is not finite is above. It asks for nothing
    but losses, so that a training loop can call it with a step and a batch it holds.

    Examples:
        >>> 1.8 < critical_factor(lambda s: (1 - s) ** 2, 1.0, start=0.3) < 2.2
        True
    """

    def below(factor: float) -> bool:
        return loss_at(factor) <= base

    low, high = bracket(below, start)
    if low is None or high is None:
        return 0.0 if low is None else math.inf
    return math.sqrt(math.prod(bisect(below, low, high, tol)))


def critical_rate(
    objective: Objective,
    optimizer: torch.optim.Optimizer | None = None,
    *,
    gradient: Mapping[str, Tensor] | None = None,
    start: float | None = None,
    tol: float = 0.1,
) -> float:
    """Return the rate at which the optimizer's own next step comes to raise the loss: 2 over the critical sharpness.

    Along the line of the step u the loss is L - s <g, u> + s^2 u^T H u / 2 to second order, back at L for
    s = 2 <g, u> / u^T H u; for u = g that is 2 over the curvature along the gradient, at least 2 / lambda_max.

    Kind: estimate, to `tol`. Cost: one forward, about six more, and a gradient where none is given.

    Args:
        objective: model, loss, data and mode; `objective.replace(data=batch)` for another batch.
        optimizer: with its state; a copy takes the step. Plain gradient descent by default.
        gradient: of the objective, where it is there already.
        start: a rate to search from, such as the last answer; the optimizer's own by default.
        tol: relative width of the bracket.

    Returns:
        The rate; 0 where the step leads uphill from the start (momentum may), inf where no rate tried does, nan for an
        optimizer whose rate is 0.

    References: kalra2024.
    """
    if gradient is None:
        value, gradient = objective.loss_and_gradient()
    else:
        value = objective.loss()
    used = 1.0 if optimizer is None else max(float(group["lr"]) for group in optimizer.param_groups)
    moved = apply_update(objective, 1.0 if optimizer is None else optimizer, gradient)
    here = objective.parameters
    step = {name: moved[name] - before for name, before in here.items()}
    if not used or not any(bool(change.any()) for change in step.values()):
        return math.nan

    def loss_at(factor: float) -> float:
        try:
            return float(objective.at({name: here[name] + factor * step[name] for name in here}).loss())
        except NonFiniteError:
            return math.inf

    return used * critical_factor(loss_at, float(value), 1.0 if start is None else start / used, tol)
