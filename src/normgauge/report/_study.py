"""The page of a paper's experiment (verdict, figure that decides, numbers, protocol, sensitivity) as Markdown or HTML.

Both are written from the same blocks, made of the document a study left in its store and the pictures drawn from it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from pathlib import Path

from normgauge import charts
from normgauge.documents import About, CriterionDocument, Margin, StudyDocument, write_whole
from normgauge.records import Row, format_number, plain
from normgauge.report._markup import Markup, asset, concat, fill_page
from normgauge.report._markup import seconds as duration
from normgauge.stats import CONFIDENCE, POWER, interval, natural_bounds, student_quantile

#: What an outcome means, for the reader of a page.
OUTCOMES = {
    "reproduced": "Reproduced at this scale: every interval lies beyond the smallest effect that counts.",
    "contradicted": "Contradicted at this scale: an interval excludes the smallest effect that counts.",
    "too_small_to_tell": "Too small to tell.",
    "premise_absent": "Premise absent: what the sentence presupposes did not come about.",
    "not_run": "Not run under this design.",
    "error": "Not judged: the table cannot be read.",
}
#: What would change the verdict, in words.
CHANGES = {
    "reproduced": "more seeds, a larger size or another setting of the sensitivity table in which one of its intervals "
    "is not beyond the smallest effect.",
    "contradicted": "more seeds, a larger size or another setting of the sensitivity table in which all of its "
    "intervals lie beyond the smallest effect, or an argument that a smaller effect counts.",
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
    """One part of a page: a heading, paragraphs (verdicts with their badges), and at most one table or picture."""

    title: str
    paragraphs: tuple[str, ...] = ()
    badges: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[Picture, ...] = ()


def study_markdown(about: About, document: StudyDocument, pictures: Sequence[Picture], folder: str) -> str:
    """Return the page for the documentation; `folder` is where the pictures lie, relative to it."""
    parts = [f"# {document.study}", f"*{_origin(about)}*", f"**{about.question}**"]
    for block in blocks(about, document, pictures):
        parts.append(f"## {block.title}")
        parts += [f"**{badge}** {text}" if badge else text for badge, text in _badged(block)]
        parts += [f"![{p.caption}]({folder}/{p.name}.svg)\n\n*{p.caption}*" for p in block.pictures]
        if block.rows:
            lines = [block.header, ("---",) * len(block.header), *block.rows]
            parts.append("\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def study_html(about: About, document: StudyDocument, pictures: Sequence[Picture]) -> str:
    """Return the page as one self-contained HTML file."""
    body = []
    for block in blocks(about, document, pictures):
        parts = [Markup("<h2>{}</h2>").format(block.title)]
        for badge, text in _badged(block):
            parts.append(Markup("<p><strong>{}</strong> {}</p>" if badge else "<p>{}{}</p>").format(badge, text))
        figure = Markup('<figure class="card">{}<figcaption class="hint">{}</figcaption></figure>')
        parts += [figure.format(Markup(picture.svg), picture.caption) for picture in block.pictures]
        if block.rows:
            head = concat(Markup('<th scope="col">{}</th>').format(cell) for cell in block.header)
            lines = (concat(Markup("<td>{}</td>").format(cell) for cell in row) for row in block.rows)
            table = Markup('<div class="scroll"><table><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>')
            parts.append(table.format(head, concat(Markup("<tr>{}</tr>").format(line) for line in lines)))
        body.append(Markup("<section>{}</section>").format(concat(parts)))
    return fill_page(
        "study.html",
        {
            "title": document.study,
            "policy": Markup(charts.POLICY),
            "origin": _origin(about),
            "question": about.question,
            "css": asset("page.css"),
            "body": concat(body),
        },
    )


def write_study(about: About, document: StudyDocument, pictures: Sequence[Picture], folder: str | Path) -> Path:
    """Write `index.html` and the pictures into a folder and return the page's path."""
    target = Path(folder)
    for picture in pictures:
        write_whole(target / f"{picture.name}.svg", picture.svg)
    page = target / "index.html"
    write_whole(page, study_html(about, document, pictures))
    return page


def blocks(about: About, document: StudyDocument, pictures: Sequence[Picture]) -> list[Block]:
    """Return the parts of the page in reading order."""
    deciding = [picture for picture in pictures if picture.name.endswith("-decides")]
    rest = [picture for picture in pictures if picture not in deciding]
    judged = document.criteria
    answer = ", ".join(f"{item.id} {item.outcome.replace('_', ' ')}" for item in judged)
    heads = ("criterion", "contrast", "effect", "half width", "smallest effect that counts", "seeds")
    parts = [
        Block(
            "Verdict",
            (f"{about.question} {answer}.", *map(verdict_sentence, judged), *document.remarks),
            ("", *(item.outcome.replace("_", " ").upper() for item in judged)),
            pictures=tuple(deciding),
        ),
        Block("What the paper found", (about.finding,)),
        Block(
            "Numbers",
            ("Mean and 95 % interval over seeds. The last column: which effect these seeds would confirm so often.",),
            (),
            (*heads, "confirmed 4 times of 5"),
            tuple((item.id, *_margin_cells(m), _confirmed(m)) for item in judged for m in item.margins),
        ),
        Block("Figures", pictures=tuple(rest)),
        Block(
            "Protocol",
            (
                "`normgauge claims --id ID` judges the same runs by the same rule.",
                "Where a table is older than its criteria, the smallest effects were declared after its runs.",
                *about.protocol,
            ),
            (),
            ("criterion", "printed", "rule"),
            tuple((item.id, item.printed, item.criterion) for item in judged),
        ),
        Block(
            "Sensitivity",
            (
                "The same contrasts where a choice is made otherwise; they decide nothing."
                if any(item.sensitivity for item in judged)
                else "No criterion holds a choice fixed that the runs vary.",
            ),
            (),
            heads,
            tuple((item.id, *_margin_cells(m)) for item in judged for m in item.sensitivity),
        ),
        _trend(document),
        Block("Arms", ("Mean and 95 % interval over seeds.",), (), *summary(about, document)),
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
        there = (other.size, other.outcome.replace("_", " "))
        for m, now in same:
            ends = (f"{format_number(x.mean + x.least)}{_half_width(x.half_width)}" for x in (m, now))
            rows.append((other.id, m.name, *there, *ends, _tendency(m, now)))
        if not same:  # what was judged there was another contrast, a premise for instance
            rows.append((other.id, "-", *there, "-", "-", "-"))
    head = ("criterion", "contrast", "other size", "its verdict", "effect there", f"at {document.size}", "trend")
    told = (
        "The same contrasts from runs of another size; a trend is told where the two intervals exclude that there is "
    )
    return Block("Two sizes", (f"{told}none. They decide nothing.",) if rows else (), (), head, tuple(rows))


def _tendency(other: Margin, now: Margin) -> str:
    """Say whether the effect grows from the other size to the one that decides, by the interval of the difference."""
    if not (math.isfinite(other.half_width) and math.isfinite(now.half_width)):
        return "too few seeds"
    change = now.mean - other.mean
    return "none seen" if abs(change) <= math.hypot(other.half_width, now.half_width) else f"{change:+.2g}"


def _badged(block: Block) -> list[tuple[str, str]]:
    return list(zip_longest(block.badges, block.paragraphs, fillvalue=""))


def _margin_cells(margin: Margin) -> tuple[str, ...]:
    effect, least = (format_number(value) for value in (margin.mean + margin.least, margin.least))
    return margin.name, effect, format_number(plain(margin.half_width)), least, str(margin.seeds)


def _confirmed(margin: Margin) -> str:
    """Return the effect that would be confirmed with power 0.8 at this spread and so many seeds."""
    if not math.isfinite(margin.half_width):
        return "-"
    share = student_quantile(2 * POWER - 1, margin.seeds) / student_quantile(CONFIDENCE, margin.seeds)
    return format_number(margin.least + margin.half_width * (1 + share), 3)


def verdict_sentence(criterion: CriterionDocument) -> str:
    """Say what came of a criterion and which margins decide it: one whose interval contains 0 decides nothing."""
    sorts: dict[str, list[str]] = {"Against it": [], "Undecided": [], "For it": []}
    for item in criterion.margins:
        decided = math.isfinite(item.half_width) and abs(item.mean) > item.half_width
        sorts["Undecided" if not decided else "For it" if item.mean > 0 else "Against it"].append(
            f"{item.name} ({format_number(item.mean + item.least)}{_half_width(item.half_width)}, "
            f"counts above {format_number(item.least)})"
        )
    parts = [f"{sort}: {'; '.join(names)}." for sort, names in sorts.items() if names] or [criterion.sentence]
    if criterion.outcome in ("premise_absent", "not_run", "too_small_to_tell"):
        parts = [criterion.sentence]
    return " ".join([f"{criterion.id}: {OUTCOMES[criterion.outcome]}", *parts])


def _half_width(width: float) -> str:
    return f" -+ {format_number(width, 2)}" if math.isfinite(width) else ""


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
    tally: dict[tuple[str, str], int] = {}
    for item in document.failed:
        key = (item.run.rsplit(", seed", 1)[0], item.status)
        tally[key] = tally.get(key, 0) + 1
    rows = tuple((run, status, str(count)) for (run, status), count in tally.items())
    return Block("Runs that are not ok", (), (), ("runs", "status", "how many"), rows)


def _origin(about: About) -> str:
    return f"{', '.join(about.papers)}: {about.place}"


def _show(value: object) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """Return text fit for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("$", "\\$").replace("_", "\\_").replace("*", "\\*")
