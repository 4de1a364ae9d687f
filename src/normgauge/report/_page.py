"""The page: parts, charts, style and script put into one file that opens by double click."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from normgauge import charts
from normgauge.documents import Arm, ComparisonDocument, Metric, write_whole
from normgauge.errors import StoreError
from normgauge.records import STATUSES, Run, plain
from normgauge.references import bibliography, cite
from normgauge.report import _pictures
from normgauge.report._against import Changes
from normgauge.report._content import PageContent
from normgauge.report._markup import Markup, asset, number, render, seconds
from normgauge.store import Store, spec_id


def page(
    runs: Sequence[Run], document: ComparisonDocument | None, out: str | Path, changes: Changes | None = None
) -> Path:
    """Write runs and what was concluded from them as one HTML file without any reference to the network; return it.

    The file holds its own style, script, data and the Vega runtime, and forbids the browser every request.
    Without a document it shows the runs; those that failed are shown with their sentence. `changes` are those since an
    earlier store.

    Raises:
        MissingExtraError: when altair or vl-convert is not installed.
        StoreError: when it cannot be written; a page that was there stays.
    """
    target = Path(out)
    write_whole(target, compose(PageContent(runs, document), changes))
    return target


def page_of_store(store_path: str | Path, out: str | Path, changes: Changes | None = None) -> Path:
    """Write the page of a stored study: `page` on everything the store holds.

    Raises:
        StoreError: when there is no such file, it is no store, or another version of normgauge wrote it.
        MissingExtraError: when altair or vl-convert is not installed.
    """
    source = Path(store_path)
    if not source.is_file():  # opening would make an empty store, and a typo would give an empty page
        raise StoreError("report", "the store must exist", str(source), "Give the file that `normgauge compare` wrote")
    content = content_of_store(source)
    return page(content.runs, content.document, out, changes)


def content_of_store(path: Path) -> PageContent:
    """Return the runs of a store's answer and the answer; a store may hold runs of earlier settings too."""
    with Store(path, write=False) as store:
        document = store.document(ComparisonDocument)
        return PageContent(store.runs(document.runs or None if document else None), document)


def live_page(path: Path, seconds: int) -> str:
    """Return the page of a store as it stands, which loads itself anew after some seconds."""
    return compose(content_of_store(path), refresh=seconds)


def compose(content: PageContent, changes: Changes | None = None, refresh: int | None = None) -> str:
    """Return the whole page as one string."""
    pictures, document = _pictures.specs(content), content.document
    study = document.question if document else None
    data = {
        "charts": pictures,
        "themes": {mode: charts.config(mode) for mode in charts.PALETTES},
        "chosen": {arm: content.setting(setting) for arm, setting in content.chosen_settings.items()},
    }
    knobs = [*content.scientific, *content.nuisance, "seed"]
    keys = study.cite if study else ()
    here = [key for key in keys if key in bibliography()]
    return render(
        "page.html",
        {"identity": spec_id},
        title=study.title if study else "normgauge report",
        question=study.question if study else "",
        content=content,
        changes=changes,
        refresh=refresh,
        document=document,
        runs=content.runs,
        tiles=_tiles(content),
        comparison=_comparison(content),
        pictures=[{**entry, "name": name} for name, entry in pictures.items()],
        knobs=knobs,
        numeric={knob for knob in knobs if all(_is_number(run.spec.get(knob)) for run in content.runs)},
        statuses=STATUSES,
        settings=_settings(content),
        origin=_origin(content),
        bibtex=cite(*here) if here else "",
        lost=[key for key in keys if key not in here],
        css=asset("page.css"),
        js=asset("page.js"),
        vega=Markup(charts.javascript() if pictures else ""),
        data=Markup(charts.script_json(plain(data))),
    )


def _tiles(content: PageContent) -> list[tuple[str, Any, str]]:
    """Return the counts a reader wants before believing a table: name, value, colour."""
    counts = Counter[str](run.status for run in content.runs)
    good = counts.pop("ok", 0)
    states = [("ok", good, "ok"), *((status, count, status) for status, count in sorted(counts.items()))]
    spent = seconds(sum(run.seconds for run in content.runs))
    arms = len(content.arms)
    return [("runs", len(content.runs), "plain"), *states, ("arms", arms, "plain"), ("compute time", spent, "plain")]


def _comparison(content: PageContent) -> dict[str, Any] | None:
    """Return the columns and, per arm, its place among the colours and a cell per metric; the remarks under them."""
    if content.document is None or not content.document.arms:
        return None
    arms = content.document.arms
    metrics = [metric for name, metric in content.metrics.items() if any(name in arm.values for arm in arms)]
    columns = [_column(arms, metric, decided=content.document.decided) for metric in metrics]
    places = [content.arms.index(content.arm(arm.knobs)) for arm in arms]
    rows = [(arm, places[k], [column[k] for column in columns]) for k, arm in enumerate(arms)]
    return {"metrics": metrics, "rows": rows, "remarks": [remark for arm in arms for remark in arm.remarks]}


def _column(arms: Sequence[Arm], metric: Metric, *, decided: bool) -> list[dict[str, Any] | None]:
    """Return a cell per arm: mean, interval, where it lies between the extremes of the column, whether it is best.

    Best is what is printed as the best value: arms a reader sees as equal are marked alike.
    """
    values = [arm.values[metric.name].times(metric.factor) if metric.name in arm.values else None for arm in arms]
    measured = [value for value in values if value is not None]
    ends = [end for value in measured for end in (value.mean, value.low, value.high) if math.isfinite(end)]
    start, width = min(ends), max(ends) - min(ends) or 1.0
    winner = None
    if decided and metric.better is not None and len(measured) > 1:
        best = (max if metric.better == "higher" else min)(value.mean for value in measured)
        winner = number(best, metric.unit)
    cells: list[dict[str, Any] | None] = []
    for value in values:
        if value is None:
            cells.append(None)
            continue
        inside = math.isfinite(value.low) and math.isfinite(value.high)
        bar = [f"{100 * (end - start) / width:.1f}" for end in (value.low, value.high, value.mean)] if inside else None
        shown = number(value.mean, metric.unit)
        edges = {end: number(getattr(value, end), metric.unit) for end in ("low", "high")}
        cells.append({"mean": value.mean, "shown": shown, "best": shown == winner, "bar": bar, **edges})
    return cells


def _settings(content: PageContent) -> list[tuple[str, str, Any]]:
    """Return what was asked, what was tuned, and what was fixed: the last is what the answer depends on."""
    study = content.document.question if content.document else None
    if study is None:
        return []
    return [
        ("Asked about", "the question: every value is an arm", study.scientific),
        ("Tuned", "each arm gets its own best value, so that none loses by a bad setting", study.nuisance),
        ("Fixed", "the same for all: the answer holds for these values and may change with them", study.fixed),
        ("Repeated", "seeds per arm at its chosen setting", {"seeds": study.seeds, "tuning seeds": study.tuning_seeds}),
    ]


def _origin(content: PageContent) -> list[tuple[str, Any]]:
    if content.document is None:
        return []
    origin = content.document.provenance
    run = {"python": origin.python, "revision": origin.revision, "finished": content.document.finished}
    return [("Versions", origin.versions), ("Machine", origin.machine), ("Run", run)]


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
