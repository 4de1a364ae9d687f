"""What a page is made of: the runs and the document that was concluded from them, and what follows from both."""

from __future__ import annotations

import itertools
import math
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from statistics import fmean
from typing import Any

from normgauge.charts import printable
from normgauge.documents import ComparisonDocument, Metric
from normgauge.records import Run, Spec


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
            described.setdefault(name, Metric(name, name.replace("_", " ")))
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


def _sortable(value: Any) -> tuple[int, float, str]:
    number = isinstance(value, (int, float)) and not isinstance(value, bool)
    return (0, float(value), "") if number else (1, 0.0, str(value))
