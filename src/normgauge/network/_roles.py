"""What each parameter does to the outputs of the module that reads it: asked by changing it, never by its name."""

from collections.abc import Iterator
from contextlib import suppress
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normgauge.network._arithmetic import KeepDouble, double
from normgauge.network._call_order import ModuleCall, first_tensor, replaced
from normgauge.objective import untouched
from normgauge.rng import generator

Kind = Literal["weight", "bias", "gain", "shift", "embedding", "original", "other", "unused"]
_LARGE = 2.0**12  # inputs this many times larger make the eps of a normalizer small
_SAME = 1e-3  # relative; what is left of eps at such inputs is far below, what is not the same far above


@dataclass(frozen=True)
class Role:
    """What a parameter is to the module that reads it.

    "weight" or "bias" of a map, "gain" or "shift" of a normalizer, "embedding", "original" (a parametrization makes the
    weight of it), "other" (none of these), "unused" (nothing changes with it).
    """

    parameter: str
    kind: Kind
    module: str = ""  # that was asked, the first that reads it
    tied: tuple[str, ...] = ()  # other names of the same parameter
    why: str = ""  # the module could not be asked, so that the kind is what the shape says


def kind_of(call: ModuleCall, name: str) -> Kind:
    """Return the role of one parameter in one call of its module, from a few further calls in float64."""
    module, value, source = call.module, dict(call.module.named_parameters())[name], generator(0)
    state = {key: double(entry.detach()) for key, entry in (*module.named_parameters(), *module.named_buffers())}
    step = torch.randn(value.shape, generator=source, dtype=torch.float64).to(value.device)

    def perturb(tensor: Tensor) -> Tensor:  # an example of equal samples would hide what a normalizer does
        if not tensor.is_floating_point() or not tensor.numel():
            return tensor
        noise = torch.randn(tensor.shape, generator=source, dtype=torch.float64).to(tensor.device)
        return tensor.detach() + (1.0 + tensor.detach().double().square().mean().sqrt()) * noise

    inputs = replaced((call.args, call.kwargs), Tensor, perturb)

    def output(scale: float = 1.0, change: float = 0.0, training: bool = module.training) -> Tensor:
        """Return the first output at inputs times `scale`, with the parameter moved by `change` steps."""
        arguments = replaced(inputs, Tensor, lambda t: t * scale if t.is_floating_point() else t)
        values = {key: entry.clone() for key, entry in state.items()} | {name: state[name] + change * step}
        with torch.no_grad(), untouched(module, "train" if training else "eval", 0), KeepDouble():
            result = first_tensor(functional_call(module, values, *arguments))
        return torch.zeros((), dtype=torch.float64) if result is None else result

    def normalizes(training: bool) -> bool:
        with suppress(ValueError):  # torch refuses to take statistics of one value
            return same(output(_LARGE, 0.0, training), output(2 * _LARGE, 0.0, training))
        return False

    if not step.numel() or same(output(change=1.0), output(), within=0.0):
        return "unused"
    if "parametrizations." in name:
        return "original"
    changes = [output(scale, 1.0) - output(scale) for scale in (1.0, -1.0)]
    fixed = same(*changes)
    if not same(output(change=2.0) - output(), 2 * changes[0]):
        return "weight" if value.ndim > 1 and call.leaf else "other"
    if call.given is not None and not call.given.is_floating_point():
        return "embedding"
    if normalizes(module.training) or normalizes(True):
        return "shift" if fixed else "gain"
    return "bias" if fixed else "weight"


def same(a: Tensor, b: Tensor, *, within: float = _SAME) -> bool:
    gap, size = (float(t.abs().max()) if t.numel() else 0.0 for t in (a - b, torch.maximum(a.abs(), b.abs())))
    return gap <= within * size


def roles_of(model: nn.Module, calls: dict[str, ModuleCall]) -> dict[str, Role]:
    """Return the role of every parameter, by a call of the nearest module around it that was called."""
    ties: dict[int, list[str]] = {}
    axes = {}
    for name, value in model.named_parameters(remove_duplicate=False):
        ties.setdefault(id(value), []).append(name)
        axes[name] = value.ndim
    roles = {}
    for first, *others in ties.values():
        places = (place for name in (first, *others) for place in _enclosing_modules(name))
        module, inside = next((place for place in places if place[0] in calls), ("", ""))
        why = ""
        try:
            kind: Kind = kind_of(calls[module], inside) if module else "unused"
        except (RuntimeError, TypeError, MemoryError) as error:  # a kernel without float64, no memory for one
            kind = "weight" if axes[first] > 1 else "other"
            why = f"{module!r} could not be probed ({type(error).__name__}: {str(error)[:100].splitlines()[0]})"
        roles[first] = Role(first, kind, module, tuple(others), why)
    return roles


def _enclosing_modules(parameter: str) -> Iterator[tuple[str, str]]:
    """Yield the modules around a parameter, from the inside, each with the parameter's name in it."""
    parts = parameter.split(".")
    last = parts.index("parametrizations") if "parametrizations" in parts else len(parts) - 1
    for cut in range(last, -1, -1):
        yield ".".join(parts[:cut]) or "(model)", ".".join(parts[cut:])
