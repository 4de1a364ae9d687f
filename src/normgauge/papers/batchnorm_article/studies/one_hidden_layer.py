"""S3 Decoupling, neural networks: GDNP unit by unit on one hidden layer of tanh units, against four rivals."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence

import torch
from torch import Tensor

from normgauge.charts import against
from normgauge.lab.study import Study
from normgauge.optim import gdnp_network
from normgauge.papers.batchnorm_article.studies._descents import METHODS, TITLES, Path, Race, descend
from normgauge.papers.batchnorm_article.studies._gdnp_data import FEATURES, two_classes
from normgauge.papers.batchnorm_article.studies._gdnp_pages import (
    kinds,
    race_figures,
    race_margins,
    race_remarks,
    ratio,
    record_path,
)
from normgauge.papers.court import Margins, StudyTable, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.rng import generator

DATA = ("gaussian", "laplace", "exponential", "digits")
UNITS = 4
CHUNK = 8
# How close to one line units must be for the paper's sentence on critical points; fixed before running.
ON_THE_LINE = 0.95


def run(spec: Spec, record: Record) -> None:
    """Train the hidden weights of sum_i theta_i tanh(w_i.x), output weights fixed, to the target loss."""
    seed, most, target = int(spec["seed"]), int(spec["steps"]), float(spec["target"])
    samples = max(int(spec["batch"]), 8 * FEATURES)
    x, y = two_classes(spec["data"], float(spec["condition"]), samples, seed)
    theta = torch.tensor([1.0, -1.0] * (UNITS // 2), dtype=torch.float64)
    race = _race(x, y, theta, seed)
    settled = descend(race, "lbfgs", target=0.0, most=min(most, int(spec["floor_steps"])))
    race = dataclasses.replace(race, floor=min(settled.losses))
    if spec["method"] == "gdnp":
        path = _gdnp(x, y, theta, race, target, most)
    else:
        path = descend(race, spec["method"], target=target, most=most)
    record_path(record, path, target, most)
    record(len(path.distances) - 1, "alignment", _alignment(settled.end, x, y, race.S))  # nearly critical
    record(len(path.distances) - 1, "settled_gradient", settled.distances[-1])


def _race(x: Tensor, y: Tensor, theta: Tensor, seed: int) -> Race:
    S = x.T @ x / len(x)
    drawn = torch.randn(UNITS, FEATURES, generator=generator(5000 + seed), dtype=torch.float64)
    start = drawn / ((drawn @ S) * drawn).sum(1, keepdim=True).sqrt()

    def slopes(w: Tensor) -> tuple[Tensor, Tensor]:
        t = torch.tanh(x @ w.transpose(1, 2))  # [copies, samples, units]
        margin = y * (t @ theta)
        pull = -y * torch.sigmoid(-margin) / len(x)
        gradients = (pull[..., None] * (1 - t * t) * theta).transpose(1, 2) @ x
        return torch.nn.functional.softplus(-margin).mean(1), gradients

    return Race(slopes, S, float(torch.linalg.eigvalsh(S)[-1]) * float(theta @ theta) / 4, start)


def _gdnp(x: Tensor, y: Tensor, theta: Tensor, race: Race, target: float, most: int) -> Path:
    """Sweep over the units until the target; it remembers nothing but the weights, so it can be continued."""
    path, floor = Path(end=race.start), float(race.floor or 0.0)
    evaluations: list[int] = []
    while len(path.distances) <= most and path.iterations(target) is None:
        count = min(CHUNK, most - max(len(path.distances) - 1, 0))
        descent = gdnp_network(x, y, output=theta, start=path.end, sweeps=count)
        skip = 1 if path.distances else 0
        path.losses += descent.losses[skip:]
        before = evaluations[-1] if evaluations else 0
        evaluations += [before + count for count in descent.evaluations[skip:]]
        path.distances = [(loss - floor) / (path.losses[0] - floor) for loss in path.losses]
        path.end = descent.weights
        if count == 0 or len(path.distances) > most:
            break
    arrived = path.iterations(target)
    if arrived is not None:
        path.distances, path.losses = path.distances[: arrived + 1], path.losses[: arrived + 1]
    path.gradients = evaluations[len(path.distances) - 1]  # the searches of steps and lengths too
    return path


def _alignment(w: Tensor | None, x: Tensor, y: Tensor, S: Tensor) -> float:
    """Return the smallest |cos| (S metric) of a unit with S^-1 u, the line S3 puts all critical points on."""
    if w is None:
        return math.nan
    u = -(y @ x) / len(x)
    line = torch.linalg.solve(S, u)
    lengths = ((w @ S) * w).sum(1).sqrt() * (line @ u).sqrt()
    return float(((w @ u).abs() / lengths).min())


@finding(
    "one-hidden-layer",
    printed="GDNP over alternating units trains one hidden layer faster than gradient descent, and all critical points "
    "of a unit lie on the line of S^-1 u",
    criterion="for every kind of data at every condition number, to the target loss: iterations of gradient descent at "
    "its best step over sweeps of GDNP, above 1; on Gaussian data at the smallest condition number, after L-BFGS: the "
    f"smallest |cos| of a unit with the line above {ON_THE_LINE}",
)
def _faster_and_on_the_line(table: StudyTable) -> Margins:
    condition = min(row["condition"] for row in table.rows)
    cosines = table.by_seed("alignment", data="gaussian", method="lbfgs", condition=condition)
    return {
        **race_margins(table, kinds(table), "GD over sweeps of GDNP"),
        f"gaussian, condition {condition:g}: |cos| with the line - {ON_THE_LINE}": [
            value - ON_THE_LINE for value in cosines.values()
        ],
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw iterations over condition numbers, the gradient over iterations, and how far units are on the line."""
    rows = []
    for data in kinds(table):
        for condition in sorted({row["condition"] for row in table.rows}):
            cosine = table.mean("alignment", data=data, method="lbfgs", condition=condition)
            point = {"series": data, "condition": condition, "value": cosine.mean}
            rows.append({**point, "low": cosine.low, "high": cosine.high})
    chart = against(
        rows, x="condition", low="low", high="high", x_scale="log", y_scale="linear", x_title="condition number of S"
    )
    caption = (
        "Smallest |cos| of a unit with S^-1 u after 300 iterations of L-BFGS; the article puts critical points on that "
        "line."
    )
    return [*race_figures(table, "iterations", "loss above the floor, relative"), Figure("line", chart, caption)]


def remarks(table: StudyTable) -> list[str]:
    """Say who is faster, who ends lower, and whether units end on the line."""
    lines = race_remarks(table, "iterations")
    largest = max(row["condition"] for row in table.rows)
    told = ", ".join(f"{data} {ratio(table, 'gd', data, largest, 'gradients'):.3g}" for data in kinds(table))
    lines.append(
        f"One sweep of GDNP costs {UNITS} gradients and {UNITS} searches of a length. In gradients, GD over GDNP at "
        f"condition {largest:g}: {told}."
    )
    for data in kinds(table):
        ends = {m: table.mean("final_loss", data=data, method=m, condition=largest).mean for m in METHODS}
        told = ", ".join(f"{TITLES[method]} {value:.4g}" for method, value in ends.items())
        cosine = table.mean("alignment", data=data, method="lbfgs", condition=largest)
        lines.append(
            f"Data {data}, condition {largest:g}: mean loss at the end {told}; smallest |cos| of a settled unit with "
            f"the line of S^-1 u {cosine.mean:.3g}."
        )
    late = [row for row in table.rows if row["arrived"] == 0]
    lines.append(f"{len(late)} of {len(table.rows)} runs did not arrive within {table.rows[0]['steps']} iterations.")
    return lines


def _study(
    seeds: int, conditions: Sequence[float], most: int, batch: int, data: Sequence[str] = DATA, floor: int = 300
) -> Study:
    return Study(
        "one-hidden-layer",
        "Who reaches a small loss first?",
        scientific={"data": list(data), "condition": list(conditions), "method": list(METHODS)},
        fixed={"batch": batch, "steps": most, "target": 0.1, "floor_steps": floor},
        seeds=seeds,
    )


register(
    Experiment(
        name="one-hidden-layer",
        papers=("S3",),
        place="Decoupling, Neural networks",
        question="Does GDNP over alternating units train one hidden layer faster, and do its units lie on a line?",
        finding="All critical points of a unit lie on the line of S^-1 u; with GDNP the parameters of each unit, and "
        "so the whole problem, converge linearly.",
        proxy="The article gives no setting. Ours: four tanh units, output weights fixed at 1 and -1, logistic loss, "
        "16 features, overlapping classes as in the study halfspace, as samples; target a tenth of the first loss "
        "above that of 300 iterations of L-BFGS (gradients mislead: saturated units have none); best of 15 steps for "
        "each method that has one; a sweep of GDNP counts as one iteration.",
        sizes={
            "smoke": _study(3, (3.0,), 12, 150, ("gaussian", "digits"), 40),
            "small": _study(5, (3.0, 30.0, 100.0), 300, 500),
            "paper": _study(10, (3.0, 10.0, 30.0, 100.0, 300.0), 5000, 2000),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("iterations", "gradients", "rate", "arrived", "final_loss", "alignment", "settled_gradient"),
        minutes={"small": 1.5},
        cite=("batchnorm_article", "kohler2019"),
    )
)
