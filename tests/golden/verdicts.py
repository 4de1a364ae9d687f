"""The verdict of every claim: its words, how much evidence it rests on, and the margins of the shipped tables.

Discrepancies of theorems are not pinned: they are rounding, or sizes of random counterexamples.
"""

import normgauge as ng
from golden.pins import Subject

VERDICTS = Subject("verdicts")


def verdict(claim):
    words = {"verdict": claim.verdict, "outcome": claim.outcome, "status": claim.status}
    if claim.kind != "empirical":
        return {**words, "evidence": len(claim.evidence), "fault": claim.flaw}
    margins = {item.name: {"mean": item.value, "half width": item.tolerance} for item in claim.evidence}
    return {**words, "seeds": [item.instances for item in claim.evidence], "margins": margins}


for paper in sorted({claim.paper for claim in ng.claims.ledger()}):
    VERDICTS.pin(paper)(lambda paper=paper: {claim.id: verdict(claim) for claim in ng.claims.ledger(paper=paper)})
