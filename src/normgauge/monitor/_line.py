"""The loss along an optimizer's next step, with one moved tensor at a time."""

from __future__ import annotations

import copy
from collections import defaultdict
from collections.abc import Callable, Mapping
from typing import Any

import torch
from torch import Tensor, nn
from torch.overrides import TorchFunctionMode

from normgauge.measure.curvature.edge import critical_factor
from normgauge.monitor._blocks import Place
from normgauge.monitor._look import unchanged

# what is read of a parameter without its values
_SHAPES = (
    "shape",
    "dtype",
    "device",
    "ndim",
    "requires_grad",
    "is_cuda",
    "is_sparse",
    "is_quantized",
    "is_nested",
    "layout",
)
_ASKS = {getattr(getattr(Tensor, name), "__get__", None) for name in _SHAPES} | {
    *(Tensor.size, Tensor.dim, Tensor.numel, Tensor.is_floating_point, Tensor.element_size, Tensor.__len__)
}


class Moved(TorchFunctionMode):
    """While active, every function that is given a parameter is given `move(parameter)` instead."""

    def __init__(self, move: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self._move = move

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func` on moved parameters."""
        if func in _ASKS:
            return func(*args, **(kwargs or {}))
        return func(*self._swap(args), **self._swap(kwargs or {}))

    def _swap(self, given: Any) -> Any:
        if isinstance(given, nn.Parameter):
            return self._move(given)
        if isinstance(given, dict):
            return {key: self._swap(value) for key, value in given.items()}
        if type(given) in (tuple, list):
            return type(given)(self._swap(value) for value in given)
        return given


def next_value(place: Place, gradient: Tensor) -> Tensor:
    """Return the parameter after the optimizer's next step, by a copy that owns this one alone."""
    alone = nn.Parameter(place.value.detach().clone())
    alone.grad = gradient.clone()
    twin: Any = object.__new__(type(place.optimizer))
    usual = {name: value for name, value in vars(place.optimizer).items() if name != "step"}
    twin.__dict__ = {name: type(value)() if name.endswith("_hooks") else value for name, value in usual.items()}
    twin.param_groups = [{**copy.deepcopy({k: v for k, v in place.group.items() if k != "params"}), "params": [alone]}]
    twin.state = defaultdict(dict, {alone: copy.deepcopy(place.optimizer.state.get(place.value, {}))})
    type(place.optimizer).step(twin)
    return alone.detach()


def critical_multiple(
    model: nn.Module, loss: Callable[[], Tensor], places: Mapping[int, Place], start: float = 1.0
) -> float:
    """Return the multiple of the optimizer's next step at which it comes to raise the loss, searched from `start`.

    `normgauge.measure.curvature.edge.critical_rate` over the rate, without its copies: a gradient is held, and of the
    moved parameters the one that is being read. Dropout is off.

    Kind: estimate, to 10 %. Cost: a gradient and about six forwards.
    """
    values = [place.value for place in places.values()]
    with unchanged(model, training=True):
        with torch.enable_grad():
            base = loss()
        gradient = dict(zip(places, torch.autograd.grad(base, values, materialize_grads=True), strict=True))
        still = True

        def moved(factor: float, parameter: Tensor) -> Tensor:
            nonlocal still
            place = places.get(id(parameter))
            if place is None:
                return parameter
            step = next_value(place, gradient[id(parameter)]) - place.value.detach()
            still = still and not bool(step.any())
            return place.value.detach() + factor * step

        def loss_at(factor: float) -> float:
            with Moved(lambda parameter: moved(factor, parameter)):
                value = float(loss())
            return value if value == value else float("inf")

        multiple = critical_factor(loss_at, float(base), start)
    return float("nan") if still else multiple
