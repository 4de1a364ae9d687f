"""`check_normalizer`: every declared law and every rule of normalizers, tried on random cases."""

import copy
import functools
import warnings
from collections.abc import Callable, Iterable
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from normgauge.errors import require
from normgauge.nn import registry
from normgauge.nn.registry import Declaration, Invariance
from normgauge.rng import generator, preserved_rng, seed_everything
from normgauge.testing._verdict import TOLERANCE, Conformance, Ledger, NonconformingError

DTYPES = (torch.float64, torch.float32, torch.bfloat16)
FORMATS = ("contiguous", "channels_last", "strided")
VANISHING = 1e-300  # an eps that adds nothing in any precision; torch's batch norm refuses 0

Build = Callable[[int, int], torch.nn.Module]
Twin = Callable[[torch.nn.Module, Tensor], Tensor]


@dataclass(frozen=True)
class Case:
    """One drawn situation."""

    seed: int
    batch: int
    channels: int
    spatial: int
    side: int
    dtype: torch.dtype
    layout: str
    eps: float

    def inputs(self, channels: int | None = None) -> Tensor:
        """Return inputs of the case; in bfloat16 on a grid, so that sums and doublings are exact."""
        shape = (self.batch, channels or self.channels, *(self.side,) * self.spatial)
        x = torch.randn(shape, generator=generator(self.seed), dtype=torch.float64)
        if self.dtype == torch.bfloat16:
            x = (x * 16).round().clamp(-48, 48) / 16
        return _lay_out(x.to(self.dtype), self.layout)

    def factors(self, shape: tuple[int, ...], salt: int = 1) -> Tensor:
        """Return positive factors, powers of two in bfloat16."""
        powers = torch.randint(-2, 3, shape, generator=generator(self.seed + salt)).double()
        if self.dtype == torch.bfloat16:
            return 2.0**powers
        return 2.0**powers * (1 + 0.3 * torch.rand(shape, generator=generator(self.seed + salt), dtype=torch.float64))

    def shifts(self, shape: tuple[int, ...], salt: int = 2) -> Tensor:
        """Return shifts, whole numbers in bfloat16."""
        draw = torch.randint(-4, 5, shape, generator=generator(self.seed + salt)).double()
        return draw if self.dtype == torch.bfloat16 else draw * 0.9


def check_normalizer(
    subject: str | Declaration | Build,
    *,
    invariances: Iterable[Invariance] = (),
    smallest: int = 1,
    spatial: tuple[int, ...] = (0, 1, 2, 3),
    twin: Twin | None = None,
    examples: int = 12,
) -> Conformance:
    """Run the conformance suite on a normalizer: yours or one of the register.

    Hypothesis draws shapes, dtypes (float64, float32, bfloat16), memory formats, batch sizes and eps. Tried are every
    declared invariance (those that hold only for eps = 0 with an eps of 1e-300) and the sign they promise; the declared
    place of gain and eps; shape, dtype and precision; state_dict round trip and deep copies; torch.func against
    autograd, forward over reverse; bfloat16 autocast; first and second derivatives against a twin; empty inputs, which
    raise any error or give an empty output and leave the state finite; and one value per channel, on which training
    raises an error where `smallest` says so. All checks run, and a NonconformingError names all that failed. Without
    declared invariances the result says that none was tried.

    Args:
        subject: a name, a declaration, or a factory `(channels, spatial) -> Module`.
        invariances: the laws of a factory; a declaration has its own.
        smallest: the fewest values per channel a factory's layers train on; fewer must be refused.
        spatial: the numbers of spatial axes a factory's layers take.
        twin: `(module, x) -> y`, a naive implementation of the module's map in training; without it second
            derivatives are compared with differences of first ones.
        examples: cases per check.

    Examples:
        >>> report = check_normalizer("rms", examples=3)
        >>> report.name, all(cases > 0 for _, cases, _ in report.checks)
        ('rms', True)
    """
    require("hypothesis", "dev", "check_normalizer")
    declaration = _find_declaration(subject, tuple(invariances), smallest, spatial)
    ledger = Ledger(declaration.name, "normalizer", "Correct the normalizer, or its declaration")
    with preserved_rng():  # initial weights come from the global stream: pinned here, and put back
        seed_everything(0)
        failures = _run_all(declaration, twin, examples, ledger)
    if failures:
        raise NonconformingError("\n".join(failures))
    return ledger.conformance(len(declaration.invariances))


def _run_all(declaration: Declaration, twin: Twin | None, examples: int, ledger: Ledger) -> list[str]:
    """Run every check, whether others failed or not; return what failed."""
    build = _builder(declaration)
    inner = 3 if declaration.placement == "weights" else None
    axes, few = declaration.spatial, max(2, examples // 3)

    def on_cases(check: Callable[[Case], None], examples: int, *, small: bool = False) -> Callable[[], None]:
        return lambda: _run_cases(check, axes, examples, small=small)

    bind, laws = functools.partial, declaration.invariances
    checks = {str(law): on_cases(bind(_check_law, declaration, law, ledger), examples) for law in laws}
    checks |= {
        "output": on_cases(bind(_check_output, build, inner, ledger), examples),
        "state": on_cases(bind(_check_state, build, inner, ledger), few),
        "torch.func": on_cases(bind(_check_transforms, build, inner, ledger), few, small=True),
        "autocast": on_cases(bind(_check_autocast, build, inner, ledger), few),
    }
    if twin or not declaration.detached:  # differences see what the gradient leaves out
        derivatives = bind(_check_derivatives, build, inner, ledger, twin=twin)
        checks["derivatives"] = on_cases(derivatives, few, small=True)
    if declaration.gain or declaration.eps_place:
        checks["gain and eps"] = on_cases(bind(_check_conventions, declaration, ledger), few)
    if declaration.placement == "activation":
        checks["small inputs"] = lambda: _check_refusals(declaration, ledger)
    failures = []
    for name, check in checks.items():
        try:
            check()
        except NonconformingError as error:
            failures.append(str(error))
        except Exception as error:  # noqa: BLE001 (whatever the layer raised is named, and the other checks run)
            failures.append(f"{name}: {type(error).__name__}: {error}")
    return failures


def _find_declaration(
    subject: str | Declaration | Build, laws: tuple[Invariance, ...], smallest: int, spatial: tuple[int, ...]
) -> Declaration:
    if isinstance(subject, str):
        return registry.get(subject)
    if isinstance(subject, Declaration):
        return subject
    name = getattr(subject, "__name__", type(subject).__name__)
    words: dict[str, Any] = dict.fromkeys(("title", "axes", "behaviour", "formula"), "") | {"cite": ()}
    facts: dict[str, Any] = {"invariances": laws, "make": subject, "spatial": spatial, "smallest": smallest}
    return Declaration(name=name, placement="activation", statistics="none", **words, **facts)


def _run_cases(check: Callable[[Case], None], spatial: tuple[int, ...], examples: int, *, small: bool = False) -> None:
    import hypothesis
    from hypothesis import strategies

    dtypes = (torch.float64,) if small else (torch.float64, torch.float32, torch.bfloat16)
    axes = tuple(axis for axis in spatial if axis < 3) if small else spatial
    quiet: dict[str, Any] = {"deadline": None, "database": None, "report_multiple_bugs": False}
    quiet |= {"phases": [hypothesis.Phase.generate], "suppress_health_check": list(hypothesis.HealthCheck)}
    run = hypothesis.given(_strategy(strategies, axes, dtypes))(lambda case: check(case))
    run = hypothesis.settings(max_examples=examples, derandomize=True, **quiet)(run)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", hypothesis.errors.HypothesisWarning)
        run()


def _lay_out(x: Tensor, layout: str) -> Tensor:
    """Return x with the memory layout of that name, equal in value."""
    if layout == "channels_last" and x.dim() >= 4:
        return x.contiguous(memory_format=torch.channels_last if x.dim() == 4 else torch.channels_last_3d)
    if layout == "strided":
        return torch.stack([x, x], dim=-1)[..., 0]
    return x.contiguous()


def _strategy(strategies: Any, spatial: tuple[int, ...], dtypes: tuple[torch.dtype, ...] = DTYPES) -> Any:
    """Return a Hypothesis strategy of cases."""
    return strategies.builds(
        Case,
        seed=strategies.integers(0, 10**6),
        batch=strategies.integers(2, 6),
        channels=strategies.sampled_from([1, 2, 3, 4, 6, 16, 24]),
        spatial=strategies.sampled_from(spatial),
        side=strategies.integers(2, 4),
        dtype=strategies.sampled_from(dtypes),
        layout=strategies.sampled_from(FORMATS),
        eps=strategies.sampled_from([1e-3, 1e-5, VANISHING]),
    )


def _prepare_module(build: Build, case: Case, mode: str, eps: float) -> torch.nn.Module:
    """Return a module of the case with lively parameters, the given eps in every part, in the given mode."""
    module = build(case.channels, case.spatial).double()
    draw = generator(case.seed + 7)
    with torch.no_grad():
        for parameter in module.parameters():
            parameter.mul_(1 + 0.3 * torch.rand(parameter.shape, generator=draw, dtype=torch.float64))
            parameter.add_(0.2 * torch.randn(parameter.shape, generator=draw, dtype=torch.float64))
        for name, buffer in module.named_buffers():
            if buffer.is_floating_point() and name.endswith(("var", "moment", "mean")):
                buffer.add_(0.3 * torch.rand(buffer.shape, generator=draw, dtype=torch.float64))
    for part in module.modules():
        if isinstance(getattr(part, "eps", None), float):
            setattr(part, "eps", eps)  # noqa: B010 (modules type their attributes as tensors)
    return module.to(case.dtype).train(mode == "train")


def call(module: torch.nn.Module, x: Tensor) -> Tensor:
    """Return the output of a copy, so that running statistics and noise of the module stay where they are."""
    return copy.deepcopy(module)(x)


def _builder(declaration: Declaration) -> Build:
    """Return `(channels, spatial) -> module` for any placement; weight normalizers wrap a layer of three inputs."""
    if declaration.placement != "weights":
        return declaration.layer
    return lambda channels, spatial: declaration.wrap(_linear_map(3, channels, spatial))


def _linear_map(inputs: int, outputs: int, spatial: int, *, bias: bool = True) -> torch.nn.Module:
    """Return a Linear layer, or a convolution of kernel 2 with as many axes of space."""
    if spatial == 0:
        return torch.nn.Linear(inputs, outputs, bias=bias)
    kinds = {1: torch.nn.Conv1d, 2: torch.nn.Conv2d, 3: torch.nn.Conv3d}
    return kinds[spatial](inputs, outputs, 2, padding=1, bias=bias)


def _check_law(declaration: Declaration, law: Invariance, ledger: Ledger, case: Case) -> None:
    """Try one invariance on one case, in each of its modes."""
    alone = case.channels == 1 and case.spatial == 0 and declaration.statistics in ("sample", "group", "none")
    if case.spatial not in law.spatial or alone:  # a block of one value has no scale to divide by
        return
    eps = case.eps if law.exact else VANISHING
    for mode in law.modes:
        deviation, tolerance = deviation_of(declaration, law, case, mode, eps)
        ledger.require_same(f"{law} [{mode}]", *deviation, tolerance)
        if law.kind == "scale" and law.flips:
            flipped, tolerance = deviation_of(declaration, law, case, mode, eps, sign=-1)
            ledger.require_same(f"a negative factor flips the sign: {law} [{mode}]", *flipped, tolerance)


def deviation_of(
    declaration: Declaration, law: Invariance, case: Case, mode: str, eps: float, *, sign: int = 1
) -> tuple[tuple[Tensor, Tensor], float]:
    """Return output after the change and output before it (times the sign), with the tolerance for them."""
    outcome = _outputs_of_wrapped if declaration.placement == "weights" else _outputs_of_layer
    after, before = outcome(declaration, law, case, mode, eps, sign)
    return (after, sign * before), TOLERANCE[case.dtype]


def _outputs_of_layer(
    declaration: Declaration, law: Invariance, case: Case, mode: str, eps: float, sign: int
) -> tuple[Tensor, Tensor]:
    layer = _prepare_module(declaration.layer, case, mode, eps)
    if sign < 0:
        _zero_bias(layer)
    if law.of == "input":
        x = case.inputs()
        return call(layer, _change_input(x, law, case, layer, sign)), call(layer, x)
    # In bfloat16 the linear map itself would round; the law is about the layer behind it.
    first = _linear_map(5, case.channels, case.spatial).double()
    shape = (case.batch, 5, *(case.side,) * case.spatial)
    x = torch.randn(shape, generator=generator(case.seed + 5), dtype=torch.float64)
    changed = copy.deepcopy(first)
    with torch.no_grad():
        _change_rows(changed, law, case, layer, sign)
    return call(layer, changed(x).to(case.dtype)), call(layer, first(x).to(case.dtype))


def _outputs_of_wrapped(
    declaration: Declaration, law: Invariance, case: Case, mode: str, eps: float, sign: int
) -> tuple[Tensor, Tensor]:
    module = _prepare_module(_builder(declaration), case, mode, eps)
    if sign < 0:
        _zero_bias(module)
    x = case.inputs(3)
    if case.dtype == torch.bfloat16:  # raw weights in sixteenths: adding a whole number to them is then exact
        drawn, raw = generator(case.seed + 7), _raw_weight(module)
        raw.data.copy_((torch.randint(-32, 33, raw.shape, generator=drawn) / 16).to(raw.dtype))
    changed = copy.deepcopy(module)
    raw = _raw_weight(changed)
    with torch.no_grad():
        own = {"row": 0, "column": 1}.get(law.per)  # the axis along which blocks have factors of their own
        shape = tuple(size if axis == own else 1 for axis, size in enumerate(raw.shape))
        if law.kind == "scale":
            raw.mul_(sign * case.factors(shape).to(raw.dtype))
        else:
            raw.add_(case.shifts(shape).to(raw.dtype))
    return call(changed, x), call(module, x)


def _check_conventions(declaration: Declaration, ledger: Ledger, case: Case) -> None:
    """Hold the declared place of the gain and of eps against the layer's numbers.

    A gain stored as 1 + w is one where w is zero, one stored as w is none. Multiplied by t, an input meets an eps
    outside the root as eps / t and one inside as eps / t^2.
    """
    case = replace(case, channels=max(case.channels, 2))  # one value has no scale to divide by
    if declaration.gain in ("w", "1+w"):
        layer = _prepare_module(declaration.layer, case, "eval", 1e-5)
        _zero_bias(layer)
        with torch.no_grad():
            for name, value in layer.named_parameters():
                if name.split(".")[-1] == "weight":
                    value.zero_()
        silent = bool((call(layer, case.inputs()) == 0).all())
        ledger.require(f"gain stored as {declaration.gain}", silent == (declaration.gain == "w"), f"{silent} at w = 0")
    if declaration.eps_place in ("inside", "outside"):
        x, power = case.inputs().double(), 2 if declaration.eps_place == "inside" else 1
        layers = [_prepare_module(declaration.layer, case, "eval", eps).double() for eps in (0.5**power * 0.01, 0.01)]
        small, large = (call(layer, factor * x) for layer, factor in zip(layers, (0.5, 1.0), strict=True))
        ledger.require_same(f"eps {declaration.eps_place} the root", small, large, TOLERANCE[torch.float64])


def _raw_weight(module: torch.nn.Module) -> torch.nn.Parameter:
    """Return the largest parameter behind a parametrized weight, which itself may be known after a forward only."""
    return max(module.parametrizations.weight.parameters(), key=Tensor.numel)  # type: ignore[union-attr]


def _zero_bias(module: torch.nn.Module) -> None:
    with torch.no_grad():
        for name, value in (*module.named_parameters(), *module.named_buffers()):
            if name.split(".")[-1] == "bias":
                value.zero_()


def _groups(layer: torch.nn.Module) -> int:
    return int(getattr(layer, "num_groups", getattr(layer, "groups", 1)))


def _block_shape(per: str, batch: int, channels: int, groups: int) -> tuple[int, int]:
    rows = {"row": channels, "sample_row": channels, "group": groups, "sample_group": groups}.get(per, 1)
    return (batch if per.startswith("sample") else 1), rows


def _spread_over_blocks(values: Tensor, x: Tensor) -> Tensor:
    repeat = x.shape[1] // values.shape[1]
    return values.repeat_interleave(repeat, 1).view(values.shape[0], x.shape[1], *(1,) * (x.dim() - 2)).to(x.dtype)


def _change_input(x: Tensor, law: Invariance, case: Case, layer: torch.nn.Module, sign: int) -> Tensor:
    shape = _block_shape(law.per, x.shape[0], x.shape[1], _groups(layer))
    if law.kind == "scale":
        return x * (sign * _spread_over_blocks(case.factors(shape), x))
    return x + _spread_over_blocks(case.shifts(shape), x)


def _change_rows(first: torch.nn.Module, law: Invariance, case: Case, layer: torch.nn.Module, sign: int) -> None:
    weight, bias = first.weight, first.bias
    assert isinstance(weight, Tensor) and isinstance(bias, Tensor)
    _, blocks = _block_shape(law.per, 1, case.channels, _groups(layer))
    repeat = case.channels // blocks
    if law.kind == "scale":
        rows = sign * case.factors((blocks,)).repeat_interleave(repeat)
        weight.mul_(rows.view(-1, *(1,) * (weight.dim() - 1)))
        bias.mul_(rows)
    else:
        added = case.shifts((blocks, *weight.shape[1:])).repeat_interleave(repeat, 0)
        weight.add_(0.3 * added)
        bias.add_(case.shifts((blocks,), salt=3).repeat_interleave(repeat))


def _check_output(build: Build, channels: int | None, ledger: Ledger, case: Case) -> None:
    """Shape, dtype, memory format and precision: the value is that of float64 on contiguous memory."""
    x = case.inputs(channels)
    for mode in ("train", "eval"):
        module = _prepare_module(build, case, mode, max(case.eps, 1e-5))
        y = call(module, x)
        ledger.require(f"keeps the dtype [{mode}]", y.dtype == x.dtype, f"{y.dtype} for {x.dtype}")
        reference = call(module.double(), x.double().contiguous())
        ledger.require_same(f"precision and memory format [{mode}]", y.double(), reference, TOLERANCE[case.dtype])


def _check_state(build: Build, channels: int | None, ledger: Ledger, case: Case) -> None:
    """Save and load, copy, no write in evaluation, no use of the global random state."""
    module = _prepare_module(build, case, "train", 1e-5)
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
    still = torch.equal(random_state, torch.random.get_rng_state())
    ledger.require("leaves the global random state alone", still, "it moved")
    before = {name: value.clone() for name, value in module.eval().state_dict().items()}

    def unchanged() -> bool:
        return all(torch.equal(before[name], value) for name, value in module.state_dict().items())

    module(x)
    ledger.require("evaluation writes nothing", unchanged(), "a changed state_dict")
    with torch.no_grad():
        for parameter in copy.deepcopy(module).parameters():
            parameter.add_(1)
    ledger.require("a deep copy shares nothing", unchanged(), "a copy that writes through")


def _check_transforms(build: Build, channels: int | None, ledger: Ledger, case: Case) -> None:
    """torch.func agrees with autograd: gradient, and Hessian product by forward over reverse."""
    module = _prepare_module(build, case, "train", 1e-3)
    x = case.inputs(channels).double()
    module = module.double()
    probe = torch.randn(call(module, x).shape, generator=generator(case.seed + 11), dtype=torch.float64)
    parameters = {name: value.detach() for name, value in module.named_parameters()}
    buffers = dict(module.named_buffers())

    def score(y: Tensor) -> Tensor:
        return (y * probe).sum() + (y.square() * probe.cos()).sum()

    # parameters are given, not closed over: torch crashes where a layer writes into those of an outer level
    def loss(parameters: dict[str, Tensor], inputs: Tensor) -> Tensor:
        own = {name: value.clone() for name, value in buffers.items()}
        return score(torch.func.functional_call(module, {**parameters, **own}, (inputs,)))

    def reverse(inputs: Tensor) -> Tensor:
        return torch.func.grad(loss, argnums=1)(parameters, inputs)

    inputs = x.clone().requires_grad_()
    gradient = torch.autograd.grad(score(call(module, inputs)), inputs, create_graph=True)[0]
    direction = torch.randn(x.shape, generator=generator(case.seed + 12), dtype=torch.float64)
    ledger.require_same("torch.func.grad agrees with autograd", reverse(x), gradient, 1e-8)
    curved = gradient.requires_grad
    product = torch.autograd.grad(gradient, inputs, direction)[0] if curved else torch.zeros_like(inputs)
    forward = torch.func.jvp(reverse, (x,), (direction,))[1]
    ledger.require_same("forward over reverse agrees with autograd twice", forward, product, 1e-7)


def _check_autocast(build: Build, channels: int | None, ledger: Ledger, case: Case) -> None:
    """Under bfloat16 autocast the output stays near float32's, and so does the gradient's presence."""
    module = _prepare_module(build, case, "train", 1e-3).float()
    x = case.inputs(channels).float().requires_grad_()
    plain = call(module, x)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        mixed = call(module, x)
    ledger.require_same("autocast stays near float32", mixed.float(), plain, TOLERANCE[torch.bfloat16])
    (gradient,) = torch.autograd.grad(mixed.float().square().sum(), x)
    ledger.require("autocast has finite gradients", bool(gradient.isfinite().all()), "inf or nan")


def _check_derivatives(build: Build, channels: int | None, ledger: Ledger, case: Case, twin: Twin | None) -> None:
    """First and second derivatives against the hand-written twin, or against differences without one."""
    module = _prepare_module(build, case, "train", 1e-2).double()
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


def _check_refusals(declaration: Declaration, ledger: Ledger) -> None:
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
            got = repr(output) if isinstance(output, Exception) else "inf or nan"
            ledger.require("one value per channel has a finite output", finite, got)


def _output_or_error(layer: torch.nn.Module, x: Tensor) -> Tensor | Exception:
    try:
        return layer(x)
    except Exception as error:  # noqa: BLE001 (whatever came is judged)
        return error
