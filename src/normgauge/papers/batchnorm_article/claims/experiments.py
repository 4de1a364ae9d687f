"""S3 (the encyclopedia article), what it says about experiments, and the criterion fixed before running them.

A row of the tables is one run: `model`, `norm` (none, batch), further knobs named at each claim, `seed`, readings.
"""

from __future__ import annotations

from math import log10, pi

from normgauge.papers.court.registry import empirical
from normgauge.papers.court.tables import Margins, Rows, by_seed, paired_log10

CITE = ("batchnorm_article",)
CHANCE = 0.1  # ten classes
NOT_LISTED = "Not in the list the ledger started from."


@empirical(
    "S3-lamfull",
    place="Vanishing/exploding gradients (full sweep)",
    printed="ReLU: the gradient of the first-layer weights has norm > c lambda^L, lambda decreasing to pi/(pi-1) = "
    "1.467 as the batch size tends to infinity",
    study="gradient-explosion",
    criterion="per-layer growth of the gradient norm (not its square) at initialization: at the largest batch size "
    "above 0.95 pi/(pi-1), and log growth falling from the smallest batch size to the largest",
    cite=(*CITE, "yang2019"),
    note="S3-lam is the same sentence judged from theory and small networks: pi/(pi-1) belongs to the squared norm, "
    "so the first half of this criterion is expected to fail. Rows: `part` = batch, `activation` = relu, `batch_size`, "
    "`norm_growth` (per layer).",
)
def _explosion_sweep(rows: Rows) -> Margins:
    rows = [row for row in rows if row["part"] == "batch" and row["activation"] == "relu"]
    sizes = sorted({row["batch_size"] for row in rows})
    large = by_seed(rows, "norm_growth", batch_size=sizes[-1])
    small = by_seed(rows, "norm_growth", batch_size=sizes[0])
    return {
        "growth of the norm at the largest batch minus 0.95 pi/(pi-1)": [
            g - 0.95 * pi / (pi - 1) for g in large.values()
        ],
        "log10 growth, smallest batch minus largest": [
            log10(small[seed]) - log10(large[seed]) for seed in sorted(small.keys() & large.keys())
        ],
    }


@empirical(
    "S3-train",
    place="Vanishing/exploding gradients",
    printed="very deep batchnorm networks are untrainable; this is only relieved by skip connections",
    study="gradient-explosion",
    criterion="at the largest depth, learning rate tuned per arm: training accuracy without skip connections below "
    "chance + 0.1, and with them at least 0.2 higher",
    cite=(*CITE, "yang2019"),
    note="Rows: `part` = train, `depth`, `skip` (True, False), `train_accuracy` at the tuned learning rate.",
)
def _very_deep(rows: Rows) -> Margins:
    rows = [row for row in rows if row["part"] == "train"]
    depth = max(row["depth"] for row in rows)
    plain, skip = (by_seed(rows, "train_accuracy", depth=depth, skip=on) for on in (False, True))
    return {
        "chance + 0.1 minus training accuracy without skips": [CHANCE + 0.1 - value for value in plain.values()],
        "training accuracy with skips minus without, minus 0.2": [
            skip[seed] - plain[seed] - 0.2 for seed in sorted(skip.keys() & plain.keys())
        ],
    }


@empirical(
    "S3-GDNP-data",
    place="Learning halfspace problem, last sentence",
    printed="it is also shown in experiments that GDNP could accelerate optimization without this constraint "
    "(Gaussian input)",
    study="halfspace",
    criterion="on data that are not Gaussian, iterations to a gradient norm of 1e-3 of the initial one: gradient "
    "descent at its best step over GDNP, above 1",
    cite=(*CITE, "kohler2019"),
    note=f"{NOT_LISTED} Rows: `data` (gaussian is left out), `condition`, `method` (gdnp, gd), `iterations`; for every "
    "kind of data at every condition number.",
)
def _without_gaussian(rows: Rows) -> Margins:
    cells = sorted({(row["data"], row["condition"]) for row in rows if row["data"] != "gaussian"})
    return {
        f"{data}, condition {condition:g}: log10 iterations, gradient descent over GDNP": paired_log10(
            rows, "iterations", "gd", "gdnp", knob="method", data=data, condition=condition
        )
        for data, condition in cells
    }
