"""Write what the ledger says into the site while it is built: a page per claim, and the searchable page of them all.

Claims are judged here and now, from the runs that ship; nothing of this is kept in the repository. A page's address,
`claims/ID.html`, does not change.
"""

import inspect
import os
import re
import sys
import textwrap
from functools import cache
from pathlib import Path

from mkdocs.structure.files import File

from normgauge.papers.court import ledger
from normgauge.papers.shelf import PAPERS
from normgauge.records import format_number
from normgauge.report import ledger_page

sys.path.insert(0, str(Path(__file__).parent))
from generate_ledger import MEANINGS, escape, typeset_sentence

BADGES = {
    "holds": "good",
    "reproduced": "good",
    "false_as_stated": "bad",
    "contradicted": "bad",
    "holds_with_correction": "warn",
}


@cache
def book():
    """Return the ledger, judged."""
    return ledger().judge(workers=os.cpu_count() or 1)


def on_files(files, config, **_):
    """Add the pages (mkdocs calls this with all files)."""
    files.append(File.generated(config, "claims/ledger.html", content=ledger_page(book())))
    for claim in book():
        begun = sum(
            other.id.startswith(claim.id) for other in book()
        )  # whoever searches S1-T4.1 means it, not S1-T4.1id
        head = f"---\nsearch:\n  boost: {1 + begun}\n---\n"
        files.append(File.generated(config, f"claims/{claim.id}.md", content=head + card(claim)))
    return files


def on_page_markdown(markdown, page, **_):
    """Link claims to their pages, from the long page and from studies, whose verdicts become badges."""
    names = {claim.id for claim in book()}
    if page.file.src_uri == "_generated/ledger.md":
        return re.sub(r"^### (\S+): (.*)$", r"### [\1](../claims/\1.md): \2", markdown, flags=re.MULTILINE)
    if page.file.src_uri == "_generated/overview.md":
        linked = lambda m: f"[{m[0]}](../claims/{m[0]}.md)" if m[0] in names else m[0]  # noqa: E731
        return re.sub(r"(?<![\w\[/])(?:S\d|P)-[\w.]*\w", linked, markdown)
    if page.file.src_uri.startswith("_generated/studies/"):
        up = "../../claims"
        linked = lambda m: f"[{m[0]}]({up}/{m[0]}.md)" if m[0] in names else m[0]  # noqa: E731
        badge = lambda m: f'<span class="badge badge-{BADGES.get(m[1].lower(), "plain")}">{m[1].lower()}</span>'  # noqa: E731
        markdown = re.sub(r"^\*\*([A-Z ]{5,})\*\*(?= )", badge, markdown, flags=re.MULTILINE)
        return re.sub(r"(?<![\w\[/])(?:S\d|P)-[\w.]*\w(?=[ :,|])", linked, markdown)
    return markdown


def card(claim):
    """Return the page of one claim: sentence, formula, verdict, numbers, and the code that decides it."""
    verdict, paper = claim.result, PAPERS[claim.paper]
    word = verdict.outcome or verdict.verdict or verdict.status
    spoken = word.replace("_", " ")
    parts = [
        f"# {claim.id}: {spoken}",
        f'<span class="badge badge-{BADGES.get(word, "plain")}">{spoken}</span> {paper.name}, {escape(claim.place)}'
        + (f"; fault: {claim.flaw}" if claim.flaw else ""),
        f"> {typeset_sentence(claim, 'printed')}",
    ]
    if claim.corrected:
        parts += ["## What holds instead", f"> {typeset_sentence(claim, 'corrected')}"]
    parts += ["## What was found", escape(verdict.sentence or MEANINGS.get(word, ""))]
    rows = [
        f"| {item.role} | {escape(item.name)} | {format_number(item.value)} | "
        f"{'' if item.role == 'fact' else format_number(item.tolerance)} | {item.instances} |"
        for item in verdict.evidence
    ]
    if rows:
        parts.append(
            "\n".join(
                [
                    "| speaks for | compared | discrepancy or value | tolerance | instances |",
                    "|---|---|---:|---:|---:|",
                    *rows,
                ]
            )
        )
    for title, text in (
        ("Why", typeset_sentence(claim, "note")),
        ("Hypotheses", typeset_sentence(claim, "hypotheses")),
        ("Fault", escape(claim.fault) if claim.flaw else ""),
        ("Criterion, fixed before the runs", escape(claim.criterion)),
        ("Rests on", escape(verdict.rests_on)),
    ):
        if text:
            parts += [f"**{title}.** {text}"]
    parts += [f"> {escape(quote)}" for quote in claim.quotes]
    parts += ["## Run it", f"```console\n{claim.command}\n```"]
    if claim.study:
        parts.append(
            f"The study with its figures: [{claim.study}](../_generated/studies/{claim.study}.md)."
            if _has_page(claim.study)
            else ""
        )
    parts.append(
        f'```py\nimport normgauge as ng\n\nprint(ng.claims.ledger(ids=["{claim.id}"]).explain("{claim.id}"))\n```'
    )
    if claim.trial is not None:
        source = textwrap.dedent(inspect.getsource(inspect.unwrap(claim.trial)))
        place = Path(inspect.getsourcefile(inspect.unwrap(claim.trial))).as_posix().rpartition("/src/")[2]
        parts += [f"The judge, from `{place}`:", f"```py\n{source.rstrip()}\n```"]
    parts.append("[All claims, to search](ledger.html) · [the ledger as one page](../_generated/ledger.md)")
    return "\n\n".join(part for part in parts if part) + "\n"


def _has_page(study):
    return (Path(__file__).parent / "_generated" / "studies" / f"{study}.md").exists()
