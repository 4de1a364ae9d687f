"""Weight normalization by name: length and direction of each row as two parameters."""

from __future__ import annotations

import torch

from normgauge.nn import registry

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
        parametrize=torch.nn.utils.parametrizations.weight_norm,
    )
)
