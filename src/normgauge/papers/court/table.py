"""`StudyTable`: the runs of a study as flat rows, with the few questions criteria, figures and remarks ask of them."""

from __future__ import annotations

import math
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, replace
from typing import Any

from normgauge.errors import DataError, explain
from normgauge.records import Row, Run
from normgauge.stats import Choice, Interval, choose, interval, natural_bounds
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
    """

    rows: tuple[Row, ...]
    trials: tuple[Row, ...] = ()
    readings: tuple[Row, ...] = ()
    choices: tuple[Choice, ...] = ()

    def where(self, **knobs: Any) -> list[Row]:
        """Return the rows whose knobs have these values."""
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
                raise DataError(explain(f"reading {reading!r}", "one row per seed", duplicate, "Name more knobs"))
            values[row["seed"]] = float(row[reading])
        return values

    def mean(self, reading: str, **knobs: Any) -> Interval:
        """Return mean and 95 % interval over seeds, inside the bounds its name tells."""
        return interval(self.by_seed(reading, **knobs).values(), bounds=natural_bounds(reading))

    def paired(self, reading: str, left: Any, right: Any, *, knob: str = "norm", **where: Any) -> list[float]:
        """Return `reading(left) - reading(right)` on every seed both arms have.

        Examples:
            >>> rows = [{"norm": n, "seed": s, "loss": s + (n == "none")} for n in ("batch", "none") for s in (0, 1)]
            >>> StudyTable(tuple(rows)).paired("loss", "none", "batch")
            [1.0, 1.0]
        """
        first, second = (self.by_seed(reading, **{knob: arm}, **where) for arm in (left, right))
        return differences(first, second)

    def paired_log10(self, reading: str, left: Any, right: Any, *, knob: str = "norm", **where: Any) -> list[float]:
        """Return `log10(reading(left) / reading(right))` on every seed both arms have: orders of magnitude."""
        logs = ({**row, reading: math.log10(row[reading])} for row in self.rows if row.get(reading) is not None)
        return StudyTable(tuple(logs)).paired(reading, left, right, knob=knob, **where)

    def at_best(self, knob: str, *, by: str, within: Sequence[str]) -> StudyTable:
        """Return the rows whose `knob` has the value chosen for their cell of `within` (see `stats.choose`).

        So a knob that was compared answers as one that was tuned.

        Args:
            knob: what is tuned.
            by: the reading it is tuned by, larger is better; of validation data, so that the test stays a test.
            within: the knobs whose combinations are the cells.

        Examples:
            >>> rows = [{"norm": "none", "lr": r, "seed": s, "fit": r * (s + 1)} for r in (1, 2) for s in (0, 1)]
            >>> StudyTable(tuple(rows)).at_best("lr", by="fit", within=["norm"]).by_seed("lr")
            {0: 2.0, 1: 2.0}
        """
        chosen = [{**c.arm, **c.setting} for c in choose(self.rows, by=by, over=[knob], within=within)]
        return replace(self, rows=tuple(row for row in self.rows if any(_has(row, setting) for setting in chosen)))

    def best_by_seed(self, knob: str, *, by: str, **knobs: Any) -> dict[int, Any]:
        """Return, per seed, the value of `knob` whose run has the best `by`: for claims about the best value itself.

        Examples:
            >>> rows = [{"decay": d, "seed": s, "fit": -abs(d - s)} for d in (2, 1, 0) for s in (0, 1)]
            >>> StudyTable(tuple(rows)).best_by_seed("decay", by="fit")
            {0: 0, 1: 1}
        """
        chosen = choose(self.where(**knobs), by=by, over=[knob], within=["seed"])
        return {choice.arm["seed"]: choice.setting[knob] for choice in sorted(chosen, key=lambda c: c.arm["seed"])}

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


def differences(first: dict[int, float], second: dict[int, float]) -> list[float]:
    """Return first - second on every seed both have."""
    return [first[seed] - second[seed] for seed in sorted(first.keys() & second.keys())]


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
    return all(row.get(name) == value for name, value in wanted.items())
