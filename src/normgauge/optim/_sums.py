"""Row sums, and arithmetic on one number per row: by numpy on a CPU, where a call costs a third of torch's.

An update of a block needs a few sums per row and some twenty operations on them. `numpy.vecdot` runs BLAS's dot product
over the rows without writing the products, in half the time of torch's norm, and small arrays are cheaper in numpy.
Elsewhere the same formulas run on tensors of shape `[rows, 1]`; numpy before 2.0 has no `vecdot` and gets torch's sums.
"""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor

#: A number per row, `[rows, 1]`: a numpy array for rows on a CPU, a tensor elsewhere.
Column = Any

_ON_HOST = (torch.float32, torch.float64)


def numbers(tensor: Tensor) -> Any:
    """Return what numpy or torch calculates with: the same memory as an array, or the tensor itself."""
    return tensor.numpy() if tensor.device.type == "cpu" and tensor.dtype in _ON_HOST else tensor


def sums(a: Any, b: Any) -> Column:
    """Return `<a, b>` per row of two arrays or two tensors."""
    if isinstance(a, Tensor):
        return (a * b).sum(1, keepdim=True)
    if hasattr(np, "vecdot"):
        return np.vecdot(a, b)[:, None]
    return torch.linalg.vecdot(torch.from_numpy(a), torch.from_numpy(b)).unsqueeze(1).numpy()


def column(values: Column) -> Tensor:
    """Return a column as a tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def functions(values: Column) -> Any:
    """Return the module with `sqrt`, `cos`, `where` and the like for a column."""
    return torch if isinstance(values, Tensor) else np


def vanishes(values: Column, bound: float) -> bool:
    """Tell whether all numbers are within a bound; `False` where they would have to be fetched from a device."""
    return not isinstance(values, Tensor) and bool(values.max() <= bound and values.min() >= -bound)
