"""`check_optimizer`: run the rules our optimizers keep on an optimizer of your own."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Protocol

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from normgauge.results import Result
from normgauge.rng import generator
from normgauge.testing import _optimizer_rules as rules
from normgauge.testing._verdict import Ledger


class Twin(Protocol):
    """A naive optimizer of one tensor: `step(gradient)` returns the tensor after the step."""

    def step(self, gradient: Tensor) -> Tensor:
        """Move by one gradient."""
        ...


Make = Callable[..., Optimizer]


@dataclass(frozen=True)
class OptimizerConformance(Result):
    """The checks an optimizer passed, with the number of cases and the largest deviation of each.

    Attributes:
        name: of the optimizer.
        checks: `(check, cases, largest deviation)`.
    """

    name: str
    checks: tuple[tuple[str, int, float], ...]

    def _title(self) -> str:
        return f"optimizer {self.name!r} conforms"

    def _rows(self) -> list[dict[str, Any]]:
        return [{"check": check, "cases": cases, "deviation": largest} for check, cases, largest in self.checks]

    def _footer(self) -> str:
        return "kind lower: no counterexample in these cases; seed 0; float64 except norm drift (float32)"


def check_optimizer(
    make: Make,
    *,
    spherical: bool = True,
    twin: Callable[[Tensor], Twin] | None = None,
    tangent_state: str | None = None,
    euclidean: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    steps: int = 10_000,
) -> OptimizerConformance:
    """Run the rules of torch.optim and, for optimizers on spheres, of the sphere.

    Tried are: norms that drift by less than 1e-6 over `steps` float32 steps; tangent state; equality with a twin in
    float64; descent; the Euclidean limit of a large radius; NaN that stays in its row; a state_dict round trip and a
    deep copy in the middle of training, bit for bit; closures, schedulers, `maximize`, tensor learning rates; `fused`
    and `foreach` honoured or refused; sparse gradients refused; gradients never changed; memory formats; parameters
    without gradients; GradScaler.

    Args:
        make: `make(params, **options)`, passing options such as `lr`, `maximize`, `fused` on to the optimizer.
        spherical: whether parameters of two dimensions live as rows on spheres.
        twin: makes a naive version from a starting tensor; `None` skips the comparison.
        tangent_state: the key of a state tensor that must be tangent to the rows.
        euclidean: the optimizer that `geometry="euclidean"` must equal bit for bit; `None` skips it.
        steps: of the test of drift.

    Returns:
        An `OptimizerConformance`, to print.

    Raises:
        NonconformingError: naming the broken rule and the deviation.

    Examples:
        torch's own SGD keeps the rules of torch.optim, and is not on spheres:

        >>> make = lambda params, **options: torch.optim.SGD(params, **{"lr": 0.1, **options})
        >>> check_optimizer(make, spherical=False).name
        'SGD'
        >>> check_optimizer(make)
        Traceback (most recent call last):
        ...
        normgauge.testing._verdict.NonconformingError: optimizer 'SGD': norms stay...
    """
    probe = make([nn.Parameter(torch.ones(2, 2))])
    ledger = Ledger(type(probe).__name__, "optimizer", "Correct the optimizer")
    if spherical:
        _norms(make, ledger, steps)
        _nan_rows(make, ledger)
        _euclidean_limit(make, ledger)
    if tangent_state is not None:
        _tangency(make, tangent_state, ledger)
    if twin is not None:
        _same_as_twin(make, twin, ledger)
    if euclidean is not None:
        _flat_groups(make, euclidean, ledger)
    _descent(make, ledger)
    for rule in rules.ALL:
        rule(make, ledger)
    checks = tuple((check, ledger.cases[check], ledger.largest[check]) for check in ledger.cases)
    return OptimizerConformance(ledger.name, checks)


def _draws(shape: tuple[int, ...], dtype: torch.dtype, seed: int = 0) -> Callable[[], Tensor]:
    return functools.partial(torch.randn, shape, generator=generator(seed), dtype=dtype)


def _norms(make: Make, ledger: Ledger, steps: int) -> None:
    check = "norms stay within 1e-6 of the radius in float32"
    draw = _draws((5, 7), torch.float32)
    weight = nn.Parameter(draw())
    before = weight.detach().double().norm(dim=1)
    optimizer = make([weight], lr=0.05)
    worst = 0.0
    for number in range(steps):
        weight.grad = draw()
        optimizer.step()
        if number % 97 == 0 or number == steps - 1:
            worst = max(worst, float((weight.detach().double().norm(dim=1) / before - 1).abs().max()))
            if not worst < 1e-6:
                ledger.fail(check, f"a drift of {worst:.3g} after {number + 1} steps")
    ledger.record_pass(check, worst)


def _nan_rows(make: Make, ledger: Ledger) -> None:
    draw = _draws((4, 3), torch.float64)
    first, grad = draw(), draw()
    clean, spoiled = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    clean.grad, spoiled.grad = grad.clone(), grad.clone()
    spoiled.grad[1, 0] = math.nan
    make([clean]).step(), make([spoiled]).step()
    check = "a NaN gradient spoils its own row, and no other"
    ledger.require(check, bool(spoiled[1].isnan().any()), "a NaN that vanished")
    ledger.require_same(check, spoiled.detach()[[0, 2, 3]], clean.detach()[[0, 2, 3]], 1e-14)


def _euclidean_limit(make: Make, ledger: Ledger) -> None:
    """On a sphere of radius R a step along the tangent differs from the flat one by O(1 / R)."""
    gaps = []
    for radius in (1e3, 1e5):
        draw = _draws((3, 4), torch.float64)
        first, grad = draw(), draw()
        first *= radius / first.norm(dim=1, keepdim=True)
        unit = first / radius
        grad -= unit * (unit * grad).sum(1, keepdim=True)
        weight = nn.Parameter(first.clone())
        weight.grad = grad.clone()
        make([weight], lr=0.1).step()
        moved = weight.detach() - first
        gaps.append(float((moved * unit).sum(1).abs().max() / moved.norm(dim=1).max()))
    check = "steps on a large sphere are nearly straight"
    ledger.require(check, gaps[1] < 0.05 * gaps[0] + 1e-9, f"radial shares {gaps[0]:.2g} and {gaps[1]:.2g}")


def _tangency(make: Make, key: str, ledger: Ledger) -> None:
    draw = _draws((5, 6), torch.float64)
    weight = nn.Parameter(draw())
    optimizer = make([weight], lr=0.1)
    for _ in range(50):
        weight.grad = draw()
        optimizer.step()
    state = optimizer.state[weight][key].detach()
    rows = weight.detach()
    cosine = (state * rows).sum(1).abs() / (state.norm(dim=1) * rows.norm(dim=1))
    ledger.require_same(f"state {key!r} is tangent to the rows", cosine, torch.zeros_like(cosine), 1e-11)


def _same_as_twin(make: Make, twin: Callable[[Tensor], Twin], ledger: Ledger) -> None:
    for shape in ((4, 6), (4, 2, 3, 3)):
        draw = _draws(shape, torch.float64)
        first = draw()
        weight = nn.Parameter(first.clone())
        optimizer, naive = make([weight]), twin(first)
        for _ in range(25):
            grad = draw() + 0.5 * weight.detach()  # with a radial part
            weight.grad = grad.clone()
            optimizer.step()
            ledger.require_same("equals its twin in float64", weight.detach(), naive.step(grad), 1e-11)


def _flat_groups(make: Make, euclidean: Callable[[list[nn.Parameter]], Optimizer], ledger: Ledger) -> None:
    draw = _draws((3, 4), torch.float32)
    first = draw()
    ours, theirs = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    optimizer, reference = make([ours], geometry="euclidean"), euclidean([theirs])
    for _ in range(12):
        grad = draw()
        ours.grad, theirs.grad = grad.clone(), grad.clone()
        optimizer.step(), reference.step()
    equal = torch.equal(ours, theirs)
    ledger.require("Euclidean groups equal torch's optimizer bit for bit", equal, "another number")


def _descent(make: Make, ledger: Ledger) -> None:
    """Rayleigh quotients of a matrix: scale-invariant, with a known minimum."""
    draw = _draws((6, 6), torch.float64)
    matrix = draw()
    matrix = matrix @ matrix.T / 6
    weight = nn.Parameter(draw()[:2].clone())
    optimizer = make([weight], lr=0.02)
    losses = []
    for _ in range(60):
        optimizer.zero_grad()
        loss = (((weight @ matrix) * weight).sum(1) / weight.square().sum(1)).sum()
        loss.backward()
        losses.append(float(loss.detach()))
        optimizer.step()
    low = 2 * float(torch.linalg.eigvalsh(matrix)[0])
    check = "descends on a scale-invariant loss"
    done = (losses[0] - losses[-1]) / (losses[0] - low)
    ledger.require(check, done > 0.1, f"{100 * done:.3g} % of the way in 60 steps")
