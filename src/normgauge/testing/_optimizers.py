"""`check_optimizer`: run the rules our optimizers keep on an optimizer of your own."""

import copy
import functools
import io
import math
from collections.abc import Callable
from typing import Any, Protocol, Self

import torch
from torch import Tensor, nn
from torch.optim.optimizer import Optimizer

from normgauge.rng import generator
from normgauge.testing._verdict import Conformance, Ledger


class Twin(Protocol):
    """A naive optimizer of one tensor: `step(gradient)` returns the tensor after the step."""

    def step(self, gradient: Tensor) -> Tensor:
        """Move by one gradient."""
        ...


Make = Callable[..., Optimizer]


def check_optimizer(
    make: Make,
    *,
    spherical: bool = True,
    twin: Callable[[Tensor], Twin] | None = None,
    tangent_state: str | None = None,
    euclidean: Callable[[list[nn.Parameter]], Optimizer] | None = None,
    steps: int = 10_000,
) -> Conformance:
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
    name = type(make([nn.Parameter(torch.ones(2, 2))])).__name__
    ledger = Ledger(name, "optimizer", "Correct the optimizer")
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
    for rule in _RULES:
        rule(make, ledger)
    return ledger.conformance()


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
    check = "Euclidean groups equal torch's optimizer bit for bit"
    ledger.require(check, torch.equal(ours, theirs), "another number")


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


class _Run:
    """A short training run on a small layer with fixed gradients."""

    def __init__(self, make: Make, *, shape: tuple[int, ...] = (4, 5), **options: Any) -> None:
        self.source = generator(1)
        self.params = [nn.Parameter(self.draw(shape)), nn.Parameter(self.draw((4,)))]
        self.optimizer = make(self.params, **options)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        return torch.randn(shape, generator=self.source, dtype=torch.float64)

    def steps(self, count: int, sign: float = 1.0) -> Self:
        for _ in range(count):
            for param in self.params:
                param.grad = sign * self.draw(tuple(param.shape))
            self.optimizer.step()
        return self

    @property
    def flat(self) -> Tensor:
        return torch.cat([param.detach().reshape(-1) for param in self.params])


def _equal(ledger: Ledger, check: str, a: _Run, b: _Run) -> None:
    ledger.require(check, torch.equal(a.flat, b.flat), f"a difference of {float((a.flat - b.flat).abs().max()):.3g}")


def _state_round_trip(make: Make, ledger: Ledger) -> None:
    """Save in the middle, load into a fresh optimizer, go on: the same bits."""
    straight, broken = _Run(make).steps(3), _Run(make).steps(3)
    file = io.BytesIO()
    torch.save(broken.optimizer.state_dict(), file)
    file.seek(0)
    broken.optimizer = make(broken.params)
    broken.optimizer.load_state_dict(torch.load(file, weights_only=True))
    _equal(ledger, "state_dict round trip in mid-training is bit-identical", straight.steps(3), broken.steps(3))


def _deep_copies(make: Make, ledger: Ledger) -> None:
    """A deep copy of parameters and optimizer goes on alone, and as the original does."""
    run = _Run(make).steps(3)
    twin = copy.copy(run)
    twin.source = generator(0)
    twin.source.set_state(run.source.get_state())
    twin.params, twin.optimizer = copy.deepcopy((run.params, run.optimizer))
    before = run.flat.clone()
    twin.steps(3)
    check = "a deep copy is independent and equal"
    ledger.require(check, torch.equal(run.flat, before), "a copy that moved the original")
    _equal(ledger, check, run.steps(3), twin)


def _closures(make: Make, ledger: Ledger) -> None:
    """`step(closure)` returns the loss, computed with gradients enabled."""
    run = _Run(make)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = sum((param.square().sum() + param.sum() for param in run.params), torch.zeros(()))
        loss.backward()
        return loss.detach()

    expected = float(closure())
    check = "closures are evaluated and their loss returned"
    with torch.no_grad():
        loss_of_step = run.optimizer.step(closure)  # type: ignore[arg-type]
    ledger.require(check, abs(float(loss_of_step) - expected) < 1e-9, f"loss {loss_of_step}")


def _schedulers(make: Make, ledger: Ledger) -> None:
    """A scheduler that sets the rate to zero stops the parameters."""
    run = _Run(make)
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 1.0 if epoch == 0 else 0.0)
    run.steps(2)
    schedule.step()
    before = run.flat.clone()
    run.steps(2)
    ledger.require_same("a learning rate of zero set by a scheduler stops the parameters", run.flat, before, 1e-14)


def _maximizing(make: Make, ledger: Ledger) -> None:
    """`maximize=True` is descent on the negative."""
    up, down = _Run(make, maximize=True).steps(4), _Run(make).steps(4, sign=-1.0)
    ledger.require_same("maximize goes up", up.flat, down.flat, 1e-13)


def _tensor_rates(make: Make, ledger: Ledger) -> None:
    """A tensor learning rate means the number it holds."""
    number, tensor = _Run(make, lr=0.05).steps(4), _Run(make, lr=torch.tensor(0.05, dtype=torch.float64)).steps(4)
    ledger.require_same("a tensor lr means its number", tensor.flat, number.flat, 1e-7)


def _untouched_gradients(make: Make, ledger: Ledger) -> None:
    """Gradients keep their bits, also with weight decay and maximize."""
    run = _Run(make).steps(2)
    for _ in range(2):
        for param in run.params:
            param.grad = run.draw(tuple(param.shape))
        before = [(param.grad, param.grad.clone()) for param in run.params if param.grad is not None]
        run.optimizer.step()
        for param, (own, bits) in zip(run.params, before, strict=True):
            kept = param.grad is own and torch.equal(own, bits)
            ledger.require("gradients are never changed", kept, "another gradient after the step")


def _kernels(make: Make, ledger: Ledger) -> None:
    """`fused` and `foreach` give the same numbers or are refused, and never pass unseen."""
    plain = _Run(make).steps(4)
    choices: tuple[dict[str, Any], ...] = ({"fused": True}, {"fused": False}, {"foreach": True}, {"foreach": False})
    for options in choices:
        try:
            other = _Run(make, **options).steps(4)
        except (TypeError, ValueError, RuntimeError):
            ledger.record_pass("fused and foreach are honoured or refused")
            continue
        ledger.require_same("fused and foreach are honoured or refused", other.flat, plain.flat, 1e-12)


def _sparse_gradients(make: Make, ledger: Ledger) -> None:
    """A sparse gradient is refused in words, or handled like the dense one."""
    first = torch.arange(1.0, 7.0, dtype=torch.float64).reshape(3, 2)
    param, dense = nn.Parameter(first.clone()), nn.Parameter(first.clone())
    param.grad = torch.eye(3, 2, dtype=torch.float64).to_sparse()
    dense.grad = torch.eye(3, 2, dtype=torch.float64)
    check = "sparse gradients are refused or handled"
    try:
        make([param]).step()
    except (ValueError, RuntimeError) as error:
        ledger.require(check, len(str(error)) > 10, "an error without words")
        return
    make([dense]).step()
    ledger.require_same(check, param.detach(), dense.detach(), 1e-12)


def _missing_gradients(make: Make, ledger: Ledger) -> None:
    """A parameter without gradient stays, and its state starts when it first gets one."""
    run = _Run(make)
    before = run.params[0].detach().clone()
    run.params[1].grad = run.draw((4,))
    run.optimizer.step()
    ledger.require("parameters without gradient stay", torch.equal(run.params[0], before), "a moved parameter")
    run.steps(2)


def _memory_formats(make: Make, ledger: Ledger) -> None:
    """Channels-last parameters keep their format and get the same numbers."""
    plain = _Run(make, shape=(4, 3, 2, 2)).steps(3)
    other = _Run(make, shape=(4, 3, 2, 2))
    other.params[0].data = other.params[0].data.to(memory_format=torch.channels_last)
    other.steps(3)
    check = "memory formats are kept and change no number"
    kept = other.params[0].is_contiguous(memory_format=torch.channels_last)
    ledger.require(check, kept, "another memory format")
    ledger.require_same(check, other.flat, plain.flat, 1e-12)


def _grad_scaler(make: Make, ledger: Ledger) -> None:
    """GradScaler unscales before the step and skips it when a gradient overflowed."""
    run, plain = _Run(make), _Run(make)
    scaler = torch.amp.GradScaler("cpu", init_scale=8.0)
    for overflow in (False, True, False):
        scaler.scale(torch.zeros(()))  # makes the scale known
        for a, b in zip(run.params, plain.params, strict=True):
            grad = plain.draw(tuple(b.shape))
            a.grad, b.grad = grad * scaler.get_scale(), grad
        if overflow and run.params[0].grad is not None:
            run.params[0].grad.fill_(float("inf"))
        scaler.step(run.optimizer)
        scaler.update()
        if not overflow:
            plain.optimizer.step()
    ledger.require_same("GradScaler unscales, and skips overflowed steps", run.flat, plain.flat, 1e-12)


_RULES: list[Callable[[Make, Ledger], None]] = [
    *(_untouched_gradients, _state_round_trip, _deep_copies, _closures, _schedulers, _maximizing),
    *(_tensor_rates, _kernels, _sparse_gradients, _missing_gradients, _memory_formats, _grad_scaler),
]
