"""The index of the papers: everything a paper numbers, measures or recommends, and where it is here, or an open hole.

`index.toml` beside a paper's claims says what there is and where; verdicts and sizes are looked up when it is read.
"""

import json
import textwrap
import tomllib
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from typing import Any

from normgauge.errors import unknown_name
from normgauge.papers.court import Ledger, shipped
from normgauge.papers.shelf import PAPERS

WIDTH = 80
STATES = ("implemented", "in part", "open")


@dataclass(frozen=True, slots=True)
class Entry:
    """One thing a paper says, shows or advises."""

    paper: str  # the letter its claims begin with
    at: str  # where in the paper
    kind: str  # theorem, definition, algorithm, figure, table, experiment, recommendation, ...
    says: str  # what it is, in a few words
    code: tuple[str, ...] = ()  # public names that implement or measure it (`ng.` stands for `normgauge.`)
    tests: tuple[str, ...] = ()  # where that is tested: file, or file::function
    claims: tuple[str, ...] = ()  # ids of the ledger that judge it
    studies: tuple[str, ...] = ()  # names for `normgauge reproduce`
    hole: str = ""  # what is missing, and why; empty where nothing is

    @property
    def state(self) -> str:
        """Whether it is implemented, in part, or open."""
        if not self.hole:
            return "implemented"
        return "in part" if self.code or self.claims or self.studies else "open"


def read_index(paper: str | None = None) -> tuple[Entry, ...]:
    """Return the entries of one paper, or of all, in the order of the texts.

    Raises:
        UnknownNameError: for a paper that has no index.

    Examples:
        >>> read_index("S4")[0].at
        'abstract (1)'
    """
    indexed = {id: it.folder / "index.toml" for id, it in PAPERS.items() if (it.folder / "index.toml").is_file()}
    if paper is not None and paper not in indexed:
        raise unknown_name("paper", paper, indexed)
    texts = {id: file.read_text(encoding="utf-8") for id, file in indexed.items() if paper in (None, id)}
    return tuple(_entry(id, item) for id, text in texts.items() for item in tomllib.loads(text)["entry"])


def _entry(paper: str, item: dict[str, Any]) -> Entry:
    """Return an entry; where claims judge it, the tests of their judges are among its tests."""
    lists = {key: tuple(item.get(key, ())) for key in ("code", "tests", "claims", "studies")}
    keys = (PAPERS[id.partition("-")[0]].key for id in lists["claims"])
    judges = (f"tests/papers/{key}/test_claims_{key}.py" for key in keys)
    return Entry(paper, **{**item, **lists, "tests": tuple(dict.fromkeys((*lists["tests"], *judges)))})


def count_states(entries: Sequence[Entry]) -> dict[str, int]:
    """Return how many entries are implemented, in part and open."""
    return {state: sum(entry.state == state for entry in entries) for state in STATES}


def describe_counts(entries: Sequence[Entry]) -> str:
    """Return the counts as words: `62 entries: 55 implemented, 4 in part, 3 open`."""
    told = ", ".join(f"{number} {state}" for state, number in count_states(entries).items())
    return f"{len(entries)} entries: {told}"


def verdict_words(entry: Entry, book: Ledger) -> dict[str, str]:
    """Return claim id -> its verdict now, an experiment's outcome included."""
    return {id: book[id].result.word.replace("_", " ") for id in entry.claims}


def study_sizes(entry: Entry) -> dict[str, str]:
    """Return study -> the size at which its runs ship, or that none do."""
    sources = shipped()
    return {name: sources[name].document.size if name in sources else "not run" for name in entry.studies}


def index_text(entries: Sequence[Entry], book: Ledger) -> str:
    """Return the index for reading in a terminal, at most 80 columns wide."""
    parts = []
    for paper in dict.fromkeys(entry.paper for entry in entries):
        own = [entry for entry in entries if entry.paper == paper]
        parts.append(f"{PAPERS[paper].name} ({paper})\n{describe_counts(own)}")
        parts += ["\n".join(_lines(entry, book)) for entry in own]
    if len({entry.paper for entry in entries}) > 1:
        parts.append(f"all papers\n{describe_counts(entries)}")
    return "\n\n".join(parts)


def index_json(entries: Sequence[Entry], book: Ledger) -> str:
    """Return the index as a JSON list, with state, verdicts and sizes."""
    records = []
    for entry in entries:
        told = {"state": entry.state, "verdicts": verdict_words(entry, book), "studies": study_sizes(entry)}
        records.append({**{name: value for name, value in asdict(entry).items() if name != "claims"}, **told})
    return json.dumps(records, indent=2, ensure_ascii=False)


def _lines(entry: Entry, book: Ledger) -> list[str]:
    rows = {
        "code": ", ".join(entry.code),
        "test": ", ".join(entry.tests),
        "claim": "; ".join(f"{id} {word}" for id, word in verdict_words(entry, book).items()),
        "study": ", ".join(f"{name} ({size})" for name, size in study_sizes(entry).items()),
        "open": entry.hole,
    }
    lines = textwrap.wrap(f"{entry.at} ({entry.kind}): {entry.says}", WIDTH, subsequent_indent="  ")
    for name, text in rows.items():
        if text:
            lines += textwrap.wrap(f"  {name:5} {text}", WIDTH, subsequent_indent=" " * 8, break_on_hyphens=False)
    return lines
