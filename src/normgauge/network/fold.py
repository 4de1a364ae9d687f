"""BatchNorm with stored statistics is y = factors x + shift per channel; and the weights of a layer with it inside."""

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.errors import ModelError

_TRANSPOSED = (nn.ConvTranspose1d, nn.ConvTranspose2d, nn.ConvTranspose3d)


def folded_affine(
    mean: Tensor | None, variance: Tensor, weight: Tensor | None, bias: Tensor | None, eps: float
) -> tuple[Tensor, Tensor]:
    """Return factors = weight / sqrt(variance + eps) and shift = bias - mean factors, in float64.

    Examples:
        >>> folded_affine(torch.ones(1), torch.full((1,), 4.0), None, None, 0.0)
        (tensor([0.5000], dtype=torch.float64), tensor([-0.5000], dtype=torch.float64))
    """
    factors = (variance.detach().double() + eps).rsqrt()
    factors = factors if weight is None else factors * weight.detach().double()
    shift = torch.zeros_like(factors) if bias is None else bias.detach().double()
    return factors, shift if mean is None else shift - mean.detach().double() * factors


def stored_affine(layer: nn.Module) -> tuple[Tensor, Tensor]:
    """Return the factors and the shift of a BatchNorm in evaluation mode, in float64."""
    assert isinstance(layer, _BatchNorm)  # for the type checker
    if layer.training or layer.running_var is None:
        state = "train mode" if layer.training else "no running statistics"
        rule = "only in evaluation mode, with running statistics, is BatchNorm a linear map"
        step = "Call .eval() first" if layer.training else "Build it with track_running_stats=True"
        raise ModelError(type(layer).__name__, rule, state, step)
    return folded_affine(layer.running_mean, layer.running_var, layer.weight, layer.bias, layer.eps)


def fold_channels(layer: nn.Module, weight: Tensor, factors: Tensor, *, after: bool) -> Tensor:
    """Multiply output channels (BatchNorm `after` the layer) or input channels (before it) of a layer's weight."""
    groups = getattr(layer, "groups", 1)
    names = ("out_channels", "out_features") if after else ("in_channels", "in_features")
    expected = next(getattr(layer, name) for name in names if hasattr(layer, name))
    if len(factors) != expected:
        rule = f"BatchNorm beside {type(layer).__name__} must have {expected} features"
        raise ModelError("operator_norm", rule, f"{len(factors)}", "Check the order of the layers")
    # rows of the weight are output channels; of a transposed convolution they are input channels
    tail = (1,) * (weight.ndim - 2)
    if after != isinstance(layer, _TRANSPOSED):
        return weight * factors.reshape(-1, 1, *tail)
    grouped = weight.reshape(groups, weight.shape[0] // groups, *weight.shape[1:])
    return (grouped * factors.reshape(groups, 1, -1, *tail)).reshape(weight.shape)
