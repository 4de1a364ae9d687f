"""Stored runs and documents -> one self-contained HTML page; sees no model. Needs the `lab` extra to draw."""

from normgauge.report._against import Changes, changes_between
from normgauge.report._ledger import ledger_page
from normgauge.report._page import checkup_page, live_page, page, page_of_store, watch_page
from normgauge.report._study import Picture, study_markdown, write_study

__all__ = ["Changes", "Picture", "changes_between", "checkup_page", "ledger_page", "live_page", "page"]
__all__ += ["page_of_store", "study_markdown", "watch_page", "write_study"]
