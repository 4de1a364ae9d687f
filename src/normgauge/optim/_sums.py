"""Row sums, and arithmetic on one number per row: by numpy on a CPU, where a call costs a third of torch's.

An update of a block needs a few sums per row and a dozen operations on them. `numpy.vecdot` runs BLAS's dot product
over the rows without writing the products, which is twice as fast as torch's norm, and small arrays are cheaper in numpy.
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


def on_host(tensor: Tensor) -> bool:
    """Tell whether numbers of these rows are kept in numpy."""
    return tensor.device.type == "cpu" and tensor.dtype in _ON_HOST


def sums(a: Tensor, b: Tensor) -> Column:
    """Return `<a, b>` per row."""
    if not on_host(a):
        return (a * b).sum(1, keepdim=True)
    if hasattr(np, "vecdot"):
        return np.vecdot(a.numpy(), b.numpy())[:, None]
    return torch.linalg.vecdot(a, b).unsqueeze(1).numpy()


def numbers(tensor: Tensor) -> Column:
    """Return a tensor `[rows, 1]` as a column that shares its memory."""
    return tensor.numpy() if on_host(tensor) else tensor


def column(values: Column) -> Tensor:
    """Return a column as a tensor."""
    return values if isinstance(values, Tensor) else torch.from_numpy(values)


def functions(values: Column) -> Any:
    """Return the module with `sqrt`, `cos`, `sinc` for a column."""
    return torch if isinstance(values, Tensor) else np


def largest(values: Column) -> float:
    """Return the largest size in a column, infinite where it would have to be fetched from a device; nan if any is."""
    return float("inf") if isinstance(values, Tensor) else float(abs(values).max(initial=0.0))
