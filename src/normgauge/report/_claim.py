"""One claim as HTML: what is printed, what holds, why, and the numbers; on the ledger's page and a study's."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from normgauge.records import format_number
from normgauge.references import bibliography, title
from normgauge.report._markup import Markup, concat

if TYPE_CHECKING:
    from normgauge.papers.court import Claim, Evidence

HEADS = ("speaks for", "compared", "discrepancy or value", "tolerance", "instances", "counts as")


def card(claim: Claim, neighbours: Container[str] = ()) -> Markup:
    """Return one claim: its sentences at once, the numbers behind a fold that is open where no script closes it.

    Args:
        claim: with its verdict.
        neighbours: ids of the claims on the same page; where a sentence names one, it links there.
    """
    from normgauge.papers.court import typeset

    verdict = claim.result
    said = _list(
        [
            ("printed", Markup(typeset(claim, "printed"))),
            ("corrected", Markup(typeset(claim, "corrected"))),
            ("finding", verdict.sentence),
            ("rests on", verdict.rests_on),
            *(
                ("beside it", f"{spoken_word(other.word)}: {other.sentence} ({other.rests_on})")
                for other in verdict.beside
            ),
            ("note", _link_claims(Markup(typeset(claim, "note")), claim, neighbours)),
            ("fault", claim.fault if claim.flaw else ""),
        ]
    )
    return Markup(
        '<article class="claim card" id="{id}" data-paper="{paper}" data-verdict="{verdict}" data-status="{status}" '
        'data-outcome="{outcome}" data-text="{words}">'
        '<header><h3><a href="#{id}" title="link to this claim">{id}</a></h3>{badges}'
        '<span class="place">{place}</span></header>{said}'
        "<details open><summary>Evidence, hypotheses, how to reproduce</summary>{details}</details></article>"
    ).format(
        id=claim.id,
        paper=claim.paper,
        verdict=verdict.verdict or "",
        status=verdict.status,
        outcome=verdict.outcome or "",
        words=_search_text(claim),
        badges=_badges(claim),
        place=claim.place,
        said=said,
        details=_details(claim, neighbours),
    )


def spoken_word(word: str) -> str:
    """Return a word of the ledger as people say it."""
    return word.replace("_", " ")


def _details(claim: Claim, neighbours: Container[str]) -> Markup:
    from normgauge.papers.court import typeset

    plain = [claim.printed, *([f"corrected: {claim.corrected}"] if claim.corrected else [])]
    rows = [
        ("hypotheses", _link_claims(Markup(typeset(claim, "hypotheses")), claim, neighbours)),
        ("criterion", claim.criterion),
        *(("quoted", Markup("<q>{}</q>").format(quote)) for quote in claim.quotes),
        ("reproduce", Markup("<code>{}</code>").format(claim.command)),
        ("sources", "; ".join(_reference(key) for key in claim.cite)),
        ("as text", Markup("<br>").join(Markup("<code>{}</code>").format(line) for line in plain)),
    ]
    return _evidence(claim.evidence) + _list(rows)


def _link_claims(markup: Markup, claim: Claim, neighbours: Container[str]) -> Markup:
    """Turn the ids of other claims into links; a full stop after an id is not part of it."""

    def link(match: re.Match[str]) -> str:
        linkable = match[0] in neighbours and match[0] != claim.id
        return f'<a href="#{match[0]}">{match[0]}</a>' if linkable else match[0]

    return Markup(re.sub(r"\bS\d-[\w.-]*\w", link, markup))  # an id has no character that means anything in HTML


def _list(rows: Sequence[tuple[str, str]]) -> Markup:
    line = Markup('<div class="said-{}"><dt>{}</dt><dd>{}</dd></div>')
    body = concat(line.format(name.replace(" ", "-"), name, said) for name, said in rows if said)
    return Markup('<dl class="said">{}</dl>').format(body)


def _evidence(evidence: Sequence[Evidence]) -> Markup:
    """Return the numbers as a table; how each counts is said in a word, not by colour alone."""
    if not evidence:
        return Markup('<p class="hint">No numbers yet.</p>')
    line = Markup(
        '<tr><th scope="row">{role}</th><td>{name}</td><td class="num">{value}</td>'
        '<td class="num">{tolerance}</td><td class="num">{instances}</td>'
        '<td><span class="is-{counts}">{counts}</span></td></tr>'
    )
    body = []
    for item in evidence:
        tolerance = "" if item.role == "fact" else format_number(item.tolerance)
        body.append(
            line.format(
                role=item.role,
                name=item.name,
                value=format_number(item.value),
                tolerance=Markup("&plusmn; {}").format(tolerance) if item.role == "margin" else tolerance,
                instances=item.instances,
                counts=_counts_as(item),
            )
        )
    return Markup(
        '<div class="scroll" tabindex="0" role="group" aria-label="Evidence"><table class="evidence">'
        "<thead><tr>{}</tr></thead><tbody>{}</tbody></table></div>"
    ).format(concat(Markup('<th scope="col">{}</th>').format(name) for name in HEADS), concat(body))


def _counts_as(item: Evidence) -> str:
    if item.role in ("fact", "margin"):
        return {"fact": "shown", "margin": "polled"}[item.role]
    return "passes" if item.passes else "fails" if item.fails else "undecided"


def _badges(claim: Claim) -> Markup:
    verdict = claim.result
    words = [verdict.verdict or "no verdict", verdict.outcome, verdict.status if verdict.status != "judged" else None]
    badge = Markup('<span class="badge word-{}">{}</span>')
    return concat(badge.format(word, spoken_word(word)) for word in words if word)


def _search_text(claim: Claim) -> str:
    """Return every word a reader may look a claim up by, in small letters; formulas as the ledger writes them."""
    verdict = claim.result
    said = [claim.id, claim.place, claim.printed, claim.corrected, claim.hypotheses, claim.note, *claim.quotes]
    said += [verdict.sentence, claim.criterion, claim.command, *claim.cite, *(item.name for item in verdict.evidence)]
    said += [spoken_word(word) for word in (verdict.verdict, verdict.outcome, verdict.status, claim.kind) if word]
    return " ".join(" ".join(said).lower().split())


def _reference(key: str) -> str:
    return f"{title(key)} ({key})" if key in bibliography() else key
