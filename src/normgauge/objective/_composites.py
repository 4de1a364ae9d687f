"""Kernels of torch whose derivative is missing or wrong, replaced by compositions that have it."""

import inspect
from collections.abc import Callable
from functools import cache
from threading import Thread
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.nn.utils.parametrizations import _SpectralNorm
from torch.nn.utils.spectral_norm import SpectralNorm
from torch.overrides import TorchFunctionMode

_AGREEMENT = 1e-3  # in float32; a second derivative that lacks terms is off by order one


def composed_weight_norm(v: Tensor, g: Tensor, dim: int = 0) -> Tensor:
    """Return g v / |v| with the norm over all axes but `dim`, from differentiable operations.

    torch's fused kernel keeps |v| as a constant when it is differentiated twice: the Hessian is then neither right
    nor symmetric (15% off on a small net; `docs/dev/torch-second-derivatives.md`).
    """
    return v * (g / torch.norm_except_dim(v, 2, dim))


def clip_rows(weight: Tensor, max_norm: float, norm_type: float = 2.0) -> Tensor:
    """Return `weight` with rows longer than `max_norm` scaled to it, as `nn.Embedding(max_norm=)` does in place."""
    long = torch.linalg.vector_norm(weight.detach(), norm_type, dim=1, keepdim=True) > max_norm
    norms = torch.linalg.vector_norm(torch.where(long, weight, 1.0), norm_type, dim=1, keepdim=True)
    return torch.where(long, weight * (max_norm / (norms + 1e-7)), weight)


def iterates_norm(module: nn.Module) -> bool:
    """Tell whether a module is torch's spectral norm, as parametrization or by a hook: it iterates in train mode."""
    hooks = module._forward_pre_hooks.values()
    return isinstance(module, _SpectralNorm) or any(isinstance(hook, SpectralNorm) for hook in hooks)


class ClipsNothingInPlace(TorchFunctionMode):
    """While active, embeddings with a largest norm clip a copy of their weights, and derivatives go through it.

    torch clips the weights themselves and hides that from the derivative, which is then not that of the loss.
    """

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func in _EMBEDDINGS:
            bound = _EMBEDDINGS[func].bind(*args, **(kwargs or {}))
            bound.apply_defaults()
            given = bound.arguments
            if given["max_norm"] is not None:
                given["weight"] = clip_rows(given["weight"], given["max_norm"], given["norm_type"])
                given["max_norm"] = None
                return func(*bound.args, **bound.kwargs)
        return func(*args, **(kwargs or {}))


_EMBEDDINGS = {function: inspect.signature(function) for function in (F.embedding, F.embedding_bag)}


def has_second_derivative(weight_norm: Callable[[Tensor, Tensor, int], Tensor], device: str = "cpu") -> bool:
    """Return whether a weight norm, differentiated twice, agrees with its composition.

    Examples:
        >>> has_second_derivative(composed_weight_norm)
        True
    """
    kinds = (weight_norm, composed_weight_norm)
    pairs = ([_second_derivative(kind, dim, device) for kind in kinds] for dim in (0, 1))
    return all(bool((own - right).abs().max() < _AGREEMENT) for own, right in pairs)


def _second_derivative(weight_norm: Callable[[Tensor, Tensor, int], Tensor], dim: int, device: str) -> Tensor:
    """Return one Hessian product of the sum of w(v, g)^3 at a fixed point."""
    v = torch.tensor([[0.3, -0.4, 0.5], [-0.6, 0.7, 0.2]], dtype=torch.float32, device=device, requires_grad=True)
    g = torch.full((2, 1) if dim == 0 else (1, 3), 0.9, dtype=torch.float32, device=device)
    (slope,) = torch.autograd.grad(weight_norm(v, g, dim).pow(3).sum(), v, create_graph=True)
    return torch.autograd.grad(slope[0, 0] - slope[1, 2], v)[0]


@cache
def fused_weight_norm_is_right(device: str) -> bool:
    """Return whether torch's own weight norm on this kind of device can be differentiated twice; probed once.

    The probe runs in a thread of its own, where no mode of the caller (no_grad, torch.func, fake tensors) is active.
    """
    if device == "meta":
        return False
    answer: list[bool] = []
    probe = Thread(target=lambda: answer.append(has_second_derivative(torch._weight_norm, device)))
    probe.start()
    probe.join()
    return answer == [True]


class TwiceDifferentiable(TorchFunctionMode):
    """While active, calls of kernels with wrong second derivatives run their composition instead."""

    def __torch_function__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        if func is torch._weight_norm:
            v = args[0] if args else kwargs["v"]
            func = func if fused_weight_norm_is_right(v.device.type) else composed_weight_norm
        return func(*args, **(kwargs or {}))
