"""`StudyTable`: the runs of a study as flat rows, with the few questions criteria, figures and remarks ask of them."""

import math
from collections.abc import Collection, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from normgauge.records import Row, Run
from normgauge.stats import Choice
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

    def has_failed(self, knobs: Mapping[str, Any]) -> bool:
        """Say whether a run with these knobs was made and is no measurement."""
        told = [f"{name} {value}" for name, value in knobs.items()]
        named = any(set(told) <= set(run.split(", ")) for run in self.failed)
        return named or any(_has(row, knobs) and row["status"] != "ok" for row in self.trials)

    def curve(self, reading: str, **knobs: Any) -> list[Row]:
        """Return the readings of this name by step, each with `step`, `layer`, `value` and its run's knobs."""
        own = (row for row in self.readings if row["reading"] == reading and math.isfinite(row["value"]))
        return sorted((row for row in own if _has(row, knobs)), key=lambda row: row["step"])


def tabulate(runs: Sequence[Run], chosen: Collection[str], choices: Sequence[Choice] = ()) -> StudyTable:
    """Make the table from stored runs; `chosen` are the ids of those at the setting that answers the question."""
    answering = [run for run in runs if spec_id(run.spec) in chosen]
    readings = tuple(
        {**run.knobs, "reading": r.name, "step": r.step, "layer": r.layer, "value": r.value}
        for run in answering
        for r in run.readings
    )
    rows = tuple(run.row() for run in answering if run.ok)
    return StudyTable(rows, tuple(run.row() for run in runs), readings, tuple(choices))


def _has(row: Row, wanted: Row) -> bool:
    return all(row.get(knob) in (value if isinstance(value, tuple) else (value,)) for knob, value in wanted.items())
