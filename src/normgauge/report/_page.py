"""Pages of one file that open by double click: of a comparison, a checkup, a monitored run."""

import math
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from textwrap import dedent
from typing import Any

from normgauge import charts
from normgauge.documents import Arm, ComparisonDocument, Metric, write_whole
from normgauge.errors import StoreError
from normgauge.records import STATUSES, Run, plain
from normgauge.references import bibliography, cite
from normgauge.report._against import Changes
from normgauge.report._content import PageContent, is_number, specs
from normgauge.report._markup import Markup, number, render, seconds
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
    pictures = specs(content)
    data = {
        "charts": pictures,
        "themes": {mode: charts.config(mode) for mode in charts.PALETTES},
        "chosen": {arm: content.setting(setting) for arm, setting in content.chosen_settings.items()},
    }
    knobs = [*content.scientific, *content.nuisance, "seed"]
    keys = content.document.question.cite if content.document else ()
    here = [key for key in keys if key in bibliography()]
    return render(
        "page.html",
        {"identity": spec_id},
        content=content,
        changes=changes,
        refresh=refresh,
        tiles=_tiles(content),
        comparison=_comparison(content),
        pictures=[{**entry, "name": name} for name, entry in pictures.items()],
        knobs=knobs,
        numeric={knob for knob in knobs if all(is_number(run.spec.get(knob)) for run in content.runs)},
        statuses=STATUSES,
        bibtex=cite(*here) if here else "",
        lost=[key for key in keys if key not in here],
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


def checkup_page(findings: Iterable[Mapping[str, Any]], *, title: str, summary: str, footer: str) -> str:
    """Return findings (mappings with the fields of `Finding`, the first ones the most urgent) as one offline page."""
    groups: dict[str, dict[str, Any]] = {}
    for finding in findings:
        fix, _, code = finding["remedy"].partition("\n")
        words = {"references": ", ".join(finding["references"]), "exactness": finding["exactness"].replace("_", " ")}
        group = groups.setdefault(finding["id"], {**finding, **words, "fix": fix, "code": dedent(code), "places": []})
        group["places"].append((finding["where"], finding["evidence"]))
    return render("checkup.html", {}, groups=list(groups.values()), title=title, summary=summary, footer=footer)


def watch_page(log: str, title: str, *, live: bool = False) -> str:
    """Return the page of a monitor's log (its JSON lines); a live one fetches the log from where it is served."""
    kept = Markup(charts.script_json("" if live else log))
    return render("watch.html", {}, title=title, log=kept, live="true" if live else "false")
