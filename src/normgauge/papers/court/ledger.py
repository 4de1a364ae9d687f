"""`ledger()`: every claim of the papers with its verdict, for reading, for pandas and for machines."""

from __future__ import annotations

import json
import multiprocessing
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch

from normgauge.errors import InputError, unknown_name
from normgauge.papers.court.claim import FAULTS, Claim
from normgauge.papers.court.registry import find, registered_claims
from normgauge.papers.court.sources import own_runs
from normgauge.papers.court.verdict import Verdict
from normgauge.papers.shelf import PAPERS
from normgauge.records import Chart, Reading, format_table, plain, spoken
from normgauge.results import Result

Progress = Callable[[str, int, int], None]


@dataclass(frozen=True)
class Ledger(Result):
    """The claims and their verdicts; a verdict is computed when first asked for and then remembered.

    Iterating gives the `Claim`s; `ledger["S1-T4.1"]` is one of them, with its `verdict` and `evidence`.

    Args:
        claims: what is in it.
        trouble: sentences about the reader's own runs that could not be read.
    """

    claims: tuple[Claim, ...]
    trouble: tuple[str, ...] = ()

    def __iter__(self) -> Iterator[Claim]:
        return iter(self.claims)

    def __len__(self) -> int:
        return len(self.claims)

    def __getitem__(self, id: str) -> Claim:
        for claim in self.claims:
            if claim.id == id:
                return claim
        raise unknown_name("claim", id, [claim.id for claim in self.claims])

    def judge(self, *, workers: int = 1, progress: Progress | None = None) -> Ledger:
        """Return the ledger with every verdict computed, in `workers` processes.

        Call it with several workers under `if __name__ == "__main__":` in a script, as with any process pool.
        """
        return replace(self, claims=judge_many(self.claims, workers=workers, progress=progress))

    def counts(self) -> dict[str, dict[str, int]]:
        """Return, per paper, how often each verdict fell; `not_run` and `error` count what is not judged."""
        tally: dict[str, Counter[str]] = {}
        for claim in self.claims:
            tally.setdefault(claim.paper, Counter())[_word(claim.result)] += 1
        return {paper: dict(sorted(words.items())) for paper, words in tally.items()}

    def faults(self) -> dict[str, int]:
        """Return how many of the false sentences are misprints, lack a hypothesis, or are false."""
        tally = Counter(claim.flaw for claim in self.claims if claim.flaw)
        return {flaw: tally[flaw] for flaw in FAULTS}

    def tally(self, paper: str | None = None) -> str:
        """Return the counts in words, of one paper or of all: every tally printed anywhere is this one."""
        claims = [claim for claim in self.claims if paper in (None, claim.paper)]
        words = Counter(_word(claim.result) for claim in claims)
        flaws = ", ".join(f"{n} {flaw}" for flaw, n in replace(self, claims=tuple(claims)).faults().items() if n)
        split = {"false_as_stated": f" ({flaws})"} if flaws else {}
        return ", ".join(f"{n} {spoken(word)}{split.get(word, '')}" for word, n in sorted(words.items()))

    def json(self) -> str:
        """Return a JSON list: id, verdict, outcome, status, printed, corrected, evidence and what explains them."""
        return json.dumps([self._record(claim) for claim in self.claims], indent=2, ensure_ascii=False)

    def explain(self, id: str) -> str:
        """Return one claim in full: printed, what is wrong, corrected, evidence, how to reproduce."""
        claim, verdict = self[id], self[id].result
        parts = [
            ("printed", claim.printed),
            ("finding", verdict.sentence),
            ("note", claim.note),
            ("fault", claim.fault if claim.flaw else ""),
            ("corrected", claim.corrected),
            ("hypotheses", claim.hypotheses),
            *(("quoted", quote) for quote in claim.quotes),
            ("criterion", claim.criterion),
            *(("evidence", str(item)) for item in verdict.evidence),
            ("rests on", verdict.rests_on),
            *(("beside it", f"{spoken(v.word)}: {v.sentence} ({v.rests_on})") for v in verdict.beside),
            ("reproduce", claim.command),
            ("cite", ", ".join(claim.cite)),
        ]
        head = f"{claim.id} ({_name(claim.paper)}, {claim.place}; {claim.kind}): {spoken(verdict.word)}"
        told = f"verdict {verdict.verdict or 'none'}, status {verdict.status}"
        told += f", float64, seed {self.seed}" if claim.trial else ""
        return "\n".join([head, *(f"{label + ':':<13}{text}" for label, text in parts if text), told])

    def chart(self) -> Chart:
        """Return bars of the verdicts per paper (needs the `lab` extra)."""
        from normgauge.charts import bars

        rows = [
            {"paper": _name(paper), "verdict": spoken(word), "claims": number}
            for paper, words in self.counts().items()
            for word, number in words.items()
        ]
        order = list(dict.fromkeys(str(row["verdict"]) for row in rows))
        return bars(rows, x="paper", y="claims", series="verdict", order=order)

    def readings(self) -> tuple[Reading, ...]:
        """Return how often each verdict fell."""
        total = Counter(_word(claim.result) for claim in self.claims)
        return tuple(Reading(f"claims {spoken(word)}", number) for word, number in sorted(total.items()))

    def _meaning(self) -> str:
        return f"Of {len(self)} claims: {self.tally()}. ledger.explain(id) says why, and what holds instead."

    def __str__(self) -> str:
        """Return the claims paper by paper, each paper with its counts."""
        tables = []
        for paper in self.counts():
            own = [claim for claim in self.claims if claim.paper == paper]
            rows = [{"id": c.id, "verdict": spoken(c.result.word), "sentence": f"{c.printed} ({c.place})"} for c in own]
            title = f"{_name(paper, 'other')} ({paper}): {len(rows)} claims ({self.tally(paper)})"
            tables.append(format_table(rows, title=title))
        return "\n\n".join([*tables, format_table([], footer=self._footer())])

    def _rows(self) -> list[dict[str, Any]]:
        columns = ["id", "paper", "kind", "place", "verdict", "outcome", "status", "printed", "corrected"]
        own = ({name: getattr(claim, name) for name in columns} for claim in self.claims)
        return [{**row, "sentence": claim.result.sentence} for row, claim in zip(own, self.claims, strict=True)]

    def _record(self, claim: Claim) -> dict[str, Any]:
        told = ["printed", "corrected", "criterion", "paper", "place", "kind", "hypotheses", "note", "quotes", "cite"]
        own = {name: plain(getattr(claim, name)) for name in told}
        fault = claim.fault if claim.flaw else ""
        return {"id": claim.id, **plain(claim.result), **own, "fault": fault, "reproduce": claim.command}

    def _footer(self) -> str:
        judged = sum(claim.status == "judged" for claim in self.claims)
        return (
            f"{judged} of {len(self)} judged: {self.tally()}; theorems on random float64 instances and edge cases, "
            f"seed {self.seed}; `normgauge claims --id ID` shows one in full"
        )


def ledger(
    *, paper: str | None = None, ids: Sequence[str] | None = None, seed: int = 0, runs: str | Path | None = None
) -> Ledger:
    """Return the ledger: every claim of the papers, its verdict, the evidence and the corrected sentence.

    Verdicts are computed when asked for; `ledger().judge(workers=2)` returns it with all of them computed.

    Args:
        paper: only this paper's claims (`S1`).
        ids: only these claims.
        seed: from which the judges draw their instances.
        runs: the reader's own runs, the folder `normgauge reproduce` wrote; they supersede those that ship with the
            package at equal or larger size, otherwise both are shown. `None` takes those that ship only.

    Raises:
        UnknownNameError: for an id or a paper without claims.
        InputError: for a folder that does not exist.

    Examples:
        >>> ledger(ids=["S1-FC.2"])["S1-FC.2"].verdict
        'holds'
    """
    claims = registered_claims() if ids is None else tuple(find(id) for id in ids)
    if paper is not None:
        papers = {claim.paper for claim in claims}
        if paper not in papers:
            raise unknown_name("paper", paper, papers)
        claims = tuple(claim for claim in claims if claim.paper == paper)
    if runs is not None and not Path(runs).is_dir():
        rule = "it is a folder that `normgauge reproduce` wrote"
        raise InputError(f"runs {runs}", rule, "no such folder", "Check the path, or leave it out")
    sources, trouble = own_runs(runs) if runs is not None else ({}, [])
    asked = (replace(claim, seed=seed, runs=tuple(sources.get(claim.study, ()))) for claim in claims)
    return Ledger(tuple(asked), tuple(trouble), seed=seed)


def judge_many(claims: Sequence[Claim], *, workers: int = 1, progress: Progress | None = None) -> tuple[Claim, ...]:
    """Return the claims with their results computed; `progress` gets (id, how many are done, how many there are)."""
    verdicts: dict[str, Verdict] = {}
    for id, verdict in _verdicts(claims, workers):
        verdicts[id] = verdict
        if progress is not None:
            progress(id, len(verdicts), len(claims))
    return tuple(replace(claim, given=verdicts[claim.id]) for claim in claims)


def _verdicts(claims: Sequence[Claim], workers: int) -> Iterator[tuple[str, Verdict]]:
    """Yield verdicts as they come; experiments, which only read a table, are judged here."""
    drawn = [claim for claim in claims if claim.trial is not None] if workers > 1 else []
    for claim in claims:
        if claim not in drawn:
            yield claim.id, claim.result
    if not drawn:
        return
    # spawn, not fork: torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    crew = min(workers, len(drawn))
    with ProcessPoolExecutor(crew, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending = {pool.submit(_judge_by_id, claim.id, claim.seed): claim.id for claim in drawn}
        for future in as_completed(pending):
            yield pending[future], future.result()


def _judge_by_id(id: str, seed: int) -> Verdict:
    return replace(find(id), seed=seed).result


def _word(verdict: Verdict) -> str:
    return verdict.status if verdict.status != "judged" else str(verdict.verdict)


def _name(paper: str, other: str | None = None) -> str:
    return PAPERS[paper].name if paper in PAPERS else other or paper
