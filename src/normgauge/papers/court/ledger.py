"""`ledger()`: every claim of the papers with its verdict, for reading, for pandas and for machines."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normgauge.errors import InputError, unknown_name
from normgauge.papers.court.claim import FAULTS, Claim
from normgauge.papers.court.judges import Progress, judge_many
from normgauge.papers.court.registry import find, registered_claims
from normgauge.papers.court.sources import own_runs
from normgauge.papers.court.verdict import Verdict
from normgauge.papers.shelf import PAPERS
from normgauge.records import Reading, format_table, plain
from normgauge.results import Result

if TYPE_CHECKING:
    import altair


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
        """Go through the claims by paper."""
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
        return ", ".join(f"{n} {_spell(word)}{split.get(word, '')}" for word, n in sorted(words.items()))

    def json(self) -> str:
        """Return a JSON list: id, verdict, outcome, status, printed, corrected, evidence and what explains them."""
        return json.dumps([self._record(claim) for claim in self.claims], indent=2, ensure_ascii=False)

    def explain(self, id: str) -> str:
        """Return one claim in full: printed, what is wrong, corrected, evidence, how to reproduce."""
        claim, verdict = self[id], self[id].result
        paper = PAPERS[claim.paper].name if claim.paper in PAPERS else claim.paper
        parts = [
            f"{claim.id} ({paper}, {claim.place}; {claim.kind}): {_spell(verdict.word)}",
            f"printed:     {claim.printed}",
            f"finding:     {verdict.sentence}",
            f"note:        {claim.note}" if claim.note else "",
            f"fault:       {claim.fault}" if claim.flaw else "",
            f"corrected:   {claim.corrected}" if claim.corrected else "",
            f"hypotheses:  {claim.hypotheses}" if claim.hypotheses else "",
            *(f"quoted:      {quote}" for quote in claim.quotes),
            f"criterion:   {claim.criterion}" if claim.criterion else "",
            *(f"evidence:    {item}" for item in verdict.evidence),
            f"rests on:    {verdict.rests_on}" if verdict.rests_on else "",
            *(f"beside it:   {_spell(v.word)}: {v.sentence} ({v.rests_on})" for v in verdict.beside),
            f"reproduce:   {claim.command}",
            f"cite:        {', '.join(claim.cite)}",
            f"verdict {verdict.verdict or 'none'}, status {verdict.status}"
            + (f", float64, seed {self.seed}" if claim.trial else ""),
        ]
        return "\n".join(part for part in parts if part)

    def chart(self) -> altair.TopLevelMixin:
        """Return bars of the verdicts per paper (needs the `lab` extra)."""
        from normgauge.charts import bars

        rows = [
            {"paper": PAPERS[paper].name if paper in PAPERS else paper, "verdict": _spell(word), "claims": number}
            for paper, words in self.counts().items()
            for word, number in words.items()
        ]
        order = list(dict.fromkeys(str(row["verdict"]) for row in rows))
        return bars(rows, x="paper", y="claims", series="verdict", order=order)

    def readings(self) -> tuple[Reading, ...]:
        """Return how often each verdict fell."""
        total = Counter[str]()
        for words in self.counts().values():
            total.update(words)
        return tuple(Reading(f"claims {_spell(word)}", number) for word, number in sorted(total.items()))

    def _meaning(self) -> str:
        return f"Of {len(self)} claims: {self.tally()}. ledger.explain(id) says why, and what holds instead."

    def __str__(self) -> str:
        """Return the claims paper by paper, each paper with its counts."""
        tables = []
        for paper in self.counts():
            own = [claim for claim in self.claims if claim.paper == paper]
            rows = [{"id": c.id, "verdict": _spell(c.result.word), "sentence": f"{c.printed} ({c.place})"} for c in own]
            name = PAPERS[paper].name if paper in PAPERS else "other"
            title = f"{name} ({paper}): {len(rows)} claims ({self.tally(paper)})"
            tables.append(format_table(rows, title=title))
        return "\n\n".join([*tables, format_table([], footer=self._footer())])

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {
                "id": claim.id,
                "paper": claim.paper,
                "kind": claim.kind,
                "place": claim.place,
                "verdict": claim.verdict,
                "outcome": claim.outcome,
                "status": claim.status,
                "printed": claim.printed,
                "corrected": claim.corrected,
                "sentence": claim.result.sentence,
            }
            for claim in self.claims
        ]

    def _record(self, claim: Claim) -> dict[str, Any]:
        verdict = plain(claim.result)
        return {
            "id": claim.id,
            "verdict": verdict["verdict"],
            "outcome": verdict["outcome"],
            "status": verdict["status"],
            "printed": claim.printed,
            "corrected": claim.corrected,
            "evidence": verdict["evidence"],
            "sentence": verdict["sentence"],
            "criterion": claim.criterion,
            "rests_on": verdict["rests_on"],
            "beside": verdict["beside"],
            "paper": claim.paper,
            "place": claim.place,
            "kind": claim.kind,
            "hypotheses": claim.hypotheses,
            "note": claim.note,
            "fault": claim.fault if claim.flaw else "",
            "quotes": list(claim.quotes),
            "cite": list(claim.cite),
            "reproduce": claim.command,
        }

    def _footer(self) -> str:
        judged = sum(claim.status == "judged" for claim in self.claims)
        return (
            f"{judged} of {len(self.claims)} judged: {self.tally()}; theorems on random float64 instances and edge "
            "cases, "
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


def _word(verdict: Verdict) -> str:
    return verdict.status if verdict.status != "judged" else str(verdict.verdict)


def _spell(word: str) -> str:
    return word.replace("_", " ")
