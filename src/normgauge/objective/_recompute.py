"""Graphs that keep only what passes between the blocks of a model; the inside of a block is computed again."""

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.autograd import Function
from torch.func import functional_call

from normgauge.objective._composites import ClipsNothingInPlace, TwiceDifferentiable
from normgauge.objective._diagnose import check_differentiable, not_twice_differentiable
from normgauge.rng import save_global_states

CONSTANTS = (type(None), bool, int, float, str)
SHARE = 0.25  # of what all modules without parts write: the most that a block with parts may


class BlockFinder:
    """Notes in a forward pass which modules may be computed again, and how much they write.

    A block is called once, takes tensors and constants, leaves them as they are, and gives one new tensor.
    """

    def __init__(self, model: nn.Module) -> None:
        self._written: dict[nn.Module, int] = {}
        self._unfit, self._versions = {model}, []  # type: tuple[set[nn.Module], list[list[Any]]]
        for module in model.modules():
            module.register_forward_pre_hook(self._enter, with_kwargs=True)
            module.register_forward_hook(self._leave, with_kwargs=True)

    def _enter(self, _: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self._versions.append([value._version for value in (*args, *kwargs.values()) if isinstance(value, Tensor)])

    def _leave(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any], out: Any) -> None:
        given = (*args, *kwargs.values())
        fit = isinstance(out, Tensor) and all(isinstance(value, (Tensor, *CONSTANTS)) for value in given)
        untouched = self._versions.pop() == [value._version for value in given if isinstance(value, Tensor)]
        once = module not in self._written and not any(out is value for value in given)
        if not (fit and untouched and once) or torch.is_autocast_enabled():
            self._unfit.add(module)
        leaf = isinstance(out, Tensor) and not any(True for _ in module.children())
        self._written[module] = out.numel() * out.element_size() if leaf else 0

    def blocks(self) -> list[nn.Module]:
        """Return the outermost modules with parameters that are fit, and small or without parts."""
        most, chosen, covered = SHARE * sum(self._written.values()), [], set[nn.Module]()
        for module in sorted(self._written, key=lambda each: -sum(1 for _ in each.modules())):  # the whole before parts
            inside = [self._written.get(part, 0) for part in module.modules()]
            small = len(inside) == 1 or sum(inside) <= most
            if small and module not in self._unfit | covered and any(True for _ in module.parameters()):
                chosen.append(module)
                covered.update(module.modules())
        return chosen


def forget_inside(modules: Iterable[nn.Module]) -> None:
    """Have calls of these modules keep nothing but their inputs, until the caller puts their attributes back."""
    for module in modules:
        module._compiled_call_impl = _Forgetful(module)  # where torch looks for another way to call a module


class _Forgetful:
    def __init__(self, module: nn.Module) -> None:
        self.module, self.usual = module, module._compiled_call_impl

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        self.module._compiled_call_impl = self.usual
        try:
            call = _Call(self.module, args, kwargs)
            return _Block.apply(call, *call.given, *(value for _, value in self.module.named_parameters()))
        finally:
            self.module._compiled_call_impl = self


class _Call:
    """One call of a block, with what it takes to repeat it: names, buffers and random numbers as they were."""

    def __init__(self, module: nn.Module, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> None:
        self.module, self._names, values = module, list(kwargs), (*args, *kwargs.values())
        self._constants = [None if isinstance(value, Tensor) else (value,) for value in values]
        self.given = [value for value in values if isinstance(value, Tensor)]
        self._parameters = [name for name, _ in module.named_parameters()]
        self._buffers = {name: value.clone() for name, value in module.named_buffers()}
        self._randomness = save_global_states()

    def make(self, given: Iterable[Tensor], state: Mapping[str, Tensor]) -> Any:
        """Call the module on tensors in the places of those it was first given."""
        tensors = iter(given)
        values = [next(tensors) if constant is None else constant[0] for constant in self._constants]
        count = len(values) - len(self._names)
        named = dict(zip(self._names, values[count:], strict=True))
        return functional_call(self.module, dict(state), tuple(values[:count]), named)

    def repeat(self, tensors: Sequence[Tensor]) -> Any:
        """Return the output for inputs and parameters; random streams stay where they are."""
        count, put_back = len(tensors) - len(self._parameters), save_global_states()
        state = dict(zip(self._parameters, tensors[count:], strict=True))
        state |= {name: value.clone() for name, value in self._buffers.items()}
        try:
            self._randomness()
            with ClipsNothingInPlace(), TwiceDifferentiable():  # the backward may run in another thread
                return self.make(tensors[:count], state)
        finally:
            put_back()

    def slopes(self, needs: list[bool], slope: Tensor, tensors: Any, *, twice: bool) -> tuple[list[Tensor], Any]:
        """Return fresh leaves for what needs a slope, and these slopes; with a graph for `twice`."""
        fresh = [value.detach().requires_grad_(need) for value, need in zip(tensors, needs, strict=True)]
        leaves = [value for value in fresh if value.requires_grad]
        with torch.enable_grad():
            out = self.repeat(fresh)
            return leaves, torch.autograd.grad(out, leaves, slope, create_graph=twice, allow_unused=True)


class _Block(Function):
    """y = f(x, w), with x and w kept."""

    @staticmethod
    def forward(ctx: Any, call: _Call, *tensors: Tensor) -> Any:
        ctx.call = call
        ctx.save_for_backward(*tensors)
        call.given = []  # kept by torch from here on
        return call.make(tensors, {})

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        needs = list(ctx.needs_input_grad[1:])
        return None, *_BlockSlopes.apply(ctx.call, needs, slopes[0], *ctx.saved_tensors)


class _BlockSlopes(Function):
    """(x, w, dy) -> (dx, dw), with x, w and dy kept."""

    @staticmethod
    def forward(ctx: Any, call: _Call, needs: list[bool], slope: Tensor, *tensors: Tensor) -> Any:
        ctx.call, ctx.needs = call, needs
        ctx.set_materialize_grads(False)
        ctx.save_for_backward(slope, *tensors)
        found = iter(call.slopes(needs, slope, tensors, twice=False)[1])
        return tuple(next(found) if need else None for need in needs)

    @staticmethod
    def backward(ctx: Any, *directions: Tensor | None) -> Any:
        slope, *tensors = ctx.saved_tensors
        slope = slope.detach().requires_grad_()
        leaves, slopes = ctx.call.slopes(ctx.needs, slope, tensors, twice=True)
        wanted = [direction for direction, need in zip(directions, ctx.needs, strict=True) if need]
        pairs = [(s, d) for s, d in zip(slopes, wanted, strict=True) if s is not None and d is not None]
        if any(not s.requires_grad for s, _ in pairs):  # a slope is linear in `slope`, so it has a graph
            raise not_twice_differentiable(type(ctx.call.module).__name__, "a gradient that comes without a graph")
        check_differentiable(type(ctx.call.module).__name__, [s for s, _ in pairs])
        if not pairs:
            return (None,) * (3 + len(tensors))
        bent, ahead = (list(side) for side in zip(*pairs, strict=True))
        found, *rest = torch.autograd.grad(bent, [slope, *leaves], ahead, allow_unused=True)
        others = iter(rest)
        return None, None, found, *(next(others) if need else None for need in ctx.needs)
