"""`StudyTable`: the stored runs of a study as flat rows, with the few questions figures and verdicts ask of them."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normgauge.lab.statistics import Interval, interval
from normgauge.lab.study import Study
from normgauge.papers.court import by_seed, paired

Row = dict[str, Any]


@dataclass(frozen=True)
class StudyTable:
    """Rows of finished runs.

    Attributes:
        rows: one flat row per run at its arm's chosen setting: knobs, `seed`, `status`, last value of every reading.
        trials: the same for every run, with the settings that were tried and not chosen.
        readings: all readings of the chosen runs, each with the knobs of its run.
    """

    rows: tuple[Row, ...]
    trials: tuple[Row, ...]
    readings: tuple[Row, ...]

    def where(self, **knobs: Any) -> list[Row]:
        """Return the rows whose knobs have these values."""
        return [row for row in self.rows if _has(row, knobs)]

    def by_seed(self, reading: str, **knobs: Any) -> dict[int, float]:
        """Return the reading per seed among the rows whose knobs have these values."""
        return by_seed(self.rows, reading, **knobs)

    def mean(self, reading: str, **knobs: Any) -> Interval:
        """Return mean and 95 % interval over seeds."""
        return interval(list(self.by_seed(reading, **knobs).values()))

    def paired(self, reading: str, left: Any, right: Any, *, knob: str = "norm", **where: Any) -> list[float]:
        """Return `reading(left) - reading(right)` on every seed both arms have."""
        return paired(self.rows, reading, left, right, knob=knob, **where)

    def curve(self, reading: str, **knobs: Any) -> list[Row]:
        """Return the readings of this name by step, each with `step`, `layer`, `value` and its run's knobs."""
        found = [row for row in self.readings if row["reading"] == reading and row["value"] is not None]
        return sorted((row for row in found if _has(row, knobs)), key=lambda row: row["step"])

    def band(self, reading: str, series: str | Callable[[Row], str], **knobs: Any) -> list[Row]:
        """Return mean, smallest and largest over seeds per series and step, ready for `charts.curves`.

        Args:
            reading: which reading.
            series: the knob that names the line, or a function of the row that does.
            **knobs: which runs.
        """
        name = series if callable(series) else (lambda row: str(row[series]))
        groups: dict[tuple[str, int], list[float]] = {}
        for row in self.curve(reading, **knobs):
            groups.setdefault((name(row), row["step"]), []).append(row["value"])
        return [
            {"series": key, "step": step, "mean": sum(v) / len(v), "low": min(v), "high": max(v)}
            for (key, step), v in groups.items()
        ]


def tabulate(runs: Sequence[Mapping[str, Any]], readings: Sequence[Mapping[str, Any]], chosen: set[str]) -> StudyTable:
    """Make the table from stored runs and readings; `chosen` are the ids of the runs that answer the question."""
    last: dict[str, dict[str, float | None]] = {}
    for reading in sorted(readings, key=lambda row: row["step"]):
        if reading["layer"] is None:
            last.setdefault(reading["run"], {})[reading["name"]] = reading["value"]
    rows = {run["id"]: {**knobs(run["spec"]), **_state(run), **last.get(run["id"], {})} for run in runs}
    specs = {run["id"]: knobs(run["spec"]) for run in runs if run["id"] in chosen}
    flat = [
        {**specs[r["run"]], "reading": r["name"], "step": r["step"], "layer": r["layer"], "value": r["value"]}
        for r in readings
        if r["run"] in specs
    ]
    answering = [row for identity, row in rows.items() if identity in chosen]
    return StudyTable(tuple(answering), tuple(rows.values()), tuple(flat))


def choose(
    study: Study, runs: Sequence[Mapping[str, Any]], value: Callable[[str], float | None], higher: bool
) -> list[Row]:
    """Return, per arm, the tuned setting whose mean over the tuning seeds is best; a failed run counts as worst.

    Of equal settings the first in the study's order wins, whatever run finished first.

    Args:
        study: which knobs are compared and which tuned.
        runs: stored runs of its first round.
        value: run id -> the reading chosen by, `None` where there is none.
        higher: whether larger is better.

    Returns:
        One mapping per arm with a value for every scientific and nuisance knob.
    """
    sign = 1.0 if higher else -1.0
    scores: dict[tuple[Any, ...], dict[tuple[Any, ...], list[float]]] = {}
    for run in runs:
        arm = tuple(_key(run["spec"][knob]) for knob in study.scientific)
        setting = tuple(_key(run["spec"][knob]) for knob in study.nuisance)
        found = value(run["id"]) if run["status"] == "ok" else None
        score = float("-inf") if found is None else sign * found
        scores.setdefault(arm, {}).setdefault(setting, []).append(score)
    order = list(itertools.product(*([_key(value) for value in values] for values in study.nuisance.values())))
    best = []
    for arm, settings in scores.items():
        winner = max(
            (setting for setting in order if setting in settings),
            key=lambda setting: sum(settings[setting]) / len(settings[setting]),
        )
        best.append({**dict(zip(study.scientific, arm, strict=True)), **dict(zip(study.nuisance, winner, strict=True))})
    return best


def knobs(spec: Mapping[str, Any]) -> Row:
    """Return a spec's plain values: lists (schedules of measuring) and the study's name are no knobs."""
    return {name: value for name, value in spec.items() if name != "study" and not isinstance(value, (list, dict))}


def _state(run: Mapping[str, Any]) -> Row:
    return {"status": run["status"], "sentence": run["sentence"], "seconds": run["seconds"]}


def _has(row: Mapping[str, Any], wanted: Mapping[str, Any]) -> bool:
    return all(row.get(name) == value for name, value in wanted.items())


def _key(value: Any) -> Any:
    return tuple(value) if isinstance(value, list) else value
