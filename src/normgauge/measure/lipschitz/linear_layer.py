"""A user's linear layer read as one linear map: weights as used, BatchNorm folded in, nothing left behind."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.errors import InputError, ModelError, NonFiniteError
from normgauge.linalg import Convolution
from normgauge.network import fold_channels, stored_affine

_LINEAR = (nn.Linear, nn.Conv1d, nn.Conv2d, nn.Conv3d, nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


@dataclass(frozen=True)
class LinearMap:
    """What a layer does to one input: an operator, or a diagonal of one factor per channel.

    Attributes:
        name: the layer in words.
        input_shape: channels and spatial size.
        weight: the folded weight, for the reshaped norm.
        operator: the map in float64, if it is not diagonal.
        dtype: precision of the layer, in which iterations run.
        diagonal: factors per channel, for BatchNorm alone.
    """

    name: str
    input_shape: tuple[int, ...]
    weight: Tensor
    operator: Convolution | None = None
    dtype: torch.dtype = torch.float64
    diagonal: Tensor | None = None


def read_layer(layer: nn.Module, input_shape: Sequence[int] | None) -> LinearMap:
    """Return the linear map of a layer on inputs of a shape, without a trace on the layer."""
    parts = [part for part in _parts(layer) if not isinstance(part, nn.Identity)]
    linear = [part for part in parts if isinstance(part, _LINEAR)]
    norms = [part for part in parts if isinstance(part, _BatchNorm)]
    if len(linear) + len(norms) != len(parts) or len(linear) > 1 or not parts:
        names = ", ".join(type(part).__name__ for part in parts) or "nothing"
        raise ModelError(
            "operator_norm",
            "the layer must be Linear, Conv, ConvTranspose or BatchNorm, or a Sequential of one of the first three "
            "with BatchNorms",
            names,
            "Measure the layers one by one",
        )
    name = " + ".join(_describe(part) for part in parts)
    scales = {id(part): stored_affine(part)[0] for part in norms}
    if not linear:
        return _diagonal(name, [scales[id(part)] for part in parts], input_shape)
    main = linear[0]
    place = next(number for number, part in enumerate(parts) if part is main)
    with keep_buffers(main):
        weight = main.weight.detach().clone()
    dtype = torch.float64 if weight.dtype == torch.float64 else torch.float32
    weight = _check_weight(weight, name).to(torch.float64)  # folding in the layer's precision would move the norm
    for number, part in enumerate(parts):
        if part is not main:
            weight = fold_channels(main, weight, scales[id(part)], after=number > place)
    size = spatial_size(main, input_shape)
    channels = main.in_features if isinstance(main, nn.Linear) else main.in_channels
    try:
        operator = Convolution.of(main, size, weight)
    except InputError as error:
        raise InputError(str(error).replace("Convolution", f"operator_norm of {name}", 1)) from error
    return LinearMap(name, (channels, *size), weight, operator, dtype)


def _parts(layer: nn.Module) -> Iterator[nn.Module]:
    if isinstance(layer, nn.Sequential):
        for part in layer:
            yield from _parts(part)
    else:
        yield layer


def _describe(layer: nn.Module) -> str:
    kind = type(layer).__name__.removeprefix("Parametrized")
    if isinstance(layer, nn.Linear):
        return f"{kind}({layer.in_features}, {layer.out_features})"
    if isinstance(layer, _BatchNorm):
        return f"{kind}({layer.num_features})"
    kernel = "x".join(str(k) for k in layer.kernel_size)  # type: ignore[union-attr]
    return f"{kind}({layer.in_channels}, {layer.out_channels}, {kernel})"


def _diagonal(name: str, factors: list[Tensor], input_shape: Sequence[int] | None) -> LinearMap:
    total = torch.stack(factors).prod(0)
    if not bool(torch.isfinite(total).all()):
        raise NonFiniteError(name, "its factors must be finite", "inf or nan", "Look at the running variance")
    shape = tuple(input_shape) if input_shape is not None else (len(total),)
    if len(total) not in shape[:2]:
        raise InputError(name, f"its input has {len(total)} channels", f"input_shape {shape}", "Give channels first")
    return LinearMap(name, shape, total, diagonal=total)


def _check_weight(weight: Tensor, name: str) -> Tensor:
    if weight.is_complex():
        raise ModelError(name, "weights must be real", str(weight.dtype), "Split real and imaginary parts")
    if not bool(torch.isfinite(weight).all()):
        raise NonFiniteError(
            f"operator_norm of {name}", "weights must be finite", "inf or nan", "Look at the step that made them"
        )
    return weight


def spatial_size(layer: nn.Module, input_shape: Sequence[int] | None) -> tuple[int, ...]:
    """Return the spatial part of an input shape given with or without channels and batch."""
    if isinstance(layer, nn.Linear):
        if input_shape is not None and (not len(input_shape) or input_shape[-1] != layer.in_features):
            raise InputError(
                _describe(layer),
                f"its input ends with {layer.in_features} features",
                f"input_shape {tuple(input_shape)}",
                "Leave input_shape out",
            )
        return ()
    axes, channels = len(layer.kernel_size), layer.in_channels  # type: ignore[arg-type]
    example = f"({channels}, {', '.join(['32'] * axes)})"
    if input_shape is None:
        raise InputError(
            f"operator_norm of {_describe(layer)}",
            "the norm of a convolution depends on the size of its input",
            "input_shape=None",
            f"Pass input_shape={example}, as the layer sees it in the network",
        )
    shape = tuple(input_shape)
    valid = len(shape) in (axes, axes + 1, axes + 2) and (len(shape) == axes or shape[-axes - 1] == channels)
    if not valid or any(isinstance(n, bool) or not isinstance(n, int) or n < 1 for n in shape):
        raise InputError(
            f"operator_norm of {_describe(layer)}",
            f"input_shape is {axes} sizes, or {channels} channels and {axes} sizes",
            str(shape),
            f"Pass for example input_shape={example}",
        )
    return shape[-axes:]


@contextmanager
def keep_buffers(layer: nn.Module) -> Iterator[None]:
    """Restore a layer's buffers on exit: torch's spectral_norm iterates whenever its weight is read in train mode."""
    kept = {name: buffer.clone() for name, buffer in layer.named_buffers()}
    try:
        with torch.no_grad():
            yield
    finally:
        with torch.no_grad():
            for name, buffer in layer.named_buffers():
                if name in kept:
                    buffer.copy_(kept[name])
