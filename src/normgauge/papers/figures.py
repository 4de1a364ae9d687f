"""`Figure`: a picture of a study as data (which reading, against what, one line per what), and the one hand that draws.

The figure that decides is drawn from the verdicts alone: every contrast with its interval against the smallest effect.
"""

import math
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from statistics import fmean
from typing import Any, Literal

from normgauge.charts import against, bars, curves, histogram, intervals, surface, svg
from normgauge.documents import StudyDocument
from normgauge.papers.court import EACH, StudyTable, resolve
from normgauge.papers.court.contrast import read_arm
from normgauge.records import Chart, Row, format_number
from normgauge.stats import FREE, Bounds, interval, natural_bounds

MOST_LINES = 11  # of one picture, where every layer is a line


@dataclass(frozen=True)
class Figure:
    """One picture of a study's page; one for each value of a knob that is `EACH`.

    Its kind is lines, points (not joined: x was measured), intervals (a dot and its interval per series), bars,
    histogram, or surface (the layer is "x y", and the readings `x` and `y` are a path on it).
    """

    y: str | Mapping[str, str]  # a reading, or reading -> what its lines are called
    x: str = "step"  # or "layer", a knob, another reading of the same run and step, or "reading" (names of `y`)
    series: tuple[str, ...] = ("norm",)  # the knobs that name a line; "layer" too
    where: Mapping[str, Any] = field(default_factory=dict)  # which runs; a `Pick` is resolved in the table
    kind: Literal["lines", "points", "intervals", "bars", "histogram", "surface"] = "lines"
    note: str = ""  # what to see in it, beside what is drawn
    along: str = ""  # what x is, where it is not what it is called: a "layer" may be a rank or a strength of noise

    @property
    def first(self) -> str:
        """The first reading, after which it is named."""
        return self.y if isinstance(self.y, str) else next(iter(self.y))

    @property
    def reading(self) -> str:
        """The reading, or the names of several, in words."""
        return self.y.replace("_", " ") if isinstance(self.y, str) else ", ".join(self.y.values())

    def draw(self, table: StudyTable) -> Iterator[tuple[str, Chart, str]]:
        """Yield name, chart and caption of each picture that has something to show."""
        each = [knob for knob, value in self.where.items() if value == EACH]
        wheres = list(resolve(self.where, table)) if table.rows else []
        drawn = [[p for p in self._points(table, where) if math.isfinite(p["value"])] for where in wheres]
        order = _names([point for points in drawn for point in points])  # one colour per name in all of them
        for where, points in zip(wheres, drawn, strict=True):
            if points:
                points.sort(key=lambda point: order.index(point["series"]))
                parts = [self.first, self.kind, self.x, *(str(where[knob]) for knob in each)]
                name = re.sub(r"[^a-z0-9.-]+", "-", "-".join(parts).lower())
                yield name, self._chart(points, table, where), self._caption(where)

    def _caption(self, where: Row) -> str:
        across = self.along or self.x.replace("_", " ")
        against_x = "" if self.kind in ("intervals", "histogram", "surface") else f" against {across}"
        by = f", by {', '.join(self.series)}" if self.series else ""
        chosen = {k: _choice(v) if isinstance(v, list | tuple) else v for k, v in where.items()}
        held = "; ".join(_label(f"{k} is", v) if v is True else f"{k} {v}" for k, v in chosen.items())
        bands = " Bands and bars: range, at a knob's values the 95 % interval, over seeds."
        spread = {"lines": bands, "intervals": " 95 % intervals."}
        drawn = f"{self.reading[0].upper()}{self.reading[1:]}{against_x}{by}{f' ({held})' if held else ''}."
        return f"{drawn}{spread.get(self.kind, '')}{f' {self.note}' if self.note else ''}"

    def _points(self, table: StudyTable, where: Row) -> Iterator[Row]:
        """Yield series, x and value of every reading that the picture shows."""
        readings = {self.y: ""} if isinstance(self.y, str) else self.y
        curved = {row["reading"] for row in table.readings}
        for reading, title in readings.items():
            rows = table.curve(reading, **where)
            if self.x != "layer" and "layer" not in self.series and self.kind not in ("histogram", "surface"):
                rows = [row for row in rows if row["layer"] is None]
            if self.x in curved and self.kind in ("lines", "points"):
                beside = {_run_step(row): row["value"] for row in table.curve(self.x, **where)}
                rows = [{**row, self.x: beside[_run_step(row)]} for row in rows if _run_step(row) in beside]
            elif self.x not in ("step", "layer") or self.kind in ("intervals", "bars"):
                rows = [{**row, "value": row[reading]} for row in table.where(**where) if row.get(reading) is not None]
            for row in rows:
                own = [_label(knob, row[knob]) for knob in self.series if row.get(knob) is not None]
                x = title if self.x == "reading" else row.get(self.x)
                name = ", ".join([*([title] if title and self.x != "reading" else []), *own]) or reading
                place = float(str(x)) if self.x == "layer" and self.kind == "lines" else x
                yield {"series": name, "x": place, "value": row["value"], "layer": row.get("layer")}

    def _chart(self, points: Sequence[Row], table: StudyTable, where: Row) -> Chart:
        y_title = self.reading if isinstance(self.y, str) else ""
        bounds = natural_bounds(self.y) if isinstance(self.y, str) else FREE
        titles: dict[str, Any] = {"x_title": self.along or self.x.replace("_", " "), "y_title": y_title}
        if self.kind == "histogram":
            return histogram(points, value="value", series="series", x_title=self.reading, bins=40)
        if self.kind == "surface":
            places = [map(float, point["layer"].split()) for point in points]
            cells = [{"w1": x, "w2": y, "loss": p["value"]} for (x, y), p in zip(places, points, strict=True)]
            edge = max(cell["w1"] for cell in cells)
            axes = zip(*(table.curve(axis, **where) for axis in ("x", "y")), strict=True)
            steps = [{"w1": a["value"], "w2": b["value"], "path": "descent", "step": a["step"]} for a, b in axes]
            path = [step for step in steps if max(abs(step["w1"]), abs(step["w2"])) <= edge]
            return surface(cells, x="w1", y="w2", value="loss", paths=path, levels=10)
        if self.kind == "intervals":
            groups = {name: [p["value"] for p in points if p["series"] == name] for name in _names(points)}
            spans = {name: interval(values, bounds=bounds) for name, values in groups.items()}
            dots: list[Row] = [{"series": n, "value": s.mean, **_ends(s.mean, s.low, s.high)} for n, s in spans.items()]
            return intervals(dots, x_title=self.reading, row_height=20)
        names = _names(points)[:MOST_LINES] if "layer" in self.series else _names(points)
        knob = self.x not in ("step", "layer") and self.x in table.rows[0]
        rows = [row for name in names for row in _bands([p for p in points if p["series"] == name], knob, bounds)]
        if self.kind == "bars":
            return bars(rows, x="x", y="value", series="series", **titles)
        if self.x == "step":
            return curves(rows, x="x", y="value", low="low", high="high", **titles)
        titles |= {"x_scale": "linear"} if self.x == "x" else {}  # a path in the plane keeps its shape
        return against(rows, x="x", y="value", low="low", high="high", joined=self.kind != "points", **titles)


def read_figure(told: Row) -> Figure:
    """Return a figure as `studies.toml` tells it."""
    return Figure(**{**told, "series": tuple(told.get("series", ("norm",))), "where": read_arm(told.get("where", {}))})


def deciding_picture(document: StudyDocument) -> list[tuple[str, str, str]]:
    """Return name, SVG and caption of the figure that decides; nothing where no contrast has an interval."""
    rows: list[Row] = []
    for id, item in ((criterion.id, item) for criterion in document.criteria for item in criterion.margins):
        if math.isfinite(item.half_width) and item.half_width > 0:
            middle = item.mean / item.half_width
            rows.append({"series": f"{id}: {item.name}", "value": middle, "low": middle - 1, "high": middle + 1})
    if not rows:
        return []
    caption = "Every contrast, as effect minus the smallest effect that counts, in half widths of its 95 % interval: "
    caption += "right of 0 it speaks for the sentence, left of 0 against it."
    chart = intervals(rows, x_title="half widths beyond the smallest effect", scale="linear", row_height=22, width=360)
    return [(f"{document.study}-decides", svg(chart, caption), caption)]


def _choice(values: Sequence[Any]) -> str:
    """Return which values are meant: by name if they are few."""
    return " or ".join(map(str, values)) if len(values) <= 4 else f"any of {len(values)}"


def _run_step(row: Row) -> tuple[Any, ...]:
    return (*((k, str(v)) for k, v in row.items() if k not in ("reading", "value")),)


def _label(knob: str, value: Any) -> str:
    return value if isinstance(value, str) else f"{knob.replace('_', ' ')} {format_number(value)}"


def _names(points: Sequence[Row]) -> list[str]:
    return list(dict.fromkeys(point["series"] for point in points))


def _ends(mean: float, low: float, high: float) -> dict[str, float]:
    return {"low": mean if math.isnan(low) else low, "high": mean if math.isnan(high) else high}


def _bands(points: Sequence[Row], knob: bool, bounds: Bounds) -> Iterator[Row]:
    """Yield per place the mean with its interval over runs at a knob's value, with the range over runs elsewhere."""
    groups: dict[Any, list[float]] = {}
    for point in points:
        groups.setdefault(point["x"], []).append(point["value"])
    for x, values in sorted(groups.items()) if all(isinstance(key, int | float) for key in groups) else groups.items():
        span = interval(values, bounds=bounds) if knob and len(values) > 1 else None
        ends = (span.low, span.high) if span else (min(values), max(values))
        yield {"series": points[0]["series"], "x": x, "value": fmean(values), **_ends(fmean(values), *ends)}
