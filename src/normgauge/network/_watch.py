"""Calls of submodules and of torch's operations, reported while a model runs; nothing stays behind."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

from normgauge.objective import tensors


@dataclass(frozen=True, slots=True)
class ModuleCall:
    """One call of a submodule.

    Attributes:
        name: of the module, "(model)" for the model itself.
        module: called.
        args: given by place.
        kwargs: given by name.
        output: what it returned; `None` while it is being entered.
        leaf: whether no other submodule was called inside.
    """

    name: str
    module: nn.Module
    args: tuple[Any, ...]
    kwargs: dict[str, Any]
    output: Any = None
    leaf: bool = True

    @property
    def given(self) -> Tensor | None:
        """The first tensor among its arguments."""
        return first_tensor((self.args, self.kwargs))

    @property
    def made(self) -> Tensor | None:
        """The first tensor of its output."""
        return first_tensor(self.output)


Report = Callable[[ModuleCall], object]


def first_tensor(tree: Any) -> Tensor | None:
    """Return the first tensor of a module's output: itself, or inside a tuple, list, mapping or Hugging Face output."""
    return next(tensors(tree), None)


@contextmanager
def watched(
    model: nn.Module, called: Report, entering: Report | None = None, *, inside: bool = False
) -> Iterator[None]:
    """Report every call of a submodule to `called`, in order of completion, and to `entering` before it begins.

    Hooks are removed on exit, also after an exception; use it inside an evaluation that leaves no trace. `inside`
    leaves the model itself out: hooks cannot come and go while its own call is under way.
    """
    stack: list[bool] = []  # per open call: is it still a leaf?
    handles = []

    def hooks(name: str) -> tuple[Callable[..., None], Callable[..., None]]:
        def enter(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any]) -> None:
            if stack:
                stack[-1] = False
            stack.append(True)
            if entering is not None:
                entering(ModuleCall(name, module, args, kwargs))

        def leave(module: nn.Module, args: tuple[Any, ...], kwargs: dict[str, Any], output: Any) -> None:
            called(ModuleCall(name, module, args, kwargs, output, stack.pop() if stack else True))

        return enter, leave

    for name, module in model.named_modules():
        if inside and module is model:
            continue
        enter, leave = hooks(name or "(model)")
        handles.append(module.register_forward_pre_hook(enter, with_kwargs=True))
        handles.append(module.register_forward_hook(leave, with_kwargs=True))
    try:
        yield
    finally:
        for handle in handles:
            handle.remove()


class Operations(TorchDispatchMode):
    """Reports every operation torch carries out, below its functions, as `report(name, args, result)`."""

    def __init__(self, report: Callable[[str, tuple[Any, ...], Any], None]) -> None:
        super().__init__()
        self.report = report

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run the operation and report it."""
        result = func(*args, **(kwargs or {}))
        self.report(func.overloadpacket.__name__, args, result)
        return result
