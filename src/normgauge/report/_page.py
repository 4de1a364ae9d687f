"""The page: parts, charts, style and script put into one file that opens by double click."""

from __future__ import annotations

from collections.abc import Mapping
from importlib.resources import files
from pathlib import Path
from string import Template
from typing import Any

from normgauge import charts
from normgauge.errors import StoreError, explain
from normgauge.report import _claim, _pictures, _sections
from normgauge.report._markup import finite, swatch, text
from normgauge.report._tables import ReportTables

_CLAIMS_HINT = (
    '<p class="hint">What this study decides about sentences of the papers, by criteria fixed before it ran. '
    "<code>normgauge claims --html FILE</code> writes the whole ledger.</p>"
)


def page(tables: ReportTables, out: str | Path) -> Path:
    """Write the tables as one HTML file without any reference to the network, and return its path.

    The file holds its own style, script, data and the Vega runtime, and forbids the browser every request.
    Missing documents leave their part out; runs that failed are shown with their sentence.

    Args:
        tables: runs, readings and documents.
        out: the file to write; its folder is made.

    Returns:
        The path of the page.

    Raises:
        MissingExtraError: when altair or vl-convert is not installed.
    """
    target = Path(out)
    html = compose(tables)
    target.parent.mkdir(parents=True, exist_ok=True)
    target.write_text(html, encoding="utf-8")
    return target


def page_of_store(store_path: str | Path, out: str | Path) -> Path:
    """Write the page of a stored study: `page` on everything the store holds.

    Args:
        store_path: the SQLite file a study wrote.
        out: the file to write.

    Returns:
        The path of the page.

    Raises:
        StoreError: when there is no such file, or it is no store.
        MissingExtraError: when altair or vl-convert is not installed.
    """
    from normgauge.store import Store

    source = Path(store_path)
    if not source.is_file():  # opening would make an empty store, and a typo would give an empty page
        raise StoreError(
            explain("report", "the store must exist", str(source), "Give the file that `normgauge compare` wrote")
        )
    with Store(source) as store:
        runs, readings, documents = store.runs(), store.readings(), store.documents()
    ids = set(documents.get("study", {}).get("runs") or (run["id"] for run in runs))
    kept = [run for run in runs if run["id"] in ids]  # a store may hold runs of earlier settings too
    return page(ReportTables(kept, [row for row in readings if row["run"] in ids], documents), out)


def compose(tables: ReportTables) -> str:
    """Return the whole page as one string."""
    pictures = _pictures.specs(tables)
    study = tables.document("study")
    title = str(study.get("title") or study.get("name") or "normgauge report")
    data = {
        "charts": pictures,
        "themes": {mode: charts.config(mode) for mode in charts.PALETTES},
        "chosen": tables.chosen,
    }
    parts = {
        "title": text(title),
        "policy": charts.POLICY,
        "question": text(study.get("question") or ""),
        "palette": "".join(
            f"--c{k}: light-dark({light}, {dark});"
            for k, (light, dark) in enumerate(zip(*charts.PALETTES.values(), strict=True))
        ),
        "answer": _sections.answer(tables),
        "hero_chart": _figure("intervals", pictures["intervals"]) if "intervals" in pictures else "",
        "tiles": _sections.tiles(tables),
        "comparison": _section("comparison", "Comparison", _comparison_hint(tables), _sections.comparison(tables)),
        "pictures": _charts(tables, pictures),
        "claims": _section("claims", "Claims of the papers", _CLAIMS_HINT, _claim.stored(tables.rows("claims"))),
        "runs": _section("runs", "Runs", _runs_hint(tables), _sections.runs(tables)),
        "settings": _section("settings", "Settings", "", _cards(_sections.settings(tables))),
        "provenance": _section("provenance", "Made with", "", _cards(_sections.provenance(tables))),
        "citation": _section("citation", "How to cite", "", _sections.citation(tables)),
        "css": _asset("page.css") + _asset("claim.css"),
        "js": _asset("page.js"),
        "vega": charts.javascript() if pictures else "",
        "data": charts.script_json(finite(data)),
    }
    return Template(_asset("page.html")).substitute(parts)


def _charts(tables: ReportTables, pictures: Mapping[str, Mapping[str, Any]]) -> str:
    """Return the curves and the sweep, under one bar of switches that rules them all."""
    curves = {name: entry for name, entry in pictures.items() if entry["kind"] == "curve"}
    finals = {name: entry for name, entry in pictures.items() if entry["kind"] == "final"}
    if not curves and not finals:
        return ""
    chips = "".join(
        f'<button type="button" class="chip" aria-pressed="true" data-arm="{text(arm)}">{swatch(k)}{text(arm)}</button>'
        for k, arm in enumerate(tables.arms)
    )
    parts = [f'<div class="toolbar" role="group" aria-label="Series"><span class="label">Show</span>{chips}']
    if curves and len(tables.settings) > 1:
        first = ['<option value="">each at its chosen setting</option>'] if tables.chosen else []
        options = first + [f'<option value="{text(s)}">all at {text(s)}</option>' for s in tables.settings]
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


def _comparison_hint(tables: ReportTables) -> str:
    decided = tables.document("answer").get("decided")
    mark = "The best of a column is marked." if decided else "No best is marked: the data cannot tell."
    return f'<p class="hint">Mean with interval; click a heading to sort. {mark}</p>'


def _runs_hint(tables: ReportTables) -> str:
    bad = sum(run["status"] != "ok" for run in tables.runs)
    return (
        '<div class="filter" role="group" aria-label="Which runs">'
        f'<button type="button" class="chip" aria-pressed="true" data-runs="all">all {len(tables.runs)}</button>'
        f'<button type="button" class="chip" aria-pressed="false" data-runs="bad">not ok {bad}</button></div>'
    )


def _asset(name: str) -> str:
    return (files("normgauge.report") / "assets" / name).read_text(encoding="utf-8")
