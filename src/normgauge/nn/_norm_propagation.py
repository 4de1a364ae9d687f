"""Normalization propagation: unit rows and the known moments of a rectified Gaussian, instead of data."""

from __future__ import annotations

import math
from typing import Any, Literal

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from normgauge.errors import InputError
from normgauge.nn import registry

RELU_MEAN = math.sqrt(1 / (2 * math.pi))
RELU_STD = math.sqrt((1 - 1 / math.pi) / 2)


class UnitRows(torch.nn.Module):
    """The parametrization `gain[i] * v[i] / ||v[i]||` of a weight, with a gain of its own for each row.

    Args:
        rows: of the weight.
        gain: its first value; `sqrt(1 - 1/pi)` keeps the mean square of the Jacobian at one after a rectifier.
    """

    def __init__(self, rows: int, gain: float = math.sqrt(1 - 1 / math.pi)) -> None:
        super().__init__()
        self.gain = torch.nn.Parameter(torch.full((rows,), gain))

    def forward(self, v: Tensor) -> Tensor:
        """Return the weight of the raw rows v."""
        norms = torch.linalg.vector_norm(v.flatten(1), dim=1)
        return v * (self.gain / norms).view(-1, *(1,) * (v.dim() - 1))

    def right_inverse(self, weight: Tensor) -> Tensor:
        """Return raw rows; their norm is forgotten, so that assigning a weight sets its directions only."""
        return weight


def norm_propagation(module: torch.nn.Module, *, after: Literal["relu", "data"] = "relu") -> torch.nn.Module:
    r"""Normalize a Linear or Conv layer by its weights and the moments of its input, without looking at data.

    `z_i = gain_i * v_i . xhat / ||v_i|| + bias_i` with `xhat = x` for standardized data, and
    `xhat = (x - c2) / c1`, `c1 = sqrt((1 - 1/pi) / 2)`, `c2 = sqrt(1 / (2 pi))` for the output of a rectifier: mean and
    standard deviation of max(0, u) for u ~ N(0, 1). If xhat has uncorrelated entries of mean 0 and variance 1, so has
    each z_i / gain_i mean 0 and variance 1.

    Args:
        module: Linear or Conv layer, changed in place.
        after: what its input is: the output of a rectifier, or standardized data.

    Returns:
        The module.

    Raises:
        InputError: for another word.

    Deviations:
        arpit2016 standardizes after the rectifier; here the next layer does it to its input, which is the same map and
        leaves the activation alone. Zero padding then pads the standardized input, by its mean.

    Examples:
        >>> layer = norm_propagation(torch.nn.Linear(3, 2), after="data")
        >>> torch.allclose(layer.weight.norm(dim=1), torch.full((2,), (1 - 1 / math.pi) ** 0.5))
        True

    References: arpit2016.
    """
    if after not in ("relu", "data"):
        raise InputError("norm_propagation", "after is 'relu' or 'data'", repr(after), "Say what comes in")
    weight = module.weight
    if not isinstance(weight, Tensor) or weight.dim() < 2:
        raise InputError(
            "norm_propagation",
            "the module needs a weight of at least two axes",
            type(module).__name__,
            "Give a Linear or Conv layer",
        )
    rows = UnitRows(weight.shape[0]).to(weight.device, weight.dtype)
    parametrize.register_parametrization(module, "weight", rows)
    if after == "relu":
        module.register_forward_pre_hook(_standardize_rectified)
    return module


def _standardize_rectified(module: torch.nn.Module, inputs: tuple[Any, ...]) -> tuple[Any, ...]:
    return ((inputs[0] - RELU_MEAN) / RELU_STD, *inputs[1:])


registry.register(
    registry.Declaration(
        name="norm_propagation",
        title="normalization propagation",
        placement="weights",
        axes="entries of each row of the weights",
        statistics="weights",
        behaviour="The same map in training and evaluation. By name the input is taken to be a rectifier's output; "
        "`norm_propagation(module, after='data')` is for the first layer.",
        formula=r"z_i = g_i \frac{v_i^\top}{\lVert v_i \rVert_2} \frac{x - c_2}{c_1} + b_i,\quad "
        r"c_1^2 = \tfrac12 (1 - \tfrac1\pi),\ c_2^2 = \tfrac{1}{2\pi}",
        cite=("arpit2016",),
        invariances=(registry.Invariance("weights", "scale", "row"),),
        parametrize=norm_propagation,
    )
)
