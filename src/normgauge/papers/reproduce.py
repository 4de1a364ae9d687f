"""`reproduce`: run an experiment of a paper, judge the claims that depend on it, write its page."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass
from datetime import UTC, datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from normgauge.charts import svg
from normgauge.lab.runs.executors import Workers
from normgauge.lab.runs.progress import StudiesBar
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.sweep import sweep
from normgauge.lab.study import Study
from normgauge.papers.court import Verdict, ledger, poll
from normgauge.papers.experiment import Experiment
from normgauge.papers.studies import execute, find
from normgauge.papers.table import StudyTable, choose, tabulate
from normgauge.records import Result
from normgauge.store import Store, spec_id

if TYPE_CHECKING:
    import altair

STORE_NAME = "runs.sqlite"
Runner = Callable[[Sequence[dict[str, Any]], Store, str], Any]


@dataclass(frozen=True)
class Reproduced(Result):
    """What became of a paper's experiment here.

    Attributes:
        experiment: what was asked.
        size: smoke, small or paper.
        table: the runs.
        verdict: the study's own, from its contrasts: confirmed, not_confirmed or inconclusive.
        claims: id -> verdict of every claim judged from this study.
        remarks: sentences with the numbers.
        seconds: processor seconds of all runs together.
        store: where the runs are.
        origins: provenance of the runs, one for each code revision that made some, in the order of the runs.
    """

    experiment: Experiment
    size: str
    table: StudyTable
    verdict: Verdict
    claims: Mapping[str, Verdict]
    remarks: tuple[str, ...]
    seconds: float
    store: Path
    origins: tuple[Mapping[str, Any], ...]

    def document(self) -> dict[str, Any]:
        """Return everything a page says, as plain data."""
        experiment, printed = self.experiment, {claim.id: claim for claim in ledger(ids=list(self.claims))}
        parts = experiment.parts(self.size)
        return {
            "study": experiment.name,
            "papers": list(experiment.papers),
            "place": experiment.place,
            "question": experiment.question,
            "finding": experiment.finding,
            "proxy": experiment.proxy,
            "size": self.size,
            "seeds": max(part.seeds for part in parts),
            "fixed": [dict(part.fixed) for part in parts],
            "outcome": self.verdict.outcome,
            "sentence": self.verdict.sentence,
            "contrasts": [
                {"contrast": item.name, "mean": item.value, "half width": item.tolerance, "seeds": item.instances}
                for item in self.verdict.evidence
            ],
            "remarks": [*self.remarks, *self._mixture()],
            "claims": [
                {
                    "id": name,
                    "printed": printed[name].printed,
                    "criterion": printed[name].criterion,
                    "outcome": verdict.outcome or verdict.status,
                    "sentence": verdict.sentence,
                }
                for name, verdict in self.claims.items()
            ],
            "knobs": self.knobs(),
            "readings": self.shown(),
            "rows": [dict(row) for row in self.table.rows],
            "failed": [
                {"run": _name(row, parts), "status": row["status"], "sentence": row["sentence"]}
                for row in self.table.trials
                if row["status"] != "ok"
            ],
            "runs": len(self.table.trials),
            "seconds": self.seconds,
            "provenance": dict(self.origins[-1]),
            "finished": datetime.now(UTC).isoformat(timespec="seconds"),
            "command": f"normgauge reproduce {experiment.name} --size {self.size}",
            "cite": list(experiment.cite),
        }

    def _mixture(self) -> list[str]:
        """Say when runs of several revisions are compared: a spec names what is run, not the code that runs it."""
        if len(self.origins) == 1:
            return []
        names = ", ".join(str(origin["revision"] or origin["versions"]["normgauge"]) for origin in self.origins)
        line = (
            f"These runs were made by {len(self.origins)} revisions of normgauge ({names}), which may differ in what "
        )
        return [f"{line}they measure. Delete {self.store.parent.name} and run again to have all of one."]

    def knobs(self) -> list[str]:
        """Return the knobs that vary: those compared, then those tuned."""
        parts = self.experiment.parts(self.size)
        return list(dict.fromkeys([k for p in parts for k in p.scientific] + [k for p in parts for k in p.nuisance]))

    def shown(self) -> list[str]:
        """Return the readings that the page's table shows."""
        measured = dict.fromkeys(row["reading"] for row in self.table.readings if row["layer"] is None)
        return list(self.experiment.columns or measured)

    def pictures(self) -> list[tuple[str, str, str]]:
        """Return name, SVG and caption of every figure (needs the `lab` extra)."""
        found = self.experiment.figures(self.table)
        return [(f"{self.experiment.name}-{figure.name}", svg(figure.chart), figure.caption) for figure in found]

    def chart(self) -> altair.TopLevelMixin:
        """Return the study's first figure."""
        return self.experiment.figures(self.table)[0].chart

    def _title(self) -> str:
        return f"{self.experiment.name} ({', '.join(self.experiment.papers)}; {self.experiment.place})"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"contrast": item.name, "mean": item.value, "+-": item.tolerance, "seeds": item.instances}
            for item in self.verdict.evidence
        ]

    def __str__(self) -> str:
        """Return the contrasts, the verdicts and the remarks."""
        from normgauge.records import format_table

        lines = [f"study: {self.verdict.outcome}", *(f"{name}: {_word(v)}" for name, v in self.claims.items())]
        lines += [*self.remarks, *self._mixture()]
        failed = sum(row["status"] != "ok" for row in self.table.trials)
        lines.append(
            f"estimate, 95 % intervals over seeds; size {self.size}; {len(self.table.trials)} runs, {failed} not ok, "
            f"{self.seconds:.0f} s of runs; store {self.store}"
        )
        return format_table(self._rows(), title=self._title(), footer="\n".join(lines))


def reproduce(
    name: str,
    *,
    size: str = "small",
    out: str | Path = "normgauge-studies",
    executor: Executor | Workers | int | None = None,
    progress: bool | StudiesBar = True,
) -> Reproduced:
    """Run an experiment of the papers, judge the claims that depend on it, and write its page.

    Finished runs are kept in `out/NAME-SIZE/runs.sqlite`: call again and only what is missing runs.

    Args:
        name: a study; `normgauge reproduce` lists them.
        size: "smoke" (proves it works), "small" (an answer in minutes) or "paper" (the published setting).
        out: the folder of stores and pages.
        executor: a `concurrent.futures.Executor`, `Workers`, a number of processes, or `None` for one per core.
        progress: show a bar on stderr; or the bar of many studies to move.

    Returns:
        The verdicts, table and remarks; the page is `out/NAME-SIZE/index.html`.

    Raises:
        UnknownNameError: for an unknown study or size.
        DataError: when the data it needs is not here, with the command that gets it.
    """
    experiment = find(name)
    parts = experiment.parts(size)
    if size != "smoke":
        _need_data(experiment)
    folder = Path(out) / f"{name}-{size}"

    own = None if isinstance(executor, Executor | Workers) else Workers(executor)

    def run(specs: Sequence[dict[str, Any]], store: Store, label: str) -> None:
        sweep(specs, store, executor=own or executor, task=execute, progress=progress, label=f"{name}: {label}")

    with Store(folder / STORE_NAME) as store, own or nullcontext():
        for part in parts:
            run(_specs(experiment, part.plan()), store, "runs")
            run(_specs(experiment, _confirmation(experiment, part, store)), store, "more seeds")
        return conclude(experiment, size, store)


def reproduce_shard(
    name: str,
    shard: tuple[int, int],
    *,
    size: str = "small",
    out: str | Path = "normgauge-studies",
    executor: Executor | Workers | int | None = None,
    progress: bool | StudiesBar = True,
) -> Path:
    """Run one of n parts of an experiment into a store of its own, for job arrays, and return the store's path.

    Knobs are chosen when all runs of the first round are there: the shards, `normgauge merge`, then `reproduce` on the
    joined store, which runs the remaining seeds.

    Args:
        name: a study.
        shard: `(i, n)`; see `normgauge.lab.runs.sweep.part_of`.
        size: as in `reproduce`.
        out: the folder; the store is `out/NAME-SIZE-shard-i-n/runs.sqlite`.
        executor: as in `reproduce`.
        progress: show a bar on stderr.
    """
    experiment = find(name)
    specs = [spec for part in experiment.parts(size) for spec in _specs(experiment, part.plan())]
    if size != "smoke":
        _need_data(experiment)
    with Store(Path(out) / f"{name}-{size}-shard-{shard[0]}-{shard[1]}" / STORE_NAME) as store:
        label = f"{name}: shard {shard[0]}/{shard[1]}"
        sweep(specs, store, executor=executor, task=execute, shard=shard, progress=progress, label=label)
        return store.path


def conclude(experiment: Experiment, size: str, store: Store) -> Reproduced:
    """Judge what the store holds of an experiment, and write table, verdicts and page beside it."""
    answering: set[str] = set()
    everything: set[str] = set()
    for part in experiment.parts(size):
        first = _specs(experiment, part.plan())
        more = _specs(experiment, _confirmation(experiment, part, store))
        everything |= {spec_id(spec) for spec in (*first, *more)}
        answering |= _answering(experiment, part, store)
    runs = store.runs(everything)
    table = tabulate(runs, store.readings(everything), answering)
    claims = {
        claim.id: claim.judge_from_tables({experiment.name: table.rows})
        for claim in ledger()
        if claim.kind == "empirical" and claim.study == experiment.name
    }
    seconds = sum(run["seconds"] for run in runs)
    verdict = poll(experiment.contrasts(table))
    remarks = tuple(experiment.remarks(table))
    result = Reproduced(experiment, size, table, verdict, claims, remarks, seconds, store.path, _origins(runs))
    store.put_document("experiment", json.loads(json.dumps(result.document(), default=str)))
    return result


def _origins(runs: Sequence[Mapping[str, Any]]) -> tuple[Mapping[str, Any], ...]:
    """Return one provenance for each revision that made some of the runs, the last one last."""
    found: dict[str, Mapping[str, Any]] = {}
    for run in runs:
        origin = run["provenance"] or provenance()
        name = str((origin["revision"], origin["versions"]))
        found.pop(name, None)
        found[name] = origin
    return tuple(found.values()) or (provenance(),)


def _need_data(experiment: Experiment) -> None:
    from normgauge.lab import data

    for name in experiment.data:
        data.load(name)  # says what is missing and which command gets it


def _specs(experiment: Experiment, plan: Iterable[Mapping[str, Any]]) -> list[dict[str, Any]]:
    return [{**spec, "study": experiment.name} for spec in plan]


def _confirmation(experiment: Experiment, part: Study, store: Store) -> list[dict[str, Any]]:
    return part.confirmation(_chosen(experiment, part, store)) if part.nuisance else []


def _chosen(experiment: Experiment, part: Study, store: Store) -> list[dict[str, Any]]:
    ids = {spec_id(spec) for spec in _specs(experiment, part.plan())}
    last = {
        row["run"]: row["value"]
        for row in sorted(store.readings(ids), key=lambda row: row["step"])
        if row["name"] == experiment.choose_by and row["layer"] is None
    }
    return choose(part, store.runs(ids), last.get, experiment.choose_higher)


def _answering(experiment: Experiment, part: Study, store: Store) -> set[str]:
    """Return the ids of the runs that answer: every arm at its chosen setting, on all seeds."""
    if not part.nuisance:
        return {spec_id(spec) for spec in _specs(experiment, part.plan())}
    chosen = _chosen(experiment, part, store)
    found = set()
    for seed in range(part.seeds):
        plan = [{**dict(part.fixed), **arm, "seed": seed} for arm in chosen]
        found |= {spec_id(spec) for spec in _specs(experiment, plan)}
    return found


def _name(row: Mapping[str, Any], parts: Sequence[Study]) -> str:
    knobs = dict.fromkeys(knob for part in parts for knob in (*part.scientific, *part.nuisance) if knob in row)
    return ", ".join(f"{knob} {row[knob]}" for knob in (*knobs, "seed"))


def _word(verdict: Verdict) -> str:
    return f"{verdict.outcome or verdict.status}. {verdict.sentence}"
