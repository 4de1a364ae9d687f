"""The ledger as a page: counts, a search box, filters, and every claim with its numbers."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from typing import TYPE_CHECKING

from normgauge import charts
from normgauge.papers.shelf import PAPERS
from normgauge.references import bibliography, title
from normgauge.report._claim import card, spoken_word
from normgauge.report._markup import Markup, asset, concat, fill_page

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
        "policy": Markup(charts.POLICY),
        "palette": Markup("").join(
            f"--c{k}: light-dark({light}, {dark});"
            for k, (light, dark) in enumerate(zip(*charts.PALETTES.values(), strict=True))
        ),
        "css": concat(map(asset, ("page.css", "claim.css", "ledger.css"))),
        "js": asset("ledger.js"),
        "total": str(len(shown)),
        "summary": _summary(shown, papers),
        "counts": _counts(shown, papers),
        "meanings": concat(
            Markup("<div><dt>{}</dt><dd>{}</dd></div>").format(spoken_word(w), said) for w, said in MEANINGS.items()
        ),
        "filters": concat(_filter(name, shown) for name in FILTERS),
        "papers": concat(_paper(paper, shown) for paper in papers),
    }
    return fill_page("ledger.html", parts)


def _summary(claims: Sequence[Claim], papers: Sequence[str]) -> str:
    from normgauge.papers.court import Ledger

    judged = sum(claim.status == "judged" for claim in claims)
    waiting = sum(claim.status == "not_run" for claim in claims)
    seeds = ", ".join(str(seed) for seed in sorted({claim.seed for claim in claims}))
    left = f" {waiting} speak of experiments that were not run here." if waiting else ""
    many = "one source" if len(papers) == 1 else f"{len(papers)} sources"
    return (
        f"{len(claims)} claims of {many}. {judged} are judged by numbers, on random float64 instances and at the edges "
        f"(seed {seeds}): how far is the printed sentence from true, how far the corrected one.{left} "
        f"All together: {Ledger(tuple(claims)).tally()}."
    )


def _counts(claims: Sequence[Claim], papers: Sequence[str]) -> Markup:
    """Return the table of papers and verdicts; every number is a link to the claims behind it."""
    columns = {name: asks for name, asks in COLUMNS.items() if any(_meets(claim, asks) for claim in claims)}
    head = concat(Markup('<th scope="col">{}</th>').format(name) for name in ("paper", *columns, "all"))
    body = []
    for paper in [*papers, *([""] if len(papers) > 1 else [])]:
        own = [claim for claim in claims if claim.paper == (paper or claim.paper)]
        link = Markup('<a href="#{}">{}</a> <span>{}</span>')
        name = link.format(paper, _name(paper), _title(own)) if paper else "all papers"
        cells = [_number(own, asks, {"paper": paper} if paper else {}) for asks in (*columns.values(), {})]
        body.append(Markup('<tr><th scope="row">{}</th>{}</tr>').format(name, concat(cells)))
    return Markup(
        '<div class="scroll"><table class="counts"><thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>'
    ).format(head, concat(body))


def _number(claims: Sequence[Claim], asks: Mapping[str, str], where: Mapping[str, str]) -> Markup:
    number = sum(_meets(claim, asks) for claim in claims)
    if not number:
        return Markup('<td class="num">&ndash;</td>')
    address = "&".join(f"{name}={value}" for name, value in {**where, **asks}.items()) or "all"
    return Markup('<td class="num"><a href="#{}">{}</a></td>').format(address, number)


def _meets(claim: Claim, asks: Mapping[str, str]) -> bool:
    return all(getattr(claim, name) == value for name, value in asks.items())


def _filter(name: str, claims: Sequence[Claim]) -> Markup:
    """Return a choice with the number of claims behind each value; a value of the vocabulary nobody has is said too."""
    from normgauge.papers.court import OUTCOMES, STANDINGS, WORDS

    tally = Counter(getattr(claim, name) for claim in claims)
    values = {"verdict": WORDS, "status": STANDINGS, "outcome": OUTCOMES}.get(name, tuple(tally))
    option = Markup('<option value="{}">{} ({})</option>')
    options = concat(option.format(v, spoken_word(v), tally[v]) for v in values)
    label = Markup('<label>{0}<select name="{0}"><option value="">any</option>{1}</select></label>')
    return label.format(name, options)


def _paper(paper: str, claims: Sequence[Claim]) -> Markup:
    own = [claim for claim in claims if claim.paper == paper]
    cards = concat(card(claim, {other.id for other in claims}) for claim in own)
    section = Markup('<section id="{}"><h2>{}: {}</h2>{}</section>')
    return section.format(paper, _name(paper), _title(own), cards)


def _name(paper: str) -> str:
    """Return author and year, with the letter its ids begin with."""
    return f"{PAPERS[paper].name} ({paper})" if paper in PAPERS else paper


def _title(claims: Sequence[Claim]) -> str:
    key = next((PAPERS[c.paper].key if c.paper in PAPERS else c.cite[0] for c in claims if c.cite), "")
    return title(key) if key in bibliography() else ""
