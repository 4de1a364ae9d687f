"""Weight normalization by name: length and direction of each row as two parameters."""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.utils import parametrize

from normgauge.nn import registry


class RowLength(torch.nn.Module):
    r"""The parametrization `w_i = g_i v_i / ||v_i||` of a weight by the lengths g and the raw rows v.

    The state is that of torch's own (`original0` is g, `original1` is v) and so is the value. It is written in plain
    operators: the second derivatives of the operator torch uses, `torch._weight_norm`, are wrong in torch 2.13 (the
    Hessian of a tanh layer of 6 rows of 4 is off by 17 % and not symmetric by 21 %).
    """

    def forward(self, g: Tensor, v: Tensor) -> Tensor:
        """Return the weight."""
        return v * (g / torch.linalg.vector_norm(v, dim=tuple(range(1, v.dim())), keepdim=True))

    def right_inverse(self, weight: Tensor) -> tuple[Tensor, Tensor]:
        """Return lengths and raw rows of a weight, so that assigning it works."""
        return torch.linalg.vector_norm(weight, dim=tuple(range(1, weight.dim())), keepdim=True), weight


def _wrap(module: torch.nn.Module) -> torch.nn.Module:
    return parametrize.register_parametrization(module, "weight", RowLength())


registry.register(
    registry.Declaration(
        name="weight",
        title="weight normalization",
        placement="weights",
        axes="entries of each row of the weights",
        statistics="weights",
        behaviour="The same map in training and evaluation; the gain of each row starts at the row's norm, so that "
        "wrapping a layer changes nothing at first. Not invariant to (alpha v, g / alpha): that divides the row by "
        "alpha.",
        formula=r"w_i = g_i \frac{v_i}{\lVert v_i \rVert_2}",
        cite=("salimans2016", "sun2020"),
        invariances=(registry.Invariance("weights", "scale", "row"),),
        parametrize=_wrap,
    )
)
