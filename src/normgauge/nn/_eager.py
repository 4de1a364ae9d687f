"""When the fast paths may run: plain autograd on real tensors; transforms and the compiler get the composite form."""

from __future__ import annotations

import torch


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
