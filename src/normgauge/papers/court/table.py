"""`StudyTable`: the runs of a study as flat rows, with the few questions criteria, figures and remarks ask of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normgauge.errors import DataError
from normgauge.records import Row, Run
from normgauge.stats import Choice, Interval, interval, natural_bounds
from normgauge.store import spec_id


@dataclass(frozen=True)
class StudyTable:
    """Rows of runs.

    Attributes:
        rows: the measurements: one flat row per run that finished, at its arm's chosen setting: knobs, `seed`, last
            value of every reading. A run that diverged, died or failed is none of them.
        trials: every run, with its `status`: failed ones and settings that were tried and not chosen too.
        readings: all readings of the runs at their chosen setting, by step, each with the knobs of its run.
        choices: the settings that were tuned.
        failed: the knobs, in words, of shipped runs that are no measurements.
    """

    rows: tuple[Row, ...]
    trials: tuple[Row, ...] = ()
    readings: tuple[Row, ...] = ()
    choices: tuple[Choice, ...] = ()
    failed: tuple[str, ...] = ()

    def where(self, **knobs: Any) -> list[Row]:
        """Return the rows whose knobs have these values; a tuple lists several."""
        return [row for row in self.rows if _has(row, knobs)]

    def by_seed(self, reading: str, **knobs: Any) -> dict[int, float]:
        """Return the reading per seed among the rows whose knobs have these values.

        Raises:
            DataError: when two rows answer for the same seed: then a knob is missing from the question.

        Examples:
            >>> rows = ({"norm": "batch", "seed": 0, "loss": 0.5}, {"norm": "none", "seed": 0, "loss": 1.0})
            >>> StudyTable(rows).by_seed("loss", norm="none")
            {0: 1.0}
        """
        values: dict[int, float] = {}
        for row in self.where(**knobs):
            if row.get(reading) is None:
                continue
            if row["seed"] in values:
                duplicate = f"two for seed {row['seed']}"
                raise DataError(f"reading {reading!r}", "one row per seed", duplicate, "Name more knobs")
            values[row["seed"]] = float(row[reading])
        return values

    def mean(self, reading: str, **knobs: Any) -> Interval:
        """Return mean and 95 % interval over seeds, inside the bounds its name tells."""
        return interval(self.by_seed(reading, **knobs).values(), bounds=natural_bounds(reading))

    def has_failed(self, knobs: Mapping[str, Any]) -> bool:
        """Say whether a run with these knobs was made and is no measurement."""
        told = [f"{name} {value}" for name, value in knobs.items()]
        named = any(set(told) <= set(run.split(", ")) for run in self.failed)
        return named or any(_has(row, knobs) and row["status"] != "ok" for row in self.trials)

    def curve(self, reading: str, **knobs: Any) -> list[Row]:
        """Return the readings of this name by step, each with `step`, `layer`, `value` and its run's knobs."""
        own = (row for row in self.readings if row["reading"] == reading and math.isfinite(row["value"]))
        return sorted((row for row in own if _has(row, knobs)), key=lambda row: row["step"])

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


def tabulate(runs: Sequence[Run], chosen: Collection[str], choices: Sequence[Choice] = ()) -> StudyTable:
    """Make the table from stored runs; `chosen` are the ids of those at the setting that answers the question."""
    answering = [run for run in runs if spec_id(run.spec) in chosen]
    readings = [
        {**run.knobs, "reading": r.name, "step": r.step, "layer": r.layer, "value": r.value}
        for run in answering
        for r in run.readings
    ]
    rows = tuple(run.row() for run in answering if run.ok)
    return StudyTable(rows, tuple(run.row() for run in runs), tuple(readings), tuple(choices))


def _has(row: Row, wanted: Row) -> bool:
    return all(
        row.get(name) in value if isinstance(value, tuple) else row.get(name) == value for name, value in wanted.items()
    )
