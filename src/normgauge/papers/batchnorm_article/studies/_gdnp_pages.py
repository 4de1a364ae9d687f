"""What the three studies of GDNP record of a race, and how they show it: iterations over condition numbers, curves."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

from normgauge.charts import against, curves
from normgauge.papers.batchnorm_article.studies._descents import METHODS, TITLES, Path
from normgauge.papers.court import StudyTable
from normgauge.papers.experiment import Figure, Record

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


def condition_rows(table: StudyTable, data: str, reading: str = "iterations") -> list[dict[str, Any]]:
    """Return mean and range over seeds per method and condition number, for `charts.against`."""
    rows = []
    for method in METHODS:
        for condition in sorted({row["condition"] for row in table.where(data=data)}):
            values = list(table.by_seed(reading, data=data, method=method, condition=condition).values())
            arrived = table.by_seed("arrived", data=data, method=method, condition=condition)
            if values:
                mean = math.exp(sum(math.log(v) for v in values) / len(values))
                point = {"series": TITLES[method], "condition": condition, "value": mean}
                late = sum(value == 0 for value in arrived.values())
                rows.append({**point, "low": min(values), "high": max(values), "late": late, "runs": len(values)})
    return rows


def race_figures(table: StudyTable, what: str, far: str = "gradient norm, relative") -> list[Figure]:
    """Draw iterations over condition numbers per kind of data, and the curves at the largest one of the first kind."""
    drawn = []
    for data in kinds(table):
        chart = against(
            condition_rows(table, data),
            x="condition",
            low="low",
            high="high",
            failed="late",
            total="runs",
            failed_label="not in time",
            order=[TITLES[method] for method in METHODS],
            x_title="condition number of S",
            y_title=f"{what} to the target",
            x_scale="log",
            y_scale="log",
        )
        caption = (
            f"Data {data}: {what} to the target, geometric mean and range over seeds, each method at its best step."
        )
        drawn.append(Figure(f"{data}", chart, caption))
    data, condition = kinds(table)[0], max(row["condition"] for row in table.rows)
    one = table.band("distance", lambda row: TITLES[row["method"]], data=data, condition=condition, seed=0)
    shown = [row for row in one if row["mean"] > 0]
    chart = curves(
        [{**row, "step": row["step"] + 1} for row in shown],
        x="step",
        y="mean",
        order=[TITLES[method] for method in METHODS],
        x_title=f"{what} + 1",
        y_title=far,
        y_scale="log",
    )
    drawn.append(Figure("curves", chart, f"One seed, data {data}, condition number {condition:g}."))
    return drawn


def kinds(table: StudyTable) -> list[str]:
    """Return the kinds of data in the order they were run."""
    return list(dict.fromkeys(row["data"] for row in table.rows))


def ratio(table: StudyTable, method: str, data: str, condition: float, reading: str = "iterations") -> float:
    """Return the geometric mean over seeds of the method's reading over GDNP's."""
    theirs, ours = (table.by_seed(reading, data=data, method=name, condition=condition) for name in (method, "gdnp"))
    logs = [math.log(theirs[seed] / ours[seed]) for seed in theirs.keys() & ours.keys()]
    return math.exp(sum(logs) / len(logs)) if logs else math.nan


def race_margins(table: StudyTable, data: Sequence[str], words: str = "GD over GDNP") -> dict[str, list[float]]:
    """Return per kind of data, condition number and seed log10 of gradient descent's iterations over GDNP's."""
    return {
        f"{kind}, condition {condition:g}: log10 iterations, {words}": table.paired_log10(
            "iterations", "gd", "gdnp", knob="method", data=kind, condition=condition
        )
        for kind in data
        for condition in sorted({row["condition"] for row in table.where(data=kind)})
    }


def race_remarks(table: StudyTable, what: str) -> list[str]:
    """Say, per kind of data, how many times GDNP's iterations each rival needs, and where GDNP brings nothing."""
    lines, slower = [], []
    conditions = sorted({row["condition"] for row in table.rows})
    cells = [(data, condition) for data in kinds(table) for condition in conditions]
    for data in kinds(table):
        parts = []
        for method in METHODS[1:]:
            ratios = [ratio(table, method, data, condition) for condition in conditions]
            parts.append(f"{TITLES[method]} {', '.join(f'{value:.3g}' for value in ratios)}")
        numbers = ", ".join(f"{condition:g}" for condition in conditions)
        lines.append(f"Data {data}, {what} over GDNP's at condition {numbers}: {'; '.join(parts)}.")
    for method in METHODS[1:]:
        ahead = [f"{data} {condition:g}" for data, condition in cells if ratio(table, method, data, condition) < 1]
        if ahead:
            where = "everywhere" if len(ahead) == len(cells) else f"at {', '.join(ahead)}"
            slower.append(f"{TITLES[method]} {where}")
    lines.append(
        f"Where GDNP brings nothing (a rival needs fewer {what}): {'; '.join(slower)}."
        if slower
        else f"GDNP needs the fewest {what} everywhere tried."
    )
    return lines
