"""What the three studies of GDNP record of a race, how they judge it and show it: iterations over condition numbers."""

from __future__ import annotations

import math
from typing import Any

from normgauge.papers.batchnorm_article.studies._descents import Path
from normgauge.papers.language import EACH, LARGEST, SMALLEST, Contrast, Figure, Record

POINTS = 60


def record_path(record: Record, path: Path, target: float, most: int) -> None:
    """Record the curve, and iterations and gradients to the target; one that never arrives counts `most` of both."""
    last = len(path.distances) - 1
    kept = sorted({round(last * k / POINTS) for k in range(POINTS + 1)})
    for number in kept:
        record(number, "distance", path.distances[number])
    arrived = path.iterations(target)
    record(last, "iterations", max(1, most if arrived is None else arrived))
    record(last, "gradients", max(1, most if arrived is None else path.gradients))
    record(last, "arrived", float(arrived is not None))
    record(last, "rate", path.rate(), status="skipped")
    record(last, "final_loss", path.losses[-1])
    record(last, "step_size", path.step, status="skipped")


def race(data: Any) -> Contrast:
    """Return the contrast: gradient descent needs a quarter more iterations than GDNP, at every condition number."""
    rivals = {"method": "gd"}, {"method": "gdnp"}
    return Contrast("iterations", *rivals, least=math.log10(1.25), at={"data": data, "condition": EACH}, log=True)


RACE_FIGURES = (
    Figure("iterations", x="condition", series=("method",), where={"data": EACH}),
    Figure("distance", series=("method",), where={"data": "gaussian", "condition": LARGEST, "seed": SMALLEST}),
)
