"""The parts of the page, each from its content to one piece of HTML, empty where there is nothing to show."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from typing import Any

from normgauge.documents import Arm, Metric
from normgauge.references import bibliography, cite
from normgauge.report._content import PageContent
from normgauge.report._markup import Markup, badge, concat, heading, number, pairs, seconds, swatch
from normgauge.stats import Interval
from normgauge.store import spec_id


def answer(content: PageContent) -> Markup:
    """Return the sentence the study ends with, and whether the data decide."""
    document = content.document
    if document is None:
        return Markup('<p class="answer-text">No answer is stored yet: run the same command again.</p>')
    if not document.answer:
        how = "join the shards by normgauge merge, then run the same command without --shard"
        return Markup('<p class="answer-text">No answer is stored yet: {}.</p>').format(how)
    verdict = "The data decide" if document.decided else "The data cannot tell"
    said = Markup('<p class="verdict {}">{}</p><p class="answer-text">{}</p>')
    return said.format("yes" if document.decided else "no", verdict, document.answer)


def tiles(content: PageContent) -> Markup:
    """Return the counts a reader wants before believing a table."""
    counts = Counter[str](run.status for run in content.runs)
    spent = sum(run.seconds for run in content.runs)
    shown = [("runs", str(len(content.runs)), ""), ("ok", str(counts.pop("ok", 0)), "ok")]
    shown += [(status, str(count), status) for status, count in sorted(counts.items())]
    shown += [("arms", str(len(content.arms)), ""), ("compute time", seconds(spent), "")]
    tile = Markup('<div class="tile tile-{}"><strong>{}</strong><span>{}</span></div>')
    return concat(tile.format(kind or "plain", value, name) for name, value, kind in shown)


def comparison(content: PageContent) -> Markup:
    """Return the table of arms, mean, interval and a small picture of it in every cell, and the remarks under it."""
    if content.document is None or not content.document.arms:
        return Markup()
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
            Markup('<th scope="row">{}{}</th>').format("" if index else swatch(place), arm.knobs.get(knob))
            for index, knob in enumerate(content.scientific)
        ]
        cells += [_plain_cell(arm.setting.get(knob)) for knob in content.nuisance]
        cells.append(_plain_cell(arm.n))
        for metric, span, winner in zip(metrics, spans, winners, strict=True):
            value = arm.values.get(metric.name)
            shown = None if value is None else value.times(metric.factor)
            cells.append(_cell(shown, metric.unit, span, winner, place))
        cells.append(Markup('<td class="num" data-value="{0}">{0}</td>').format(arm.stable_up_to))
        body.append(Markup("<tr>{}</tr>").format(concat(cells)))
    remarks = Markup("<br>").join(remark for arm in arms for remark in arm.remarks)
    under = Markup('<p class="hint remarks">{}</p>').format(remarks) if remarks else ""
    return _table("comparison", head, body) + under


def runs(content: PageContent) -> Markup:
    """Return every run with its status and the sentence that explains a failure."""
    knobs = [*content.scientific, *content.nuisance, "seed"]
    numeric = {knob for knob in knobs if all(_is_number(run.spec.get(knob)) for run in content.runs)}
    head = [heading("run"), *(heading(knob, numeric=knob in numeric) for knob in knobs), heading("status")]
    head += [heading("time", numeric=True), heading("what happened")]
    body = []
    for run in content.runs:
        identity = spec_id(run.spec)
        mark = swatch(content.arms.index(content.arm(run.spec)))
        cells = [Markup('<th scope="row"><code title="{}">{}</code></th>').format(identity, identity[:8])]
        for place, knob in enumerate(knobs):
            cells.append(_plain_cell(run.spec.get(knob), prefix="" if place else mark))
        cells.append(Markup('<td data-value="{}">{}</td>').format(run.status, badge(run.status)))
        spent = Markup('<td class="num" data-value="{}">{}</td>')
        cells.append(spent.format(_key(run.seconds), seconds(run.seconds)))
        cells.append(Markup('<td class="note">{}</td>').format(run.sentence))
        body.append(Markup('<tr data-ok="{}">{}</tr>').format("yes" if run.ok else "no", concat(cells)))
    return _table("runs", head, body) if body else Markup()


def settings(content: PageContent) -> Markup:
    """Return what was asked, what was tuned, and what was fixed: the last is what the answer depends on."""
    if content.document is None:
        return Markup()
    study = content.document.question
    groups = [
        ("Asked about", "the question: every value is an arm", study.scientific),
        ("Tuned", "each arm gets its own best value, so that none loses by a bad setting", study.nuisance),
        ("Fixed", "the same for all: the answer holds for these values and may change with them", study.fixed),
        ("Repeated", "seeds per arm at its chosen setting", {"seeds": study.seeds, "tuning seeds": study.tuning_seeds}),
    ]
    card = Markup("<section class='card'><h3>{}</h3><p class='hint'>{}</p>{}</section>")
    return concat(card.format(title, hint, pairs(values)) for title, hint, values in groups if values)


def provenance(content: PageContent) -> Markup:
    """Return versions, machine, revision and the command that makes the same page again."""
    if content.document is None:
        return Markup()
    origin = content.document.provenance
    rest = {"python": origin.python, "revision": origin.revision, "finished": content.document.finished}
    parts = [
        Markup("<section class='card'><h3>{}</h3>{}</section>").format(title, pairs(values))
        for title, values in (("Versions", origin.versions), ("Machine", origin.machine), ("Run", rest))
        if values
    ]
    command = Markup("<section class='card wide'><h3>Command</h3>{}</section>")
    return concat([*parts, command.format(_copyable_block(content.document.command))])


def citation(content: PageContent) -> Markup:
    """Return the BibTeX of the papers the study rests on; keys nobody knows are named, not dropped."""
    keys = content.document.question.cite if content.document else ()
    here = [key for key in keys if key in bibliography()]
    lost = [key for key in keys if key not in bibliography()]
    parts = [_copyable_block(cite(*here))] if here else []
    if lost:
        parts.append(Markup("<p class='hint'>Not in the bibliography: {}</p>").format(lost))
    return concat(parts)


def _cell(value: Interval | None, unit: str, span: tuple[float, float], winner: str | None, arm: int) -> Markup:
    if value is None:
        return Markup('<td class="num missing" data-value="">-</td>')
    interval = Markup()
    if math.isfinite(value.low) and math.isfinite(value.high):
        ends = Markup("<small>{} &ndash; {}</small>").format(number(value.low, unit), number(value.high, unit))
        interval = ends + _bar(value, span, arm)
    best = winner is not None and number(value.mean, unit) == winner
    return Markup('<td class="{kind}" data-value="{key}"><b>{mean}</b>{mark}{interval}</td>').format(
        kind="num is-best" if best else "num",
        key=_key(value.mean),
        mean=number(value.mean, unit),
        mark=Markup(' <span class="best" title="best of this column">best</span>') if best else "",
        interval=interval,
    )


def _bar(value: Interval, span: tuple[float, float], arm: int) -> Markup:
    start, end = span
    width = end - start or 1.0
    left, right, dot = (f"{100 * (v - start) / width:.1f}" for v in (value.low, value.high, value.mean))
    bar = Markup(
        '<span class="range" aria-hidden="true" style="--arm: var(--c{}); --from: {}%; --to: {}%; --at: {}%"></span>'
    )
    return bar.format(arm % 8, left, right, dot)


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


def _plain_cell(value: Any, prefix: str = "") -> Markup:
    kind = Markup(' class="num"') if _is_number(value) else ""
    return Markup('<td{} data-value="{}">{}{}</td>').format(kind, _key(value), prefix, value)


def _key(value: Any) -> Any:
    """Return what a column is sorted by: the number in full, or the text; empty sorts last."""
    if value is None:
        return ""
    return repr(value) if isinstance(value, float) else value


def _table(name: str, head: Sequence[Markup], body: Sequence[Markup]) -> Markup:
    return Markup(
        '<div class="scroll" tabindex="0" role="region" aria-label="{name} table"><table id="{name}-table">'
        "<thead><tr>{head}</tr></thead><tbody>{body}</tbody></table></div>"
    ).format(name=name, head=concat(head), body=concat(body))


def _copyable_block(body: Any) -> Markup:
    return Markup(
        '<div class="copyable"><button type="button" class="copy">Copy</button>'
        '<pre tabindex="0"><code>{}</code></pre></div>'
    ).format(body)


def _is_number(value: Any) -> bool:
    return isinstance(value, (int, float)) and not isinstance(value, bool)
