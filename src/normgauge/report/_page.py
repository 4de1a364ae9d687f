"""The page: parts, charts, style and script put into one file that opens by double click."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from normgauge import charts
from normgauge.documents import ComparisonDocument, write_whole
from normgauge.errors import StoreError, explain
from normgauge.records import Run, plain
from normgauge.report import _pictures, _sections
from normgauge.report._content import PageContent
from normgauge.report._markup import swatch, text
from normgauge.store import Store


def page(runs: Sequence[Run], document: ComparisonDocument | None, out: str | Path) -> Path:
    """Write runs and what was concluded from them as one HTML file without any reference to the network.

    The file holds its own style, script, data and the Vega runtime, and forbids the browser every request.
    Without a document it shows the runs; those that failed are shown with their sentence.

    Args:
        runs: with their readings.
        document: what was concluded from them, `None` where nothing was yet.
        out: the file to write; its folder is made.

    Returns:
        The path of the page.

    Raises:
        MissingExtraError: when altair or vl-convert is not installed.
        StoreError: when it cannot be written; a page that was there stays.
    """
    target = Path(out)
    html = compose(PageContent(runs, document))
    write_whole(target, html)
    return target


def page_of_store(store_path: str | Path, out: str | Path) -> Path:
    """Write the page of a stored study: `page` on everything the store holds.

    Args:
        store_path: the SQLite file a study wrote.
        out: the file to write.

    Returns:
        The path of the page.

    Raises:
        StoreError: when there is no such file, it is no store, or another version of normgauge wrote it.
        MissingExtraError: when altair or vl-convert is not installed.
    """
    source = Path(store_path)
    if not source.is_file():  # opening would make an empty store, and a typo would give an empty page
        raise StoreError(
            explain("report", "the store must exist", str(source), "Give the file that `normgauge compare` wrote")
        )
    with Store(source, write=False) as store:
        document = store.document(ComparisonDocument)
        # a store may hold runs of earlier settings too
        return page(store.runs(document.runs or None if document else None), document, out)


def compose(content: PageContent) -> str:
    """Return the whole page as one string."""
    pictures = _pictures.specs(content)
    study = content.document.question if content.document else None
    data = {
        "charts": pictures,
        "themes": {mode: charts.config(mode) for mode in charts.PALETTES},
        "chosen": {arm: content.setting(setting) for arm, setting in content.chosen_settings.items()},
    }
    parts = {
        "title": text(study.title if study else "normgauge report"),
        "policy": charts.POLICY,
        "question": text(study.question if study else ""),
        "palette": "".join(
            f"--c{k}: light-dark({light}, {dark});"
            for k, (light, dark) in enumerate(zip(*charts.PALETTES.values(), strict=True))
        ),
        "answer": _sections.answer(content),
        "hero_chart": _figure("intervals", pictures["intervals"]) if "intervals" in pictures else "",
        "tiles": _sections.tiles(content),
        "comparison": _section("comparison", "Comparison", _comparison_hint(content), _sections.comparison(content)),
        "pictures": _charts(content, pictures),
        "runs": _section("runs", "Runs", _runs_hint(content), _sections.runs(content)),
        "settings": _section("settings", "Settings", "", _cards(_sections.settings(content))),
        "provenance": _section("provenance", "Made with", "", _cards(_sections.provenance(content))),
        "citation": _section("citation", "How to cite", "", _sections.citation(content)),
        "css": _asset("page.css"),
        "js": _asset("page.js"),
        "vega": charts.javascript() if pictures else "",
        "data": charts.script_json(plain(data)),
    }
    return Template(_asset("page.html")).substitute(parts)


def _charts(content: PageContent, pictures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the curves and the sweep, under one bar of switches that rules them all."""
    curves = {name: entry for name, entry in pictures.items() if entry["kind"] == "curve"}
    finals = {name: entry for name, entry in pictures.items() if entry["kind"] == "final"}
    if not curves and not finals:
        return ""
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{text(arm)}">{swatch(k)}{text(arm)}</button>'
        for k, arm in enumerate(content.arms)
    )
    parts = [f'<div class="toolbar" role="group" aria-label="Series"><span class="label">Show</span>{chips}']
    if curves and len(content.settings) > 1:
        first = ['<option value="">each at its chosen setting</option>'] if content.chosen_settings else []
        options = first + [f'<option value="{text(s)}">all at {text(s)}</option>' for s in content.settings]
        parts.append(f'<label class="label">Curves <select id="setting">{"".join(options)}</select></label>')
    parts.append("</div>")
    if curves:
        figures = "".join(_figure(name, entry) for name, entry in curves.items())
        hint = "Line: mean over seeds. Band: smallest to largest. A run that fails counts until it does."
        parts.append(f'<h2 id="curves">Over training</h2><p class="hint">{hint}</p><div class="grid">{figures}</div>')
    if finals:
        metrics = "".join(
            f'<option value="{text(name)}">{text(entry["title"])} against {text(entry["knob"])}</option>'
            for name, entry in finals.items()
        )
        hint = "Last value of the runs that finished, mean and range over seeds; a faint cross: only some runs failed."
        parts.append(
            f'<h2 id="sweep">Sensitivity to tuning</h2><p class="hint">{hint}</p>'
            f'<label class="label">Metric <select id="metric">{metrics}</select></label>'
            f"{''.join(_figure(name, entry) for name, entry in finals.items())}"
        )
    return f'<section id="charts">{"".join(parts)}</section>'


def _figure(name: str, entry: Mapping[str, Any]) -> str:
    unit = f" <small>({text(entry['unit'])})</small>" if entry["unit"] else ""
    hint = f'<p class="hint">{text(entry["help"])}</p>' if entry["help"] else ""
    return (
        f'<figure class="card figure figure-{entry["kind"]}"><figcaption><h3>{text(entry["title"])}{unit}</h3>'
        f'{hint}</figcaption><div class="chart" data-chart="{text(name)}"></div></figure>'
    )


def _section(name: str, title: str, hint: str, body: str) -> str:
    if not body:
        return ""
    return f'<section id="{name}"><h2>{title}</h2>{hint}{body}</section>'


def _cards(body: str) -> str:
    return f'<div class="cards">{body}</div>' if body else ""


def _comparison_hint(content: PageContent) -> str:
    decided = content.document is not None and content.document.decided
    mark = "The best of a column is marked." if decided else "No best is marked: the data cannot tell."
    return f'<p class="hint">Mean with interval; click a heading to sort. {mark}</p>'


def _runs_hint(content: PageContent) -> str:
    bad = sum(not run.ok for run in content.runs)
    return (
        '<div class="filter" role="group" aria-label="Which runs">'
        f'<button type="button" class="chip" aria-pressed="true" data-runs="all">all {len(content.runs)}</button>'
        f'<button type="button" class="chip" aria-pressed="false" data-runs="bad">not ok {bad}</button></div>'
    )


def _asset(name: str) -> str:
    return (files("normgauge.report") / "assets" / name).read_text(encoding="utf-8")
