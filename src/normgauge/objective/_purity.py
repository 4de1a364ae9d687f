"""Leave no trace: run a model in a mode and give back its flags, attributes and random state as they were."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from typing import Any, Literal

import torch
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel

from normgauge.objective._composites import TwiceDifferentiable
from normgauge.rng import preserved_rng, seed_everything

Mode = Literal["train", "eval"]

# nn.Module's own dictionaries: functional_call swaps and restores them, hooks in them are the user's.
_INTERNAL = {"_parameters", "_buffers", "_modules"}


class _ModuleState:
    """The plain attributes of one module, as they were: references, contents of containers, tensor values."""

    def __init__(self, module: nn.Module) -> None:
        self.module = module
        self.attributes = {name: value for name, value in module.__dict__.items() if name not in _INTERNAL}
        self.contents = {
            name: value.copy() for name, value in self.attributes.items() if isinstance(value, (list, dict, set))
        }
        self.tensors = {
            name: (value._version, value.detach().clone())
            for name, value in self.attributes.items()
            if isinstance(value, Tensor) and not value.is_inference()
        }

    def restore(self) -> None:
        own = self.module.__dict__
        for name in [name for name in own if name not in self.attributes and name not in _INTERNAL]:
            del own[name]
        for name, value in self.attributes.items():
            if own.get(name, own) is not value:
                own[name] = value
        for name, content in self.contents.items():
            _refill(self.attributes[name], content)
        for name, (version, value) in self.tensors.items():
            if self.attributes[name]._version != version:
                with torch.no_grad():
                    self.attributes[name].copy_(value)


def _refill(container: Any, content: Any) -> None:
    if isinstance(container, list):
        if len(container) != len(content) or any(a is not b for a, b in zip(container, content, strict=True)):
            container[:] = content
    elif isinstance(container, dict):
        if container.keys() != content.keys() or any(container[key] is not content[key] for key in content):
            container.clear()
            container.update(content)
    elif container != content:
        container.clear()
        container.update(content)


@contextmanager
def untouched(model: nn.Module, mode: Mode, seed: int) -> Iterator[None]:
    """Put `model` into `mode` with a fixed random stream; restore flags, attributes and random state on exit.

    Parameters and buffers are not saved here: the caller runs the model on functional copies of them.
    The fixed stream makes dropout draw the same mask at every evaluation.
    """
    states = [_ModuleState(module) for module in model.modules()]
    with preserved_rng():
        seed_everything(seed)
        try:
            model.train(mode == "train")
            yield
        finally:
            for state in states:
                state.restore()


@contextmanager
def twice_differentiable() -> Iterator[None]:
    """Choose kernels that have second derivatives: math attention, composed weight norm, no cuDNN recurrences."""
    with ExitStack() as stack:
        stack.enter_context(TwiceDifferentiable())
        stack.enter_context(sdpa_kernel(SDPBackend.MATH))
        if torch.cuda.is_initialized():
            stack.enter_context(torch.backends.cudnn.flags(enabled=False))
        yield
