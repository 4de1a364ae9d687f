"""Another arithmetic: forwards without the eps of their normalizers, and in double precision all the way."""

import inspect
from collections.abc import Callable, Iterable, Iterator, MutableMapping
from contextlib import contextmanager
from functools import cache, partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode
from torch.utils.weak import WeakTensorKeyDictionary

from normgauge.network._call_order import replaced

TINY = 1e-30  # instead of eps: 0 / 0 stays 0, and every variance above 1e-14 is untouched in float64
LARGEST = 1e-2  # a constant above this beside a variance is part of the function, not a guard

# Where eps stands in torch's own kernels, which have no signature to ask.
_PLACES: dict[Any, int] = {
    torch.layer_norm: 4,
    torch.batch_norm: 7,
    torch.group_norm: 4,
    torch.instance_norm: 7,
    torch.rms_norm: 3,
    torch.native_batch_norm: 7,
    torch.native_layer_norm: 4,
}
_ADDITIONS = {torch.add, Tensor.add, Tensor.__add__, Tensor.__radd__}
_GUARDS = {torch.clamp_min, Tensor.clamp_min, torch.clamp, Tensor.clamp, torch.maximum, Tensor.maximum}
_ROOTS = {torch.sqrt, Tensor.sqrt, torch.rsqrt, Tensor.rsqrt, torch.reciprocal, Tensor.reciprocal}
_POWERS = {torch.pow, Tensor.pow, Tensor.__pow__}
_QUOTIENTS = {torch.div, Tensor.div, torch.true_divide, Tensor.true_divide, Tensor.__truediv__}
_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)


class WithoutEps(TorchFunctionMode):
    """While active, normalizers add nothing to the variance, norm or deviation they divide by.

    The `eps` of torch's normalizations, of `F.normalize`, and of everything that takes an argument of that name is
    replaced by 1e-30. Norms written by hand are seen by what they do: a small constant added to a tensor, or a small
    lower limit on it, goes where that tensor is then divided by or its root is taken, and nowhere else; `removed`
    counts them. Stored statistics are constants of the network, and so is the eps beside them: it stays.

    Examples:
        >>> x = torch.tensor([[1.0, 3.0]], dtype=torch.float64) * 1e-6
        >>> with WithoutEps() as mode:
        ...     round(F.layer_norm(x, (2,)).norm().item(), 6)
        ...     round((x / torch.sqrt(x.square().sum() + 1e-5)).norm().item(), 6)
        1.414214
        1.0
        >>> mode.removed
        2
    """

    def __init__(self, buffers: Iterable[Tensor] = ()) -> None:
        super().__init__()
        self.removed = 0
        self._stored = {buffer.untyped_storage().data_ptr() for buffer in buffers}
        self._guarded: MutableMapping[Tensor, Callable[[], Tensor]] = WeakTensorKeyDictionary()

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        if func in _ADDITIONS or func in _GUARDS:
            return self._note(func, args, kwargs)
        if func in _ROOTS or func in _POWERS:
            return func(self._bare(args[0]), *args[1:], **kwargs) if args else func(**kwargs)
        if func in _QUOTIENTS and len(args) > 1:
            return func(args[0], self._bare(args[1]), *args[2:], **kwargs)
        if func is Tensor.__rtruediv__:
            return func(self._bare(args[0]), *args[1:], **kwargs)
        if func in (F.batch_norm, torch.batch_norm) and not _asks_batch(func, args, kwargs):
            return func(*args, **kwargs)
        if (place := _PLACES.get(func)) is not None:
            self.removed += 1
            args = (*args[:place], TINY, *args[place + 1 :]) if len(args) > place else args
            return func(*args, **(kwargs if len(args) > place else {**kwargs, "eps": TINY}))
        signature = _with_eps(func)
        if signature is not None:
            self.removed += 1
            call = signature.bind(*args, **kwargs)
            call.arguments["eps"] = TINY
            return func(*call.args, **call.kwargs)
        return func(*args, **kwargs)

    def _note(self, func: Any, args: Any, kwargs: Any) -> Any:
        """Run an addition or a lower limit; remember what it would be without a small constant."""
        result = func(*args, **kwargs)
        operands = (*args, *(kwargs[name] for name in ("other", "min") if name in kwargs))
        constants = [x for x in operands if _small(x)]
        tensors = [x for x in operands if isinstance(x, Tensor)]
        plain = len(operands) == 2 and len(tensors) == len(constants) == 1 and not set(kwargs) - {"other", "min"}
        if plain and isinstance(result, Tensor) and tensors[0].untyped_storage().data_ptr() not in self._stored:
            change = torch.add if func in _ADDITIONS else torch.clamp_min
            self._guarded[result] = partial(change, tensors[0], TINY)
        return result

    def _bare(self, value: Any) -> Any:
        """Return a tensor without the constant that was added to it."""
        if not isinstance(value, Tensor) or value not in self._guarded:
            return value
        self.removed += 1
        return self._guarded[value]()


def _asks_batch(func: Any, args: Any, kwargs: Any) -> bool:
    """Tell whether a batch normalization takes the statistics of the batch."""
    return bool(kwargs["training"] if "training" in kwargs else args[5] if len(args) > 5 else False)


def _small(value: Any) -> bool:
    return isinstance(value, float) and 0 < value <= LARGEST


@contextmanager
def without_eps(model: nn.Module) -> Iterator[WithoutEps]:
    """Run the body without eps: numbers of that name held by modules are set to nothing too, and put back."""
    moving = [m for m in model.modules() if m.training or next(m.buffers(recurse=False), None) is None]
    named = ((module, name, value) for module in moving for name, value in vars(module).items())
    changed = [(module, name, value) for module, name, value in named if "eps" in name and _small(value)]
    try:
        for module, name, _ in changed:
            object.__setattr__(module, name, TINY)
        with WithoutEps(model.buffers()) as mode:
            mode.removed += len(changed)
            yield mode
    finally:
        for module, name, value in changed:
            object.__setattr__(module, name, value)


@cache
def _with_eps(func: Any) -> inspect.Signature | None:
    """Return the signature of a torch function written in Python that takes `eps`."""
    if getattr(func, "__module__", None) != F.__name__:
        return None
    try:
        signature = inspect.signature(func)
    except (TypeError, ValueError):
        return None
    return signature if "eps" in signature.parameters else None


class KeepDouble(TorchFunctionMode):
    """While active, whoever asks for a narrower floating type gets float64.

    Norms and softmax of Hugging Face models compute in float32 whatever the model's type is: in float64 their outputs
    are good to 1e-7 only. This answers `x.to(torch.float32)`, `x.float()` and `softmax(x, dtype=torch.float32)` with
    float64.

    Examples:
        >>> with KeepDouble():
        ...     torch.ones(1, dtype=torch.float64).float().dtype, torch.zeros(1, dtype=torch.float32).dtype
        (torch.float64, torch.float64)
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        args, kwargs = replaced((args, kwargs or {}), torch.dtype, lambda t: torch.float64 if t in _NARROW else t)
        return (Tensor.double if func in _NARROWING else func)(*args, **kwargs)


def double(tree: Any) -> Any:
    """Return nested inputs with floating tensors in float64."""
    return replaced(tree, Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
