"""`Claim`: a sentence from a paper and the way it is judged."""

import zlib
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Literal

import torch

from normgauge.papers.court.checks import Check, gather
from normgauge.papers.court.contrast import Contrast, NotRun, least_effects, measure
from normgauge.papers.court.sources import Source, choose_source
from normgauge.papers.court.table import StudyTable
from normgauge.papers.court.verdict import Evidence, Outcome, Standing, Verdict, Word, poll, weigh
from normgauge.rng import generator, preserved_rng, seed_everything

Sort = Literal["theorem", "empirical", "bibliographic", "finding"]
Trial = Callable[[torch.Generator], Iterable[Check]]

#: Why a sentence is false as stated: a slip that the text itself mends, an assumption it needs and lacks, or neither.
FAULTS = ("misprint", "missing hypothesis", "false")


@dataclass(frozen=True)
class Claim:
    """A sentence from a paper, the way it is judged, the verdict and the sentence that holds.

    `judge` computes a verdict from any generator; `verdict`, `outcome`, `status` and `evidence` (of `result`) are those
    of this claim's own `seed`, computed when first asked for.

    Args:
        id: its name in the ledger, paper first (`S1-T4.1`); a finding has the name of its study.
        place: where the paper says it.
        printed: the statement as printed.
        kind: theorem, empirical or bibliographic; or finding: what a study tests and the ledger does not list.
        corrected: the statement that holds, where it differs; it is tested too.
        hypotheses: under which assumptions printed and corrected are tested.
        cite: bibliography keys: the paper, then whatever the correction leans on.
        note: what a reader should know: what is wrong, where this reading of the sentence is disputable.
        fault: of a claim that is false as stated: one of `FAULTS`, a colon, and why it is that and not another.
        quotes: the words a bibliographic claim is compared with.
        trial: yields the checks of a theorem or quotation on instances drawn from a generator.
        study: the study an empirical claim is judged from.
        contrasts: what must come out, each with the smallest effect of interest, declared before the runs.
        premise: what the sentence presupposes; where it did not come about the outcome is premise_absent.
        missing: of a claim without a study: what nobody measures yet.
        control: what stands against the mechanism claimed, or why nothing needs to.
        seed: with the id, from which `result` draws its instances: neither order nor company changes it.
        runs: the reader's own runs of the study, beside those that ship with the package.
        given: a verdict computed elsewhere, in another process.
    """

    id: str
    place: str
    printed: str
    kind: Sort
    corrected: str = ""
    hypotheses: str = ""
    cite: tuple[str, ...] = ()
    note: str = ""
    fault: str = ""
    quotes: tuple[str, ...] = ()
    trial: Trial | None = None
    study: str = ""
    contrasts: tuple[Contrast, ...] = ()
    premise: tuple[Contrast, ...] = ()
    missing: str = ""
    control: str = ""
    seed: int = 0
    runs: tuple[Source, ...] = ()
    given: Verdict | None = None

    @property
    def paper(self) -> str:
        """The paper's letter and number, as `S1`."""
        return self.id.partition("-")[0]

    @property
    def flaw(self) -> str:
        """What kind of fault a false sentence has: misprint, missing hypothesis or false; empty for any other."""
        return self.fault.partition(":")[0] if self.verdict == "false_as_stated" else ""

    @property
    def command(self) -> str:
        """The command that judges this claim on the reader's own machine."""
        return f"normgauge reproduce {self.study}" if self.study else f"normgauge claims --id {self.id}"

    @property
    def criterion(self) -> str:
        """The rule an experiment is judged by, in words."""
        given = f"where {' and '.join(each.rule for each in self.premise)}: " if self.premise else ""
        return self.missing or given + "; ".join(each.rule for each in self.contrasts)

    @cached_property
    def result(self) -> Verdict:
        """The verdict of this claim with its own seed."""
        return self.given or self.judge(generator(zlib.crc32(f"{self.seed}/{self.id}".encode())))

    @property
    def verdict(self) -> Word | None:
        """The word: holds, holds_with_correction, false_as_stated or empirical."""
        return self.result.verdict

    @property
    def outcome(self) -> Outcome | None:
        """Of an empirical claim: reproduced, contradicted, too_small_to_tell, premise_absent or not_run."""
        return self.result.outcome

    @property
    def status(self) -> Standing:
        """judged, not_run or error."""
        return self.result.status

    @property
    def evidence(self) -> tuple[Evidence, ...]:
        """The numbers the verdict follows from."""
        return self.result.evidence

    def judge(self, generator: torch.Generator) -> Verdict:
        """Compute the verdict on instances drawn from `generator`, in float64; of an empirical claim from its runs.

        A judge that raises is a value too: the status is `error` and the sentence says what happened. The default
        dtype and the global random streams are those of before on return.
        """
        if self.trial is None:
            return self._judge_runs()
        try:
            with _quiet_room(generator.initial_seed()):
                evidence = gather(self.trial(generator))
        except Exception as error:  # noqa: BLE001 (failure is a value: one judge never stops the ledger)
            return Verdict(None, None, "error", (), f"the judge raised {type(error).__name__}: {error}")
        return weigh(evidence)

    def margins(self, table: StudyTable) -> dict[str, list[float]]:
        """Return per contrast and seed the effect minus the smallest that counts."""
        return measure(self.contrasts, table)

    def judge_table(self, table: StudyTable) -> Verdict:
        """Judge an experiment from a study's table: the one rule, whoever asks and wherever the table lies."""
        try:
            for premise in self.premise:
                judged = poll(measure([premise], table), least_effects([premise], table))
                known = [each.effects(table) for each in premise.resolve(table)]
                flat = all(effects and min(effects) == max(effects) for effects in known)  # an interval without width
                known_true = flat and all(min(effects) > premise.least for effects in known)
                if judged.outcome != "reproduced" and not known_true:
                    absent = judged.outcome == "contradicted" or flat
                    told = "its premise did not come about" if absent else "whether its premise holds cannot be told"
                    word: Outcome = "premise_absent" if absent else "too_small_to_tell"
                    return replace(judged, outcome=word, sentence=f"{told}: {premise.rule}. {judged.sentence}")
            return poll(measure(self.contrasts, table), least_effects(self.contrasts, table))
        except NotRun as absent:
            return _not_run(f"not run under this design: {absent}; {self.command} runs it. Criterion: {self.criterion}")
        except (KeyError, IndexError, TypeError, ValueError, ArithmeticError) as error:
            told = f"the table of study {self.study!r} cannot be read: {type(error).__name__}: {error}"
            return Verdict("empirical", None, "error", (), told)

    def _judge_runs(self) -> Verdict:
        """Judge from the runs in force; what other runs say stands beside it, with the reason why it does not count."""
        if not self.study:
            return _not_run(f"no study decides it: {self.criterion}.")
        chosen, others = choose_source(self.study, self.runs)
        if chosen is None:
            told = f"not run yet; {self.command} runs the study that decides it. Criterion: {self.criterion}"
            return _not_run(told)
        beside = (replace(self.judge_table(s.table), rests_on=f"{s}; {why}") for s, why in others)
        return replace(self.judge_table(chosen.table), rests_on=str(chosen), beside=tuple(beside))


def _not_run(sentence: str) -> Verdict:
    return Verdict("empirical", "not_run", "not_run", (), sentence)


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
