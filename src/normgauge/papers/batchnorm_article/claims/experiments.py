"""S3 (the encyclopedia article), what it says about experiments, and the criterion fixed before running them.

A row of the tables is one run: `model`, `norm` (none, batch), further knobs named at each claim, `seed`, readings.
"""

from __future__ import annotations

from statistics import pstdev

from normgauge.papers.court.registry import empirical
from normgauge.papers.court.tables import Margins, Rows, by_seed, paired

CITE = ("batchnorm_article",)
NOT_LISTED = "Not in the list the ledger started from."


@empirical(
    "S3-ICS",
    place="Measure",
    printed="standard VGG and DLN have higher gradient correlations than their BN counterparts",
    study="covariate-shift",
    criterion="for each model, the cosine of the gradients before and after updating earlier layers, averaged over "
    "layers and training: without BN minus with BN is above 0",
    cite=(*CITE, "santurkar2018"),
)
def _shift(rows: Rows) -> Margins:
    return {
        f"{model}: cosine, none minus batch": paired(rows, "cosine", "none", "batch", model=model) for model in MODELS
    }


MODELS = ("vgg", "dln")


@empirical(
    "S3-dropout",
    place="Internal covariate shift, benefits",
    printed="batch normalization seems to have a regularizing effect ... it is thus unnecessary to use dropout to "
    "mitigate overfitting",
    study="dropout",
    criterion="test accuracy with BN and no dropout at most 0.005 below BN with the best dropout rate, and above that "
    "of the network without BN and without dropout",
    cite=(*CITE, "ioffe2015"),
    note=f"{NOT_LISTED} Rows: `norm`, `dropout` (the rate), `test_accuracy`.",
)
def _dropout(rows: Rows) -> Margins:
    plain = by_seed(rows, "test_accuracy", norm="batch", dropout=0.0)
    bare = by_seed(rows, "test_accuracy", norm="none", dropout=0.0)
    rates = sorted({row["dropout"] for row in rows} - {0.0})
    arms = [by_seed(rows, "test_accuracy", norm="batch", dropout=rate) for rate in rates]
    seeds = [seed for seed in sorted(plain) if all(seed in arm for arm in arms)]
    return {
        "0.005 + BN alone minus BN with the best dropout": [
            0.005 + plain[seed] - max(arm[seed] for arm in arms) for seed in seeds
        ],
        "BN alone minus nothing": [plain[seed] - bare[seed] for seed in sorted(plain.keys() & bare.keys())],
    }


@empirical(
    "S3-init",
    place="Internal covariate shift, benefits",
    printed="the network becomes more robust to different initialization schemes and learning rates while using batch "
    "normalization",
    study="bad-init",
    criterion="standard deviation of the final training accuracy over initialization schemes (and over learning "
    "rates): without BN minus with BN is above 0",
    cite=(*CITE, "ioffe2015"),
    note=f"{NOT_LISTED} Rows: `norm`, `init`, `lr`, `train_accuracy`; over schemes at each learning rate and over "
    "learning rates at each scheme, averaged.",
)
def _robustness(rows: Rows) -> Margins:
    return {
        f"spread over {knob}, none minus batch": _spread_difference(rows, held)
        for knob, held in (("init", "lr"), ("lr", "init"))
    }


def _spread_difference(rows: Rows, held: str) -> list[float]:
    """Return, per seed, how much wider the accuracies of the arm without BN scatter while one knob is held."""
    spreads = {norm: _mean_spread(rows, norm, held) for norm in ("none", "batch")}
    seeds = sorted(spreads["none"].keys() & spreads["batch"].keys())
    return [spreads["none"][seed] - spreads["batch"][seed] for seed in seeds]


def _mean_spread(rows: Rows, norm: str, held: str) -> dict[int, float]:
    groups: dict[int, dict[object, list[float]]] = {}
    for row in rows:
        if row["norm"] == norm and "init" in row:  # the study's other parts have no scheme
            groups.setdefault(row["seed"], {}).setdefault(row[held], []).append(row["train_accuracy"])
    return {seed: sum(map(pstdev, cells.values())) / len(cells) for seed, cells in groups.items()}
