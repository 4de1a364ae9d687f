"""The page of a paper's experiment (figures, the paper's finding, ours, proxy, verdict) as Markdown or HTML.

Both are written from the same blocks, made of the document a study left in its store and the pictures drawn from it.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from importlib.resources import files
from pathlib import Path
from statistics import fmean, stdev
from string import Template
from typing import Any

from normgauge import charts
from normgauge.records import format_number
from normgauge.report._markup import seconds as duration

Document = Mapping[str, Any]


@dataclass(frozen=True, slots=True)
class Picture:
    """A figure as text: its file name without ending, the SVG, and the caption."""

    name: str
    svg: str
    caption: str


@dataclass(frozen=True, slots=True)
class Block:
    """One part of a page: a heading, paragraphs, and at most one table or picture."""

    title: str
    paragraphs: tuple[str, ...] = ()
    header: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    pictures: tuple[Picture, ...] = ()


def study_markdown(document: Document, pictures: Sequence[Picture], folder: str) -> str:
    """Return the page for the documentation; `folder` is where the pictures lie, relative to it."""
    parts = [f"# {document['study']}", f"*{_origin(document)}*", f"**{document['question']}**"]
    for block in blocks(document, pictures):
        parts.append(f"## {block.title}")
        parts += block.paragraphs
        parts += [f"![{p.caption}]({folder}/{p.name}.svg)\n\n*{p.caption}*" for p in block.pictures]
        if block.rows:
            lines = [block.header, ("---",) * len(block.header), *block.rows]
            parts.append("\n".join("| " + " | ".join(_cell(cell) for cell in line) + " |" for line in lines))
    return "\n\n".join(parts) + "\n"


def study_html(document: Document, pictures: Sequence[Picture]) -> str:
    """Return the page as one self-contained HTML file."""
    body = []
    for block in blocks(document, pictures):
        body.append(f"<section><h2>{escape(block.title)}</h2>")
        body += [f"<p>{escape(text)}</p>" for text in block.paragraphs]
        body += [
            f'<figure class="card">{p.svg}<figcaption class="hint">{escape(p.caption)}</figcaption></figure>'
            for p in block.pictures
        ]
        if block.rows:
            head = "".join(f'<th scope="col">{escape(cell)}</th>' for cell in block.header)
            lines = "".join(
                "<tr>" + "".join(f"<td>{escape(cell)}</td>" for cell in row) + "</tr>" for row in block.rows
            )
            body.append(
                f'<div class="scroll"><table><thead><tr>{head}</tr></thead><tbody>{lines}</tbody></table></div>'
            )
        body.append("</section>")
    assets = files("normgauge.report") / "assets"
    return Template((assets / "study.html").read_text(encoding="utf-8")).substitute(
        title=escape(str(document["study"])),
        policy=charts.POLICY,
        origin=escape(_origin(document)),
        question=escape(str(document["question"])),
        css=(assets / "page.css").read_text(encoding="utf-8"),
        body="".join(body),
    )


def write_study(document: Document, pictures: Sequence[Picture], folder: str | Path) -> Path:
    """Write `index.html` and the pictures into a folder and return the page's path."""
    target = Path(folder)
    target.mkdir(parents=True, exist_ok=True)
    for picture in pictures:
        (target / f"{picture.name}.svg").write_text(picture.svg, encoding="utf-8")
    page = target / "index.html"
    page.write_text(study_html(document, pictures), encoding="utf-8")
    return page


def blocks(document: Document, pictures: Sequence[Picture]) -> list[Block]:
    """Return the parts of the page in reading order."""
    claims = [
        (item["id"], item["outcome"], item["printed"], item["criterion"], item["sentence"])
        for item in document["claims"]
    ]
    contrasts = [
        (item["contrast"], format_number(item["mean"]), format_number(item["half width"]), str(item["seeds"]))
        for item in document["contrasts"]
    ]
    found = [
        Block("Verdict", (verdict_sentence(document), *document["remarks"])),
        Block("What the paper found", (document["finding"],)),
        Block("Figures", pictures=tuple(pictures)),
        Block(
            "Contrasts",
            ("Positive speaks for the paper; the 95 % interval over seeds is mean -+ half width.",),
            ("contrast", "mean", "half width", "seeds"),
            tuple(contrasts),
        ),
        Block("Claims", (), ("claim", "outcome", "printed", "criterion fixed in advance", "evidence"), tuple(claims)),
        Block("Numbers", ("Mean -+ half width of the 95 % interval over seeds.",), *summary(document)),
        Block("Proxy against paper", (document["proxy"],)),
        _failures(document),
        Block("How it was run", (made_with(document), f"Again: `{document['command']}`")),
    ]
    return [block for block in found if block.paragraphs or block.rows or block.pictures]


def verdict_sentence(document: Document) -> str:
    """Say what came of the study and which contrasts decide it: one whose interval contains 0 decides nothing."""
    words = {
        "confirmed": "Confirmed at this scale: every interval lies above 0.",
        "not_confirmed": "Not confirmed at this scale.",
        "inconclusive": "Inconclusive: the arms cannot be told apart.",
    }
    sorts: dict[str, list[str]] = {"Against the paper": [], "Undecided": [], "For the paper": []}
    for item in document["contrasts"]:
        mean, half = item["mean"], item["half width"]
        decided = mean is not None and half is not None and abs(mean) > half
        sorts["Undecided" if not decided else "For the paper" if mean > 0 else "Against the paper"].append(
            f"{item['contrast']} ({format_number(mean)} -+ {format_number(half, 2)})"
        )
    parts = [f"{sort}: {'; '.join(names)}." for sort, names in sorts.items() if names]
    return " ".join([words.get(str(document["outcome"]), "Not judged."), *parts])


def made_with(document: Document) -> str:
    """Say size, runs, machine, versions and revision."""
    origin = document["provenance"]
    machine, versions = origin["machine"], origin["versions"]
    failed = len(document["failed"])
    return (
        f"Size {document['size']}, {document['runs']} runs ({failed} not ok), {document['seeds']} seeds, "
        f"{duration(document['seconds'])} of runs in all; {machine['system']} {machine['processor']}, "
        f"{machine['device']}; torch {versions['torch']}, Python {origin['python']}; revision {origin['revision']}; "
        f"{document['finished'][:10]}."
    )


def summary(document: Document) -> tuple[tuple[str, ...], tuple[tuple[str, ...], ...]]:
    """Return header and rows: one row per arm, each reading as mean -+ half width over its seeds."""
    knobs = [k for k in document["knobs"] if len({str(row.get(k)) for row in document["rows"]}) > 1]
    groups: dict[tuple[str, ...], list[Mapping[str, Any]]] = {}
    for row in document["rows"]:
        groups.setdefault(tuple(_show(row.get(knob)) for knob in knobs), []).append(row)
    readings = document["readings"]
    rows = [
        (*arm, str(len(members)), *(_mean([row.get(name) for row in members]) for name in readings))
        for arm, members in groups.items()
    ]
    return (*knobs, "runs", *(name.replace("_", " ") for name in readings)), tuple(rows)


def _mean(values: Sequence[float | None]) -> str:
    known = [value for value in values if value is not None and math.isfinite(value)]
    if not known:
        return "-"
    if len(known) < 2:
        return format_number(known[0], 4)
    from scipy.stats import t

    half = float(t.ppf(0.975, len(known) - 1)) * stdev(known) / math.sqrt(len(known))
    holes = f" ({len(known)} of {len(values)})" if len(known) < len(values) else ""
    return f"{format_number(fmean(known), 4)} -+ {format_number(half, 2)}{holes}"


def _failures(document: Document) -> Block:
    tally: dict[tuple[str, str], int] = {}
    for item in document["failed"]:
        key = (item["run"].rsplit(", seed", 1)[0], item["status"])
        tally[key] = tally.get(key, 0) + 1
    rows = tuple((run, status, str(count)) for (run, status), count in tally.items())
    return Block("Runs that are not ok", (), ("runs", "status", "how many"), rows)


def _origin(document: Document) -> str:
    return f"{', '.join(document['papers'])}: {document['place']}"


def _show(value: Any) -> str:
    return format_number(value) if isinstance(value, float) else str(value)


def _cell(text: str) -> str:
    """Return text fit for a cell of a Markdown table."""
    return text.replace("|", "\\|").replace("\n", " ").replace("$", "\\$").replace("_", "\\_").replace("*", "\\*")
