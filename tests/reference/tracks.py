"""Everything a measurement must leave as it was, written down naively."""

import random

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
                key: (id(value), value.clone() if isinstance(value, torch.Tensor) else repr(value))
                for key, value in vars(module).items()
                if key not in ("_parameters", "_buffers", "_modules")
            }
            for name, module in model.named_modules()
        },
        "random": (torch.get_rng_state(), random.getstate(), str(np.random.get_state())),
    }


def same(first, second):
    """Compare two pictures bit for bit."""
    if isinstance(first, torch.Tensor):
        return isinstance(second, torch.Tensor) and first.dtype == second.dtype and torch.equal(first, second)
    if isinstance(first, dict):
        return first.keys() == second.keys() and all(same(first[key], second[key]) for key in first)
    if isinstance(first, (list, tuple)):
        return len(first) == len(second) and all(same(a, b) for a, b in zip(first, second, strict=True))
    return first == second
