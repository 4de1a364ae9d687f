"""Lower bounds of a Lipschitz constant: norms of Jacobians at data, then uphill inside the ball."""

from collections.abc import Callable
from dataclasses import dataclass

import torch
from torch import Tensor, nn

from normgauge.errors import NotDifferentiableError
from normgauge.measure.lipschitz.trace import Domain
from normgauge.objective import twice_differentiable
from normgauge.rng import generator

FEW_OUTPUTS = 50  # up to here all rows of the Jacobian are taken, and its norm is exact
_POWER_STEPS = 15
_JITTER = 1e-7  # relative; away from kinks, where automatic differentiation may give no derivative of the function
_SLACK = 1e-9
_SCALES = (0.03, 0.3, 1.0)
_STARTS = 3  # the steepest data
LARGE = 20_000_000  # parameters: one start and fewer candidates
Model = Callable[[Tensor], Tensor]


@dataclass(frozen=True)
class Steepest:
    """The steepest point found."""

    value: float  # norm of the Jacobian there, in float64
    at_data: Tensor  # norm of the Jacobian at each datum
    exact: bool  # whether those are exact; else lower bounds by power iterations
    gradients: int  # vector-Jacobian products over a batch that were spent


def jacobian_norms(model: Model, inputs: Tensor, seed: int = 0) -> tuple[Tensor, Tensor, Tensor]:
    """Return the norm of the Jacobian at each input, and the top right and left singular vectors.

    Exact up to `FEW_OUTPUTS` outputs (one backward pass per output over the whole batch, then a small Gram matrix
    per input), else a lower bound by power iterations that reuse one graph.
    """
    x = inputs.detach().clone().requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        outputs = model(x.clone()).flatten(1)
        if not outputs.requires_grad:
            rule = "the output must depend on the input differentiably"
            raise NotDifferentiableError("lipschitz", rule, "no gradient", "Look for detach")
        return _all_rows(outputs, x) if outputs.shape[1] <= FEW_OUTPUTS else _power(outputs, x, seed)


def _all_rows(outputs: Tensor, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    count = outputs.shape[1]
    rows = [
        torch.autograd.grad(outputs[:, k].sum(), x, retain_graph=k + 1 < count, materialize_grads=True)[0].flatten(1)
        for k in range(count)
    ]
    jacobians = torch.nan_to_num(torch.stack(rows, 1), 0.0, 0.0, 0.0)
    sizes = jacobians.abs().amax((1, 2), keepdim=True)
    jacobians = torch.where(sizes > 0, jacobians / sizes, 0.0)  # squares of large and small slopes have no room
    values, vectors = torch.linalg.eigh(jacobians @ jacobians.transpose(1, 2))
    right = (jacobians * vectors[:, :, -1:]).sum(1)
    norms = values[:, -1].clamp_min(0.0).sqrt() * sizes[:, 0, 0]
    return norms, _unit(right).view_as(x), vectors[:, :, -1]


def _power(outputs: Tensor, x: Tensor, seed: int) -> tuple[Tensor, Tensor, Tensor]:
    u = torch.randn(outputs.shape, generator=generator(seed), dtype=x.dtype).to(x.device)
    u = _unit(u).requires_grad_()
    (pulled,) = torch.autograd.grad(outputs, x, u, create_graph=True)
    weights = u.detach()
    for _ in range(_POWER_STEPS):
        (back,) = torch.autograd.grad(outputs, x, weights, retain_graph=True)
        # d <J^T u, v> / du = J v: the second product reuses the graph of the first
        (forward,) = torch.autograd.grad(pulled, u, _unit(back.flatten(1)).view_as(x), retain_graph=True)
        weights = _unit(forward)
    (back,) = torch.autograd.grad(outputs, x, weights)
    flat = torch.nan_to_num(back.flatten(1), 0.0, 0.0, 0.0)
    return _lengths(flat)[:, 0], _unit(flat).view_as(x), weights


def uphill_direction(model: Model, point: Tensor, left: Tensor) -> Tensor:
    """Return the direction in which ||J(x)^T left|| grows fastest, of length 1; zero where J is locally constant.

    By Danskin that is the direction for the norm of J itself, if its top singular value is simple.
    """
    x = point.detach().clone()[None].requires_grad_()
    with torch.enable_grad(), twice_differentiable():
        outputs = model(x.clone()).flatten(1)
        (pulled,) = torch.autograd.grad(outputs, x, left[None], create_graph=True)
        if not pulled.requires_grad:  # linear, or linear between kinks
            return torch.zeros_like(point)
        (slope,) = torch.autograd.grad(pulled.square().sum(), x, materialize_grads=True)
    return _unit(torch.nan_to_num(slope.flatten(1), 0.0, 0.0, 0.0)).view_as(point)


def _lengths(rows: Tensor) -> Tensor:
    """Return lengths of rows whose squares may have no room."""
    sizes = rows.abs().amax(-1, keepdim=True)
    return sizes * torch.where(sizes > 0, rows / sizes, 0.0).norm(dim=-1, keepdim=True)


def _unit(rows: Tensor) -> Tensor:
    return rows / _lengths(rows).clamp_min(torch.finfo(rows.dtype).tiny)


def find_steepest(
    domain: Domain, single: nn.Module, double: nn.Module, radius: float | None, climbs: int, seed: int
) -> Steepest:
    """Find the steepest point near the data, from several starts, and certify it in float64.

    `single` is the model in its own precision, for the search, `double` the one in float64; `radius`: of the ball
    around each datum, `None` lets the search go anywhere; `climbs`: rounds of the search, 0 for the data alone.
    """
    dtype = next((p.dtype for p in single.parameters() if p.is_floating_point()), torch.float64)
    inputs, everyone = domain.points(single, dtype), range(domain.samples)
    norms, rights, lefts = jacobian_norms(domain.function(single, everyone), inputs, seed)
    norms = torch.nan_to_num(norms, 0.0, 0.0, 0.0)
    if not bool(norms.any()) and dtype != torch.float64:  # slopes this dtype cannot hold
        return find_steepest(domain, double, double, radius, climbs, seed)
    few = lefts.shape[1] <= FEW_OUTPUTS
    outputs = lefts.shape[1] if few else 2 * _POWER_STEPS + 2
    exact = norms
    if few and dtype != torch.float64:
        exact = jacobian_norms(domain.function(double, everyone), domain.points(double, torch.float64))[0]
    spent, random, best = outputs * (2 if few else 1), generator(seed), (0.0, inputs[0], 0)
    large = sum(p.numel() for p in single.parameters()) > LARGE
    for datum in norms.argsort(descending=True)[: 1 if large else _STARTS].tolist():
        point, value, direction, left = inputs[datum], float(norms[datum]), rights[datum], lefts[datum]
        length = radius if radius is not None else 0.3 * float(point.norm()) or 1.0
        for _ in range(climbs):
            moves = _moves(direction, uphill_direction(domain.function(single, [datum]), point, left), length, random)
            moves = moves[::5] if large else moves
            candidates = _pull_inside(point + moves, inputs[datum], radius)
            near = domain.function(single, [datum] * len(candidates))
            found, right, leftmost = jacobian_norms(near, candidates, seed)
            found = torch.nan_to_num(found, 0.0, 0.0, 0.0)
            top = int(found.argmax())
            spent += outputs + 2
            if float(found[top]) > value:
                value, point, direction, left = float(found[top]), candidates[top], right[top], leftmost[top]
            else:
                length /= 3
        best = max(best, (value, point, datum), key=lambda entry: entry[0])
    certified = _certify_norm(domain.function(double, [best[2]] * 3), best[1], inputs[best[2]], radius, random)
    return Steepest(certified, torch.nan_to_num(exact.double(), 0.0, 0.0, 0.0), few, spent)


def _moves(direction: Tensor, gradient: Tensor, length: float, random: torch.Generator) -> Tensor:
    """Return steps uphill, along the top singular vector, both ways, and at random, of several lengths.

    A network of ReLUs has no uphill: its Jacobian is constant between kinks, and only the other steps find new ones.
    """
    noise = torch.randn((2, *direction.shape), generator=random, dtype=direction.dtype).to(direction.device)
    noise = _unit(noise.flatten(1)).view_as(noise)
    ways = torch.cat([gradient[None], direction[None], -direction[None], noise])
    return torch.cat([ways * (length * scale) for scale in _SCALES])


def _pull_inside(points: Tensor, home: Tensor, radius: float | None) -> Tensor:
    if radius is None:
        return points
    offsets = (points - home).flatten(1)
    lengths = offsets.norm(dim=1, keepdim=True)
    limit = radius * (1 - 1e-6)  # rounding must not lead out of the ball
    shrunk = offsets * (limit / lengths.clamp_min(torch.finfo(points.dtype).tiny)).clamp_max(1.0)
    return home + shrunk.view_as(points)


def _certify_norm(double: Model, point: Tensor, home: Tensor, radius: float | None, random: torch.Generator) -> float:
    """Return the norm at a point a hair away, where the function is differentiable with probability one."""
    centre, start = home.double(), point.double()
    jitter = torch.randn((3, *point.shape), generator=random, dtype=torch.float64).to(point.device)
    scale = _JITTER * (float(start.abs().max()) or 1.0)
    scale = scale if radius is None else min(scale, 1e-3 * radius / jitter[0].numel() ** 0.5)
    near = _pull_inside(start + scale * jitter, centre, radius)
    norms, _, _ = jacobian_norms(double, near)
    return float(torch.nan_to_num(norms, 0.0, 0.0, 0.0).max()) * (1 - _SLACK)
