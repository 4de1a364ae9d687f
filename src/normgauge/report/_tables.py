"""What a report is made of: the runs, their readings, and the documents of the study."""

from __future__ import annotations

import itertools
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any


@dataclass(frozen=True)
class ReportTables:
    """Everything a page is drawn from, as plain rows; whatever is missing is left out of the page.

    Args:
        runs: dicts with `id`, `status`, `sentence`, `seconds` and `spec` (flat: norm, lr, seed, model, ...).
        readings: dicts with `run`, `step`, `name`, `layer`, `value`, `kind`, `status`.
        documents: by name: `study`, `comparison` (one row per arm), `columns`, `answer`, `chosen`, `provenance`,
            `claims` (the records of `Ledger.json` that the study decides).
            A share (a column whose unit is "%") is stored as a fraction, in the comparison as in the readings.

    Examples:
        >>> runs = [{"id": "a", "status": "ok", "spec": {"norm": "batch", "lr": 0.1, "seed": 0}}]
        >>> tables = ReportTables(runs, documents={"study": {"scientific": {"norm": ["batch"]}}})
        >>> tables.arms, tables.arm(runs[0]["spec"])
        (['batch'], 'batch')
    """

    runs: Sequence[Mapping[str, Any]]
    readings: Sequence[Mapping[str, Any]] = ()
    documents: Mapping[str, Any] = field(default_factory=dict)

    def document(self, name: str) -> dict[str, Any]:
        """Return a document that is a mapping, empty where it is not stored."""
        body = self.documents.get(name)
        return dict(body) if isinstance(body, Mapping) else {}

    def rows(self, name: str) -> list[dict[str, Any]]:
        """Return a document that is a list of rows, empty where it is not stored."""
        body = self.documents.get(name)
        return [dict(row) for row in body if isinstance(row, Mapping)] if isinstance(body, (list, tuple)) else []

    @cached_property
    def scientific(self) -> tuple[str, ...]:
        """The knobs asked about; without a study, `norm` where runs have one."""
        named = tuple(self.document("study").get("scientific") or ())
        return named or (("norm",) if any("norm" in run["spec"] for run in self.runs) else ())

    @cached_property
    def nuisance(self) -> tuple[str, ...]:
        """The knobs tuned per arm; without a study, whatever else varies between runs, seeds aside."""
        study = self.document("study")
        if "nuisance" in study:
            return tuple(study["nuisance"] or ())
        values: dict[str, set[str]] = {}
        for run in self.runs:
            for knob, value in run["spec"].items():
                values.setdefault(knob, set()).add(repr(value))
        return tuple(k for k, seen in values.items() if len(seen) > 1 and k != "seed" and k not in self.scientific)

    def arm(self, row: Mapping[str, Any]) -> str:
        """Return the arm a spec or a row of the comparison belongs to: its scientific values, joined."""
        return " / ".join(str(row.get(knob)) for knob in self.scientific) or "all runs"

    def setting(self, row: Mapping[str, Any]) -> str:
        """Return the nuisance values of a spec, a row or a choice, as `lr 0.3`."""
        return ", ".join(f"{knob} {show(row.get(knob))}" for knob in self.nuisance)

    @cached_property
    def arms(self) -> list[str]:
        """Every arm: in the study's order, then as rows and runs bring them."""
        study = self.document("study").get("scientific") or {}
        planned = [dict(zip(study, values, strict=True)) for values in itertools.product(*study.values())]
        present = [*self.rows("comparison"), *(run["spec"] for run in self.runs)]
        here = dict.fromkeys(self.arm(row) for row in present)
        order = dict.fromkeys(self.arm(row) for row in planned if study)
        return [*(arm for arm in order if arm in here), *(arm for arm in here if arm not in order)]

    @cached_property
    def settings(self) -> list[str]:
        """Every nuisance setting that was run, sorted by its values."""
        if not self.nuisance:
            return []
        found = {self.setting(run["spec"]): run["spec"] for run in self.runs}
        return sorted(found, key=lambda name: [_sortable(found[name].get(knob)) for knob in self.nuisance])

    @cached_property
    def chosen(self) -> dict[str, str]:
        """The setting chosen for each arm, from the document or else from the arm's row of the comparison."""
        named = {
            arm: self.setting(choice)
            for arm, choice in self.document("chosen").items()
            if isinstance(choice, Mapping) and any(knob in choice for knob in self.nuisance)
        }
        for row in self.rows("comparison"):
            if any(row.get(knob) is not None for knob in self.nuisance):
                named.setdefault(self.arm(row), self.setting(row))
        return named

    @cached_property
    def columns(self) -> dict[str, dict[str, Any]]:
        """The described metrics by name; a metric that is only measured gets its name as title."""
        described = {str(column["name"]): column for column in self.rows("columns") if "name" in column}
        for name in dict.fromkeys(str(reading["name"]) for reading in self.readings):
            described.setdefault(name, {"name": name})
        for name, column in described.items():
            title = str(column.get("title") or name.replace("_", " "))
            column |= {"title": title[:1].upper() + title[1:], "unit": str(column.get("unit") or "")}
            column |= {"help": str(column.get("help") or ""), "factor": 100.0 if column["unit"] == "%" else 1.0}
        return described

    @cached_property
    def comparison(self) -> list[dict[str, Any]]:
        """The rows of the comparison, every metric in the unit of its column."""
        rows = self.rows("comparison")
        for row in rows:
            for name, column in self.columns.items():
                for key in (name, f"{name}_low", f"{name}_high"):
                    if isinstance(row.get(key), (int, float)) and column["factor"] != 1.0:
                        row[key] *= column["factor"]
        return rows


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


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))
