"""The parts of the page, each from the tables to one piece of HTML, empty where there is nothing to show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Mapping, Sequence
from typing import Any

from normgauge.references import bibliography, cite
from normgauge.report._markup import badge, heading, number, pairs, seconds, swatch, text
from normgauge.report._tables import ReportTables


def answer(tables: ReportTables) -> str:
    """Return the sentence the study ends with, and whether the data decide."""
    document = tables.document("answer")
    if not document.get("sentence"):
        return '<p class="answer-text">No answer is stored yet: the runs below are what there is.</p>'
    decided = bool(document.get("decided"))
    verdict = "The data decide" if decided else "The data cannot tell"
    return (
        f'<p class="verdict {"yes" if decided else "no"}">{verdict}</p>'
        f'<p class="answer-text">{text(document["sentence"])}</p>'
    )


def tiles(tables: ReportTables) -> str:
    """Return the counts a reader wants before believing a table."""
    counts = Counter(str(run["status"]) for run in tables.runs)
    spent = sum(run["seconds"] for run in tables.runs if isinstance(run.get("seconds"), (int, float)))
    shown = [("runs", str(len(tables.runs)), ""), ("ok", str(counts.pop("ok", 0)), "ok")]
    shown += [(status, str(count), status) for status, count in sorted(counts.items())]
    shown += [("arms", str(len(tables.arms)), ""), ("compute time", seconds(spent), "")]
    return "".join(
        f'<div class="tile tile-{text(kind) or "plain"}"><strong>{text(value)}</strong><span>{text(name)}</span></div>'
        for name, value, kind in shown
    )


def comparison(tables: ReportTables) -> str:
    """Return the table of arms: mean, interval and a small picture of it in every cell."""
    rows = tables.comparison
    if not rows:
        return ""
    columns = [column for name, column in tables.columns.items() if any(row.get(name) is not None for row in rows)]
    decided = bool(tables.document("answer").get("decided"))
    head = [heading(knob) for knob in tables.scientific] + [heading(knob, numeric=True) for knob in tables.nuisance]
    head.append(heading("n", numeric=True, tip="runs behind the mean"))
    for column in columns:
        unit = f" ({column['unit']})" if column["unit"] else ""
        first = "descending" if column.get("better") == "higher" else "ascending"
        head.append(heading(f"{column['title']}{unit}", first=first, numeric=True, tip=column["help"]))
    extra = _extra(tables, rows)
    head += [heading(name.replace("_", " "), numeric=True) for name in extra]
    notes = any(row.get("note") or row.get("status", "ok") != "ok" for row in rows)
    if notes:
        head.append(heading("note"))
    spans = [_span(rows, str(column["name"])) for column in columns]
    winners = [_best(rows, column) if decided else None for column in columns]
    body = []
    for row in rows:
        arm = tables.arm(row)
        mark = swatch(tables.arms.index(arm))
        cells = []
        for place, knob in enumerate(tables.scientific):
            cells.append(f'<th scope="row">{"" if place else mark}{text(row.get(knob))}</th>')
        cells += [_plain(row.get(knob)) for knob in (*tables.nuisance, "n")]
        for column, span, winner in zip(columns, spans, winners, strict=True):
            cells.append(_cell(row, column, span, winner, tables.arms.index(arm)))
        cells += [f'<td class="num" data-value="{_key(row.get(k))}">{text(number(row.get(k)))}</td>' for k in extra]
        if notes:
            status = str(row.get("status", "ok"))
            flag = "" if status == "ok" else badge(status) + " "
            cells.append(f'<td class="note">{flag}{text(row.get("note") or "")}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    return _table("comparison", head, body)


def runs(tables: ReportTables) -> str:
    """Return every run with its status and the sentence that explains a failure."""
    knobs = [*tables.scientific, *tables.nuisance, "seed"]
    numeric = {knob for knob in knobs if all(_finite(run["spec"].get(knob)) for run in tables.runs)}
    head = [heading("run"), *(heading(knob, numeric=knob in numeric) for knob in knobs), heading("status")]
    head += [heading("time", numeric=True), heading("what happened")]
    body = []
    for run in tables.runs:
        status, spec = str(run["status"]), run["spec"]
        mark = swatch(tables.arms.index(tables.arm(spec)))
        cells = [f'<th scope="row"><code title="{text(run["id"])}">{text(str(run["id"])[:8])}</code></th>']
        for place, knob in enumerate(knobs):
            cells.append(_plain(spec.get(knob), prefix="" if place else mark))
        cells.append(f'<td data-value="{text(status)}">{badge(status)}</td>')
        spent = run.get("seconds")
        cells.append(f'<td class="num" data-value="{_key(spent)}">{seconds(spent)}</td>')
        cells.append(f'<td class="note">{text(run.get("sentence") or "")}</td>')
        body.append(f'<tr data-ok="{"yes" if status == "ok" else "no"}">{"".join(cells)}</tr>')
    return _table("runs", head, body) if body else ""


def settings(tables: ReportTables) -> str:
    """Return what was asked, what was tuned, and what was fixed: the last is what the answer depends on."""
    study = tables.document("study")
    groups = [
        ("Asked about", "the question: every value is an arm", study.get("scientific")),
        ("Tuned", "each arm gets its own best value, so that none loses by a bad setting", study.get("nuisance")),
        ("Fixed", "the same for all: the answer holds for these values and may change with them", study.get("fixed")),
    ]
    parts = [
        f"<section class='card'><h3>{title}</h3><p class='hint'>{hint}</p>{pairs(values)}</section>"
        for title, hint, values in groups
        if isinstance(values, Mapping) and values
    ]
    if study.get("seeds") is not None:
        parts.append(
            "<section class='card'><h3>Repeated</h3><p class='hint'>seeds per arm at its chosen setting</p>"
            f"{pairs({k.replace('_', ' '): study[k] for k in ('seeds', 'tuning_seeds') if k in study})}</section>"
        )
    return "".join(parts)


def provenance(tables: ReportTables) -> str:
    """Return versions, machine, revision and the command that makes the same page again."""
    document = tables.document("provenance")
    parts = []
    for title, name in (("Versions", "versions"), ("Machine", "machine")):
        if isinstance(document.get(name), Mapping) and document[name]:
            parts.append(f"<section class='card'><h3>{title}</h3>{pairs(document[name])}</section>")
    rest = {k: v for k, v in document.items() if k not in ("versions", "machine", "command")}
    if rest:
        parts.append(f"<section class='card'><h3>Run</h3>{pairs(rest)}</section>")
    if document.get("command"):
        parts.append(f"<section class='card wide'><h3>Command</h3>{_copyable(document['command'])}</section>")
    return "".join(parts)


def citation(tables: ReportTables) -> str:
    """Return the BibTeX of the papers the study rests on; keys nobody knows are named, not dropped."""
    keys = [str(key) for key in tables.document("study").get("cite", [])]
    known = [key for key in keys if key in bibliography()]
    lost = [key for key in keys if key not in bibliography()]
    parts = [_copyable(cite(*known))] if known else []
    if lost:
        parts.append(f"<p class='hint'>Not in the bibliography: {text(lost)}</p>")
    return "".join(parts)


def _cell(
    row: Mapping[str, Any], column: Mapping[str, Any], span: tuple[float, float], winner: str | None, arm: int
) -> str:
    name, unit = str(column["name"]), str(column["unit"])
    value, low, high = row.get(name), row.get(f"{name}_low"), row.get(f"{name}_high")
    if not _finite(value):
        return '<td class="num missing" data-value="">-</td>'
    interval = ""
    if _finite(low) and _finite(high):
        interval = f"<small>{number(low, unit)} &ndash; {number(high, unit)}</small>" + _bar(
            value, low, high, span, arm
        )
    best = winner is not None and number(value, unit) == winner
    mark = ' <span class="best" title="best of this column">best</span>' if best else ""
    kind = "num is-best" if best else "num"
    return f'<td class="{kind}" data-value="{_key(value)}"><b>{number(value, unit)}</b>{mark}{interval}</td>'


def _bar(value: Any, low: Any, high: Any, span: tuple[float, float], arm: int) -> str:
    start, end = span
    width = end - start or 1.0
    left, right, dot = (100 * (v - start) / width for v in (low, high, value))
    return (
        f'<span class="range" aria-hidden="true" style="--arm: var(--c{arm % 8}); --from: {left:.1f}%; '
        f'--to: {right:.1f}%; --at: {dot:.1f}%"></span>'
    )


def _span(rows: Sequence[Mapping[str, Any]], name: str) -> tuple[float, float]:
    ends: list[Any] = [row.get(key) for row in rows for key in (name, f"{name}_low", f"{name}_high")]
    numbers = [float(end) for end in ends if _finite(end)]
    return (min(numbers), max(numbers)) if numbers else (0.0, 1.0)


def _extra(tables: ReportTables, rows: Sequence[Mapping[str, Any]]) -> list[str]:
    """Return what rows hold beyond knobs, counts and described metrics; nothing that was stored is hidden."""
    known = {*tables.scientific, *tables.nuisance, "n", "status", "note"}
    known |= {f"{name}{end}" for name in tables.columns for end in ("", "_low", "_high")}
    return [name for name in dict.fromkeys(key for row in rows for key in row) if name not in known]


def _best(rows: Sequence[Mapping[str, Any]], column: Mapping[str, Any]) -> str | None:
    """Return the best value as it is printed, so that two arms a reader sees as equal are marked alike."""
    values = [row[column["name"]] for row in rows if _finite(row.get(column["name"]))]
    if column.get("better") not in ("higher", "lower") or len(values) < 2:
        return None
    return number((max if column["better"] == "higher" else min)(values), column["unit"])


def _plain(value: Any, prefix: str = "") -> str:
    kind = ' class="num"' if isinstance(value, (int, float)) and not isinstance(value, bool) else ""
    return f'<td{kind} data-value="{_key(value)}">{prefix}{text(value)}</td>'


def _key(value: Any) -> str:
    """Return what a column is sorted by: the number in full, or the text; empty sorts last."""
    if value is None or (isinstance(value, float) and not math.isfinite(value)):
        return ""
    return repr(value) if isinstance(value, float) else text(value)


def _table(name: str, head: Sequence[str], body: Sequence[str]) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name} table"><table id="{name}-table">'
        f"<thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _copyable(body: Any) -> str:
    return (
        '<div class="copyable"><button type="button" class="copy">Copy</button>'
        f'<pre tabindex="0"><code>{text(body)}</code></pre></div>'
    )


def _finite(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool) and math.isfinite(value)
