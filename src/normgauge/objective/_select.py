"""Which parameters are the variables: a glob, names, or a predicate over the trainable ones."""

from collections.abc import Callable, Iterable, Mapping
from fnmatch import fnmatchcase

from torch import Tensor, nn

from normgauge.errors import InputError, ModelError, unknown_name

Selection = str | Iterable[str] | Callable[[str, Tensor], bool] | None


def select_parameters(model: nn.Module, selection: Selection) -> tuple[str, ...]:
    """Return the names of the chosen trainable parameters, in the model's order (tied ones once).

    The selection is `None` for all; a glob such as `"layer1.*"`, names or globs; or `(name, parameter) -> bool`.
    """
    every = dict(model.named_parameters())
    trainable = {name: parameter for name, parameter in every.items() if parameter.requires_grad}
    if not trainable:
        description = f"{len(every)} parameters, all frozen" if every else "none"
        rule, step = "the model must have a trainable parameter", "Set requires_grad_(True) on what should vary"
        raise ModelError(f"Objective({type(model).__name__})", rule, description, step)
    _check_values(model, every)
    chosen = tuple(trainable) if selection is None else tuple(_matching_names(model, every, trainable, selection))
    if not chosen:
        rule = "parameters= must select at least one trainable parameter"
        step = f"Trainable names begin with {', '.join(list(trainable)[:4])}"
        raise InputError("Objective", rule, f"{selection!r}, which selects none of {len(trainable)}", step)
    return chosen


def _matching_names(
    model: nn.Module, every: Mapping[str, Tensor], trainable: Mapping[str, Tensor], selection: Selection
) -> Iterable[str]:
    if callable(selection):
        return [name for name, parameter in trainable.items() if selection(name, parameter)]
    patterns = [selection] if isinstance(selection, str) else list(selection or ())
    first: dict[int, str] = {}  # every name, tied ones included, leads to the first name of the same tensor
    named = model.named_parameters(remove_duplicate=False)
    aliases = {name: first.setdefault(id(parameter), name) for name, parameter in named}
    wanted: set[str] = set()
    for pattern in patterns:
        if not any(mark in pattern for mark in "*?["):
            if pattern not in aliases:
                raise unknown_name("parameter", pattern, every)
            wanted.add(aliases[pattern])
        else:
            wanted.update(first for name, first in aliases.items() if fnmatchcase(name, pattern))
    return [name for name in trainable if name in wanted]


def _check_values(model: nn.Module, parameters: Mapping[str, Tensor]) -> None:
    subject, places = f"Objective({type(model).__name__})", dict[str, str]()
    for name, parameter in parameters.items():
        places.setdefault(str(parameter.device), name)
    if len(places) > 1:
        devices = ", ".join(f"{name} on {device}" for device, name in places.items())
        raise ModelError(subject, "all parameters must be on one device", devices, "Call model.to(device) first")
    for name, parameter in parameters.items():
        lazy = isinstance(parameter, nn.parameter.UninitializedParameter)
        if lazy or parameter.is_meta:
            got = f"{name!r}, " + ("which has no shape yet" if lazy else "on the meta device")
            step = "Call the model once" if lazy else "Call model.to_empty(device='cpu') and load its weights"
            raise ModelError(subject, "parameters must have values", got, step)
