"""Everything a measurement must leave as it was, written down naively."""

import random
from collections import deque
from types import SimpleNamespace

import numpy as np
import torch


def tracks(model):
    """Return a comparable picture of a model and of the global random states."""
    parameters = dict(model.named_parameters())
    return {
        "state": {name: value.clone() for name, value in model.state_dict().items()},
        "identity": {name: id(value) for name, value in [*parameters.items(), *model.named_buffers()]},
        "grads": {name: None if p.grad is None else p.grad.clone() for name, p in parameters.items()},
        "requires": {name: p.requires_grad for name, p in parameters.items()},
        "flags": {name: module.training for name, module in model.named_modules()},
        "hooks": {
            name: [list(getattr(module, kind)) for kind in vars(module) if kind.endswith("_hooks")]
            for name, module in model.named_modules()
        },
        "plain": {
            name: {
                key: (id(value), picture(value))
                for key, value in vars(module).items()
                if key not in ("_parameters", "_buffers", "_modules")
            }
            for name, module in model.named_modules()
        },
        "registered": {
            name: [(kind, list(vars(module)[kind])) for kind in ("_parameters", "_buffers", "_modules")]
            for name, module in model.named_modules()
        },
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
    }


def picture(value):
    """Copy what hangs on a model, as deep as it goes, into something comparable."""
    if isinstance(value, torch.Tensor):
        return value.detach().clone()
    if isinstance(value, np.ndarray):
        return torch.from_numpy(value.copy())
    if isinstance(value, torch.Generator):
        return value.get_state()
    if isinstance(value, np.random.Generator):
        return str(value.bit_generator.state)
    if isinstance(value, random.Random):
        return value.getstate()
    if isinstance(value, dict):
        return {key: picture(item) for key, item in value.items()}
    if isinstance(value, (list, tuple, deque)):
        return [picture(item) for item in value]
    if isinstance(value, torch.nn.Module):
        return [value.training, picture(value.state_dict())]
    if isinstance(value, (SimpleNamespace, Kept)):
        return picture(vars(value))
    return repr(value)


class Kept:
    """An object of a user's class that a model may keep."""

    def __init__(self, **values):
        vars(self).update(values)


def same(first, second):
    """Compare two pictures bit for bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return first == second
