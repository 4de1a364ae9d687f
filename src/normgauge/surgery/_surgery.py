"""`Surgery`: the new model, what was done to which layer, and the way back."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

from torch import nn

from normgauge.records import Result


@dataclass(frozen=True)
class Surgery(Result):
    """What an operation on a model left behind; the user's model itself is never touched.

    Attributes:
        model: the new model.
        rows: one row per normalizer: what was done, or why nothing was.
        proof: largest difference on the example between the new model and what the operation promises to equal.
        change: largest difference on the example between the outputs before and after.
        original: the model as it came.
        footer: what a person needs before using it.
    """

    model: nn.Module
    rows: tuple[dict[str, Any], ...]
    proof: float
    change: float
    original: nn.Module
    footer: str

    def undo(self) -> nn.Module:
        """Return a copy of the model as it came."""
        return copy.deepcopy(self.original)

    def _title(self) -> str:
        return "Surgery: what was done to each normalizer"

    def _rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.rows]

    def _footer(self) -> str:
        return f"largest change of the outputs {self.change:.3g}, proof {self.proof:.3g}; {self.footer}"
