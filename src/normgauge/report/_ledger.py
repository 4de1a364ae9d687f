"""The ledger as a page: counts, a search box, filters, and every claim with its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from importlib.resources import files
from string import Template
from typing import TYPE_CHECKING

from normgauge import charts
from normgauge.papers.shelf import PAPERS
from normgauge.references import bibliography, title
from normgauge.report._claim import card, spoken_word
from normgauge.report._markup import text

if TYPE_CHECKING:
    from normgauge.papers.court import Claim

#: The columns of the counts, and what each asks of a claim.
COLUMNS: dict[str, dict[str, str]] = {
    "holds": {"verdict": "holds"},
    "holds with correction": {"verdict": "holds_with_correction"},
    "false as stated": {"verdict": "false_as_stated"},
    "experiment, judged": {"verdict": "empirical", "status": "judged"},
    "experiment, not run": {"verdict": "empirical", "status": "not_run"},
    "judge failed": {"status": "error"},
}
MEANINGS = {
    "holds": "the printed statement is true on every instance tried",
    "holds_with_correction": "it is not, but its conclusion survives in the paper's own setting once a constant, an "
    "index, a norm or a missing hypothesis is mended; the corrected sentence is tested too",
    "false_as_stated": "the conclusion itself must change: there is a counterexample, and what holds instead is tested "
    "where there is something",
    "empirical": "a statement about experiments, judged over seeds by a criterion fixed in advance: reproduced, "
    "contradicted, too small to tell, or premise absent at the scale run; not run until its study was run",
}
FILTERS = ("paper", "verdict", "status", "outcome")


def ledger_page(claims: Iterable[Claim]) -> str:
    """Return the claims as one HTML page that needs no network, no LaTeX, and no script to be read.

    With scripts it searches and filters, and the address holds the choice: `#q=margin&paper=S0&verdict=holds` opens
    that view, `#S1-T4.1` one claim. Verdicts not computed yet are computed here.

    Args:
        claims: those to show, as `ledger().judge(workers=2)`.

    Returns:
        The page.

    Examples:
        >>> from normgauge.papers.court import ledger
        >>> html = ledger_page(ledger(ids=["S1-FC.2"]))
        >>> 'id="S1-FC.2"' in html, "<math>" in html, "//" in html.replace("// ", "")
        (True, True, False)
    """
    shown = list(claims)
    papers = list(dict.fromkeys(claim.paper for claim in shown))
    parts = {
        "policy": charts.POLICY,
        "palette": "".join(
            f"--c{k}: light-dark({light}, {dark});"
            for k, (light, dark) in enumerate(zip(*charts.PALETTES.values(), strict=True))
        ),
        "css": _asset("page.css") + _asset("claim.css") + _asset("ledger.css"),
        "js": _asset("ledger.js"),
        "total": str(len(shown)),
        "summary": _summary(shown, papers),
        "counts": _counts(shown, papers),
        "meanings": "".join(
            f"<div><dt>{spoken_word(w)}</dt><dd>{text(said)}</dd></div>" for w, said in MEANINGS.items()
        ),
        "filters": "".join(_filter(name, shown) for name in FILTERS),
        "papers": "".join(_paper(paper, shown) for paper in papers),
    }
    return Template(_asset("ledger.html")).substitute(parts)


def _summary(claims: Sequence[Claim], papers: Sequence[str]) -> str:
    judged = sum(claim.status == "judged" for claim in claims)
    waiting = sum(claim.status == "not_run" for claim in claims)
    seeds = ", ".join(str(seed) for seed in sorted({claim.seed for claim in claims}))
    left = f" {waiting} speak of experiments that were not run here." if waiting else ""
    many = "one paper" if len(papers) == 1 else f"{len(papers)} papers"
    return (
        f"{len(claims)} claims of {many}. {judged} are judged by numbers, on random float64 instances and at the edges "
        f"(seed {seeds}): how far is the printed sentence from true, how far the corrected one.{left}"
    )


def _counts(claims: Sequence[Claim], papers: Sequence[str]) -> str:
    """Return the table of papers and verdicts; every number is a link to the claims behind it."""
    columns = {name: asks for name, asks in COLUMNS.items() if any(_meets(claim, asks) for claim in claims)}
    head = "".join(f'<th scope="col">{text(name)}</th>' for name in ("paper", *columns, "all"))
    body = []
    for paper in [*papers, *([""] if len(papers) > 1 else [])]:
        own = [claim for claim in claims if claim.paper == (paper or claim.paper)]
        name = (
            f'<a href="#{text(paper)}">{text(_name(paper))}</a> <span>{text(_title(own))}</span>'
            if paper
            else "all papers"
        )
        cells = [_number(own, asks, {"paper": paper} if paper else {}) for asks in (*columns.values(), {})]
        body.append(f'<tr><th scope="row">{name}</th>{"".join(cells)}</tr>')
    return (
        '<div class="scroll"><table class="counts">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _number(claims: Sequence[Claim], asks: Mapping[str, str], where: Mapping[str, str]) -> str:
    number = sum(_meets(claim, asks) for claim in claims)
    if not number:
        return '<td class="num">&ndash;</td>'
    address = "&amp;".join(f"{name}={text(value)}" for name, value in {**where, **asks}.items()) or "all"
    return f'<td class="num"><a href="#{address}">{number}</a></td>'


def _meets(claim: Claim, asks: Mapping[str, str]) -> bool:
    return all(getattr(claim, name) == value for name, value in asks.items())


def _filter(name: str, claims: Sequence[Claim]) -> str:
    """Return a choice with the number of claims behind each value; a value of the vocabulary nobody has is said too."""
    from normgauge.papers.court import OUTCOMES, STANDINGS, WORDS

    tally = Counter(getattr(claim, name) for claim in claims)
    values = {"verdict": WORDS, "status": STANDINGS, "outcome": OUTCOMES}.get(name, tuple(tally))
    options = "".join(f'<option value="{text(v)}">{spoken_word(v)} ({tally[v]})</option>' for v in values)
    return f'<label>{name}<select name="{name}"><option value="">any</option>{options}</select></label>'


def _paper(paper: str, claims: Sequence[Claim]) -> str:
    own = [claim for claim in claims if claim.paper == paper]
    cards = "".join(card(claim, {other.id for other in claims}) for claim in own)
    return f'<section id="{text(paper)}"><h2>{text(_name(paper))}: {text(_title(own))}</h2>{cards}</section>'


def _name(paper: str) -> str:
    """Return author and year, with the letter its ids begin with."""
    return f"{PAPERS[paper].name} ({paper})" if paper in PAPERS else paper


def _title(claims: Sequence[Claim]) -> str:
    key = next((claim.cite[0] for claim in claims if claim.cite), "")
    return title(key) if key in bibliography() else key


def _asset(name: str) -> str:
    return (files("normgauge.report") / "assets" / name).read_text(encoding="utf-8")
