"""One model made equal to another in place: its own modules and parameters stay where shapes and classes allow it."""

from __future__ import annotations

import torch
from torch import nn

from normgauge.network import exchange

_REGISTERED = ("_parameters", "_buffers", "_modules")


@torch.no_grad()
def transplant(source: nn.Module, target: nn.Module) -> nn.Module:
    """Give `target` the structure and values of `source` and return it; `source` must not be used afterwards."""
    _copy_own(source, target)
    own = dict(target.named_modules())
    for name, module in list(source.named_modules(remove_duplicate=False)):
        there = own.get(name)
        if not name or any(name.startswith(f"{taken}.") for taken in own if own[taken] is None):
            continue
        akin = there is not None and (isinstance(module, type(there)) or isinstance(there, type(module)))
        if there is None or not akin:
            exchange(target, name, module)
            own[name] = None
        else:
            _copy_own(module, there)
            exchange(target, name, there)
    ties = {id(value): name for name, value in source.named_parameters()}
    for name, value in source.named_parameters(remove_duplicate=False):
        if ties[id(value)] != name:
            _assign(target, name, target.get_parameter(ties[id(value)]))
    return target


def _assign(model: nn.Module, name: str, value: nn.Parameter) -> None:
    parent, _, child = name.rpartition(".")
    model.get_submodule(parent)._parameters[child] = value


def _copy_own(source: nn.Module, target: nn.Module) -> None:
    """Copy what a module has besides its children; a parameter of the same shape stays the same object."""
    attributes = {name: value for name, value in vars(source).items() if name not in _REGISTERED}
    for name in [name for name in vars(target) if name not in _REGISTERED and name not in attributes]:
        del target.__dict__[name]
    target.__dict__.update(attributes)
    target.__class__ = source.__class__
    for kind in ("_parameters", "_buffers"):
        there, new = getattr(target, kind), getattr(source, kind)
        for name in [name for name in there if name not in new]:
            del there[name]
        for name, value in new.items():
            old = there.get(name)
            if old is not None and value is not None and old.shape == value.shape and old.dtype == value.dtype:
                old.data.copy_(value)
                old.requires_grad_(value.requires_grad)
            else:
                there[name] = value
    for name in [name for name in target._modules if name not in source._modules]:
        del target._modules[name]
