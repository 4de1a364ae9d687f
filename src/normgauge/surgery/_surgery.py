"""`Surgery`: the new model, what was done to which layer, and the way back."""

from __future__ import annotations

from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from torch import nn

from normgauge.network import copy_model
from normgauge.records import Reading
from normgauge.results import Result

if TYPE_CHECKING:
    import altair

PROVED = 1e-3  # largest difference from what was promised: rounding of float32 through a deep network, outputs near 1


@dataclass(frozen=True)
class Surgery(Result):
    """What an operation on a model left behind; the user's model itself is never touched.

    Attributes:
        model: the new model.
        rows: one row per normalizer: what was done, or why nothing was.
        proof: largest difference on the example between the new model and what the operation promises to equal.
        change: largest difference on the example between the outputs before and after.
        original: the model as it came.
        note: what else a person needs before using it.
    """

    model: nn.Module
    rows: tuple[dict[str, Any], ...]
    proof: float
    change: float
    original: nn.Module
    note: str

    def undo(self) -> nn.Module:
        """Return a copy of the model as it came."""
        return copy_model(self.original)

    def chart(self) -> altair.TopLevelMixin:
        """Return bars of the channels before and after, per normalizer (needs the `lab` extra)."""
        from normgauge.charts import bars

        rows = [
            {"normalizer": row["normalizer"], "state": state, "channels": row[column]}
            for row in self.rows
            for state, column in (("before", "channels"), ("after", "kept"))
            if row[column] is not None
        ]
        return bars(rows, x="normalizer", y="channels", series="state")

    def _title(self) -> str:
        return "Surgery: what was done to each normalizer"

    def _rows(self) -> list[dict[str, Any]]:
        return [dict(row) for row in self.rows]

    def readings(self) -> tuple[Reading, ...]:
        """Return the proof and the change of the outputs, both at the example."""
        return Reading("proof", self.proof), Reading("change of the outputs", self.change)

    def _meaning(self) -> str:
        told = f"the outputs on the example have changed by {self.change:.3g} at most"
        if self.proof <= PROVED:
            return f"The new model is what was promised, up to {self.proof:.2g} (limit {PROVED:g}); {told}."
        return f"The new model is {self.proof:.2g} from what was promised (limit {PROVED:g}): do not use it; {told}."

    def _notes(self) -> str:
        return self.note
