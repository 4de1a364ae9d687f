"""What a page is drawn from (runs, and the document concluded from them) and its charts: curves, sweeps, intervals."""

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from normgauge import charts
from normgauge.charts import printable
from normgauge.documents import ComparisonDocument, Metric
from normgauge.records import Row, Run, Spec, plain

FAILED = ("diverged", "error", "nonconverged")
SPREAD: Any = {"y": "mean", "low": "low", "high": "high", "series": "arm", "legend": False}


@dataclass(frozen=True)
class PageContent:
    """Everything a page is drawn from; without a document it shows the runs.

    Args:
        runs: with their readings.
        document: what was concluded from them, `None` where nothing was yet.

    Examples:
        >>> content = PageContent([Run({"norm": "batch", "lr": lr, "seed": 0}) for lr in (0.1, 1.0)])
        >>> content.arms, content.settings
        (['batch'], ['lr 0.1', 'lr 1'])
    """

    runs: Sequence[Run]
    document: ComparisonDocument | None = None

    @cached_property
    def scientific(self) -> tuple[str, ...]:
        """The knobs asked about; without a document, `norm` where runs have one."""
        if self.document is not None:
            return tuple(self.document.question.scientific)
        return ("norm",) if any("norm" in run.spec for run in self.runs) else ()

    @cached_property
    def nuisance(self) -> tuple[str, ...]:
        """The knobs tuned per arm; without a document, whatever else varies between runs, seeds aside."""
        if self.document is not None:
            return tuple(self.document.question.nuisance)
        values: dict[str, set[str]] = {}
        for run in self.runs:
            for knob, value in run.spec.items():
                values.setdefault(knob, set()).add(repr(value))
        return tuple(
            k for k, distinct in values.items() if len(distinct) > 1 and k != "seed" and k not in self.scientific
        )

    def arm(self, knobs: Spec) -> str:
        """Return the arm a spec belongs to: its scientific values, joined, as charts write them."""
        return printable(" / ".join(str(knobs.get(knob)) for knob in self.scientific)) or "all runs"

    def setting(self, knobs: Spec) -> str:
        """Return the nuisance values of a spec or a choice, as `lr 0.3`."""
        return printable(", ".join(f"{knob} {show(knobs.get(knob))}" for knob in self.nuisance))

    @cached_property
    def arms(self) -> list[str]:
        """Every arm: in the study's order, then as document and runs bring them."""
        planned: Mapping[str, Sequence[Any]] = self.document.question.scientific if self.document else {}
        concluded = [arm.knobs for arm in self.document.arms] if self.document else []
        order = [self.arm(dict(zip(planned, values, strict=True))) for values in itertools.product(*planned.values())]
        here = dict.fromkeys(self.arm(knobs) for knobs in [*concluded, *(run.spec for run in self.runs)])
        return [*(arm for arm in order if arm in here), *(arm for arm in here if arm not in order)]

    @cached_property
    def settings(self) -> list[str]:
        """Every nuisance setting that was run, sorted by its values."""
        if not self.nuisance:
            return []
        specs = {self.setting(run.spec): run.spec for run in self.runs}
        return sorted(specs, key=lambda name: [_sortable(specs[name].get(knob)) for knob in self.nuisance])

    @cached_property
    def chosen_settings(self) -> dict[str, Mapping[str, Any]]:
        """Arm -> its chosen setting."""
        arms = self.document.arms if self.document else ()
        return {self.arm(arm.knobs): arm.setting for arm in arms if arm.setting}

    @cached_property
    def metrics(self) -> dict[str, Metric]:
        """The metrics by name, titles as they stand over a picture; what is only measured gets its name as title."""
        described = {metric.name: metric for metric in (self.document.metrics if self.document else ())}
        for name in dict.fromkeys(reading.name for run in self.runs for reading in run.readings):
            described.setdefault(
                name, Metric(name, name.replace("_", " "), unit="%" if name.endswith("accuracy") else "")
            )
        return {n: replace(m, title=m.title[:1].upper() + m.title[1:]) for n, m in described.items()}

    @cached_property
    def averaged_metrics(self) -> set[str]:
        """The metrics that are read per layer only; pictures show the mean over layers."""
        sorts = {(reading.name, reading.layer is None) for run in self.runs for reading in run.readings}
        return {name for name, whole in sorts if not whole and (name, True) not in sorts}

    @cached_property
    def values(self) -> dict[str, dict[tuple[int, int], float]]:
        """Metric -> place of the run and step -> value in the unit of the metric."""
        groups: dict[str, dict[tuple[int, int], list[float]]] = defaultdict(lambda: defaultdict(list))
        for place, run in enumerate(self.runs):
            for reading in run.readings:
                if math.isfinite(reading.value) and (reading.layer is None or reading.name in self.averaged_metrics):
                    groups[reading.name][place, reading.step].append(reading.value)
        return {
            name: {key: metric.factor * fmean(values) for key, values in groups[name].items()}
            for name, metric in self.metrics.items()
            if name in groups
        }


def show(value: Any) -> str:
    """Write a setting's value: numbers short, lists joined, nothing as a dash."""
    if value is None:
        return "-"
    if isinstance(value, float):
        return f"{value:.6g}"
    if isinstance(value, (list, tuple)):
        return ", ".join(show(item) for item in value)
    if isinstance(value, Mapping):
        return ", ".join(f"{key} {show(item)}" for key, item in value.items())
    return str(value)


def is_number(value: Any) -> bool:
    """Say whether a setting is a number; True and False are none."""
    return isinstance(value, (int, float)) and not isinstance(value, bool)


def _sortable(value: Any) -> tuple[int, float, str]:
    return (0, float(value), "") if is_number(value) else (1, 0.0, str(value))


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
        if is_number(value) and _others_chosen(content, run, knob):
            groups[content.arm(run.spec), float(str(value))].append(place)
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
    scale, said = _scale(default or rows, rows), ("setting", "n")
    chart = charts.curves(rows, **SPREAD, detail=said, order=content.arms, y_scale=scale)
    return _entry(content, "curve", content.metrics[name], chart)


def _final(content: PageContent, name: str, knob: str) -> dict[str, Any] | None:
    rows = final_rows(content, name, knob)
    if len({row[knob] for row in rows}) < 2 or not any(row["mean"] is not None for row in rows):
        return None
    statuses = {run.status for run in content.runs} & set(FAILED)
    label = "diverged" if statuses == {"diverged"} else "diverged or failed"
    failures: Any = {"failed": "failed", "total": "runs", "failed_label": label}
    title = "learning rate" if knob == "lr" else knob
    chart = charts.against(rows, x=knob, **SPREAD, **failures, x_title=title, order=content.arms, height=360)
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
