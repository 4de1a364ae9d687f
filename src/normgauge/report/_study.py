"""The page of a paper's experiment (verdict, figure that decides, numbers, protocol, sensitivity) as Markdown or HTML.

Both are written from the same blocks, made of the document a study left in its store and the pictures drawn from it.
"""

import math
import re
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from pathlib import Path
from typing import Any

from normgauge.documents import About, CriterionDocument, Margin, StudyDocument, write_whole
from normgauge.records import Row, format_number, plain, spoken
from normgauge.report._markup import Markup, render
from normgauge.report._markup import seconds as duration
from normgauge.stats import CONFIDENCE, POWER, interval, natural_bounds, student_quantile

#: What the intervals of a criterion that is decided say; the others bring their own sentence.
OUTCOMES = {
    "reproduced": "every interval lies beyond the smallest effect that counts.",
    "contradicted": "an interval excludes the smallest effect that counts.",
}
_MARGINS = re.compile(r"(?:margin: .*? \(counts above [^)]*\)[;:.]\s*)+")
SENSITIVITY = "The same contrasts where a choice is made otherwise; they decide nothing."
#: What would change the verdict, in words.
CHANGES = {
    "reproduced": "more seeds, a larger size or another setting in which an interval is not beyond that effect.",
    "contradicted": "runs whose intervals all lie beyond that effect, or an argument that a smaller one counts.",
    "too_small_to_tell": "more seeds: the last part of its sentence says about how many.",
    "premise_absent": "runs in which the premise holds.",
    "not_run": "the runs.",
    "error": "a table that can be read.",
}


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as text: its file name without ending, the SVG, and the caption."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a page: a heading, paragraphs, pictures, and at most one table."""

    title: str
    paragraphs: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[Picture, ...] = ()


def study_markdown(about: About, document: StudyDocument, pictures: Sequence[Picture], folder: str) -> str:
    """Return the page for the documentation; `folder` is where the pictures lie, relative to it."""
    parts = [f"# {document.study}", f"*{_origin(about)}*", f"**{about.question}** {tally(document)}", "## Verdict"]
    parts += [f"**{spoken(item.outcome).upper()}** {verdict_sentence(item)}" for item in document.criteria]
    deciding, rest = _sort_pictures(pictures)
    parts += [*gather_remarks(document.remarks), *(_figure(picture, folder) for picture in deciding)]
    for block in blocks(about, document, rest):
        parts += [f"## {block.title}", *block.paragraphs, *(_figure(picture, folder) for picture in block.pictures)]
        if block.rows:
            lines = [block.header, ("---",) * len(block.header), *block.rows]
            parts.append("\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def study_html(about: About, document: StudyDocument, pictures: Sequence[Picture]) -> str:
    """Return the page as one self-contained HTML file."""
    deciding, rest = _sort_pictures(pictures)
    tiles = [("runs", document.runs), ("not ok", len(document.failed)), ("seeds", document.seeds)]
    parts: dict[str, Any] = {"origin": _origin(about), "question": about.question, "tally": tally(document)}
    parts["tiles"] = [*tiles, ("size", document.size), ("compute time", duration(document.seconds))]
    filters: dict[str, Any] = {"spoken": spoken, "sentence": verdict_sentence, "safe_svg": Markup, "code": _code}
    filters["gather"] = gather_remarks
    told = blocks(about, document, rest)
    return render("study.html", filters, document=document, deciding=deciding, blocks=told, **parts)


def write_study(about: About, document: StudyDocument, pictures: Sequence[Picture], folder: str | Path) -> Path:
    """Write `index.html` and the pictures into a folder and return the page's path."""
    target = Path(folder)
    for picture in pictures:
        write_whole(target / f"{picture.name}.svg", picture.svg)
    page = target / "index.html"
    write_whole(page, study_html(about, document, pictures))
    return page


def gather_remarks(remarks: Sequence[str]) -> list[str]:
    """Say once what is said of several arms, with the names of all before it."""
    split = [remark.rpartition(": ") for remark in dict.fromkeys(remarks)]
    told = dict.fromkeys(colon + words for _, colon, words in split)
    return ["; ".join(arm for arm, *rest in split if "".join(rest) == words) + words for words in told]


def tally(document: StudyDocument) -> str:
    """Say how many criteria came out how, and at which size."""
    counts = Counter(spoken(item.outcome) for item in document.criteria)
    return f"{', '.join(f'{count} {word}' for word, count in counts.items())} at the size {document.size}."


def blocks(about: About, document: StudyDocument, pictures: Sequence[Picture]) -> list[Block]:
    """Return the parts of the page below the verdict, in reading order."""
    judged = document.criteria
    heads = ("criterion", "contrast", "effect", "half width", "smallest effect that counts", "seeds")
    varied = any(item.sensitivity for item in judged)
    parts = [
        Block("What the paper found", (about.finding,)),
        Block(
            "Numbers",
            ("Mean and 95 % interval over seeds. The last column: which effect these seeds would confirm so often.",),
            (*heads, "speaks", "confirmed 4 times of 5"),
            tuple((item.id, *_margin_cells(m), _side(m), _confirmed(m)) for item in judged for m in item.margins),
        ),
        Block("Figures", pictures=tuple(pictures)),
        Block(
            "Protocol",
            (
                "`normgauge claims --id ID` judges the same runs by the same rule.",
                "Where a table is older than its criteria, the smallest effects were declared after its runs.",
                *about.protocol,
            ),
            ("criterion", "printed", "rule"),
            tuple((item.id, item.printed, item.criterion) for item in judged),
        ),
        Block(
            "Sensitivity",
            (SENSITIVITY if varied else "No criterion holds a choice fixed that the runs vary.",),
            heads,
            tuple((item.id, *_margin_cells(m)) for item in judged for m in item.sensitivity),
        ),
        _trend(document),
        Block("Arms", ("Mean and 95 % interval over seeds.",), *summary(about, document)),
        Block("Proxy against paper", (about.proxy,)),
        _failures(document),
        Block("What would change our mind", tuple(f"{item.id}: {CHANGES[item.outcome]}" for item in judged)),
        Block("How it was run", (origin_sentence(document), f"Again: `{about.command}`")),
        Block("Raw runs", (_raw(document),)),
    ]
    return [block for block in parts if block.paragraphs or block.rows or block.pictures]


def _raw(document: StudyDocument) -> str:
    rows = f'`normgauge.papers.court.shipped()["{document.study}"].document.rows`'
    told = f"{len(document.rows)} rows, one for each run that is judged: {rows} where the table ships"
    return f"{told}; every reading of every run is in the store that `reproduce` keeps, `runs.sqlite`."


def _trend(document: StudyDocument) -> Block:
    """Return the contrasts at the other sizes beside those that decide, and where they tend."""
    deciding = {(item.id, margin.name): margin for item in document.criteria for margin in item.margins}
    rows = []
    for other in document.other_sizes:
        same = [(m, deciding[other.id, m.name]) for m in other.margins if (other.id, m.name) in deciding]
        there = (other.size, spoken(other.outcome))
        for m, now in same:
            ends = (_with_half_width(x) for x in (m, now))
            rows.append((other.id, m.name, *there, *ends, _tendency(m, now)))
        if not same:  # what was judged there was another contrast, a premise for instance
            rows.append((other.id, "-", *there, "-", "-", "-"))
    head = ("criterion", "contrast", "other size", "its verdict", "effect there", f"at {document.size}", "trend")
    told = "The same contrasts from runs of another size; a trend is told where the two intervals exclude that there is"
    return Block("Two sizes", (f"{told} none. They decide nothing.",) if rows else (), head, tuple(rows))


def _tendency(other: Margin, now: Margin) -> str:
    """Say whether the effect grows from the other size to the one that decides, by the interval of the difference."""
    if not (math.isfinite(other.half_width) and math.isfinite(now.half_width)):
        return "too few seeds"
    change = now.mean - other.mean
    return "none seen" if abs(change) <= math.hypot(other.half_width, now.half_width) else f"{change:+.2g}"


def _sort_pictures(pictures: Sequence[Picture]) -> tuple[list[Picture], list[Picture]]:
    """Return the figure that decides, which stands beside the verdict, and the others."""
    deciding = [picture for picture in pictures if picture.name.endswith("-decides")]
    return deciding, [picture for picture in pictures if picture not in deciding]


def _figure(picture: Picture, folder: str) -> str:
    return f"![{picture.caption}]({folder}/{picture.name}.svg)\n\n*{picture.caption}*"


def _code(text: str) -> Markup:
    """Return a sentence of Markdown as HTML: what stands in backticks is code."""
    return Markup(re.sub(r"`([^`]*)`", r"<code>\1</code>", escape(text)))


def _margin_cells(margin: Margin) -> tuple[str, ...]:
    effect, least = (format_number(value) for value in (margin.mean + margin.least, margin.least))
    return margin.name, effect, format_number(plain(margin.half_width)), least, str(margin.seeds)


def _confirmed(margin: Margin) -> str:
    if not math.isfinite(margin.half_width):
        return "-"
    share = student_quantile(2 * POWER - 1, margin.seeds) / student_quantile(CONFIDENCE, margin.seeds)
    return format_number(margin.least + margin.half_width * (1 + share), 3)


def verdict_sentence(criterion: CriterionDocument) -> str:
    """Say what came of a criterion: what its intervals say, or why they say nothing; the table has the numbers."""
    told = _MARGINS.sub("", criterion.sentence).replace(". the interval", "; the interval")
    return f"{criterion.id}: {OUTCOMES.get(criterion.outcome, told)}"


def _side(margin: Margin) -> str:
    """Return the side a contrast speaks for; one whose interval contains the smallest effect decides nothing."""
    decided = math.isfinite(margin.half_width) and abs(margin.mean) > margin.half_width
    return ("for it" if margin.mean > 0 else "against it") if decided else "undecided"


def _with_half_width(margin: Margin) -> str:
    effect = format_number(margin.mean + margin.least)
    return f"{effect} \u00b1 {format_number(margin.half_width, 2)}" if math.isfinite(margin.half_width) else effect


def origin_sentence(document: StudyDocument) -> str:
    """Say size, runs, machine, versions and revision."""
    origin, machine = document.provenance, document.provenance.machine
    return (
        f"Size {document.size}, {document.runs} runs ({len(document.failed)} not ok), {document.seeds} seeds, "
        f"{duration(document.seconds)} of runs in all; "
        f"{machine['system']} {machine['processor']}, {machine['device']}; torch {origin.versions['torch']}, Python "
        f"{origin.python}; revision {origin.code}; {document.finished[:10]}."
    )


def summary(about: About, document: StudyDocument) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return header and rows: one row per arm, each reading as mean and interval over its seeds."""
    knobs = [k for k in about.knobs if len({str(row.get(k)) for row in document.rows}) > 1]
    groups: dict[tuple[str, ...], list[Row]] = {}
    for row in document.rows:
        groups.setdefault(tuple(_show(row.get(knob)) for knob in knobs), []).append(row)
    rows = [
        (*arm, str(len(members)), *(_mean(name, [row.get(name) for row in members]) for name in about.columns))
        for arm, members in groups.items()
    ]
    return (*knobs, "runs", *(name.replace("_", " ") for name in about.columns)), tuple(rows)


def _mean(reading: str, values: Sequence[float | None]) -> str:
    numbers = [value for value in values if value is not None and math.isfinite(value)]
    if not numbers:
        return "-"
    holes = f", {len(numbers)} of {len(values)}" if len(numbers) < len(values) else ""
    return f"{interval(numbers, bounds=natural_bounds(reading))}{holes}"


def _failures(document: StudyDocument) -> Block:
    counts = Counter((item.run.rsplit(", seed", 1)[0], item.status) for item in document.failed)
    rows = tuple((run, status, str(count)) for (run, status), count in counts.items())
    return Block("Runs that are not ok", (), ("runs", "status", "how many"), rows)


def _origin(about: About) -> str:
    return f"{', '.join(about.papers)}: {about.place}"


def _show(value: object) -> str:
    shown = format_number(value) if isinstance(value, float) else str(value)
    return {"None": "-", "True": "yes", "False": "no"}.get(shown, shown)  # a knob the arm does not have; a switch


def _cell(text: str) -> str:
    """Return text fit for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("$", "\\$").replace("_", "\\_").replace("*", "\\*")
