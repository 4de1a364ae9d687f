"""When the fast paths may run: plain autograd on real tensors; transforms and the compiler get the composite form."""

from __future__ import annotations

from collections.abc import Iterator

import torch
from torch import Tensor

_CHUNK = 1 << 21  # entries: temporaries small enough to be reused, chunks few enough that threads rarely wait


def plain_autograd() -> bool:
    """Return whether neither torch.func, forward-mode differentiation nor torch.compile is at work.

    The fast paths are `torch.autograd.Function`s that call fused kernels; those know nothing of tangents and batching
    rules, so that under a transform the same map is written in ordinary operators.
    """
    return not (
        torch.compiler.is_compiling()
        or torch._C._are_functorch_transforms_active()
        or torch.autograd.forward_ad._current_level >= 0
    )


def sample_chunks(x: Tensor) -> Iterator[slice]:
    """Cut the batch axis into slices with small temporaries."""
    per_sample = max(1, x.numel() // max(1, x.shape[0]))
    step = max(1, _CHUNK // per_sample)
    for start in range(0, x.shape[0], step):
        yield slice(start, start + step)
