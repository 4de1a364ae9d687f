"""The parts of the page, each from its content to one piece of HTML, empty where there is nothing to show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from normgauge.documents import Arm, Metric
from normgauge.references import bibliography, cite
from normgauge.report._content import PageContent
from normgauge.report._markup import badge, heading, number, pairs, seconds, swatch, text
from normgauge.stats import Interval
from normgauge.store import spec_id


def answer(content: PageContent) -> str:
    """Return the sentence the study ends with, and whether the data decide."""
    document = content.document
    if document is None:
        return '<p class="answer-text">No answer is stored yet: run the same command again.</p>'
    if not document.answer:
        how = "join the shards by normgauge merge, then run the same command without --shard"
        return f'<p class="answer-text">No answer is stored yet: {how}.</p>'
    verdict = "The data decide" if document.decided else "The data cannot tell"
    return (
        f'<p class="verdict {"yes" if document.decided else "no"}">{verdict}</p>'
        f'<p class="answer-text">{text(document.answer)}</p>'
    )


def tiles(content: PageContent) -> str:
    """Return the counts a reader wants before believing a table."""
    counts = Counter[str](run.status for run in content.runs)
    spent = sum(run.seconds for run in content.runs)
    shown = [("runs", str(len(content.runs)), ""), ("ok", str(counts.pop("ok", 0)), "ok")]
    shown += [(status, str(count), status) for status, count in sorted(counts.items())]
    shown += [("arms", str(len(content.arms)), ""), ("compute time", seconds(spent), "")]
    return "".join(
        f'<div class="tile tile-{text(kind) or "plain"}"><strong>{text(value)}</strong><span>{text(name)}</span></div>'
        for name, value, kind in shown
    )


def comparison(content: PageContent) -> str:
    """Return the table of arms, mean, interval and a small picture of it in every cell, and the remarks under it."""
    if content.document is None or not content.document.arms:
        return ""
    arms = content.document.arms
    metrics = [metric for name, metric in content.metrics.items() if any(name in arm.values for arm in arms)]
    head = [heading(knob) for knob in content.scientific] + [heading(knob, numeric=True) for knob in content.nuisance]
    head.append(heading("n", numeric=True, tip="runs behind the mean"))
    for metric in metrics:
        unit = f" ({metric.unit})" if metric.unit else ""
        first = "descending" if metric.better == "higher" else "ascending"
        head.append(heading(f"{metric.title}{unit}", first=first, numeric=True, tip=metric.help))
    head.append(heading("stable up to", numeric=True))
    spans = [_span(arms, metric) for metric in metrics]
    winners = [_best(arms, metric) if content.document.decided else None for metric in metrics]
    body = []
    for arm in arms:
        place = content.arms.index(content.arm(arm.knobs))
        cells = [
            f'<th scope="row">{"" if index else swatch(place)}{text(arm.knobs.get(knob))}</th>'
            for index, knob in enumerate(content.scientific)
        ]
        cells += [_plain_cell(arm.setting.get(knob)) for knob in content.nuisance]
        cells.append(_plain_cell(arm.n))
        for metric, span, winner in zip(metrics, spans, winners, strict=True):
            value = arm.values.get(metric.name)
            shown = None if value is None else value.times(metric.factor)
            cells.append(_cell(shown, metric.unit, span, winner, place))
        cells.append(f'<td class="num" data-value="{_key(arm.stable_up_to)}">{text(arm.stable_up_to)}</td>')
        body.append(f"<tr>{''.join(cells)}</tr>")
    remarks = "<br>".join(text(remark) for arm in arms for remark in arm.remarks)
    return _table("comparison", head, body) + (f'<p class="hint remarks">{remarks}</p>' if remarks else "")


def runs(content: PageContent) -> str:
    """Return every run with its status and the sentence that explains a failure."""
    knobs = [*content.scientific, *content.nuisance, "seed"]
    numeric = {knob for knob in knobs if all(_is_number(run.spec.get(knob)) for run in content.runs)}
    head = [heading("run"), *(heading(knob, numeric=knob in numeric) for knob in knobs), heading("status")]
    head += [heading("time", numeric=True), heading("what happened")]
    body = []
    for run in content.runs:
        identity = spec_id(run.spec)
        mark = swatch(content.arms.index(content.arm(run.spec)))
        cells = [f'<th scope="row"><code title="{identity}">{identity[:8]}</code></th>']
        for place, knob in enumerate(knobs):
            cells.append(_plain_cell(run.spec.get(knob), prefix="" if place else mark))
        cells.append(f'<td data-value="{text(run.status)}">{badge(run.status)}</td>')
        cells.append(f'<td class="num" data-value="{_key(run.seconds)}">{seconds(run.seconds)}</td>')
        cells.append(f'<td class="note">{text(run.sentence)}</td>')
        body.append(f'<tr data-ok="{"yes" if run.ok else "no"}">{"".join(cells)}</tr>')
    return _table("runs", head, body) if body else ""


def settings(content: PageContent) -> str:
    """Return what was asked, what was tuned, and what was fixed: the last is what the answer depends on."""
    if content.document is None:
        return ""
    study = content.document.question
    groups = [
        ("Asked about", "the question: every value is an arm", study.scientific),
        ("Tuned", "each arm gets its own best value, so that none loses by a bad setting", study.nuisance),
        ("Fixed", "the same for all: the answer holds for these values and may change with them", study.fixed),
        (
            "Repeated",
            "seeds per arm at its chosen setting",
            {"seeds": study.seeds, "tuning seeds": study.tuning_seeds},
        ),
    ]
    return "".join(
        f"<section class='card'><h3>{title}</h3><p class='hint'>{hint}</p>{pairs(values)}</section>"
        for title, hint, values in groups
        if values
    )


def provenance(content: PageContent) -> str:
    """Return versions, machine, revision and the command that makes the same page again."""
    if content.document is None:
        return ""
    origin = content.document.provenance
    rest = {"python": origin.python, "revision": origin.revision, "finished": content.document.finished}
    parts = [
        f"<section class='card'><h3>{title}</h3>{pairs(values)}</section>"
        for title, values in (("Versions", origin.versions), ("Machine", origin.machine), ("Run", rest))
        if values
    ]
    parts.append(f"<section class='card wide'><h3>Command</h3>{_copyable_block(content.document.command)}</section>")
    return "".join(parts)


def citation(content: PageContent) -> str:
    """Return the BibTeX of the papers the study rests on; keys nobody knows are named, not dropped."""
    keys = content.document.question.cite if content.document else ()
    here = [key for key in keys if key in bibliography()]
    lost = [key for key in keys if key not in bibliography()]
    parts = [_copyable_block(cite(*here))] if here else []
    if lost:
        parts.append(f"<p class='hint'>Not in the bibliography: {text(lost)}</p>")
    return "".join(parts)


def _cell(value: Interval | None, unit: str, span: tuple[float, float], winner: str | None, arm: int) -> str:
    if value is None:
        return '<td class="num missing" data-value="">-</td>'
    interval = ""
    if math.isfinite(value.low) and math.isfinite(value.high):
        interval = (
            f"<small>{number(value.low, unit)} &ndash; {number(value.high, unit)}</small>{_bar(value, span, arm)}"
        )
    best = winner is not None and number(value.mean, unit) == winner
    mark = ' <span class="best" title="best of this column">best</span>' if best else ""
    kind = "num is-best" if best else "num"
    return f'<td class="{kind}" data-value="{_key(value.mean)}"><b>{number(value.mean, unit)}</b>{mark}{interval}</td>'


def _bar(value: Interval, span: tuple[float, float], arm: int) -> str:
    start, end = span
    width = end - start or 1.0
    left, right, dot = (100 * (v - start) / width for v in (value.low, value.high, value.mean))
    return (
        f'<span class="range" aria-hidden="true" style="--arm: var(--c{arm % 8}); --from: {left:.1f}%; '
        f'--to: {right:.1f}%; --at: {dot:.1f}%"></span>'
    )


def _span(arms: Sequence[Arm], metric: Metric) -> tuple[float, float]:
    values = [arm.values[metric.name].times(metric.factor) for arm in arms if metric.name in arm.values]
    ends = [end for value in values for end in (value.mean, value.low, value.high) if math.isfinite(end)]
    return min(ends), max(ends)


def _best(arms: Sequence[Arm], metric: Metric) -> str | None:
    """Return the best value as it is printed, so that two arms a reader sees as equal are marked alike."""
    values = [metric.factor * arm.values[metric.name].mean for arm in arms if metric.name in arm.values]
    if metric.better is None or len(values) < 2:
        return None
    return number((max if metric.better == "higher" else min)(values), metric.unit)


def _plain_cell(value: Any, prefix: str = "") -> str:
    kind = ' class="num"' if _is_number(value) else ""
    return f'<td{kind} data-value="{_key(value)}">{prefix}{text(value)}</td>'


def _key(value: Any) -> str:
    """Return what a column is sorted by: the number in full, or the text; empty sorts last."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else text(value)


def _table(name: str, head: Sequence[str], body: Sequence[str]) -> str:
    return (
        f'<div class="scroll" tabindex="0" role="region" aria-label="{name} table"><table id="{name}-table">'
        f"<thead><tr>{''.join(head)}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _copyable_block(body: Any) -> str:
    return (
        '<div class="copyable"><button type="button" class="copy">Copy</button>'
        f'<pre tabindex="0"><code>{text(body)}</code></pre></div>'
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
