"""What a person sees while runs go on: a bar for the runs of one sweep, or one bar over many studies."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from datetime import UTC, datetime, timedelta
from pathlib import Path

from rich import progress as bars
from rich.console import Console

from normgauge.documents import write_whole
from normgauge.lab.runs.provenance import provenance
from normgauge.records import plain

# Where stderr is no terminal, a line is printed at most this often, and at the end.
LINE_SECONDS = 20.0


class RunsBar:
    """A bar for every sweep, with the time left, on stderr; where that is no terminal, a line now and then."""

    def __init__(self, *, shown: bool = True) -> None:
        self._shown, self._console = shown, Console(file=sys.stderr)

    def note(self, text: str) -> None:
        """Print a line."""
        if self._shown:
            self._console.print(text, soft_wrap=True, highlight=False, markup=False)

    @contextmanager
    def runs(self, label: str, total: int, done: int) -> Iterator[Callable[[], None]]:
        """Yield what to call after each run of a sweep of `total`, of which `done` were there already."""
        begin = last = time.monotonic()
        count = 0

        def advance() -> None:
            nonlocal last, count
            bar.advance(job)
            now, count = time.monotonic(), count + 1
            if bar.disable and (now - last >= LINE_SECONDS or done + count == total):
                last, left = now, (now - begin) / count * (total - done - count)
                self.note(f"{label}: {done + count} of {total} runs, about {timedelta(seconds=round(left))} left")

        with self._bar(bars.MofNCompleteColumn(), bars.TimeElapsedColumn(), bars.TimeRemainingColumn()) as bar:
            job = bar.add_task(label, total=total, completed=done)
            yield advance

    def _bar(self, *columns: bars.ProgressColumn) -> bars.Progress:
        words, hidden = bars.TextColumn("{task.description}"), not (self._shown and self._console.is_terminal)
        return bars.Progress(words, bars.BarColumn(), *columns, console=self._console, disable=hidden)


class StudiesBar(RunsBar):
    """One bar over several studies, each as long as its weight; elsewhere than in a terminal a line per study.

    The time left follows from what was run in this session: what was in a store already took none.

    Weights are shares of the whole in any unit, such as expected minutes.

    Examples:
        >>> with StudiesBar({"valley": 1.0, "margin": 3.0}, shown=False) as bar:
        ...     with bar.study("valley", runs=2):
        ...         with bar.runs("runs", 2, 0) as advance:
        ...             advance()
        ...     bar.fraction
        0.25
    """

    def __init__(self, weights: Mapping[str, float], *, shown: bool = True) -> None:
        super().__init__(shown=shown)
        self._weights = dict(weights)
        self._whole = self._bar(bars.TimeElapsedColumn(), bars.TextColumn("{task.fields[left]}"))
        self._job = self._whole.add_task("", total=sum(self._weights.values()) or 1.0, left="")
        self._before, self._runs, self._done, self._number, self._name = 0.0, 1, 0, 0, ""
        self._begin = time.monotonic()
        self._worked = 0.0  # the weight of what was run in this session
        self.ran = 0  # its runs

    def __enter__(self) -> StudiesBar:
        self._whole.start()
        return self

    def __exit__(self, *_: object) -> None:
        self._whole.stop()

    @property
    def fraction(self) -> float:
        """The part of everything that is done."""
        task = self._whole.tasks[0]
        return task.completed / (task.total or 1.0)

    @property
    def seconds_left(self) -> float | None:
        """The time left at the speed of this session; `None` before its first run is done."""
        task = self._whole.tasks[0]
        left = (task.total or 0.0) - task.completed
        return None if self._worked == 0 else 60 * self.minutes * left / self._worked

    @property
    def minutes(self) -> float:
        """The minutes since the bar was made."""
        return (time.monotonic() - self._begin) / 60

    @contextmanager
    def study(self, name: str, runs: int) -> Iterator[None]:
        """Begin a study of so many runs; at its end its whole weight counts, whatever was skipped."""
        self._number, self._name, self._runs, self._done = self._number + 1, name, max(runs, 1), 0
        if self._shown and not self._console.is_terminal:
            self.note(f"{self._number} of {len(self._weights)}: {name} ({runs} runs; {self.minutes:.1f} min so far)")
        self._update()
        yield
        self._before += self._weights[name]
        self._done = 0
        self._whole.update(self._job, completed=self._before)

    @contextmanager
    def runs(self, label: str, total: int, done: int) -> Iterator[Callable[[], None]]:
        """Yield what to call after each run of a sweep of `total`, of which `done` were there already."""
        self._done += done
        self._update()

        def advance() -> None:
            self._done += 1
            self._worked += self._weights[self._name] / self._runs
            self.ran += 1
            self._update()

        yield advance

    def _update(self) -> None:
        part = min(self._done / self._runs, 1.0) * self._weights[self._name]
        text = f"{self._number} of {len(self._weights)}: {self._name}, run {self._done} of {self._runs}"
        left = "" if self.seconds_left is None else f"left {timedelta(seconds=round(self.seconds_left))}"
        self._whole.update(self._job, completed=self._before + part, description=text, left=left)


def note_session(out: Path, size: str, studies: int, bar: StudiesBar, jobs: int | None) -> Path:
    """Add to `out/all-SIZE.json` how long this session over all studies took; `jobs` is `None` on a cluster."""
    path = out / f"all-{size}.json"
    sessions = json.loads(path.read_text(encoding="utf-8")) if path.exists() else []
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    session = {"studies": studies, "runs": bar.ran, "minutes": round(bar.minutes, 1), "jobs": jobs}
    noted = [*sessions, {**session, "finished": finished, **plain(provenance())}]
    write_whole(path, json.dumps(noted, indent=1) + "\n")
    return path
