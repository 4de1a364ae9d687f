"""From runs to charts: curves over steps, final values against the tuned knob, the arms' intervals."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence
from statistics import fmean
from typing import Any

from normgauge import charts
from normgauge.documents import Metric
from normgauge.records import Row, Run, plain
from normgauge.report._content import PageContent

FAILED = ("diverged", "error", "nonconverged")


def curve_rows(content: PageContent, metric: str) -> list[Row]:
    """Return mean, min and max over seeds per arm, setting and step; a run counts until it fails."""
    groups: dict[tuple[str, str, int], list[float]] = defaultdict(list)
    for (place, step), value in content.values[metric].items():
        spec = content.runs[place].spec
        groups[content.arm(spec), content.setting(spec), step].append(value)
    return [
        {"arm": arm, "setting": setting, "step": step, "mean": fmean(v), "low": min(v), "high": max(v), "n": len(v)}
        for (arm, setting, step), v in sorted(groups.items(), key=lambda item: item[0][2])
    ]


def final_rows(content: PageContent, metric: str, knob: str) -> list[Row]:
    """Return the last value of the ok runs per arm and knob value, with the number of runs that failed.

    Where several knobs are tuned, the others are held at the arm's chosen setting if there is one.
    """
    last = {place: value for (place, _), value in sorted(content.values[metric].items())}
    groups: dict[tuple[str, float], list[int]] = defaultdict(list)
    for place, run in enumerate(content.runs):
        value = run.spec.get(knob)
        if isinstance(value, (int, float)) and not isinstance(value, bool) and _others_chosen(content, run, knob):
            groups[content.arm(run.spec), float(value)].append(place)
    rows: list[Row] = []
    for (arm, value), places in sorted(groups.items(), key=lambda item: item[0][1]):
        finals = [last[place] for place in places if content.runs[place].ok and place in last]
        failed = sum(content.runs[place].status in FAILED for place in places)
        if finals or failed:
            spread = (fmean(finals), min(finals), max(finals)) if finals else (None, None, None)
            ends = dict(zip(("mean", "low", "high"), spread, strict=True))
            rows.append({"arm": arm, knob: value, **ends, "failed": failed, "runs": len(places)})
    return rows


def specs(content: PageContent) -> dict[str, dict[str, Any]]:
    """Return every chart of the page: id -> kind, title, help and its Vega-Lite specification."""
    entries = {"intervals": _intervals(content)}
    for index, name in enumerate(content.values):
        entries[f"curve-{index}"] = _curve(content, name)
    for knob in content.nuisance:
        for index, name in enumerate(content.values):
            entries[f"final-{knob}-{index}"] = _final(content, name, knob)
    return {name: entry for name, entry in entries.items() if entry is not None}


def _curve(content: PageContent, name: str) -> dict[str, Any] | None:
    rows = curve_rows(content, name)
    if len({row["step"] for row in rows}) < 2:
        return None
    chosen = {(arm, content.setting(setting)) for arm, setting in content.chosen_settings.items()}
    default = [row for row in rows if not chosen or (row["arm"], row["setting"]) in chosen]
    chart = charts.curves(
        rows,
        y="mean",
        series="arm",
        low="low",
        high="high",
        detail=("setting", "n"),
        order=content.arms,
        y_scale=_scale(default or rows, rows),
        legend=False,
    )
    return _entry(content, "curve", content.metrics[name], chart)


def _final(content: PageContent, name: str, knob: str) -> dict[str, Any] | None:
    rows = final_rows(content, name, knob)
    if len({row[knob] for row in rows}) < 2 or not any(row["mean"] is not None for row in rows):
        return None
    statuses = {run.status for run in content.runs} & set(FAILED)
    chart = charts.against(
        rows,
        x=knob,
        y="mean",
        series="arm",
        low="low",
        high="high",
        failed="failed",
        total="runs",
        order=content.arms,
        x_title={"lr": "learning rate"}.get(knob, knob),
        failed_label="diverged" if statuses == {"diverged"} else "diverged or failed",
        legend=False,
        height=360,
    )
    return {**_entry(content, "final", content.metrics[name], chart), "knob": knob}


def _intervals(content: PageContent) -> dict[str, Any] | None:
    """Return the picture beside the answer: the first metric of the comparison that has a better direction."""
    arms = content.document.arms if content.document else ()
    for metric in sorted(content.metrics.values(), key=lambda metric: not metric.better):
        if sum(metric.name in arm.values for arm in arms) < 2:
            continue
        rows = []
        for arm in arms:
            value = arm.values.get(metric.name)
            ends = {"mean": None, "low": None, "high": None} if value is None else plain(value.times(metric.factor))
            rows.append({"arm": content.arm(arm.knobs), **ends})
        chart = charts.intervals(rows, value="mean", series="arm", order=content.arms, x_title="")
        return _entry(content, "intervals", metric, chart)
    return None


def _entry(content: PageContent, kind: str, metric: Metric, chart: Any) -> dict[str, Any]:
    spec = chart.to_dict(validate=False)  # the chart is ours, and the schema walks every row: half the time
    spec.pop("config", None)  # the page brings the theme, light or dark
    spec.pop("$schema", None)
    averaged = "Mean over layers." if kind != "intervals" and metric.name in content.averaged_metrics else ""
    words = " ".join(filter(None, (metric.help, averaged)))
    return {"kind": kind, "title": metric.title, "unit": metric.unit, "help": words, "spec": spec}


def _others_chosen(content: PageContent, run: Run, knob: str) -> bool:
    choice = content.chosen_settings.get(content.arm(run.spec), {})
    return all(run.spec.get(other) == value for other, value in choice.items() if other != knob)


def _scale(default: Sequence[Row], rows: Sequence[Row]) -> Any:
    """Choose log by what the page shows first, unless another view holds a value a log axis cannot show."""
    lows = [row["low"] for row in default]
    wide = max(row["mean"] for row in default) >= 100 * min(lows)
    return "log" if wide and min(row["low"] for row in rows) > 0 else "linear"
