"""`swap_norms`: other normalizers in the place of a trained network's, gains carried or fitted to data."""

from collections.abc import Callable
from typing import Any, Unpack

import torch
from torch import Tensor, nn

from normgauge.errors import InputError
from normgauge.network import Step, double, exchange, role_of
from normgauge.nn import registry
from normgauge.results import instrument
from normgauge.surgery import _operate
from normgauge.surgery._maps import affine_of, read_norm
from normgauge.surgery._operate import Options, Patient, Where, has_statistics, hooked, operate, run, store_statistics
from normgauge.surgery._surgery import Surgery

Factory = Callable[[int, int], nn.Module]


class LastAxis(nn.Module):
    """A normalizer of (batch, channels) put on the last axis: every position is a sample."""

    def __init__(self, norm: nn.Module) -> None:
        super().__init__()
        self.norm, self.eps = norm, getattr(norm, "eps", 0.0)  # eps: torch's transformer layers ask for it

    def forward(self, input: Tensor) -> Tensor:
        """Normalize each position."""
        return self.norm(input.reshape(-1, input.shape[-1])).reshape(input.shape)


@instrument
def swap_norms(
    model: nn.Module,
    to: str | Factory,
    *,
    example: Any,
    where: Where = None,
    data: Any = None,
    **options: Unpack[Options],
) -> Surgery:
    r"""Replace normalizers by others, with the affine map that moves the outputs least.

    Gains and shifts are carried over. Then, in the order of execution, each new normalizer with normalized values z
    gets, per channel, $\gamma, \beta = \arg\min \sum (\gamma z + \beta - y)^2$ over `data`, y what the old one gave in
    the old network, and statistics, where it stores any, from what it reads. Groups are chosen from the channels, at
    least two in each. A module in several places is replaced once; one whose class does more is refused.

    `to` is a name of `ng.nn.registry`, or `(channels, spatial) -> module`; `where` a glob, names or a predicate(name,
    module), all normalizers by default; `data` inputs to fit on, the example by default.

    Kind: changes the function: `change` by how much, the note how much without the fit. Cost: eight forward passes.

    Examples:
        >>> net = nn.Sequential(nn.Conv2d(3, 8, 3), nn.BatchNorm2d(8), nn.ReLU())
        >>> swap_norms(net, "group", example=torch.randn(2, 3, 8, 8)).model[1].num_groups
        4
    """
    make = to if callable(to) else registry.get(to).layer
    if isinstance(to, str) and registry.get(to).placement == "weights":
        rule = "swap_norms puts normalizers of activations in the place of others"
        raise InputError("swap_norms", rule, f"{to!r}, of weights", "Use ng.nn.registry.get(name).wrap(layer)")

    def edit(patient: Patient) -> str:
        steps: dict[nn.Module, Step] = {}
        for step in patient.network.record().steps:
            if step.module is not None and role_of(step.module) == "normalizer":
                steps.setdefault(step.module, step)
        names = {module: name for name, module in patient.model.named_modules()}
        chosen = {module: step for module, step in steps.items() if _operate.is_selected(where, names[module], module)}
        _operate.require_selection("swap_norms", where, model, [names[module] for module in chosen])
        inputs = patient.inputs if data is None else double(data)
        target = _outputs_of(patient, chosen, inputs)
        before = run(patient.model, inputs, patient.forward, "eval")
        new: dict[nn.Module, tuple[str, nn.Module]] = {}
        for old, step in chosen.items():
            made = _replacement(old, step, make)
            if isinstance(made, str):
                patient.refuse(names[old], made)
                continue
            for name, module in list(patient.model.named_modules(remove_duplicate=False)):
                if module is old:
                    exchange(patient.model, name, made)
            new[old] = names[old], made
        if not new:
            return "" if chosen else "no class here has norm in its name, by which normalizers are known: name yours so"
        _operate.unfuse(patient.model)
        plain = _operate.relative_difference(before, run(patient.model, inputs, patient.forward, "eval"))
        _fit(patient, inputs, new, target)
        kind = to if isinstance(to, str) else "given"
        for old, (name, made) in new.items():
            patient.did(name, f"{type(old).__name__} -> {kind} ({type(made).__name__})")
        return f"with gains carried over alone the outputs would move by {plain:.3g} of their size"

    return operate("swap_norms", model, example, edit, **options, exact=False)


def _replacement(old: nn.Module, step: Step, make: Factory) -> nn.Module | str:
    """Return the new normalizer for what the old one reads, with its gain and shift; or why there is none."""
    shape = step.inputs[0]
    gain, shift = getattr(old, "weight", None), getattr(old, "bias", None)
    last = read_norm(old, shape[-1])
    if last is not None:
        gain, shift = last.scale(), getattr(old, last.shift) if last.shift else None
    elif has_statistics(old) and isinstance(affine_of(old, step), str):
        return f"its class does more than normalize: {affine_of(old, step)}"
    channels, spatial = (shape[-1], 0) if last is not None else (shape[1] if len(shape) > 1 else 0, len(shape) - 2)
    if not 0 <= spatial <= 3 or channels < 1:
        return f"its input has the shape {shape}"
    try:
        made = make(channels, spatial)
    except ValueError as error:
        return str(error)
    device = next((value.device for value in (*old.parameters(), *old.buffers())), torch.device("cpu"))
    made = made.double().to(device).train(old.training)
    probe = torch.randn(2, channels, *((shape[2:]) if last is None else ()), dtype=torch.float64, device=device)
    if not bool(made.eval()(probe).std() > 1e-3):
        return "the new normalizer would read one value at a time and give nothing else than its shift"
    made.train(old.training)
    for name, value in (("weight", gain), ("bias", shift)):
        own = getattr(made, name, None)
        if isinstance(own, nn.Parameter) and value is not None and own.shape == value.shape:
            own.data.copy_(value.detach())
    if has_statistics(made) and has_statistics(old):
        store_statistics(made, old.running_mean, old.running_var)  # type: ignore[arg-type]
    return LastAxis(made) if last is not None and len(shape) > 2 else made


def _outputs_of(patient: Patient, chosen: dict[nn.Module, Step], inputs: Any) -> dict[nn.Module, list[Tensor]]:
    """Return what each chosen module gives, call by call."""
    outputs: dict[nn.Module, list[Tensor]] = {module: [] for module in chosen}

    def note(module: nn.Module, _: Any, made: Tensor) -> None:
        outputs[module].append(made.detach().clone())

    with hooked(module.register_forward_hook(note) for module in chosen):
        run(patient.model, inputs, patient.forward, "eval")
    return outputs


def _fit(
    patient: Patient, inputs: Any, new: dict[nn.Module, tuple[str, nn.Module]], target: dict[nn.Module, list[Tensor]]
) -> None:
    """Fit affine maps while the new network runs: what stands behind a normalizer reads the fitted one's output."""
    fits: dict[nn.Module, tuple[Tensor, Tensor]] = {}
    statistics: dict[nn.Module, tuple[Tensor, Tensor]] = {}

    def by_channel(values: Tensor, made: nn.Module) -> Tensor:
        return values.flatten(0, -2).T if isinstance(made, LastAxis) else values.transpose(0, 1).flatten(1)

    def read(made: nn.Module, args: tuple[Any, ...]) -> None:
        inner = made.norm if isinstance(made, LastAxis) else made
        if has_statistics(inner):
            values = by_channel(args[0], made)
            statistics[inner] = values.mean(1), values.var(1)
            store_statistics(inner, *statistics[inner])

    def fit(old: nn.Module) -> Any:
        seen: list[tuple[Tensor, Tensor]] = []

        def hook(made: nn.Module, args: Any, output: Tensor) -> Tensor:
            inner: Any = made.norm if isinstance(made, LastAxis) else made
            goal = target[old][min(len(seen), len(target[old]) - 1)]
            gain, shift = getattr(inner, "weight", None), getattr(inner, "bias", None)
            if gain is None or bool((gain == 0).any()):  # what a zero hides cannot be fitted
                return output
            layout = (1, -1, *(1,) * (output.ndim - 2)) if not isinstance(made, LastAxis) else (-1,)
            z = (output if shift is None else output - shift.reshape(layout)) / gain.reshape(layout)
            seen.append((by_channel(z, made), by_channel(goal, made)))
            z_all, y_all = (torch.cat(parts, 1) for parts in zip(*seen, strict=True))
            middle = 0.0 if shift is None else z_all.mean(1, keepdim=True)
            slope = ((z_all - middle) * y_all).sum(1) / (z_all - middle).square().sum(1).clamp_min(1e-300)
            offset = torch.zeros_like(slope) if shift is None else y_all.mean(1) - slope * z_all.mean(1)
            fits[inner] = slope, offset
            return z * slope.reshape(layout) + offset.reshape(layout)

        return hook

    handles = [made.register_forward_pre_hook(read) for _, made in new.values()]
    handles += [made.register_forward_hook(fit(old)) for old, (_, made) in new.items()]
    with hooked(handles):
        run(patient.model, inputs, patient.forward, "eval")
    for inner, values in statistics.items():
        store_statistics(inner, *values)
    for inner, (slope, offset) in fits.items():
        for name, value in (("weight", slope), ("bias", offset)):
            if getattr(inner, name, None) is not None:
                getattr(inner, name).data.copy_(value)
