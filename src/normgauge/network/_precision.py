"""Double precision all the way: forwards that narrow their numbers on their own are kept from it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode

from normgauge.network._call_order import replaced

_NARROW = (torch.float32, torch.float16, torch.bfloat16)
_NARROWING = (Tensor.float, Tensor.half, Tensor.bfloat16)


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
        """Run `func` with float64 in place of narrower types."""
        args, kwargs = replaced((args, kwargs or {}), torch.dtype, _widen)
        return (Tensor.double if func in _NARROWING else func)(*args, **kwargs)


def _widen(dtype: torch.dtype) -> torch.dtype:
    return torch.float64 if dtype in _NARROW else dtype


def double(tree: Any) -> Any:
    """Return nested inputs with floating tensors in float64."""
    return replaced(tree, Tensor, lambda tensor: tensor.double() if tensor.is_floating_point() else tensor)
