"""`Claim`: a sentence from a paper and the way it is judged."""

from __future__ import annotations

import zlib
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Literal

import torch

from normgauge.errors import InputError, explain
from normgauge.papers.court.checks import Check, gather
from normgauge.papers.court.shipped import shipped_tables
from normgauge.papers.court.verdict import Evidence, Outcome, Standing, Verdict, Word
from normgauge.papers.court.weigh import poll, weigh
from normgauge.rng import generator, preserved_rng, seed_everything

Sort = Literal["theorem", "empirical", "bibliographic"]
Row = Mapping[str, Any]
Tables = Mapping[str, Sequence[Row]]
Trial = Callable[[torch.Generator], Iterable[Check]]
Criterion = Callable[[Sequence[Row]], Mapping[str, Sequence[float]]]


@dataclass(frozen=True)
class Claim:
    """A sentence from a paper, the way it is judged, the verdict and the sentence that holds.

    `judge` computes a verdict from any generator; `verdict`, `outcome`, `status` and `evidence` (of `result`) are those
    of this claim's own `seed`, computed when first asked for.

    Args:
        id: its name in the ledger, paper first (`S1-T4.1`).
        place: where the paper says it.
        printed: the statement as printed.
        kind: theorem, empirical or bibliographic.
        corrected: the statement that holds, where it differs; it is tested too.
        hypotheses: under which assumptions printed and corrected are tested.
        cite: bibliography keys: the paper, then whatever the correction leans on.
        note: what a reader should know: what is wrong, where this reading of the sentence is disputable.
        quotes: the words a bibliographic claim is compared with.
        trial: yields the checks of a theorem or quotation on instances drawn from a generator.
        study: the study whose table an empirical claim is judged from.
        criterion: the rule fixed in advance, in words.
        margins: the same rule as a function of the table's rows: per criterion one margin per seed.
        seed: with the id, from which `result` draws its instances: neither order nor company changes it.
    """

    id: str
    place: str
    printed: str
    kind: Sort
    corrected: str = ""
    hypotheses: str = ""
    cite: tuple[str, ...] = ()
    note: str = ""
    quotes: tuple[str, ...] = ()
    trial: Trial | None = None
    study: str = ""
    criterion: str = ""
    margins: Criterion | None = None
    seed: int = 0

    @property
    def paper(self) -> str:
        """The paper's letter and number, as `S1`."""
        return self.id.partition("-")[0]

    @property
    def command(self) -> str:
        """The command that judges this claim on the reader's own machine."""
        return f"normgauge reproduce {self.study}" if self.kind == "empirical" else f"normgauge claims --id {self.id}"

    @cached_property
    def result(self) -> Verdict:
        """The verdict of this claim with its own seed."""
        return self.judge(generator(zlib.crc32(f"{self.seed}/{self.id}".encode())))

    @property
    def verdict(self) -> Word | None:
        """The word: holds, holds_with_correction, false_as_stated or empirical."""
        return self.result.verdict

    @property
    def outcome(self) -> Outcome | None:
        """Of an empirical claim: confirmed, not_confirmed or inconclusive, once its study was run."""
        return self.result.outcome

    @property
    def status(self) -> Standing:
        """judged, not_run or error."""
        return self.result.status

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The numbers the verdict follows from."""
        return self.result.evidence

    def settled(self, verdict: Verdict) -> Claim:
        """Return the same claim with a verdict found elsewhere: in another process, or from a study's table."""
        claim = replace(self)
        vars(claim)["result"] = verdict  # where cached_property keeps it; a frozen dataclass refuses setattr
        return claim

    def judge(self, generator: torch.Generator) -> Verdict:
        """Compute the verdict on instances drawn from `generator`, in float64.

        An empirical claim is judged from the table that ships with the package, and says not_run where there is none.

        A judge that raises is a value too: the status is `error` and the sentence says what happened. The default
        dtype and the global random streams are those of before on return.
        """
        if self.trial is None:
            return self._from_shipped_table()
        try:
            with _quiet_room(generator.initial_seed()):
                evidence = gather(self.trial(generator))
        except Exception as error:  # noqa: BLE001 (failure is a value: one judge never stops the ledger)
            return Verdict(None, None, "error", (), f"the judge raised {type(error).__name__}: {error}")
        return weigh(evidence)

    def judge_from_tables(self, tables: Tables) -> Verdict:
        """Judge an empirical claim from stored study tables: study name -> rows, one row per run.

        A row is flat: the study's knobs (`norm`, `model`, ...), `seed`, and the readings by name. Without the
        claim's study among the tables the verdict is that of the shipped table, or `not_run`.

        Raises:
            InputError: for a claim that is not empirical.
        """
        if self.kind != "empirical":
            raise InputError(
                explain(f"Claim {self.id}", "only empirical claims are judged from tables", self.kind, "Call judge()")
            )
        rows = tables.get(self.study)
        if not rows or self.margins is None:
            return self._from_shipped_table()
        return self._from_rows(rows)

    def _from_shipped_table(self) -> Verdict:
        shipped = shipped_tables().get(self.study)
        if not shipped:
            sentence = f"not run yet; {self.command} runs the study that decides it. Criterion: {self.criterion}"
            return Verdict("empirical", None, "not_run", (), sentence)
        verdict = self._from_rows(shipped["rows"])
        origin = f"table shipped with normgauge, size {shipped['size']}, revision {shipped['revision']}"
        return replace(verdict, sentence=f"{verdict.sentence} ({origin})")

    def _from_rows(self, rows: Sequence[Row]) -> Verdict:
        if self.margins is None:
            raise InputError(explain(f"Claim {self.id}", "an empirical claim has margins", "none", "Add them"))
        try:
            return poll(self.margins(rows))
        except (KeyError, TypeError, ValueError, ArithmeticError) as error:
            told = f"the table of study {self.study!r} cannot be read: {type(error).__name__}: {error}"
            return Verdict("empirical", None, "error", (), told)


@contextmanager
def _quiet_room(seed: int) -> Iterator[None]:
    """Run a judge in float64 with seeded global streams (layers draw from them), and put everything back."""
    dtype = torch.get_default_dtype()
    try:
        with preserved_rng(), torch.enable_grad():
            seed_everything(seed)
            torch.set_default_dtype(torch.float64)
            yield
    finally:
        torch.set_default_dtype(dtype)
