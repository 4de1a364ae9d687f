"""Run any function of a model on functional parameters and cloned buffers."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import TypeVar

import torch
from torch import Tensor, nn
from torch.func import functional_call

from normgauge.objective._snapshot import Alias

T = TypeVar("T")


class _Bound(nn.Module):
    """Lets `functional_call` run any function of the model, not only its `forward`."""

    def __init__(self, model: nn.Module) -> None:
        super().__init__()
        self.model = model

    def forward(self, body: Callable[[nn.Module], T]) -> T:
        """Run the function."""
        return body(self.model)


def call_purely(
    model: nn.Module,
    values: Mapping[str, Tensor],
    body: Callable[[nn.Module], T],
    dtype: torch.dtype | None = None,
    *,
    aliases: Sequence[Alias] = (),
) -> T:
    """Return `body(model)` with the given parameter values, the model's own elsewhere; they and buffers are cloned.

    Some forwards write into parameters (`nn.Embedding(max_norm=1.0)`), so nothing of the model's is handed out.

    Args:
        model: the module; its parameters and buffers are not touched.
        values: parameters by name; gradients flow to those that require them, and these are not cloned.
        body: any function of the model.
        dtype: if given, floating parameters and buffers are converted to it.
        aliases: from `untouched`: lists and dicts in which the model keeps parameters besides, given their values too.
    """
    names = {id(own): name for name, own in (*model.named_parameters(), *model.named_buffers())}
    state = {name: values.get(name, own.detach()) for name, own in model.named_parameters()}
    state = {name: value if value.requires_grad else value.clone() for name, value in state.items()}
    tie = next((0.0 * value.reshape(-1)[0] for value in values.values() if _is_batched(value)), None)
    for name, buffer in model.named_buffers():
        # Under vmap BatchNorm writes batched statistics in place, so the clone must be batched as well.
        state[name] = buffer + tie if tie is not None and buffer.is_floating_point() else buffer.clone()
    if dtype is not None:
        state = {name: value.to(dtype) if value.is_floating_point() else value for name, value in state.items()}
    for put, place, own in aliases:
        put(place, state[names[id(own)]])
    return functional_call(_Bound(model), {f"model.{name}": value for name, value in state.items()}, (body,))


def _is_batched(value: Tensor) -> bool:
    return torch._C._functorch.is_batchedtensor(value)
