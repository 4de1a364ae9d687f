"""Kernels of torch whose second derivative is missing or wrong, replaced by compositions that have it."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.overrides import TorchFunctionMode


def composed_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / |v| with the norm over all axes but `dim`, from differentiable operations.

    torch's fused kernel keeps |v| as a constant when it is differentiated twice: the Hessian is then neither right
    nor symmetric (15% off on a small net; `docs/dev/torch-second-derivatives.md`).
    """
    return v * (g / torch.norm_except_dim(v, 2, dim))


class TwiceDifferentiable(TorchFunctionMode):
    """While active, calls of kernels with wrong second derivatives run their composition instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        """Run `func`, or its composition."""
        if func is torch._weight_norm:
            return composed_weight_norm(*args, **(kwargs or {}))
        return func(*args, **(kwargs or {}))
