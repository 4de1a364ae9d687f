"""Matrix symmetries (placeholder while the other parts are built)."""
from __future__ import annotations
from dataclasses import dataclass
from normgauge.symmetry._family import Family
@dataclass(frozen=True)
class MatrixFamily(Family):
    pass
