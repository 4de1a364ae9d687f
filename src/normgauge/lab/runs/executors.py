"""Where runs happen: here, in worker processes, on a Dask cluster; the caller's process is the only writer."""

from __future__ import annotations

import multiprocessing
import os
import signal
import sys
import threading
from collections.abc import Callable, Generator, Iterator, Sequence
from concurrent.futures import BrokenExecutor, CancelledError, Executor, Future, ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from contextlib import contextmanager
from multiprocessing import resource_tracker
from typing import Any, cast

from normgauge.errors import ExecutorError, require
from normgauge.lab.runs.run import execute
from normgauge.records import Run

Specs = Sequence[dict[str, Any]]
# A worker that dies (out of memory, killed) takes the pool with it; the runs in flight are tried again this often.
ATTEMPTS = 3
CONNECT_SECONDS = 15.0
_RUNNING = threading.Lock()


def run_on(executor: Executor, specs: Specs, task: Callable[[Any], Run] = execute) -> Generator[Run]:
    """Run specs on any `concurrent.futures.Executor`, yielding them as they finish.

    A run whose worker cannot finish it has status "error".
    """
    futures = {executor.submit(_run_alone, task, spec): spec for spec in specs}
    try:
        for future in as_completed(futures):
            try:
                run = future.result()
            except (BrokenExecutor, CancelledError) as error:
                rule, got = "it must live until the last run", f"{type(error).__name__} {error}".strip()
                step = "Start it anew and run the same command again: finished runs are kept"
                raise ExecutorError("executor", rule, got, step) from error
            except Exception as error:  # noqa: BLE001 (a sweep must not die from one run)
                reason = f"its worker could not finish it: {type(error).__name__}: {error}"
                run = Run(dict(futures[future]), "error", reason)
            yield run
    finally:
        for future in futures:
            future.cancel()


@contextmanager
def cluster_executor(address: str) -> Iterator[Executor]:
    """Yield an executor of the Dask cluster whose scheduler listens at `address`, and leave the cluster afterwards.

    Workers need normgauge, the data, and a user's own package installed. Give each worker one thread
    (`dask worker ADDRESS --nthreads 1`): runs share torch's random state, so one process runs one at a time.
    """
    distributed = require("distributed", "cluster", "a Dask cluster")
    try:
        client = distributed.Client(address, timeout=CONNECT_SECONDS, set_as_default=False)
    except Exception as error:  # distributed raises what comes: OSError, ValueError, TypeError, KeyError by address
        rule, got = "a Dask scheduler must listen there", str(error) or type(error).__name__
        step = "Start one with: dask scheduler, and workers with: dask worker ADDRESS --nthreads 1"
        raise ExecutorError(f"cluster {address}", rule, got, step) from error
    executor = cast(Executor, client.get_executor())
    try:
        yield executor
    finally:
        executor.shutdown(wait=False)
        client.close()


class Workers:
    """Worker processes with one thread each (`None`: one per core), kept from sweep to sweep: starts take seconds.

    Examples:
        >>> with Workers(2) as workers:  # no process starts before there is work
        ...     workers.jobs
        2
    """

    def __init__(self, jobs: int | None = None) -> None:
        self.jobs = available_cores() if jobs is None else jobs
        self._pool: ProcessPoolExecutor | None = None

    def __enter__(self) -> Workers:
        return self

    def __exit__(self, *_: object) -> None:
        self.dismiss()

    def pool(self) -> ProcessPoolExecutor:
        """Return the pool, started anew if the last one was dismissed."""
        if self._pool is None:
            context = multiprocessing.get_context("spawn")
            self._pool = ProcessPoolExecutor(self.jobs, context, initializer=_start_worker)
        return self._pool

    def dismiss(self, *, at_once: bool = False) -> None:
        """Let the workers go when they are done, or end them at once."""
        pool, self._pool = self._pool, None
        if pool is not None:
            if at_once:
                for process in list((pool._processes or {}).values()):  # no public way before Python 3.14
                    process.terminate()
            pool.shutdown(wait=False, cancel_futures=True)


def run_in_processes(specs: Specs, workers: Workers | int, task: Callable[[Any], Run] = execute) -> Generator[Run]:
    """Run specs in worker processes with one thread each, yielding them as they finish.

    A worker that is killed does not stop the sweep: the pool is made again and what was in flight is run again, each
    alone, so that a neighbour is not blamed; a spec that has broken the pool `ATTEMPTS` times becomes a run with
    status "error".
    """
    if isinstance(workers, int):
        with Workers(workers) as own:
            yield from run_in_processes(specs, own, task)
        return
    waiting = list(specs)
    broken: dict[int, int] = {}
    while waiting:
        suspects = [spec for spec in waiting if id(spec) in broken]
        batch, others = (suspects[:1], [s for s in waiting if s is not suspects[0]]) if suspects else (waiting, [])
        left = dict(enumerate(batch))
        crew = Workers(1) if suspects else workers
        futures: dict[Future[Run], int] = {}
        try:
            with _hide_main(), _interrupts_held():
                for key, spec in left.items():
                    futures[crew.pool().submit(task, spec)] = key
            for future in as_completed(futures):
                run = future.result()
                del left[futures[future]]
                yield run
        except BrokenProcessPool:
            crew.dismiss()
            for spec in list(left.values())[: crew.jobs]:  # the pool works in order, so the culprit is among the first
                broken[id(spec)] = broken.get(id(spec), 0) + 1
        except BaseException:  # Ctrl-C, or the consumer closed the generator: workers must not outlive us
            crew.dismiss(at_once=True)
            raise
        finally:
            if crew is not workers:
                crew.dismiss()
        waiting = others
        for spec in left.values():
            if broken.get(id(spec), 0) >= ATTEMPTS:
                yield Run(dict(spec), "error", f"its worker process died {ATTEMPTS} times; it may need more memory")
            else:
                waiting.append(spec)


def available_cores() -> int:
    """Return the number of cores this process may use."""
    return len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else (os.cpu_count() or 1)


def _run_alone(task: Callable[[Any], Run], spec: Any) -> Run:
    """Run a spec alone in its process: runs seed torch's global stream, which threads would share."""
    with _RUNNING:
        return task(spec)


def _start_worker() -> None:
    """Give a worker one thread, leave Ctrl-C to the parent, which ends it, and end it when the parent is killed."""
    import torch

    signal.signal(signal.SIGINT, signal.SIG_IGN)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)
    torch.set_num_threads(1)  # one_thread would do; this starts no pool of threads at all
    threading.Thread(target=_end_with_parent, daemon=True).start()


def _end_with_parent() -> None:
    """End this process when its parent has: a killed driver cannot, and a worker would wait for work for ever."""
    parent = multiprocessing.parent_process()
    if parent is not None:
        parent.join()
        os._exit(1)


@contextmanager
def _interrupts_held() -> Iterator[None]:
    """Start workers deaf to Ctrl-C, which a terminal sends to them too: before they run our code they would print it.

    A mask of signals is inherited. An interrupt that comes meanwhile is not lost: it arrives at the end.
    """
    if not hasattr(signal, "pthread_sigmask"):  # Windows
        yield
        return
    resource_tracker.ensure_running()  # it would open the mask when it is started later
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


@contextmanager
def _hide_main() -> Iterator[None]:
    """Keep spawned workers from importing the caller's script, which may lack `if __name__ == "__main__"`.

    Workers need nothing from it: their task is a function of this package.
    """
    main = sys.modules["__main__"]
    names: tuple[str, ...] = ("__file__", "__spec__")
    hidden = {name: main.__dict__.pop(name) for name in names if name in main.__dict__}
    main.__dict__["__spec__"] = None
    try:
        yield
    finally:
        del main.__dict__["__spec__"]
        main.__dict__.update(hidden)
