"""Initializations, drawn from generators of their own; each changes a model in place and returns it.

A *weight layer* is a Linear, Conv or ConvTranspose layer. fan_in counts the entries one output reads (kernel positions
times input channels per group), fan_out the outputs one input reaches. Biases become zero. Normalizers keep their
parameters. A layer that stands in the model twice is drawn once.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator

import torch
from torch import Tensor, nn
from torch.nn.utils import parametrize

from normgauge.errors import InputError, ModelError
from normgauge.rng import generator

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)
_CONVOLUTIONS = (nn.Conv1d, nn.Conv2d, nn.Conv3d)
WeightLayer = (nn.Linear, *_CONVOLUTIONS, *_TRANSPOSED)


def he(model: nn.Module, *, gain: float = math.sqrt(2.0), seed: int = 0) -> nn.Module:
    """Draw every weight from N(0, gain^2 / fan_in): the mean square of the signal is kept through ReLU.

    Args:
        model: changed in place.
        gain: sqrt(2) for ReLU; 1 for the identity.
        seed: of the generator.

    Examples:
        >>> layer = he(torch.nn.Linear(400, 300))
        >>> abs(layer.weight.var().item() * 400 / 2 - 1) < 0.02
        True

    References: he2015.
    """
    return _fill(model, lambda weight, fans, draw: weight.normal_(0.0, gain / math.sqrt(fans[0]), generator=draw), seed)


def glorot(model: nn.Module, *, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """Draw every weight uniformly with variance gain^2 2 / (fan_in + fan_out).

    Args:
        model: changed in place.
        gain: factor of the standard deviation.
        seed: of the generator.

    Examples:
        >>> layer = glorot(torch.nn.Linear(400, 200))
        >>> abs(layer.weight.var().item() * 300 - 1) < 0.02
        True

    References: glorot2010.
    """

    def draw_one(weight: Tensor, fans: tuple[int, int], draw: torch.Generator) -> Tensor:
        half_width = gain * math.sqrt(6.0 / (fans[0] + fans[1]))
        return weight.uniform_(-half_width, half_width, generator=draw)

    return _fill(model, draw_one, seed)


def selu(model: nn.Module, *, seed: int = 0) -> nn.Module:
    """Draw every weight from N(0, 1 / fan_in), the initialization under which SELU keeps mean zero and variance one.

    Use with `torch.nn.SELU` (and `torch.nn.AlphaDropout`); the model must contain SELU, since with another activation
    this scale has no fixed point at variance one.

    Args:
        model: changed in place.
        seed: of the generator.

    Raises:
        ModelError: when the model has no SELU.

    Examples:
        >>> net = selu(torch.nn.Sequential(torch.nn.Linear(300, 300), torch.nn.SELU()))
        >>> abs(net[0].weight.var().item() * 300 - 1) < 0.02
        True

    References: klambauer2017.
    """
    if not any(isinstance(part, nn.SELU) for part in model.modules()):
        raise ModelError(
            "init.selu", "the model must contain SELU activations", "none", "Use init.he for ReLU networks"
        )
    return he(model, gain=1.0, seed=seed)


def orthogonal(model: nn.Module, *, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """Make every weight, as a matrix `[output channels, rest]`, a random (semi-)orthogonal one times `gain`.

    Args:
        model: changed in place.
        gain: the value of all singular values.
        seed: of the generator.

    Deviations: for a convolution with overlapping kernels the reshaped matrix is not the operator, so the layer is not
    an isometry; `delta_orthogonal` is one.

    Examples:
        >>> w = orthogonal(torch.nn.Linear(5, 3)).weight
        >>> bool(torch.allclose(w @ w.T, torch.eye(3), atol=1e-5))
        True

    References: saxe2014.
    """

    def draw_one(weight: Tensor, fans: tuple[int, int], draw: torch.Generator) -> Tensor:
        return weight.copy_(gain * _orthogonal(weight.shape[0], weight[0].numel(), draw).reshape(weight.shape))

    return _fill(model, draw_one, seed)


def delta_orthogonal(model: nn.Module, *, gain: float = 1.0, seed: int = 0) -> nn.Module:
    """Make every layer an isometry times `gain`: an orthogonal matrix at the kernel's centre, zero elsewhere.

    Exact for stride 1 and odd kernels with half padding, when channels do not decrease: the operator is then the same
    orthogonal matrix at every position. Linear layers are as in `orthogonal`.

    Args:
        model: changed in place.
        gain: norm of every layer.
        seed: of the generator.

    Raises:
        ModelError: for grouped or transposed convolutions and even kernels.

    References: xiao2018.
    """
    for layer in weight_layers(model):
        even = any(k % 2 == 0 for k in getattr(layer, "kernel_size", ()))
        if isinstance(layer, _TRANSPOSED) or getattr(layer, "groups", 1) != 1 or even:
            raise ModelError(
                "init.delta_orthogonal", "convolutions have odd kernels and groups=1", repr(layer), "Use orthogonal"
            )

    def draw_one(weight: Tensor, fans: tuple[int, int], draw: torch.Generator) -> Tensor:
        taps = weight.zero_().reshape(weight.shape[0], weight.shape[1], -1)  # odd kernels: the middle tap is the centre
        taps[:, :, taps.shape[2] // 2] = gain * _orthogonal(weight.shape[0], weight.shape[1], draw)
        return weight

    return _fill(model, draw_one, seed)


def _orthogonal(rows: int, columns: int, draw: torch.Generator) -> Tensor:
    normal = torch.randn(max(rows, columns), min(rows, columns), generator=draw, dtype=torch.float64)
    basis, triangle = torch.linalg.qr(normal)
    basis = basis * triangle.diagonal().sign()  # without the signs the draw is not uniform
    return basis if rows >= columns else basis.T


def weight_layers(model: nn.Module) -> Iterator[nn.Module]:
    """Yield the Linear, Conv and ConvTranspose layers of a model, each once, in the order of `modules()`."""
    for part in model.modules():
        if isinstance(part, WeightLayer):
            yield part


def fans(layer: nn.Module) -> tuple[int, int]:
    """Return fan_in and fan_out of a weight layer, groups counted.

    Examples:
        >>> fans(torch.nn.Conv2d(4, 6, 3, groups=2))
        (18, 27)
    """
    weight = layer.weight
    assert isinstance(weight, Tensor)  # for the type checker
    kernel = math.prod(weight.shape[2:])
    groups = int(getattr(layer, "groups", 1))
    if isinstance(layer, _TRANSPOSED):
        return weight.shape[0] // groups * kernel, weight.shape[1] * kernel
    return weight.shape[1] * kernel, weight.shape[0] // groups * kernel


def _fill(
    model: nn.Module, draw_one: Callable[[Tensor, tuple[int, int], torch.Generator], Tensor], seed: int
) -> nn.Module:
    layers = list(weight_layers(model))
    if not layers:
        raise ModelError(
            "initialization",
            "the model must have a Linear, Conv or ConvTranspose layer",
            type(model).__name__,
            "Pass the whole model",
        )
    draw = generator(seed)
    with torch.no_grad():
        for layer in layers:
            set_weight(layer, draw_one, draw)
    return model


def set_weight(
    layer: nn.Module, draw_one: Callable[[Tensor, tuple[int, int], torch.Generator], Tensor], draw: torch.Generator
) -> None:
    """Fill one layer's weight on the CPU, so that every device gets the same numbers, and zero its bias."""
    if parametrize.is_parametrized(layer, "weight"):
        raise InputError(
            "initialization",
            "weights must be plain, not parametrized",
            f"{type(layer).__name__} with a weight normalizer",
            "Initialize first, then normalize the weights",
        )
    weight, bias = layer.weight, layer.bias
    assert isinstance(weight, Tensor)  # for the type checker
    drawn = draw_one(torch.empty(weight.shape, dtype=torch.float64), fans(layer), draw)
    with torch.no_grad():
        weight.copy_(drawn)
        if isinstance(bias, Tensor):
            bias.zero_()
