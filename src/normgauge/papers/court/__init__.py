"""Sentences of the papers, each with a judge that computes its verdict: `ledger()` is the door."""

from normgauge.papers.court.claim import Claim
from normgauge.papers.court.ledger import Ledger, ledger
from normgauge.papers.court.shipped import shipped_tables
from normgauge.papers.court.tables import at_best, best_by_seed, by_seed, paired, paired_log10
from normgauge.papers.court.typeset import typeset
from normgauge.papers.court.verdict import OUTCOMES, STANDINGS, WORDS, Evidence, Verdict
from normgauge.papers.court.weigh import poll, weigh

__all__ = [
    "Claim",
    "Evidence",
    "Ledger",
    "Verdict",
    "at_best",
    "best_by_seed",
    "by_seed",
    "ledger",
    "paired",
    "paired_log10",
    "poll",
    "shipped_tables",
    "OUTCOMES",
    "STANDINGS",
    "WORDS",
    "typeset",
    "weigh",
]
