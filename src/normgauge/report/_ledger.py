"""The ledger as a page: counts, a search box, filters, and every claim with its numbers."""

from __future__ import annotations

import re
from collections import Counter
from collections.abc import Container, Iterable, Mapping, Sequence
from functools import partial
from typing import TYPE_CHECKING, Any

from normgauge.papers.shelf import PAPERS
from normgauge.records import spoken
from normgauge.references import bibliography, title
from normgauge.report._markup import Markup, render

if TYPE_CHECKING:
    from normgauge.papers.court import Claim, Evidence

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
FILTERS = ("paper", "verdict", "flaw", "status", "outcome")


def ledger_page(claims: Iterable[Claim]) -> str:
    """Return the claims as one HTML page that needs no network, no LaTeX, and no script to be read.

    With scripts it searches and filters, and the address holds the choice: `#q=margin&paper=S0&verdict=holds` opens
    that view, `#S1-T4.1` one claim. Verdicts not computed yet are computed here.

    Examples:
        >>> from normgauge.papers.court import ledger
        >>> html = ledger_page(ledger(ids=["S1-FC.2"]))
        >>> 'id="S1-FC.2"' in html, "<math>" in html, "//" in html.replace("// ", "")
        (True, True, False)
    """
    from normgauge.papers.court import FAULTS, OUTCOMES, STANDINGS, WORDS

    shown = list(claims)
    papers = list(dict.fromkeys(claim.paper for claim in shown))
    counted = [(paper, [claim for claim in shown if claim.paper == paper]) for paper in papers]
    tallies = {name: Counter(getattr(claim, name) for claim in shown) for name in FILTERS}
    words = {"verdict": WORDS, "flaw": FAULTS, "status": STANDINGS, "outcome": OUTCOMES}  # all are said
    neighbours = {claim.id for claim in shown}
    filters = {
        "spoken": spoken,
        "paper_name": lambda paper: f"{PAPERS[paper].name} ({paper})" if paper in PAPERS else paper,
        "paper_title": _title,
        "meeting": lambda own, asks: sum(_meets(claim, asks) for claim in own),
        "address": _address,
        "search_text": _search_text,
        "badges": _badges,
        "sentences": partial(_sentences, neighbours=neighbours),
        "details": partial(_details, neighbours=neighbours),
        "counts_as": _counts_as,
    }
    return render(
        "ledger.html",
        filters,
        total=len(shown),
        summary=_summary(shown, papers),
        columns={name: asks for name, asks in COLUMNS.items() if any(_meets(claim, asks) for claim in shown)},
        counted=[*counted, *([("", shown)] if len(papers) > 1 else [])],
        meanings=MEANINGS,
        choices={name: [(word, tally[word]) for word in words.get(name, tally)] for name, tally in tallies.items()},
    )


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


def _address(asks: Mapping[str, str], paper: str) -> str:
    """Return the address that shows the claims behind a number."""
    wanted = {"paper": paper, **asks} if paper else asks
    return "&".join(f"{name}={value}" for name, value in wanted.items()) or "all"


def _meets(claim: Claim, asks: Mapping[str, str]) -> bool:
    return all(getattr(claim, name) == value for name, value in asks.items())


def _title(claims: Sequence[Claim]) -> str:
    key = next((PAPERS[c.paper].key if c.paper in PAPERS else c.cite[0] for c in claims if c.cite), "")
    return title(key) if key in bibliography() else ""


def _sentences(claim: Claim, neighbours: Container[str]) -> list[tuple[str, str]]:
    """Return what is shown at once: printed, corrected, finding, note."""
    from normgauge.papers.court import typeset

    verdict = claim.result
    return [
        ("printed", Markup(typeset(claim, "printed"))),
        ("corrected", Markup(typeset(claim, "corrected"))),
        ("finding", verdict.sentence),
        ("rests on", verdict.rests_on),
        *(("beside it", f"{spoken(own.word)}: {own.sentence} ({own.rests_on})") for own in verdict.beside),
        ("note", _link_claims(Markup(typeset(claim, "note")), claim, neighbours)),
        ("fault", claim.fault if claim.flaw else ""),
    ]


def _details(claim: Claim, neighbours: Container[str]) -> list[tuple[str, Any]]:
    """Return what stands behind a fold, under the numbers."""
    from normgauge.papers.court import typeset

    plain = [claim.printed, *([f"corrected: {claim.corrected}"] if claim.corrected else [])]
    sources = [f"{title(key)} ({key})" if key in bibliography() else key for key in claim.cite]
    return [
        ("hypotheses", _link_claims(Markup(typeset(claim, "hypotheses")), claim, neighbours)),
        ("criterion", claim.criterion),
        *(("quoted", Markup("<q>{}</q>").format(quote)) for quote in claim.quotes),
        ("reproduce", Markup("<code>{}</code>").format(claim.command)),
        ("sources", "; ".join(sources)),
        ("as text", Markup("<br>").join(Markup("<code>{}</code>").format(line) for line in plain)),
    ]


def _link_claims(markup: Markup, claim: Claim, neighbours: Container[str]) -> Markup:
    """Turn the ids of other claims into links; a full stop after an id is not part of it."""

    def link(match: re.Match[str]) -> str:
        linkable = match[0] in neighbours and match[0] != claim.id
        return f'<a href="#{match[0]}">{match[0]}</a>' if linkable else match[0]

    return Markup(re.sub(r"\bS\d-[\w.-]*\w", link, markup))  # an id has no character that means anything in HTML


def _counts_as(item: Evidence) -> str:
    """Say in a word, not by colour alone, how a number counts."""
    if item.role in ("fact", "margin"):
        return {"fact": "shown", "margin": "polled"}[item.role]
    return "passes" if item.passes else "fails" if item.fails else "undecided"


def _badges(claim: Claim) -> list[str]:
    verdict = claim.result
    words = [verdict.verdict or "no verdict", verdict.outcome, verdict.status if verdict.status != "judged" else None]
    return [word for word in words if word]


def _search_text(claim: Claim) -> str:
    """Return every word a reader may look a claim up by, in small letters; formulas as the ledger writes them."""
    verdict = claim.result
    said = [claim.id, claim.place, claim.printed, claim.corrected, claim.hypotheses, claim.note, *claim.quotes]
    said += [verdict.sentence, claim.criterion, claim.command, *claim.cite, *(item.name for item in verdict.evidence)]
    said += [spoken(word) for word in (verdict.verdict, verdict.outcome, verdict.status, claim.kind) if word]
    return " ".join(" ".join(said).lower().split())
