"""Stored runs and documents -> one self-contained HTML page; sees no model. Needs the `lab` extra to draw."""

from normgauge.report._against import Changes as Changes
from normgauge.report._against import changes_between as changes_between
from normgauge.report._checkup import checkup_page as checkup_page
from normgauge.report._ledger import ledger_page as ledger_page
from normgauge.report._page import live_page as live_page
from normgauge.report._page import page as page
from normgauge.report._page import page_of_store as page_of_store
from normgauge.report._study import Picture as Picture
from normgauge.report._study import study_markdown as study_markdown
from normgauge.report._study import write_study as write_study
from normgauge.report._watch import watch_page as watch_page

__all__ = [
    "Changes",
    "Picture",
    "changes_between",
    "checkup_page",
    "ledger_page",
    "live_page",
    "page",
    "page_of_store",
    "study_markdown",
    "watch_page",
    "write_study",
]
