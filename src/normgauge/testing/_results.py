"""`check_result` holds results to the contract of `Result`; `assert_norms_healthy` is the doctor in a test."""

import html
import math
import re
from typing import Any, Literal

from torch import nn

from normgauge.doctor import checkup
from normgauge.objective import Objective
from normgauge.records import KINDS, STATUSES
from normgauge.results import Cost, Result
from normgauge.testing._verdict import Ledger

LONGEST_REPR = 200
SHORTEST_MEANING, LONGEST_MEANING = 20, 400
# Nothing may be fetched or run when a page shows a result: the names of XML namespaces are not fetched.
_FOREIGN = re.compile(r"<script|<link|<iframe|\son\w+=|javascript:|(?:src|href)=[\"']?(?!#|data:)", re.IGNORECASE)


def check_result(result: Result) -> None:
    """Check one result: readings with kinds, counted cost, meaning, footer, short repr, safe HTML, rows for a frame.

    Examples:
        >>> import torch
        >>> from normgauge.nn import layer_geometry
        >>> check_result(layer_geometry(torch.eye(2), torch.tensor([[1.0, 0.0], [0.0, 2.0], [3.0, 1.0]])))
    """
    ledger = Ledger(type(result).__name__, "result", "See normgauge.results.Result")
    _check_readings(result, ledger)
    _check_words(result, ledger)
    page = result._repr_html_()
    visible = html.unescape(page)
    ledger.require("HTML shows the meaning and the footer", result.meaning() in visible, page[:200])
    ledger.require("HTML is escaped", html.escape(result.meaning()) in page, page[:200])
    ledger.require("HTML fetches and runs nothing", not _FOREIGN.search(page), str(_FOREIGN.search(page)))
    rows = len(result.frame())
    ledger.require("the frame holds the rows", rows == len(result._rows()), f"{rows} rows")


def _check_readings(result: Result, ledger: Ledger) -> None:
    readings = result.readings()
    ledger.require("there is a reading", bool(readings), "none")
    for reading in readings:
        registered = reading.kind in KINDS and reading.status in STATUSES
        ledger.require("a reading has a kind and a status", registered, f"{reading.kind}, {reading.status}")
        hole = math.isnan(reading.value)
        ledger.require("a reading that is not a number is not ok", not hole or reading.status != "ok", str(reading))
        said = reading.status == "ok" or bool(reading.sentence)
        ledger.require("a reading that is not ok says why", said, str(reading))
    ledger.require("the status is a known one", result.status in STATUSES, result.status)
    ledger.require("a result that is not ok says why", result.status == "ok" or bool(result.sentence), result.status)
    ledger.require("the mode is train, eval or empty", result.mode in ("train", "eval", ""), repr(result.mode))
    counts = isinstance(result.cost, Cost) and min(result.cost.forwards, result.cost.gradients) >= 0
    ledger.require("the cost is counted", counts, repr(result.cost))


def _check_words(result: Result, ledger: Ledger) -> None:
    meaning, text = result.meaning(), str(result)
    footer = text.splitlines()[-1]
    fits = SHORTEST_MEANING <= len(meaning) <= LONGEST_MEANING
    rule = f"meaning() has {SHORTEST_MEANING} to {LONGEST_MEANING} characters"
    ledger.require(rule, fits, f"{len(meaning)}: {meaning!r}")
    ledger.require("meaning() holds a number", any(character.isdigit() for character in meaning), meaning)
    first = result.status == "ok" or meaning.lower().startswith(result.status)
    ledger.require("meaning() says a status that is not ok first", first, meaning)
    ledger.require("print shows the meaning", meaning in text, text[-500:])
    hole = re.search(r"\bnan\b", f"{text.splitlines()[0]} {meaning} {footer}")
    ledger.require("a hole is a dash in title, meaning and footer", hole is None, text[-500:])
    for word in (f"kind {result.readings()[0].kind}", "mode ", "seed", "cost ", f"status {result.status}"):
        ledger.require(f"the last line printed says {word!r}", word in footer, footer)
    short = len(repr(result)) < LONGEST_REPR and "\n" not in repr(result)
    ledger.require("repr is one short line", short, repr(result))


def assert_norms_healthy(
    objective: Objective | nn.Module,
    batch: Any = None,
    *,
    severity: Literal["warning", "error"] = "warning",
    **rest: Any,
) -> None:
    """Raise AssertionError with the checkup's text where it has findings of this severity, or models diverge.

    Arguments are those of `ng.checkup`: objective, or model and batch, optimizer, loader, against, quick, ignore.

    Examples:
        >>> import torch
        >>> assert_norms_healthy(nn.Sequential(nn.Linear(4, 8), nn.LayerNorm(8)), torch.randn(16, 4))
    """
    found = checkup(objective, batch, **rest)
    bad = [finding for finding in found if finding.severity in ("error", severity)]
    assert not bad and found.divergence is None, "\n" + found.text(everything=True)
