"""Many judges at work: each claim with its own generator, in this process or in several."""

from __future__ import annotations

import multiprocessing
import zlib
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor, as_completed

import torch

from normgauge.claims._claim import Claim
from normgauge.claims._registry import find
from normgauge.claims._verdict import Verdict
from normgauge.rng import generator

Progress = Callable[[str, int, int], None]


def judge_one(claim: Claim, seed: int) -> Verdict:
    """Judge a claim with a generator that depends on `seed` and its id alone: order and company change nothing."""
    return claim.judge(generator(zlib.crc32(f"{seed}/{claim.id}".encode())))


def judge_many(
    claims: Sequence[Claim], *, seed: int = 0, workers: int = 1, progress: Progress | None = None
) -> dict[str, Verdict]:
    """Judge claims, in `workers` processes, and return the verdicts by id in the order of the claims.

    Args:
        claims: what to judge; with several workers they must be registered ones.
        seed: the ledger's seed.
        workers: processes; 1 stays in this one.
        progress: called after each judge with (id, how many are done, how many there are).
    """
    found: dict[str, Verdict] = {}
    for id, verdict in _verdicts(claims, seed, min(workers, len(claims))):
        found[id] = verdict
        if progress is not None:
            progress(id, len(found), len(claims))
    return {claim.id: found[claim.id] for claim in claims}


def _verdicts(claims: Sequence[Claim], seed: int, workers: int) -> Iterator[tuple[str, Verdict]]:
    if workers <= 1:
        for claim in claims:
            yield claim.id, judge_one(claim, seed)
        return
    # spawn, not fork: torch's threads do not survive a fork
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, mp_context=context, initializer=torch.set_num_threads, initargs=(1,)) as pool:
        pending = {pool.submit(_judge_by_id, claim.id, seed): claim.id for claim in claims}
        for future in as_completed(pending):
            yield pending[future], future.result()


def _judge_by_id(id: str, seed: int) -> Verdict:
    return judge_one(find(id), seed)
