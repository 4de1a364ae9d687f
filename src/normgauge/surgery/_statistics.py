"""Classes put over a normalizer's own class: frozen, guarded. They copy, pickle and count as instances of it."""

from __future__ import annotations

from typing import Any, Self

import torch
from torch import Tensor, nn

_CLASSES: dict[tuple[type, type], type[nn.Module]] = {}
_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


class Frozen:
    """Stays in evaluation mode whatever `train()` says."""

    def train(self, mode: bool = True) -> Self:
        """Stay as it is."""
        return super().train(False)  # type: ignore[misc]


class Guarded:
    """Keeps its statistics from batches that are not finite, and from the second pass of activation checkpoints."""

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Normalize; write statistics back only where they may be."""
        module: Any = self
        kept = {name: module._buffers[name] for name in _STATISTICS if module._buffers.get(name) is not None}
        if not module.training or not kept:
            return super().forward(*args, **kwargs)  # type: ignore[misc]
        try:
            for name, value in kept.items():
                setattr(module, name, value.clone())
            result = super().forward(*args, **kwargs)  # type: ignore[misc]
            new = {name: getattr(module, name) for name in kept}
        finally:
            for name, value in kept.items():
                setattr(module, name, value)
        recomputing = torch._C._current_graph_task_id() != -1  # a forward inside of a backward pass
        if not recomputing:
            good = torch.stack([value.isfinite().all() for value in new.values()]).all()
            with torch.no_grad():
                for name, value in kept.items():  # no branch on a value: nothing waits for the device
                    value.copy_(torch.where(good, new[name], value))
        return result


def class_over(layer: type, base: type[nn.Module]) -> type[nn.Module]:
    """Return `base` under `layer`, called Frozen... or Guarded...; what it pickles is the two of them."""

    def reduce(self: nn.Module, protocol: int) -> Any:
        return _rebuild, (layer, base), self.__dict__

    if (layer, base) not in _CLASSES:
        _CLASSES[layer, base] = type(f"{layer.__name__}{base.__name__}", (layer, base), {"__reduce_ex__": reduce})
    return _CLASSES[layer, base]


def _rebuild(layer: type, base: type[nn.Module]) -> nn.Module:
    made = class_over(layer, base)
    return made.__new__(made)


def has_statistics(module: nn.Module) -> bool:
    """Tell whether a normalizer keeps statistics of what it has seen."""
    return isinstance(getattr(module, "running_mean", None), Tensor) and isinstance(
        getattr(module, "running_var", None), Tensor
    )
