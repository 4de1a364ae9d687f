"""The page: parts, charts, style and script put into one file that opens by double click."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from normgauge import charts
from normgauge.documents import ComparisonDocument, write_whole
from normgauge.errors import StoreError
from normgauge.records import Run, plain
from normgauge.report import _pictures, _sections
from normgauge.report._content import PageContent
from normgauge.report._markup import Markup, asset, concat, fill_page, swatch
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
        raise StoreError("report", "the store must exist", str(source), "Give the file that `normgauge compare` wrote")
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
        "title": study.title if study else "normgauge report",
        "policy": Markup(charts.POLICY),
        "question": study.question if study else "",
        "palette": concat(
            f"--c{k}: light-dark({light}, {dark});"
            for k, (light, dark) in enumerate(zip(*charts.PALETTES.values(), strict=True))
        ),
        "answer": _sections.answer(content),
        "hero_chart": _figure("intervals", pictures["intervals"]) if "intervals" in pictures else "",
        "tiles": _sections.tiles(content),
        "comparison": _section("comparison", "Comparison", _comparison_hint(content), _sections.comparison(content)),
        "pictures": _charts(content, pictures),
        "runs": _section("runs", "Runs", _runs_hint(content), _sections.runs(content)),
        "settings": _section("settings", "Settings", Markup(), _cards(_sections.settings(content))),
        "provenance": _section("provenance", "Made with", Markup(), _cards(_sections.provenance(content))),
        "citation": _section("citation", "How to cite", Markup(), _sections.citation(content)),
        "css": asset("page.css"),
        "js": asset("page.js"),
        "vega": Markup(charts.javascript() if pictures else ""),
        "data": Markup(charts.script_json(plain(data))),
    }
    return fill_page("page.html", parts)


def _charts(content: PageContent, pictures: Mapping[str, Mapping[str, Any]]) -> Markup:
    """Return the curves and the sweep, under one bar of switches that rules them all."""
    curves = {name: entry for name, entry in pictures.items() if entry["kind"] == "curve"}
    finals = {name: entry for name, entry in pictures.items() if entry["kind"] == "final"}
    if not curves and not finals:
        return Markup()
    chip = Markup('<button type="button" class="chip" aria-pressed="true" data-arm="{arm}">{mark}{arm}</button>')
    option = Markup('<option value="{}">{}</option>')
    switches = [chip.format(arm=arm, mark=swatch(k)) for k, arm in enumerate(content.arms)]
    if curves and len(content.settings) > 1:
        options = [option.format("", "each at its chosen setting")] if content.chosen_settings else []
        options += [option.format(setting, f"all at {setting}") for setting in content.settings]
        select = Markup('<label class="label">Curves <select id="setting">{}</select></label>')
        switches.append(select.format(concat(options)))
    bar = Markup('<div class="toolbar" role="group" aria-label="Series"><span class="label">Show</span>{}</div>')
    parts = [bar.format(concat(switches))]
    if curves:
        hint = "Line: mean over seeds. Band: smallest to largest. A run that fails counts until it does."
        block = Markup('<h2 id="curves">Over training</h2><p class="hint">{}</p><div class="grid">{}</div>')
        parts.append(block.format(hint, concat(_figure(name, entry) for name, entry in curves.items())))
    if finals:
        metrics = [option.format(name, f"{entry['title']} against {entry['knob']}") for name, entry in finals.items()]
        hint = "Last value of the runs that finished, mean and range over seeds; a faint cross: only some runs failed."
        block = Markup(
            '<h2 id="sweep">Sensitivity to tuning</h2><p class="hint">{}</p>'
            '<label class="label">Metric <select id="metric">{}</select></label>{}'
        )
        figures = concat(_figure(name, entry) for name, entry in finals.items())
        parts.append(block.format(hint, concat(metrics), figures))
    return Markup('<section id="charts">{}</section>').format(concat(parts))


def _figure(name: str, entry: Mapping[str, Any]) -> Markup:
    return Markup(
        '<figure class="card figure figure-{kind}"><figcaption><h3>{title}{unit}</h3>'
        '{hint}</figcaption><div class="chart" data-chart="{name}"></div></figure>'
    ).format(
        kind=entry["kind"],
        title=entry["title"],
        unit=Markup(" <small>({})</small>").format(entry["unit"]) if entry["unit"] else "",
        hint=Markup('<p class="hint">{}</p>').format(entry["help"]) if entry["help"] else "",
        name=name,
    )


def _section(name: str, title: str, hint: Markup, body: Markup) -> Markup:
    if not body:
        return Markup()
    return Markup('<section id="{}"><h2>{}</h2>{}{}</section>').format(name, title, hint, body)


def _cards(body: Markup) -> Markup:
    return Markup('<div class="cards">{}</div>').format(body) if body else Markup()


def _comparison_hint(content: PageContent) -> Markup:
    decided = content.document is not None and content.document.decided
    mark = "The best of a column is marked." if decided else "No best is marked: the data cannot tell."
    return Markup('<p class="hint">Mean with interval; click a heading to sort. {}</p>').format(mark)


def _runs_hint(content: PageContent) -> Markup:
    return Markup(
        '<div class="filter" role="group" aria-label="Which runs">'
        '<button type="button" class="chip" aria-pressed="true" data-runs="all">all {}</button>'
        '<button type="button" class="chip" aria-pressed="false" data-runs="bad">not ok {}</button></div>'
    ).format(len(content.runs), sum(not run.ok for run in content.runs))
