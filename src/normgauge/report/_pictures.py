"""From tables to charts: curves over steps, final values against the tuned knob, the arms' intervals."""

from __future__ import annotations

import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import fmean
from typing import Any

from normgauge import charts
from normgauge.report._tables import ReportTables

FAILED = ("diverged", "error", "nonconverged")


def curve_rows(tables: ReportTables, metric: str) -> list[dict[str, Any]]:
    """Return mean, min and max over seeds per arm, setting and step; a run counts until it fails."""
    specs = {run["id"]: run["spec"] for run in tables.runs}
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for (run, step), value in _values(tables, metric).items():
        if run in specs:
            groups[tables.arm(specs[run]), tables.setting(specs[run]), step].append(value)
    return [
        {"arm": arm, "setting": setting, "step": step, "mean": fmean(v), "low": min(v), "high": max(v), "n": len(v)}
        for (arm, setting, step), v in sorted(groups.items(), key=lambda item: item[0][2])
    ]


def final_rows(tables: ReportTables, metric: str, knob: str) -> list[dict[str, Any]]:
    """Return the last value of the ok runs per arm and knob value, with the number of runs that failed.

    Where several knobs are tuned, the others are held at the arm's chosen setting if one is known.
    """
    last: dict[str, tuple[int, float]] = {}
    for (identity, step), reading in _values(tables, metric).items():
        last[identity] = max(last.get(identity, (step, reading)), (step, reading))
    groups: dict[tuple[str, float], list[Mapping[str, Any]]] = defaultdict(list)
    for run in tables.runs:
        value = run["spec"].get(knob)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _others_chosen(tables, run, knob):
            groups[tables.arm(run["spec"]), float(value)].append(run)
    rows = []
    for (arm, value), runs in sorted(groups.items(), key=lambda item: item[0][1]):
        finals = [last[run["id"]][1] for run in runs if run["status"] == "ok" and run["id"] in last]
        failed = sum(run["status"] in FAILED for run in runs)
        if finals or failed:
            spread = {"mean": fmean(finals), "low": min(finals), "high": max(finals)} if finals else {}
            empty: dict[str, Any] = {"mean": None, "low": None, "high": None}
            rows.append({"arm": arm, knob: value, **empty, **spread, "failed": failed, "runs": len(runs)})
    return rows


def specs(tables: ReportTables) -> dict[str, dict[str, Any]]:
    """Return every chart of the page: id -> kind, title, help and its Vega-Lite specification."""
    found: dict[str, dict[str, Any]] = {}
    hero = _intervals(tables)
    if hero:
        found["intervals"] = hero
    measured = {str(reading["name"]) for reading in tables.readings}
    names = [name for name in tables.columns if name in measured]
    for index, name in enumerate(names):
        curve = _curve(tables, name)
        if curve:
            found[f"curve-{index}"] = curve
    for knob in tables.nuisance:
        for index, name in enumerate(names):
            final = _final(tables, name, knob)
            if final:
                found[f"final-{knob}-{index}"] = final
    return found


def _curve(tables: ReportTables, name: str) -> dict[str, Any] | None:
    rows = curve_rows(tables, name)
    if len({row["step"] for row in rows}) < 2:
        return None
    default = [row for row in rows if not tables.chosen or tables.chosen.get(row["arm"]) == row["setting"]]
    chart = charts.curves(
        rows,
        y="mean",
        series="arm",
        low="low",
        high="high",
        detail=("setting", "n"),
        order=tables.arms,
        y_scale=_scale(default or rows, rows),
        legend=False,
    )
    return _entry(tables, "curve", name, chart)


def _final(tables: ReportTables, name: str, knob: str) -> dict[str, Any] | None:
    rows = final_rows(tables, name, knob)
    if len({row[knob] for row in rows}) < 2 or not any(row["mean"] is not None for row in rows):
        return None
    statuses = {run["status"] for run in tables.runs} & set(FAILED)
    chart = charts.against(
        rows,
        x=knob,
        y="mean",
        series="arm",
        low="low",
        high="high",
        failed="failed",
        total="runs",
        order=tables.arms,
        x_title={"lr": "learning rate"}.get(knob, knob),
        failed_label="diverged" if statuses == {"diverged"} else "diverged or failed",
        legend=False,
        height=360,
    )
    return {**_entry(tables, "final", name, chart), "knob": knob}


def _intervals(tables: ReportTables) -> dict[str, Any] | None:
    """Return the picture beside the answer: the first metric of the comparison that has a better direction."""
    table = tables.comparison
    columns = sorted(tables.rows("columns"), key=lambda column: not column.get("better"))
    for column in columns:
        name = str(column.get("name"))
        rows = [
            {"arm": tables.arm(row), "mean": row.get(name), **{e: row.get(f"{name}_{e}") for e in ("low", "high")}}
            for row in table
        ]
        if sum(_finite(row["mean"]) for row in rows) >= 2:
            chart = charts.intervals(rows, value="mean", series="arm", order=tables.arms, x_title="")
            return _entry(tables, "intervals", name, chart)
    return None


def _entry(tables: ReportTables, kind: str, name: str, chart: Any) -> dict[str, Any]:
    column = tables.columns[name]
    spec = chart.to_dict(validate=False)  # the chart is ours, and the schema walks every row: half the time
    spec.pop("config", None)  # the page brings the theme, light or dark
    spec.pop("$schema", None)
    return {
        "kind": kind,
        "title": column["title"],
        "unit": column["unit"],
        "help": " ".join(filter(None, (column["help"], _averaged(tables, kind, name)))),
        "spec": spec,
    }


def _averaged(tables: ReportTables, kind: str, name: str) -> str:
    mine = [reading.get("layer") for reading in tables.readings if reading["name"] == name]
    return "Mean over layers." if kind != "intervals" and mine and None not in mine else ""


def _values(tables: ReportTables, metric: str) -> dict[tuple[str, int], float]:
    """Return the metric per run and step; a metric read per layer only is averaged over layers."""
    whole: dict[tuple[str, int], list[float]] = defaultdict(list)
    layers: dict[tuple[str, int], list[float]] = defaultdict(list)
    for reading in tables.readings:
        if reading["name"] == metric and _finite(reading.get("value")):
            kept = whole if reading.get("layer") is None else layers
            kept[reading["run"], int(reading["step"])].append(float(reading["value"]))
    factor = tables.columns[metric]["factor"]
    return {key: factor * fmean(values) for key, values in (whole or layers).items()}


def _others_chosen(tables: ReportTables, run: Mapping[str, Any], knob: str) -> bool:
    choice = tables.document("chosen").get(tables.arm(run["spec"]))
    if not isinstance(choice, Mapping):
        return True
    return all(run["spec"].get(k) == choice[k] for k in tables.nuisance if k != knob and k in choice)


def _scale(default: Sequence[Mapping[str, Any]], rows: Sequence[Mapping[str, Any]]) -> Any:
    """Choose log by what the page shows first, unless another view holds a value a log axis cannot show."""
    lows = [row["low"] for row in default]
    wide = max(row["mean"] for row in default) >= 100 * min(lows)
    return "log" if wide and min(row["low"] for row in rows) > 0 else "linear"


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
