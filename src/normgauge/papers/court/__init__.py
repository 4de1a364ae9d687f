"""The one judge of theorem and experiment: sentences of the papers, verdicts, evidence; `ledger()` is the door."""

from normgauge.papers.court.claim import FAULTS, Claim, Margins, PremiseAbsent
from normgauge.papers.court.ledger import Ledger, ledger
from normgauge.papers.court.registry import criteria, empirical, finding
from normgauge.papers.court.sources import DEFAULT_FOLDER, Source, shipped
from normgauge.papers.court.table import StudyTable, differences
from normgauge.papers.court.typeset import typeset
from normgauge.papers.court.verdict import OUTCOMES, STANDINGS, WORDS, Evidence, Verdict
from normgauge.papers.court.weigh import poll, weigh

__all__ = [
    "Claim",
    "DEFAULT_FOLDER",
    "Evidence",
    "FAULTS",
    "Ledger",
    "Margins",
    "OUTCOMES",
    "PremiseAbsent",
    "STANDINGS",
    "Source",
    "StudyTable",
    "Verdict",
    "WORDS",
    "criteria",
    "differences",
    "empirical",
    "finding",
    "ledger",
    "poll",
    "shipped",
    "typeset",
    "weigh",
]
