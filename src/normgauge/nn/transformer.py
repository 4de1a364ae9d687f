"""Normalizers of transformers beside LayerNorm and RMSNorm: ScaleNorm, QK-norm, the unit stream, DyT and Derf."""

from collections.abc import Callable

import torch
from torch import Tensor, nn

from normgauge.nn import registry
from normgauge.nn._layout import ChannelsLast, at_least_float32, check_not_empty, fitting_groups
from normgauge.nn.standard import RMSNorm


class ScaleNorm(nn.Module):
    """Give the last axis of each sample one learned length: `y = weight * x / max(|x|, eps)`, weight a number.

    It starts at sqrt(channels), where it is RMSNorm with one gain for all.

    Examples:
        >>> ScaleNorm(2)(torch.tensor([[3.0, 3.0]])).tolist()
        [[1.0, 1.0]]

    References: nguyen2019.
    """

    def __init__(self, channels: int, eps: float = 1e-5) -> None:
        super().__init__()
        self.eps, self.weight = eps, nn.Parameter(torch.tensor(channels**0.5))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input at its learned length."""
        check_not_empty("ScaleNorm", x)
        wide = at_least_float32(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True).clamp_min(self.eps)
        return (self.weight * (wide / length)).to(x.dtype)


class UnitStream(nn.Module):
    """Put the last axis of each sample on the unit sphere, `y = x / |x|`: the stream of nGPT. Zero stays zero.

    Examples:
        >>> UnitStream()(torch.tensor([[3.0, 4.0]])).tolist()
        [[0.6000000238418579, 0.800000011920929]]

    References: loshchilov2025.
    """

    def forward(self, x: Tensor) -> Tensor:
        """Return the direction of the input."""
        check_not_empty("UnitStream", x)
        wide = at_least_float32(x)
        length = torch.linalg.vector_norm(wide, dim=-1, keepdim=True)
        return (wide / torch.where(length == 0, 1.0, length)).to(x.dtype)


class HeadRMSNorm(nn.Module):
    """RMSNorm of each head's part of the last axis, one gain for all heads: QK-norm per head.

    `y[h] = weight * x[h] / sqrt(mean(x[h]**2) + eps)`. QK-norm over the whole width is `RMSNorm(width)`.

    Examples:
        >>> HeadRMSNorm(2, 4, eps=0.0)(torch.tensor([[3.0, 3.0, -5.0, 5.0]])).tolist()
        [[1.0, 1.0, -1.0, 1.0]]

    References: henry2020, dehghani2023.
    """

    def __init__(self, num_groups: int, channels: int, eps: float = 1e-6) -> None:
        super().__init__()
        self.num_groups, self.eps, self.weight = num_groups, eps, nn.Parameter(torch.ones(channels // num_groups))

    def forward(self, x: Tensor) -> Tensor:
        """Return the input with every head normalized."""
        check_not_empty("HeadRMSNorm", x)
        heads = x.unflatten(-1, (self.num_groups, -1))
        return nn.functional.rms_norm(heads, heads.shape[-1:], self.weight, self.eps).flatten(-2)


class DynamicTanh(nn.Module):
    """`y = weight * tanh(alpha x) + bias`, alpha one learned number: bounded, and invariant to nothing.

    Examples:
        >>> DynamicTanh(1, alpha=1.0)(torch.tensor([[100.0]])).tolist()
        [[1.0]]

    References: zhu2025.
    """

    def __init__(self, channels: int, alpha: float = 0.5) -> None:
        super().__init__()
        self.alpha = nn.Parameter(torch.tensor(alpha))
        self.weight, self.bias = nn.Parameter(torch.ones(channels)), nn.Parameter(torch.zeros(channels))

    def forward(self, x: Tensor) -> Tensor:
        """Return the squashed input."""
        check_not_empty(type(self).__name__, x)
        return (self.weight * self._squash(at_least_float32(x)) + self.bias).to(x.dtype)

    def _squash(self, x: Tensor) -> Tensor:
        return torch.tanh(self.alpha * x)


class DynamicErf(DynamicTanh):
    """`y = weight * erf(alpha x + shift) + bias`, alpha and shift one learned number each: DyT with another curve.

    Examples:
        >>> DynamicErf(1)(torch.tensor([[0.0, 100.0]])).tolist()
        [[0.0, 1.0]]

    References: chen2025.
    """

    def __init__(self, channels: int, alpha: float = 0.5) -> None:
        super().__init__(channels, alpha)
        self.shift = nn.Parameter(torch.tensor(0.0))

    def _squash(self, x: Tensor) -> Tensor:
        return torch.erf(self.alpha * x + self.shift)


def _declare(name: str, make: Callable[[int], nn.Module]) -> None:
    """Declare a layer over the last axis; on maps the channels of each place are a sample of their own."""
    registry.declare(name, make=lambda channels, spatial: ChannelsLast(make(channels)) if spatial else make(channels))


_declare("scale_norm", ScaleNorm)
_declare("unit_stream", lambda channels: UnitStream())
_declare("qk_head", lambda channels: HeadRMSNorm(fitting_groups(channels, smallest=2, most=8), channels))
_declare("qk_full", lambda channels: RMSNorm(channels, eps=1e-6))
_declare("dyt", DynamicTanh)
_declare("derf", DynamicErf)
