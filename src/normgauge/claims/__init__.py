"""Sentences of the papers, each with a judge that computes its verdict: `ledger()` is the door."""

from normgauge.claims._claim import Claim
from normgauge.claims._ledger import Ledger, ledger
from normgauge.claims._shipped import shipped_tables
from normgauge.claims._tables import at_best, best_by_seed, by_seed, paired, paired_log10
from normgauge.claims._typeset import typeset
from normgauge.claims._verdict import OUTCOMES, STANDINGS, WORDS, Evidence, Verdict
from normgauge.claims._weigh import poll, weigh

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
