"""Study -> runs -> store: run what is missing, show progress, survive an interruption."""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Executor
from typing import Any

from rich.console import Console
from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn, TimeRemainingColumn

from normgauge.lab.executors import available_cores, run_in_processes, run_on, run_serially
from normgauge.lab.study import Study
from normgauge.lab.training import Outcome, execute
from normgauge.store import Store, spec_id


def sweep(
    specs: Study | Sequence[dict[str, Any]],
    store: Store,
    *,
    executor: Executor | int | None = None,
    task: Callable[[Any], Outcome] = execute,
    progress: bool = True,
    label: str = "runs",
) -> int:
    """Run the specs that the store does not hold yet, writing each run when it is finished.

    Args:
        specs: what to run: a study's first round, or a list of specs.
        store: where finished runs are; only this process writes to it.
        executor: a `concurrent.futures.Executor`, a number of worker processes (1 runs in this process), or
            `None` for one process per core.
        task: what a run is: a function from a spec to an `Outcome`.
        progress: show a bar with time left on stderr when it is a terminal.
        label: what the bar is called.

    Returns:
        How many runs were run now; the others were in the store already.
    """
    finished = store.finished()
    plan = specs.plan() if isinstance(specs, Study) else list(specs)
    missing = [spec for spec in plan if spec_id(spec) not in finished]
    if not missing:
        return 0
    outcomes = _outcomes(missing, executor, task)
    with _bar(progress) as bar:
        job = bar.add_task(label, total=len(plan), completed=len(plan) - len(missing))
        for outcome in outcomes:
            run = {name: getattr(outcome, name) for name in ("spec", "status", "sentence", "seconds", "provenance")}
            store.put(run, outcome.readings)
            bar.advance(job)
    return len(missing)


def _outcomes(
    specs: list[dict[str, Any]], executor: Executor | int | None, task: Callable[[Any], Outcome]
) -> Iterator[Outcome]:
    if isinstance(executor, Executor):
        return run_on(executor, specs, task)
    jobs = min(available_cores() if executor is None else executor, len(specs))
    return run_serially(specs, task) if jobs <= 1 else run_in_processes(specs, jobs, task)


def _bar(shown: bool) -> Progress:
    console = Console(file=sys.stderr)
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("left"),
        TimeRemainingColumn(),
    )
    return Progress(*columns, console=console, disable=not (shown and console.is_terminal))
