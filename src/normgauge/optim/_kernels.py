"""The elementwise part of an update: torch's fused kernels where they exist, the same arithmetic otherwise."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor

from normgauge.errors import InputError

_FUSED_DEVICES = ("cpu", "cuda", "mps", "xpu")


def fused_works(name: str, tensor: Tensor) -> bool:
    """Tell whether torch has the fused kernel (`"sgd"` or `"adam"`) and it takes tensors of this kind."""
    return (
        hasattr(torch, f"_fused_{name}_") and tensor.device.type in _FUSED_DEVICES and torch.is_floating_point(tensor)
    )


def choose(name: str, fused: bool | None, tensor: Tensor) -> bool:
    """Decide between the fused kernel and the plain form; `fused=True` that cannot be honoured is refused.

    Raises:
        InputError: when `fused=True` and there is no such kernel.
    """
    if fused and not fused_works(name, tensor):
        raise InputError(
            "fused=True",
            f"torch must have a fused {name} kernel for the parameters",
            f"{tensor.dtype} on {tensor.device}",
            "Pass fused=None to use it where it exists",
        )
    return fused is not False and fused_works(name, tensor)


def sgd_(w: Tensor, grad: Tensor, buffer: Tensor | None, *, lr: float, mu: float, keep: float, fused: bool) -> None:
    """Set `buffer = mu buffer + keep grad` and `w -= lr buffer` (`w -= lr grad` without a buffer)."""
    if fused:
        torch._fused_sgd_(
            [w],
            [grad],
            [] if buffer is None else [buffer],
            weight_decay=0.0,
            momentum=mu,
            lr=lr,
            dampening=1 - keep,
            nesterov=False,
            maximize=False,
            is_first_step=False,
        )
    elif buffer is None:
        w.add_(grad, alpha=-lr)
    else:
        w.add_(buffer.mul_(mu).add_(grad, alpha=keep), alpha=-lr)


def adam_(
    w: Tensor,
    grad: Tensor,
    mean: Tensor,
    square: Tensor,
    step: Tensor,
    *,
    lr: float,
    betas: tuple[float, float],
    eps: float,
    fused: bool,
) -> None:
    """Do one step of Adam without weight decay; `step` counts this one already."""
    first, second = betas
    if fused:
        torch._fused_adam_(
            [w],
            [grad],
            [mean],
            [square],
            [],
            [step],
            lr=lr,
            beta1=first,
            beta2=second,
            weight_decay=0.0,
            eps=eps,
            amsgrad=False,
            maximize=False,
        )
        return
    t = step.item()
    mean.lerp_(grad, 1 - first)
    square.mul_(second).addcmul_(grad, grad, value=1 - second)
    scale = (square / (1 - second**t)).sqrt_().add_(eps)
    w.addcdiv_(mean, scale, value=-lr / (1 - first**t))


Update = Callable[..., None]
