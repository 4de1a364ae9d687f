"""The rules of torch.optim that every optimizer keeps, each a function of its factory and a ledger."""

from __future__ import annotations

import copy
import io
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.rng import generator
from normgauge.testing._verdict import Ledger

Make = Callable[..., Any]


class Run:
    """A short training run on a small layer with fixed gradients."""

    def __init__(self, make: Make, *, shape: tuple[int, ...] = (4, 5), **options: Any) -> None:
        self.source = generator(1)
        self.params = [nn.Parameter(self.draw(shape)), nn.Parameter(self.draw((4,)))]
        self.optimizer = make(self.params, **options)

    def draw(self, shape: tuple[int, ...]) -> Tensor:
        """Return random numbers of this run's own stream."""
        return torch.randn(shape, generator=self.source, dtype=torch.float64)

    def steps(self, count: int, sign: float = 1.0) -> Run:
        """Do some steps with random gradients."""
        for _ in range(count):
            for param in self.params:
                param.grad = sign * self.draw(tuple(param.shape))
            self.optimizer.step()
        return self

    @property
    def flat(self) -> Tensor:
        """All parameters in one vector."""
        return torch.cat([param.detach().reshape(-1) for param in self.params])


def _equal(ledger: Ledger, check: str, a: Run, b: Run) -> None:
    ledger.require(check, torch.equal(a.flat, b.flat), f"a difference of {float((a.flat - b.flat).abs().max()):.3g}")


def state_round_trip(make: Make, ledger: Ledger) -> None:
    """Save in the middle, load into a fresh optimizer, go on: the same bits."""
    straight, broken = Run(make).steps(3), Run(make).steps(3)
    file = io.BytesIO()
    torch.save(broken.optimizer.state_dict(), file)
    file.seek(0)
    broken.optimizer = make(broken.params)
    broken.optimizer.load_state_dict(torch.load(file, weights_only=True))
    _equal(ledger, "state_dict round trip in mid-training is bit-identical", straight.steps(3), broken.steps(3))


def deep_copies(make: Make, ledger: Ledger) -> None:
    """A deep copy of parameters and optimizer goes on alone, and as the original does."""
    run = Run(make).steps(3)
    twin = copy.copy(run)
    twin.source = generator(0)
    twin.source.set_state(run.source.get_state())
    twin.params, twin.optimizer = copy.deepcopy((run.params, run.optimizer))
    before = run.flat.clone()
    twin.steps(3)
    check = "a deep copy is independent and equal"
    ledger.require(check, torch.equal(run.flat, before), "a copy that moved the original")
    _equal(ledger, check, run.steps(3), twin)


def closures(make: Make, ledger: Ledger) -> None:
    """`step(closure)` returns the loss, computed with gradients enabled."""
    run = Run(make)

    def closure() -> Tensor:
        run.optimizer.zero_grad()
        loss = sum((param.square().sum() + param.sum() for param in run.params), torch.zeros(()))
        loss.backward()
        return loss.detach()

    expected = float(closure())
    check = "closures are evaluated and their loss returned"
    with torch.no_grad():
        loss_of_step = run.optimizer.step(closure)
    ledger.require(check, abs(float(loss_of_step) - expected) < 1e-9, f"loss {loss_of_step}")


def schedulers(make: Make, ledger: Ledger) -> None:
    """A scheduler that sets the rate to zero stops the parameters."""
    run = Run(make)
    schedule = torch.optim.lr_scheduler.LambdaLR(run.optimizer, lambda epoch: 1.0 if epoch == 0 else 0.0)
    run.steps(2)
    schedule.step()
    before = run.flat.clone()
    run.steps(2)
    ledger.require_same("a learning rate of zero set by a scheduler stops the parameters", run.flat, before, 1e-14)


def maximizing(make: Make, ledger: Ledger) -> None:
    """`maximize=True` is descent on the negative."""
    up, down = Run(make, maximize=True).steps(4), Run(make).steps(4, sign=-1.0)
    ledger.require_same("maximize goes up", up.flat, down.flat, 1e-13)


def tensor_rates(make: Make, ledger: Ledger) -> None:
    """A tensor learning rate means the number it holds."""
    number, tensor = Run(make, lr=0.05).steps(4), Run(make, lr=torch.tensor(0.05, dtype=torch.float64)).steps(4)
    ledger.require_same("a tensor lr means its number", tensor.flat, number.flat, 1e-7)


def untouched_gradients(make: Make, ledger: Ledger) -> None:
    """Gradients keep their bits, also with weight decay and maximize."""
    run = Run(make).steps(2)
    for _ in range(2):
        for param in run.params:
            param.grad = run.draw(tuple(param.shape))
        before = [(param.grad, param.grad.clone()) for param in run.params if param.grad is not None]
        run.optimizer.step()
        kept = all(
            param.grad is object_ and torch.equal(object_, bits)
            for param, (object_, bits) in zip(run.params, before, strict=True)
        )
        ledger.require("gradients are never changed", kept, "another gradient after the step")


def kernels(make: Make, ledger: Ledger) -> None:
    """`fused` and `foreach` give the same numbers or are refused, and never pass unseen."""
    plain = Run(make).steps(4)
    choices: tuple[dict[str, Any], ...] = ({"fused": True}, {"fused": False}, {"foreach": True}, {"foreach": False})
    for options in choices:
        try:
            other = Run(make, **options).steps(4)
        except (TypeError, ValueError, RuntimeError):
            ledger.record_pass("fused and foreach are honoured or refused")
            continue
        ledger.require_same("fused and foreach are honoured or refused", other.flat, plain.flat, 1e-12)


def sparse_gradients(make: Make, ledger: Ledger) -> None:
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


def missing_gradients(make: Make, ledger: Ledger) -> None:
    """A parameter without gradient stays, and its state starts when it first gets one."""
    run = Run(make)
    before = run.params[0].detach().clone()
    run.params[1].grad = run.draw((4,))
    run.optimizer.step()
    ledger.require("parameters without gradient stay", torch.equal(run.params[0], before), "a moved parameter")
    run.steps(2)


def memory_formats(make: Make, ledger: Ledger) -> None:
    """Channels-last parameters keep their format and get the same numbers."""
    plain = Run(make, shape=(4, 3, 2, 2)).steps(3)
    other = Run(make, shape=(4, 3, 2, 2))
    other.params[0].data = other.params[0].data.to(memory_format=torch.channels_last)
    other.steps(3)
    check = "memory formats are kept and change no number"
    kept = other.params[0].is_contiguous(memory_format=torch.channels_last)
    ledger.require(check, kept, "another memory format")
    ledger.require_same(check, other.flat, plain.flat, 1e-12)


def grad_scaler(make: Make, ledger: Ledger) -> None:
    """GradScaler unscales before the step and skips it when a gradient overflowed."""
    run, plain = Run(make), Run(make)
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


ALL: tuple[Callable[[Make, Ledger], None], ...] = (
    untouched_gradients,
    state_round_trip,
    deep_copies,
    closures,
    schedulers,
    maximizing,
    tensor_rates,
    kernels,
    sparse_gradients,
    missing_gradients,
    memory_formats,
    grad_scaler,
)
