"""Study -> runs -> store: run what is missing, show progress, survive an interruption."""

import math
import re
import time
from collections.abc import Callable, Generator, Sequence
from concurrent.futures import Executor
from contextlib import closing
from typing import Any

from normgauge.errors import InputError
from normgauge.lab.runs.digests import changes_since
from normgauge.lab.runs.executors import Workers, available_cores, run_in_processes, run_on
from normgauge.lab.runs.progress import RunsBar, StudiesBar
from normgauge.lab.runs.run import execute
from normgauge.lab.study import Study
from normgauge.records import Run
from normgauge.store import Store, spec_id


def sweep(
    specs: Study | Sequence[dict[str, Any]],
    store: Store,
    *,
    executor: Executor | Workers | int | None = None,
    task: Callable[[Any], Run] = execute,
    shard: tuple[int, int] | None = None,
    progress: bool | StudiesBar = True,
    label: str = "runs",
    deadline: float = math.inf,
) -> int:
    """Run the specs that the store does not hold yet, writing each run when it is finished.

    Runs that failed before (error, skipped) are tried again; a notice says so, and what changed in a user's own code or
    data since runs were stored. The run that is interrupted is not stored.

    Args:
        specs: what to run: a study's first round, or a list of specs.
        store: where finished runs are; only this process writes to it.
        executor: a `concurrent.futures.Executor`, `Workers` kept from sweep to sweep, a number of worker processes
            (1 runs in this process), or `None` for one process per core.
        task: what a run is: a function from a spec to a `Run`.
        shard: `(i, n)` runs the i-th of n parts only; see `part_of`.
        progress: show a bar with time left on stderr, or a line now and then where it is no terminal; or the bar of
            many studies to move.
        label: what the bar is called.
        deadline: on the clock of `time.monotonic`; runs in flight then are given up, and made by the next sweep.

    Returns:
        How many runs were run now; the others were in the store already, or the deadline came before them.

    Raises:
        StoreError: when another process writes to the store, or the disk is full; finished runs are kept.
        ExecutorError: when the executor is gone; finished runs are kept.
    """
    store.claim()
    finished = store.finished()
    plan = specs.plan() if isinstance(specs, Study) else list(specs)
    plan = plan if shard is None else part_of(plan, shard)
    missing = [spec for spec in plan if spec_id(spec) not in finished]
    bar = progress if isinstance(progress, StudiesBar) else RunsBar(shown=progress and bool(missing))
    for notice in _notices(missing, store) if missing else ():
        bar.note(notice)
    ran = 0
    with (
        bar.runs(label, len(plan), len(plan) - len(missing)) as advance,
        closing(_runs(missing if time.monotonic() < deadline else [], executor, task)) as runs,  # workers end with it
    ):
        for run in runs:
            store.put(run)
            advance()
            ran += 1
            if time.monotonic() > deadline:
                break
    return ran


def _notices(missing: Sequence[dict[str, Any]], store: Store) -> list[str]:
    """Say why runs are made that one may believe to be there: they failed, or what they rest on has changed."""
    notices = []
    again = {spec_id(spec) for spec in missing} & store.ids()
    if again:
        first = store.runs([min(again)])[0]
        reason = f"{first.status}: {first.sentence}".rstrip(".: ")
        notices.append(f"Stored runs that failed are tried again: {len(again)} ({reason}).")
    changes = changes_since(store.specs(), missing)
    if changes:
        notices.append(f"Runs are made again, since {', '.join(changes)} changed after they were stored.")
    return notices


def part_of(specs: Sequence[dict[str, Any]], shard: tuple[int, int]) -> list[dict[str, Any]]:
    """Return the specs of the i-th of n parts, i from 0 to n - 1 (n means 0, so counting from 1 works as well).

    A spec's part depends on its id alone, so every machine agrees on it, and the parts are disjoint and complete.

    Examples:
        >>> specs = [{"lr": lr} for lr in range(9)]
        >>> parts = [part_of(specs, (i, 3)) for i in range(3)]
        >>> sorted(spec["lr"] for part in parts for spec in part)
        [0, 1, 2, 3, 4, 5, 6, 7, 8]
        >>> part_of(specs, (3, 3)) == parts[0]
        True
    """
    index, count = shard
    if count < 1 or not 0 <= index <= count:
        step = "Write --shard 1/4, for instance"
        raise InputError("shard", "i/n with 0 <= i <= n and n >= 1", f"{index}/{count}", step)
    return [spec for spec in specs if int(spec_id(spec), 16) % count == index % count]


def parse_shard(text: str) -> tuple[int, int]:
    """Read `i/n`, as `--shard` takes it.

    Examples:
        >>> parse_shard("2/8")
        (2, 8)
    """
    index, _, count = text.partition("/")
    if not re.fullmatch(r"[0-9]{1,9}/[0-9]{1,9}", text):
        raise InputError("--shard", "two numbers i/n", repr(text), "Write --shard 1/4, for instance")
    part_of([], (int(index), int(count)))
    return int(index), int(count)


def _runs(
    specs: list[dict[str, Any]], executor: Executor | Workers | int | None, task: Callable[[Any], Run]
) -> Generator[Run]:
    if isinstance(executor, Executor):
        return run_on(executor, specs, task)
    if isinstance(executor, Workers) and executor.jobs > 1:
        return run_in_processes(specs, executor, task)
    jobs = 1 if isinstance(executor, Workers) else available_cores() if executor is None else executor
    jobs = min(jobs, len(specs))
    return (task(spec) for spec in specs) if jobs <= 1 else run_in_processes(specs, jobs, task)
