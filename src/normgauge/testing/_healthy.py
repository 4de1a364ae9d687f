"""`assert_norms_healthy`: the doctor in a test."""

from __future__ import annotations

from typing import Any, Literal

from torch import nn

from normgauge.doctor import checkup
from normgauge.objective import Objective


def assert_norms_healthy(
    objective: Objective | nn.Module,
    batch: Any = None,
    *,
    severity: Literal["warning", "error"] = "warning",
    **rest: Any,
) -> None:
    """Raise AssertionError with the checkup's text where it has findings of this severity, or models diverge.

    Args:
        objective: an `Objective`, or a model with `batch`.
        batch: as `ng.checkup` takes it.
        severity: "error" lets warnings pass.
        rest: what else `ng.checkup` takes: optimizer, loader, against, quick, ignore.

    Examples:
        >>> import torch
        >>> assert_norms_healthy(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), torch.randn(16, 4))
    """
    found = checkup(objective, batch, **rest)
    bad = [finding for finding in found if finding.severity in ("error", severity)]
    assert not bad and found.divergence is None, "\n" + found.text(everything=True)
