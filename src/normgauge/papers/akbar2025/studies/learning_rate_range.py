"""S0 sec. 1.1, 5.1, 7.1 and S1: the largest learning rate that trains, per normalizer, predicted and observed."""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import median

import torch
from torch import nn

from normgauge.charts import against, intervals
from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.measure.curvature.stable_rate import stable_rate
from normgauge.objective import Objective
from normgauge.papers.akbar2025.studies._networks import dataset, hidden_layers
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec

NORMS = ("none", "batch", "layer", "group", "rms", "weight")
FACTOR = 3.0  # on the weights before the normalizers, for the second search
TRAINED = 0.5  # of the first loss


def run(spec: Spec, record: Record) -> None:
    """Predict 2 / lambda_max at the start, observe it in full-batch runs, and search the largest rate that trains."""
    digits = dataset(spec["data"])
    rows = int(spec["measured"])
    network = _network(spec, digits)
    batch = (digits.train[0][:rows], digits.train[1][:rows])
    objective = Objective(network, nn.functional.cross_entropy, batch, mode="train")
    rates = stable_rate(objective, iterations=int(spec["probe_steps"]), tol=0.2)
    record(0, "lambda_max", rates.top_eigenvalue, kind="estimate")
    record(0, "predicted_rate", rates.predicted, kind="estimate")
    record(0, "observed_start_rate", rates.observed, kind="estimate", status=rates.status)
    steps = int(spec["steps"])
    record(steps, "largest_stable_rate", _search(spec, record, digits, 1.0, "final_loss"))
    record(steps, "largest_stable_rate_scaled", _search(spec, record, digits, FACTOR, "final_loss_scaled"))


def _network(spec: Spec, digits: Dataset, factor: float = 1.0) -> nn.Module:
    """Build the network with the weights of its normalized layers times a factor; weight normalizers keep g."""
    network = models.build(spec["model"], spec["norm"], digits.shape, digits.classes, int(spec["seed"])).float()
    with torch.no_grad():
        for layer in hidden_layers(network):
            named = dict(layer.layer.named_parameters())
            directions = [value for name, value in named.items() if value.ndim > 1 and value.shape[1] > 1]
            for value in directions:
                value.mul_(factor)
    return network


def _search(spec: Spec, record: Record, digits: Dataset, factor: float, reading: str) -> float:
    """Return the largest rate of the grid after which the loss has halved, from the top down; nan if none does.

    A search from the bottom would stop at the first rate that fails; this one cannot miss a larger one that trains.
    """
    rate, lowest = float(spec["highest"]), float(spec["lowest"])
    while rate >= lowest:
        network = _network(spec, digits, factor)
        optimizer = torch.optim.SGD(network.parameters(), lr=rate)
        course = train(
            network, digits, optimizer, steps=int(spec["steps"]), batch=int(spec["batch"]), seed=int(spec["seed"])
        )
        recent = course.losses[-10:]
        last = sum(recent) / len(recent)
        ended = not course.diverged and math.isfinite(last)
        record(0, reading, last / course.losses[0] if ended else math.nan, layer=f"{rate:.6g}")
        if ended and last <= TRAINED * course.losses[0]:
            return rate
        rate /= 2
    return math.nan


@empirical(
    "S0-rate",
    place="sec 1.1, 5.1, 7.1",
    printed="the allowed stable step size is larger with BN",
    study="learning-rate-range",
    criterion="the largest stable rate with BN is above that without",
    cite=("akbar2025",),
    note="Not in the list the ledger started from. From weights c times as large a first step of c^2 times the rate "
    "turns them as far (S0-efflr); over whole runs the study sees no such gain.",
)
def _stable_rate(table: StudyTable) -> Margins:
    orders = table.paired_log10("largest_stable_rate", "batch", "none")
    return {"log10 of the largest stable rate, batch over none": orders}


@finding(
    "learning-rate-range",
    printed="the curvature at the start predicts it: 2 / lambda_max is larger with BN",
    criterion="2 / lambda_max at the start is larger with BN than without",
)
def _predicted_rate(table: StudyTable) -> Margins:
    return {"log10 of the predicted rate, BN over none": table.paired_log10("predicted_rate", "batch", "none")}


def _norms(table: StudyTable) -> list[str]:
    return list(dict.fromkeys(row["norm"] for row in table.rows))


def figures(table: StudyTable) -> list[Figure]:
    """Draw the largest rates per normalizer, and observed against predicted."""
    rows = []
    for norm in _norms(table):
        interval = table.mean("largest_stable_rate", norm=norm)
        rows.append({"series": norm, "value": interval.mean, "low": max(interval.low, 1e-3), "high": interval.high})
    pairs = [
        {"series": row["norm"], "predicted": row["predicted_rate"], "value": row["largest_stable_rate"]}
        for row in table.rows
        if row.get("predicted_rate") and row.get("largest_stable_rate")
    ]
    return [
        Figure(
            "rates",
            intervals(rows, x_title="largest rate that trains", scale="log"),
            "Largest rate after which the training loss has halved; 95 % intervals over seeds.",
        ),
        Figure(
            "prediction",
            against(
                sorted(pairs, key=lambda row: (row["series"], row["predicted"])),
                x="predicted",
                x_title="2 / lambda_max at the start",
                y_title="largest rate that trains",
                x_scale="log",
                y_scale="log",
            ),
            "Observed against predicted, one point per run.",
        ),
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say prediction and observation per normalizer, and the effect of larger weights."""
    lines = []
    for norm in _norms(table):
        values = [list(table.by_seed(name, norm=norm).values()) or [math.nan] for name in COLUMNS[1:]]
        predicted, start, largest, scaled = map(median, values)
        lines.append(
            f"{norm} (medians): 2 / lambda_max at the start {predicted:.3g}, stable in a few full-batch steps up to "
            f"{start:.3g}, "
            f"trains up to {largest:.3g}; from weights {FACTOR:g} times as large up to {scaled:.3g} "
            f"({scaled / largest:.2g} times)."
        )
    lines.append(
        "Full-batch descent counts as stable if the loss does not rise in the second half of the few steps, which a "
        "normalized network does far above 2 / lambda_max: its weights grow until the steps are small."
    )
    once, thrice = (table.by_seed(name, norm="batch") for name in COLUMNS[3:])
    ratio = median([thrice[seed] / once[seed] for seed in sorted(once.keys() & thrice.keys())] or [math.nan])
    lines.append(
        f"If scale-invariant weights alone set the limit, weights {FACTOR:g} times as large would stand rates "
        f"{FACTOR**2:g} times as large (claim S0-efflr). With BN the largest rate that trains becomes {ratio:.2g} "
        "times as large: what is not scale-invariant, the last layer and the gains, counts as well."
    )
    return lines


COLUMNS = (
    "lambda_max",
    "predicted_rate",
    "observed_start_rate",
    "largest_stable_rate",
    "largest_stable_rate_scaled",
)


def _study(norms: Sequence[str], seeds: int, steps: int, measured: int, bounds: tuple[float, float]) -> Study:
    return Study(
        "learning-rate-range",
        "How large may the rate be?",
        scientific={"norm": list(norms)},
        fixed={
            "model": "mlp",
            "data": "digits",
            "steps": steps,
            "batch": 128,
            "measured": measured,
            "probe_steps": 4 if measured < 100 else 10,
            "lowest": bounds[0],
            "highest": bounds[1],
        },
        seeds=seeds,
    )


register(
    Experiment(
        name="learning-rate-range",
        papers=("S0", "S1"),
        place="Akbar 2025 sec. 1.1, 5.1, 7.1; Santurkar et al. 2018 sec. 3",
        question="How large a learning rate does each normalizer stand, and does the first curvature predict it?",
        finding="The stable step size is larger with BN, because it makes the loss smoother; eta < 2 / lambda_max.",
        proxy="Santurkar et al. 2018 train a VGG on CIFAR-10; ours is the MLP with three hidden layers of 64 on the "
        "8x8 digits, SGD with batches of 128. A rate (of a grid of powers of 2) trains if the loss has halved after "
        "the stated steps.",
        sizes={
            "smoke": _study(("none", "batch"), 3, 20, 32, (0.125, 1.0)),
            "small": _study(NORMS, 5, 60, 256, (0.015625, 64.0)),
            "paper": _study(NORMS, 5, 1000, 1149, (0.0009765625, 256.0)),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=COLUMNS,
        minutes={"small": 0.3},
        cite=("akbar2025", "santurkar2018", "lyu2022"),
    )
)
