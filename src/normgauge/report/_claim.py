"""One claim as HTML: what is printed, what holds, why, and the numbers; on the ledger's page and a study's."""

from __future__ import annotations

import re
from collections.abc import Container, Sequence
from typing import TYPE_CHECKING

from normgauge.records import format_number
from normgauge.references import bibliography, title
from normgauge.report._markup import text

if TYPE_CHECKING:
    from normgauge.papers.court import Claim, Evidence

HEADS = ("speaks for", "compared", "discrepancy or value", "tolerance", "instances", "counts as")


def card(claim: Claim, neighbours: Container[str] = ()) -> str:
    """Return one claim: its sentences at once, the numbers behind a fold that is open where no script closes it.

    Args:
        claim: with its verdict.
        neighbours: ids of the claims on the same page; where a sentence names one, it links there.
    """
    from normgauge.papers.court import typeset

    verdict = claim.result
    said = _list(
        [
            ("printed", typeset(claim, "printed")),
            ("corrected", typeset(claim, "corrected")),
            ("finding", text(verdict.sentence)),
            ("rests on", text(verdict.rests_on)),
            *(
                ("beside it", f"{spoken_word(other.word)}: {text(other.sentence)} ({text(other.rests_on)})")
                for other in verdict.beside
            ),
            ("note", _link_claims(typeset(claim, "note"), claim, neighbours)),
        ]
    )
    name = text(claim.id)
    return (
        f'<article class="claim card" id="{name}" data-paper="{text(claim.paper)}" '
        f'data-verdict="{verdict.verdict or ""}" data-status="{verdict.status}" '
        f'data-outcome="{verdict.outcome or ""}" data-text="{text(_search_text(claim))}">'
        f'<header><h3><a href="#{name}" title="link to this claim">{name}</a></h3>{_badges(claim)}'
        f'<span class="place">{text(claim.place)}</span></header>{said}'
        "<details open><summary>Evidence, hypotheses, how to reproduce</summary>"
        f"{_details(claim, neighbours)}</details></article>"
    )


def spoken_word(word: str) -> str:
    """Return a word of the ledger as people say it."""
    return text(word.replace("_", " "))


def _details(claim: Claim, neighbours: Container[str]) -> str:
    from normgauge.papers.court import typeset

    plain = [claim.printed, *([f"corrected: {claim.corrected}"] if claim.corrected else [])]
    rows = [
        ("hypotheses", _link_claims(typeset(claim, "hypotheses"), claim, neighbours)),
        ("criterion", text(claim.criterion)),
        *(("quoted", f"<q>{text(quote)}</q>") for quote in claim.quotes),
        ("reproduce", f"<code>{text(claim.command)}</code>"),
        ("sources", "; ".join(text(_reference(key)) for key in claim.cite)),
        ("as text", "<br>".join(f"<code>{text(line)}</code>" for line in plain)),
    ]
    return _evidence(claim.evidence) + _list(rows)


def _link_claims(markup: str, claim: Claim, neighbours: Container[str]) -> str:
    """Turn the ids of other claims into links; a full stop after an id is not part of it."""

    def link(match: re.Match[str]) -> str:
        linkable = match[0] in neighbours and match[0] != claim.id
        return f'<a href="#{match[0]}">{match[0]}</a>' if linkable else match[0]

    return re.sub(r"\bS\d-[\w.-]*\w", link, markup)


def _list(rows: Sequence[tuple[str, str]]) -> str:
    body = "".join(
        f'<div class="said-{name.replace(" ", "-")}"><dt>{name}</dt><dd>{said}</dd></div>'
        for name, said in rows
        if said
    )
    return f'<dl class="said">{body}</dl>'


def _evidence(evidence: Sequence[Evidence]) -> str:
    """Return the numbers as a table; how each counts is said in a word, not by colour alone."""
    if not evidence:
        return '<p class="hint">No numbers yet.</p>'
    body = []
    for item in evidence:
        counts = _counts_as(item)
        tolerance = "" if item.role == "fact" else format_number(item.tolerance)
        body.append(
            f'<tr><th scope="row">{item.role}</th><td>{text(item.name)}</td>'
            f'<td class="num">{text(format_number(item.value))}</td>'
            f'<td class="num">{"&plusmn; " if item.role == "margin" else ""}{tolerance}</td>'
            f'<td class="num">{item.instances}</td><td><span class="is-{counts}">{counts}</span></td></tr>'
        )
    head = "".join(f'<th scope="col">{name}</th>' for name in HEADS)
    return (
        '<div class="scroll" tabindex="0" role="group" aria-label="Evidence"><table class="evidence">'
        f"<thead><tr>{head}</tr></thead><tbody>{''.join(body)}</tbody></table></div>"
    )


def _counts_as(item: Evidence) -> str:
    if item.role in ("fact", "margin"):
        return {"fact": "shown", "margin": "polled"}[item.role]
    return "passes" if item.passes else "fails" if item.fails else "undecided"


def _badges(claim: Claim) -> str:
    verdict = claim.result
    words = [verdict.verdict or "no verdict", verdict.outcome, verdict.status if verdict.status != "judged" else None]
    return "".join(f'<span class="badge word-{text(word)}">{spoken_word(word)}</span>' for word in words if word)


def _search_text(claim: Claim) -> str:
    """Return every word a reader may look a claim up by, in small letters; formulas as the ledger writes them."""
    verdict = claim.result
    said = [claim.id, claim.place, claim.printed, claim.corrected, claim.hypotheses, claim.note, *claim.quotes]
    said += [verdict.sentence, claim.criterion, claim.command, *claim.cite, *(item.name for item in verdict.evidence)]
    said += [spoken_word(word) for word in (verdict.verdict, verdict.outcome, verdict.status, claim.kind) if word]
    return " ".join(" ".join(said).lower().split())


def _reference(key: str) -> str:
    return f"{title(key)} ({key})" if key in bibliography() else key
