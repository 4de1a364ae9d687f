"""Rules every normalizer keeps: state, copies, transforms, precision, errors, and derivatives of second order."""

from __future__ import annotations

import copy
from collections.abc import Callable

import torch
from torch import Tensor

from normgauge.nn.registry import Declaration
from normgauge.rng import generator
from normgauge.testing._cases import Build, Case, call, prepare_module
from normgauge.testing._verdict import TOLERANCE, Ledger

Twin = Callable[[torch.nn.Module, Tensor], Tensor]


def check_output(build: Build, case: Case, channels: int | None, ledger: Ledger) -> None:
    """Shape, dtype, memory format and precision: the value is that of float64 on contiguous memory."""
    x = case.inputs(channels)
    for mode in ("train", "eval"):
        module = prepare_module(build, case, mode, max(case.eps, 1e-5))
        y = call(module, x)
        ledger.require(f"keeps the dtype [{mode}]", y.dtype == x.dtype, f"{y.dtype} for {x.dtype}")
        reference = call(module.double(), x.double().contiguous())
        ledger.require_same(f"precision and memory format [{mode}]", y.double(), reference, TOLERANCE[case.dtype])


def check_state(build: Build, case: Case, channels: int | None, ledger: Ledger) -> None:
    """Save and load, copy, no write in evaluation, no use of the global random state."""
    module = prepare_module(build, case, "train", 1e-5)
    x = case.inputs(channels)
    module(x), module(x)
    fresh = build(case.channels, case.spatial).to(case.dtype)
    for part, source in zip(fresh.modules(), module.modules(), strict=True):
        if isinstance(getattr(part, "eps", None), float):
            setattr(part, "eps", source.eps)  # noqa: B010 (modules type their attributes as tensors)
    fresh.load_state_dict(module.state_dict())
    random_state = torch.random.get_rng_state()
    for mode in ("eval", "train"):
        outputs = [call(one.train(mode == "train"), x) for one in (module, fresh)]
        ledger.require_same(f"state_dict carries the whole state [{mode}]", outputs[1], outputs[0], 0.0)
    ledger.require(
        "leaves the global random state alone", torch.equal(random_state, torch.random.get_rng_state()), "it moved"
    )
    before = {name: value.clone() for name, value in module.eval().state_dict().items()}
    module(x)
    unchanged = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    ledger.require("evaluation writes nothing", unchanged, "a changed state_dict")
    twin = copy.deepcopy(module)
    with torch.no_grad():
        for parameter in twin.parameters():
            parameter.add_(1)
    unchanged = all(torch.equal(before[name], value) for name, value in module.state_dict().items())
    ledger.require("a deep copy shares nothing", unchanged, "a copy that writes through")


def check_transforms(build: Build, case: Case, channels: int | None, ledger: Ledger) -> None:
    """torch.func agrees with autograd: gradient, and Hessian product by forward over reverse."""
    module = prepare_module(build, case, "train", 1e-3)
    x = case.inputs(channels).double()
    module = module.double()
    probe = torch.randn(call(module, x).shape, generator=generator(case.seed + 11), dtype=torch.float64)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    buffers = dict(module.named_buffers())

    def loss(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        own = {name: value.clone() for name, value in buffers.items()}
        y = torch.func.functional_call(module, ({**parameters, **own}), (inputs,))
        return (y * probe).sum() + (y.square() * probe.cos()).sum()

    def reverse(inputs: Tensor) -> Tensor:
        return torch.func.grad(loss, argnums=1)(parameters, inputs)

    inputs = x.clone().requires_grad_()
    y = call(module, inputs)
    value = (y * probe).sum() + (y.square() * probe.cos()).sum()
    gradient = torch.autograd.grad(value, inputs, create_graph=True)[0]
    direction = torch.randn(x.shape, generator=generator(case.seed + 12), dtype=torch.float64)
    ledger.require_same("torch.func.grad agrees with autograd", reverse(x), gradient, 1e-8)
    if gradient.requires_grad:
        product = torch.autograd.grad(gradient, inputs, direction)[0]
    else:
        product = torch.zeros_like(inputs)
    forward = torch.func.jvp(reverse, (x,), (direction,))[1]
    ledger.require_same("forward over reverse agrees with autograd twice", forward, product, 1e-7)


def check_autocast(build: Build, case: Case, channels: int | None, ledger: Ledger) -> None:
    """Under bfloat16 autocast the output stays near float32's, and so does the gradient's presence."""
    module = prepare_module(build, case, "train", 1e-3).float()
    x = case.inputs(channels).float().requires_grad_()
    plain = call(module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = call(module, x)
    ledger.require_same("autocast stays near float32", mixed.float(), plain, TOLERANCE[torch.bfloat16])
    (gradient,) = torch.autograd.grad(mixed.float().square().sum(), x)
    ledger.require("autocast has finite gradients", bool(gradient.isfinite().all()), "inf or nan")


def check_derivatives(build: Build, case: Case, channels: int | None, twin: Twin | None, ledger: Ledger) -> None:
    """First and second derivatives against the hand-written twin, or against differences without one."""
    module = prepare_module(build, case, "train", 1e-2).double()
    x = case.inputs(channels).double().contiguous()
    wanted = _derivatives(twin, module, x) if twin else _differences(module, x)
    for order, (derivative, right) in enumerate(zip(_derivatives(_run, module, x), wanted, strict=True)):
        name = "against the twin" if twin else "against differences"
        ledger.require_same(f"derivative of order {order} {name}", derivative, right, 1e-8 if twin else 1e-4)


def _run(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the output with the module's own parameters, so that derivatives reach them, and copies of its buffers."""
    buffers = {name: value.clone() for name, value in module.named_buffers()}
    return torch.func.functional_call(module, {**dict(module.named_parameters()), **buffers}, (x,))


def _derivatives(function: Twin, module: torch.nn.Module, x: Tensor) -> tuple[Tensor, Tensor, Tensor]:
    """Return output, gradient and a Hessian product of a loss, with respect to input and parameters together."""
    inputs = x.clone().requires_grad_()
    variables = [inputs, *(value for value in module.parameters() if value.requires_grad)]
    y = function(module, inputs)
    loss = (y * _wave(y)).sum() + (y.square() * _wave(y, 1.3)).sum() / 2
    gradient = _flat(torch.autograd.grad(loss, variables, create_graph=True, allow_unused=True, materialize_grads=True))
    if not gradient.requires_grad:
        return y.detach(), gradient, torch.zeros_like(gradient)
    along = (gradient * _wave(gradient, 0.7)).sum()
    second = _flat(torch.autograd.grad(along, variables, allow_unused=True, materialize_grads=True))
    return y.detach(), gradient.detach(), second


def _differences(module: torch.nn.Module, x: Tensor, step: float = 1e-5) -> tuple[Tensor, Tensor, Tensor]:
    y, gradient, _ = _derivatives(_run, module, x)
    aside = _wave(gradient, 0.7)
    sides = []
    for move in (step, -step):
        moved, start = copy.deepcopy(module), x.numel()
        with torch.no_grad():
            for value in moved.parameters():
                value.add_(move * aside[start : start + value.numel()].view(value.shape))
                start += value.numel()
        sides.append(_derivatives(_run, moved, x + move * aside[: x.numel()].view(x.shape))[1])
    return y, gradient, (sides[0] - sides[1]) / (2 * step)


def _flat(tensors: tuple[Tensor, ...]) -> Tensor:
    return torch.cat([value.reshape(-1) for value in tensors])


def _wave(x: Tensor, pitch: float = 1.0) -> Tensor:
    return torch.arange(x.numel(), dtype=torch.float64).mul(pitch).add(0.5).sin().view(x.shape)


def check_refusals(declaration: Declaration, ledger: Ledger) -> None:
    """Empty inputs give an error or nothing, and spoil nothing; one value per channel is refused or answered.

    torch's own layers answer an empty batch with an empty output; any error is as good.
    """
    for spatial in (axes for axes in (0, 2) if axes in declaration.spatial):
        layer = declaration.layer(4, spatial)
        empty = torch.zeros((0, 4, *(3,) * spatial))
        output = _output_or_error(layer, empty)
        answered = not isinstance(output, Tensor) or output.shape == empty.shape
        ledger.require("empty inputs raise an error or give an empty output", answered, "an output of another shape")
        finite = all(bool(value.isfinite().all()) for value in layer.state_dict().values())
        ledger.require("empty inputs leave the state finite", finite, "inf or nan in the state_dict")
        layer = declaration.layer(4, spatial)
        output = _output_or_error(layer, torch.randn((1, 4, *(1,) * spatial)))
        if declaration.smallest > 1:
            ledger.require("one value per channel raises an error", isinstance(output, Exception), "an output")
        else:
            finite = isinstance(output, Tensor) and bool(output.isfinite().all())
            ledger.require("one value per channel has a finite output", finite, _in_words(output))


def _output_or_error(layer: torch.nn.Module, x: Tensor) -> Tensor | Exception:
    try:
        return layer(x)
    except Exception as error:  # noqa: BLE001 (whatever came is judged)
        return error


def _in_words(output: Tensor | Exception) -> str:
    return f"{type(output).__name__}: {output}" if isinstance(output, Exception) else "inf or nan"
