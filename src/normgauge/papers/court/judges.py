"""Many judges at work, in this process or in several."""

from __future__ import annotations

import multiprocessing
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed
from dataclasses import replace

import torch

from normgauge.papers.court.claim import Claim
from normgauge.papers.court.registry import find
from normgauge.papers.court.verdict import Verdict

Progress = Callable[[str, int, int], None]


def judge_many(claims: Sequence[Claim], *, workers: int = 1, progress: Progress | None = None) -> tuple[Claim, ...]:
    """Return the claims with their results computed, in `workers` processes.

    Args:
        claims: what to judge; with several workers they must be registered ones.
        workers: processes; 1 stays in this one.
        progress: called after each judge with (id, how many are done, how many there are).
    """
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
