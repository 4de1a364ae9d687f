"""`reproduce`: run an experiment of a paper, judge the claims that depend on it, write its page."""

from collections.abc import Iterable, Iterator, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext, suppress
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from itertools import product
from pathlib import Path
from typing import Any

from normgauge.charts import svg
from normgauge.documents import About, CriterionDocument, FailedRun, Margin, SizedVerdict, StudyDocument
from normgauge.errors import DataError, InputError
from normgauge.lab import data
from normgauge.lab.runs.executors import Workers
from normgauge.lab.runs.progress import StudiesBar
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.sweep import sweep
from normgauge.lab.study import Study
from normgauge.papers.court import DEFAULT_FOLDER, EACH, Claim, StudyTable, Verdict, criteria, poll
from normgauge.papers.court.contrast import NotRun, least_effects, measure
from normgauge.papers.court.sources import own_runs
from normgauge.papers.court.table import tabulate
from normgauge.papers.experiment import Experiment
from normgauge.papers.figures import deciding_picture
from normgauge.papers.studies import execute, find
from normgauge.records import Chart, Provenance, Reading, Row, Run, format_table, plain
from normgauge.results import Result
from normgauge.stats import Choice, choose
from normgauge.store import STORE_NAME, Store, spec_id


@dataclass(frozen=True)
class Reproduced(Result):
    """What became of a paper's experiment here.

    `verdicts`: id -> what each of its criteria says of these runs: the claims of the ledger judged from this study, and
    the study's own finding.
    """

    experiment: Experiment  # what was asked
    size: str  # smoke, small, medium or paper
    table: StudyTable  # the runs
    verdicts: Mapping[str, Verdict]
    remarks: tuple[str, ...]  # sentences with the numbers
    seconds: float  # processor seconds of all runs together
    store: Path  # where the runs are
    origins: tuple[Provenance, ...]  # of the runs, one for each code revision that made some, in the order of the runs

    @property
    def about(self) -> About:
        """What its page says whatever the runs say."""
        return self.experiment.about(self.size)

    def document(self) -> StudyDocument:
        """Return what the runs say, as it is stored, shipped and drawn."""
        parts = self.experiment.parts(self.size)
        knobs = dict.fromkeys(knob for part in parts for knob in (*part.scientific, *part.nuisance, "seed"))
        failed = [
            FailedRun(", ".join(f"{k} {row[k]}" for k in knobs if k in row), row["status"], row["sentence"])
            for row in self.table.trials
            if row["status"] != "ok"
        ]
        return StudyDocument(
            study=self.experiment.name,
            size=self.size,
            rows=tuple(self.table.rows),
            criteria=tuple(criterion_document(claim, self.table) for claim in criteria(self.experiment.name)),
            remarks=self.remarks,
            failed=tuple(failed),
            runs=len(self.table.trials),
            seconds=self.seconds,
            seeds=max(part.seeds for part in parts),
            fixed=tuple(dict(part.fixed) for part in parts),
            provenance=self.origins[-1],
            finished=datetime.now(UTC).isoformat(timespec="seconds"),
            other_sizes=other_sizes(self.experiment.name, self.size, self.store.parent.parent),
        )

    def pictures(self) -> list[tuple[str, str, str]]:
        """Return name, SVG and caption of every figure (needs the `lab` extra)."""
        drawn = (picture for figure in self.experiment.figures for picture in figure.draw(self.table))
        pictures = [(f"{self.experiment.name}-{name}", svg(chart, told), told) for name, chart, told in drawn]
        return [*deciding_picture(self.document()), *pictures]

    def chart(self) -> Chart:
        """Return the study's first figure."""
        return next(chart for figure in self.experiment.figures for _, chart, _ in figure.draw(self.table))

    def _title(self) -> str:
        return f"{self.experiment.name} ({', '.join(self.about.papers)}; {self.experiment.place})"

    def _rows(self) -> list[dict[str, Any]]:
        return [
            {"criterion": id, "margin": it.name, "mean": it.value, "+-": plain(it.tolerance), "seeds": it.instances}
            for id, verdict in self.verdicts.items()
            for it in verdict.evidence
        ]

    def readings(self) -> tuple[Reading, ...]:
        """Return every margin of every criterion, over seeds."""
        why = "no run was counted"
        return tuple(
            Reading.measured(f"{id}: {it.name}", it.value, "estimate", uncertainty=it.tolerance, why=why)
            for id, verdict in self.verdicts.items()
            for it in verdict.evidence
        )

    @property
    def _sentences(self) -> list[str]:
        return [f"{name}: {v.word.replace('_', ' ')}. {v.sentence}" for name, v in self.verdicts.items()]

    def _meaning(self) -> str:
        return " ".join(self._sentences)

    def __str__(self) -> str:
        failed = sum(row["status"] != "ok" for row in self.table.trials)
        account = (
            f"estimate, 95 % intervals over seeds; size {self.size}; {len(self.table.trials)} runs, {failed} not ok, "
            f"{self.seconds:.0f} s of runs; store {self.store}"
        )
        footer = "\n".join([*self._sentences, *self.remarks, account])
        return format_table(self._rows(), title=self._title(), footer=footer)


def criterion_document(claim: Claim, table: StudyTable) -> CriterionDocument:
    """Return a criterion and its verdict on a table, as a study's page shows them."""
    verdict = claim.judge_table(table)
    others = tuple(_sensitivity(claim, table)) if verdict.evidence else ()
    told = (claim.id, claim.printed, claim.criterion, verdict.word, verdict.sentence)
    return CriterionDocument(*told, margins=_margins(verdict), sensitivity=others)


def other_sizes(study: str, size: str, folder: Path) -> tuple[SizedVerdict, ...]:
    """Return what concluded runs of other sizes in a folder of stores say of each criterion."""
    sources = [source for source in own_runs(folder)[0].get(study, []) if source.document.size != size]
    judged = ((s.document.size, claim.id, claim.judge_table(s.table)) for s in sources for claim in criteria(study))
    return tuple(SizedVerdict(id, other, verdict.word, _margins(verdict)) for other, id, verdict in judged)


def _margins(verdict: Verdict) -> tuple[Margin, ...]:
    return tuple(Margin(i.name, i.value, i.tolerance, i.instances, i.least) for i in verdict.evidence)


def _sensitivity(claim: Claim, table: StudyTable) -> Iterator[Margin]:
    """Yield each contrast at the other values of a knob it holds fixed, where the table has them."""
    held = ((contrast, *item) for contrast in claim.contrasts for item in (contrast.at or {}).items())
    for contrast, knob in ((contrast, knob) for contrast, knob, value in held if value != EACH):
        taken = [each.at[knob] for each in contrast.resolve(table) if each.at]
        for value in dict.fromkeys(row[knob] for row in table.rows if knob in row and row[knob] not in taken):
            other = replace(contrast, at={**(contrast.at or {}), knob: value}, name="")
            with suppress(NotRun, DataError, ValueError, InputError):
                yield from _margins(poll(measure([other], table), least_effects([other], table)))


def reproduce(
    name: str,
    *,
    size: str = "small",
    out: str | Path = DEFAULT_FOLDER,
    executor: Executor | Workers | int | None = None,
    progress: bool | StudiesBar = True,
) -> Reproduced:
    """Run an experiment of the papers, judge the claims that depend on it, and keep both for `normgauge claims`.

    Finished runs are kept in `out/NAME-SIZE/runs.sqlite`: call again and only what is missing runs.

    Args:
        name: a study; `normgauge reproduce` lists them.
        size: "smoke" (proves it works), "small" (minutes), "medium" (hours, for some) or "paper" (as published).
        out: the folder of stores and pages.
        executor: a `concurrent.futures.Executor`, `Workers`, a number of processes, or `None` for one per core.
        progress: show a bar on stderr; or the bar of many studies to move.

    Raises:
        UnknownNameError: for an unknown study or size.
        DataError: when the data it needs is not here, with the command that gets it.
    """
    experiment = find(name)
    parts = experiment.parts(size)
    _need_data(experiment, size)
    crew = None if isinstance(executor, Executor | Workers) else Workers(executor)

    def run(specs: Sequence[dict[str, Any]], store: Store, label: str) -> None:
        sweep(specs, store, executor=crew or executor, task=execute, progress=progress, label=f"{name}: {label}")

    with Store(Path(out) / f"{name}-{size}" / STORE_NAME) as store, crew or nullcontext():
        for part in parts:
            run(_specs(experiment, part.plan()), store, "runs")
            more = part.confirmation(_settings(_choices(experiment, part, store)))
            run(_specs(experiment, more), store, "more seeds")
        return conclude(experiment, size, store)


def reproduce_shard(
    name: str,
    shard: tuple[int, int],
    *,
    size: str = "small",
    out: str | Path = DEFAULT_FOLDER,
    executor: Executor | Workers | int | None = None,
    progress: bool | StudiesBar = True,
) -> Path:
    """Run one of n parts of an experiment into a store of its own, for job arrays, and return the store's path.

    Knobs are chosen when all runs of the first round are there: the shards, `normgauge merge`, then `reproduce` on the
    joined store, which runs the remaining seeds. `shard` is `(i, n)`, see `normgauge.lab.runs.sweep.part_of`; the store
    is `out/NAME-SIZE-shard-i-n/runs.sqlite`; other arguments are those of `reproduce`.
    """
    experiment = find(name)
    specs = [spec for part in experiment.parts(size) for spec in _specs(experiment, part.plan())]
    _need_data(experiment, size)
    with Store(Path(out) / f"{name}-{size}-shard-{shard[0]}-{shard[1]}" / STORE_NAME) as store:
        label = f"{name}: shard {shard[0]}/{shard[1]}"
        sweep(specs, store, executor=executor, task=execute, shard=shard, progress=progress, label=label)
        return store.path


def conclude(experiment: Experiment, size: str, store: Store) -> Reproduced:
    """Judge what the store holds of an experiment, and keep the conclusion beside the runs."""
    ids: dict[str, None] = {}
    answering: set[str] = set()
    choices: list[Choice] = []
    remarks: list[str] = []
    for part in experiment.parts(size):
        tuned = _choices(experiment, part, store)
        answers = _specs(experiment, _answering_specs(part, _settings(tuned)) if part.nuisance else part.plan())
        answering |= {spec_id(spec) for spec in answers}
        ids |= dict.fromkeys(spec_id(spec) for spec in (*_specs(experiment, part.plan()), *answers))
        choices += tuned
        remarks += [remark for choice in tuned for remark in choice.remarks()] + _hopeless_arms(part, tuned)
    runs = store.runs(ids)
    table = tabulate(runs, answering, choices)
    origins = _origins(runs)
    result = Reproduced(
        experiment=experiment,
        size=size,
        table=table,
        verdicts={claim.id: claim.judge_table(table) for claim in criteria(experiment.name)},
        remarks=(*remarks, *_mixture(origins, store.path.parent.name)),
        seconds=sum(run.seconds for run in runs),
        store=store.path,
        origins=origins,
    )
    store.put_document(result.document())
    return result


def _hopeless_arms(part: Study, choices: Sequence[Choice]) -> list[str]:
    """Name the arms of which no run finished at any setting."""
    arms = (dict(zip(part.scientific, values, strict=True)) for values in product(*part.scientific.values()))
    alive = [dict(choice.arm) for choice in choices]
    names = [", ".join(f"{knob} {value}" for knob, value in arm.items()) for arm in arms if arm not in alive]
    return [f"{name}: no run finished at any setting tried." for name in names if part.nuisance]


def _mixture(origins: Sequence[Provenance], folder: str) -> list[str]:
    """Say when runs of several revisions are compared: a spec names what is run, not the code that runs it."""
    names = ", ".join(origin.code for origin in origins)
    line = f"These runs were made by {len(origins)} revisions of normgauge ({names}), which may differ in what"
    return [f"{line} they measure. Delete {folder} and run again to have all of one."] if len(origins) > 1 else []


def _origins(runs: Sequence[Run]) -> tuple[Provenance, ...]:
    """Return one provenance for each revision that made some of the runs, the last one last."""
    origins: dict[str, Provenance] = {}
    for run in runs:
        name = str((run.provenance.revision, run.provenance.versions))
        origins.pop(name, None)
        origins[name] = run.provenance
    return tuple(origins.values()) or (provenance(),)


def _need_data(experiment: Experiment, size: str) -> None:
    for name in dict.fromkeys(str(part.fixed["data"]) for part in experiment.parts(size) if "data" in part.fixed):
        data.load(name)  # says what is missing and which command gets it


def _specs(experiment: Experiment, plan: Iterable[Row]) -> list[dict[str, Any]]:
    return [{**spec, "study": experiment.name} for spec in plan]


def _choices(experiment: Experiment, part: Study, store: Store) -> list[Choice]:
    """Choose the tuned knobs of every arm from the runs of the first round."""
    if not part.nuisance:
        return []
    runs = store.runs(spec_id(spec) for spec in _specs(experiment, part.plan()))
    rows = [{**run.spec, **run.row()} for run in runs]
    knobs = {"over": list(part.nuisance), "within": list(part.scientific)}
    return choose(rows, by=experiment.choose_by, higher=experiment.choose_higher, **knobs)


def _settings(choices: Iterable[Choice]) -> list[dict[str, Any]]:
    return [{**choice.arm, **choice.setting} for choice in choices]


def _answering_specs(part: Study, settings: Iterable[Row]) -> list[dict[str, Any]]:
    """Return the specs that answer: every arm at its chosen setting, on the seeds that are judged."""
    return [{**dict(part.fixed), **arm, "seed": seed} for arm in settings for seed in part.judged]
