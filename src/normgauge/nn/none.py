"""No normalizer: the control every comparison needs."""

from __future__ import annotations

import torch

from normgauge.nn import registry

registry.register(
    registry.Declaration(
        name="none",
        title="no normalization",
        placement="none",
        axes="nothing",
        statistics="none",
        behaviour="The identity, in training and evaluation.",
        formula=r"y = x",
        cite=("santurkar2018",),
        make=lambda channels, spatial: torch.nn.Identity(),
    )
)
