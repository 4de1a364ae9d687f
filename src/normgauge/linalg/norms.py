"""Euclidean norms of tensors and of dicts of tensors, as fast as torch's own reduction and safe at the edges."""

import math
from collections.abc import Mapping

import torch
from torch import Tensor


def norm(values: Tensor) -> float:
    """Return the Euclidean norm of all entries.

    torch's reduction in the tensor's own type is some eighty times faster than one in float64; its squares leave
    the range of float32 for norms near 1e-19 or 1e19, where float64 takes over. Half precision is widened.

    Examples:
        >>> norm(torch.full((4,), 1e-25)), norm(torch.tensor([3.0, 4.0]))  # doctest: +ELLIPSIS
        (2.0000...e-25, 5.0)
    """
    value = values.detach()
    if value.dtype in (torch.float16, torch.bfloat16):
        value = value.float()
    length = float(torch.linalg.vector_norm(value))
    if value.dtype != torch.float64 and not 1e-15 < length < 1e15:
        length = float(torch.linalg.vector_norm(value.double()))
    return length


def joint_norm(values: Mapping[str, Tensor]) -> float:
    """Return the Euclidean norm over all tensors of a dict."""
    return math.hypot(*(norm(value) for value in values.values())) if values else 0.0
