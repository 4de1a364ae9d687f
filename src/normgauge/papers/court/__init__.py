"""The one judge of theorem and experiment: sentences of the papers, verdicts, evidence; `ledger()` is the door."""

from normgauge.papers.court.claim import FAULTS, Claim
from normgauge.papers.court.contrast import EACH, LARGEST, SMALLEST, Contrast, each_but, resolve
from normgauge.papers.court.ledger import Ledger, ledger
from normgauge.papers.court.registry import criteria, empirical, finding
from normgauge.papers.court.sources import DEFAULT_FOLDER, Source, shipped
from normgauge.papers.court.table import StudyTable
from normgauge.papers.court.typeset import typeset
from normgauge.papers.court.verdict import OUTCOMES, STANDINGS, WORDS, Evidence, Verdict, poll, weigh

__all__ = ["Claim", "Contrast", "DEFAULT_FOLDER", "EACH", "Evidence", "FAULTS", "LARGEST", "Ledger", "OUTCOMES"]
__all__ += ["SMALLEST", "STANDINGS", "Source", "StudyTable", "Verdict", "WORDS", "criteria", "each_but"]
__all__ += ["empirical", "finding", "ledger", "poll", "resolve", "shipped", "typeset", "weigh"]
