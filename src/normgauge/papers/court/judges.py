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
    found: dict[str, Verdict] = {}
    for id, verdict in _verdicts(claims, min(workers, len(claims))):
        found[id] = verdict
        if progress is not None:
            progress(id, len(found), len(claims))
    return tuple(claim.settled(found[claim.id]) for claim in claims)


def _verdicts(claims: Sequence[Claim], workers: int) -> Iterator[tuple[str, Verdict]]:
    if workers <= 1:
        for claim in claims:
            yield claim.id, claim.result
        return
    # spawn, not fork: torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending = {pool.submit(_judge_by_id, claim.id, claim.seed): claim.id for claim in claims}
        for future in as_completed(pending):
            yield pending[future], future.result()


def _judge_by_id(id: str, seed: int) -> Verdict:
    return replace(find(id), seed=seed).result
