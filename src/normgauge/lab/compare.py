"""The main job: one network under several normalizers, over learning rates and seeds, in one store."""

from __future__ import annotations

import itertools
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Executor
from contextlib import nullcontext
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from statistics import fmean
from typing import Any, TypeVar

from torch import nn

from normgauge.documents import Arm, ComparisonDocument
from normgauge.errors import InputError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.comparison import METRICS, Comparison, judge, name_arms, primary_metric
from normgauge.lab.question import arm_rates, command_of, comparison_study, first_round, is_own_grid
from normgauge.lab.race import Pair, Race, Trial, halve, in_words, race, setting_beyond
from normgauge.lab.runs.executors import Workers
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.recipe import Recipe, equip
from normgauge.lab.runs.run import measure_costs
from normgauge.lab.runs.sweep import part_of, sweep
from normgauge.lab.sentence import Exam, RaceEnd, twins
from normgauge.lab.study import Study
from normgauge.records import Run
from normgauge.store import DONE, STORE_NAME, Store, spec_id

T = TypeVar("T")
#: Seeds of a race that are measured in full: the others are for the answer alone.
MEASURED_SEEDS = 3


def compare(
    *,
    model: str | nn.Module | Callable[..., Any] = "vgg",
    data: str | Callable[..., Any] | None = None,
    norms: Sequence[str] | None = None,
    rates: Sequence[float] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    size: str = "small",
    ddp: int = 1,
    statistics: str = "replica",
    recipe: Recipe | None = None,
    arms: Mapping[str, Sequence[Any]] | None = None,
    minutes: float | None = None,
    margin: float | None = None,
    out: str | Path = "normgauge-out",
    executor: Executor | int | None = None,
    progress: bool = True,
) -> Comparison:
    """Train the same network in several ways and say which one to use here, or what it would cost to tell.

    Each arm's learning rate is tuned on validation data; arms are compared on test data, paired by seed. Finished runs
    are kept in `out/runs.sqlite`: call again with the same settings and only what is missing runs. Print the
    comparison, or take its `.frame()`, `.chart()`, `.answer`.

    With `minutes` the arms race: rates are searched by halving on seeds of their own (`lab.race.halve`), then seeds are
    added where they decide (`lab.race.race`) until the answer is known or the time is spent. Without, every arm gets
    all its rates on two seeds, one rate more where the best is the edge of the optimizer's own grid, and all seeds at
    its best rate.

    Kind: estimate, with 95 % intervals over seeds, in a race over all its looks. Cost: a race about arms x (1.5 rates +
    4 to 64 seeds) runs; else arms x (2 rates + seeds - 2).

    Args:
        model: mlp, vgg, resnet, dln, gpt; a function `factory(norm) -> nn.Module` of a module, or its name
            `package.module:factory`; a function of no normalizer that builds one network, or a module (kept in `out`),
            or a file that `torch.save(module, file)` wrote, whose normalizers are exchanged by `ng.swap_norms`. Every
            run of a module starts from its weights. Sources belong to the runs' identity: see `imports.code_digests`.
        data: a name, path or function as `normgauge.lab.data.load` takes it; by default gaussian for dln, text for gpt,
            else digits. The arrays of a path or function belong to the identity of the runs.
        norms: names of the normalizer registry; "as built" too for a network without a factory.
        rates: learning rates, tuned for each arm; by default those usual for the optimizer.
        seeds: how many seeds at each arm's best rate; of a race, at most.
        steps: how many steps of the optimizer.
        batch: the batch size; full batch for the Gaussian regression, else 128.
        size: "smoke" or "small", which gives what is not said.
        ddp: processes that share each run's batches.
        statistics: with `ddp` > 1, "replica" (each process its own batch statistics) or "synced" (those of all).
        recipe: optimizer, schedule, clipping, augmentation, own step, loss and metric; plain SGD by default.
        arms: knob -> values to compare beside the normalizers: any knob of the recipe, steps, batch, or a keyword of
            the factory (gpt: place, qk, width, depth, heads). Every combination is an arm.
        minutes: the budget of a race.
        margin: of a race, the largest difference that does not matter; 0.005 for accuracies (half a point), else 0.
        out: the folder of the store.
        executor: a `concurrent.futures.Executor`, a number of processes, or `None` for one per core.
        progress: show a progress bar on stderr.
    """
    if isinstance(model, nn.Module):
        model = models.keep_model(model, Path(out))
        if not models.is_everywhere(model):
            if executor not in (None, 1):
                rule = "other processes must know the module: its class stands in a file of its own, and can be pickled"
                raise InputError("compare", rule, model, "Move the class there, or leave executor out")
            executor = 1
    asked: dict[str, Any] = {"model": model, "data": data, "norms": norms, "rates": rates, "seeds": seeds}
    asked |= {"steps": steps, "batch": batch, "size": size, "ddp": ddp, "statistics": statistics}
    asked |= {"recipe": recipe, "arms": arms}
    study = comparison_study(**asked, raced=minutes is not None)
    with Store(Path(out) / STORE_NAME) as store:
        if minutes is not None:
            return race_study(study, store, minutes=minutes, margin=margin, executor=executor, progress=progress)
        specs = first_round(study)
        sweep(specs, store, executor=executor, progress=progress, label="tuning the rates")
        for label, round_after in (("beyond the grid", _beyond_the_grid), ("more seeds", _second_round)):
            more = round_after(study, conclude(study, store, specs))
            if more:
                sweep(more, store, executor=executor, progress=progress, label=label)
                specs += more
        return conclude(study, store, specs, priced=True)


def race_study(
    study: Study,
    store: Store,
    *,
    minutes: float,
    margin: float | None = None,
    executor: Executor | int | None = None,
    progress: bool = True,
) -> Comparison:
    """Search the rates by halving, then let the arms race until the answer is known or the minutes are spent.

    The study is one of `comparison_study(raced=True)`, whose tuning seeds are not judged; what the store holds costs no
    time. Other arguments are those of `compare`.
    """
    if not minutes > 0 or not (margin is None or margin >= 0):
        rule = "minutes are positive, the margin is not negative"
        raise InputError("race", rule, f"{minutes}, {margin}", "Correct it")
    deadline = time.monotonic() + 60 * minutes
    with Workers(executor) if not isinstance(executor, Executor) else nullcontext(executor) as crew:
        runner = _Runner(study, store, crew, deadline, progress)
        metric, exam = runner.metric, runner.exam
        rates = {name: arm_rates(study, spec) for name, spec in runner.arms.items()}
        usual = all(is_own_grid(study, rates[name], spec) for name, spec in runner.arms.items())
        chosen = halve(runner.tune, rates, higher=metric.better == "higher", extend=usual)
        terms = RaceEnd(None, study.tried, (0.005 if metric.unit == "%" else 0.0) if margin is None else margin)

        def finish(ended: RaceEnd, *, priced: bool = False) -> Comparison:
            return conclude(study, store, runner.specs, ended=ended, minutes=minutes, priced=priced)

        if time.monotonic() > deadline or not chosen:
            return finish(replace(terms, note=_budget_too_small(runner, minutes)))
        runner.rates = chosen
        same = twins([Arm(runner.knobs[name], {}, 0, {}, name=name) for name in chosen], store.runs(runner.ids()))
        racing = [name for name in chosen if name not in same]
        if len(racing) < 2:  # nothing to race: its seeds are run as far as the budget goes
            runner.judge([(name, seed) for seed in list(study.judged)[:MEASURED_SEEDS] for name in racing])
            return finish(replace(terms, race=Race(racing[0], MEASURED_SEEDS, {})), priced=True)
        design: dict[str, Any] = {"margin": terms.margin, "bounds": metric.bounds, "higher": metric.better == "higher"}
        design |= {"seeds": study.seeds, "first_seed": study.tried, "budget": deadline - time.monotonic()}
        least = 1 / exam.samples if metric.unit == "%" else 0.0
        look = lambda state: finish(replace(terms, race=state))  # noqa: E731
        ended = race(runner.judge, racing, least=least, price=runner.price, on_look=look, **design)
        note = _budget_too_small(runner, minutes)
        return finish(replace(terms, race=ended if ended.seeds else None, note=note), priced=ended.seeds > 0)


def _budget_too_small(runner: _Runner, minutes: float) -> str:
    kept, more = len(runner.finished()), in_words(runner.first_look_seconds())
    said = f"{minutes:g} minutes were too few, {kept} runs are kept. The first look at the arms takes about {more} more"
    return f"{said}: run the same command again, with more --minutes."


class _Runner:
    """Runs what a race asks for into the store, and remembers which specs those were."""

    def __init__(self, study: Study, store: Store, crew: Executor | Workers, deadline: float, progress: bool) -> None:
        self.study, self.store, self.crew, self.deadline, self.progress = study, store, crew, deadline, progress
        knobs = [dict(zip(study.scientific, v, strict=True)) for v in itertools.product(*study.scientific.values())]
        self.knobs = dict(zip(name_arms(knobs), knobs, strict=True))
        self.arms = {name: {**study.fixed, **some} for name, some in self.knobs.items()}
        dataset = equip(datasets.load(study.fixed["data"]), study.fixed)
        self.metric, self.exam = primary_metric(dataset, study.fixed), Exam.of(dataset)
        self.specs: list[dict[str, Any]] = []
        self.rates: dict[str, float] = {}

    def tune(self, trials: Sequence[Trial]) -> dict[Trial, float]:
        """Run trials of rates, which read the validation data and little else."""
        specs = {(name, rate, seed): {**self._light(name), "lr": rate, "seed": seed} for name, rate, seed in trials}
        return self._scores(specs, self.metric.name.replace("test", "validation"), "searching the rates")

    def judge(self, pairs: Sequence[Pair]) -> dict[Pair, float]:
        """Run arms at their rates; the first seeds are measured in full."""
        specs = {(name, seed): self._judged(name, seed) for name, seed in pairs}
        return self._scores(specs, self.metric.name, f"racing {len({name for name, _ in pairs})} arms")

    def price(self, pairs: Sequence[Pair]) -> float:
        """Return about how many seconds runs take that are not stored yet."""
        there, pace = self.store.finished(), self._pace()
        missing = [name for name, seed in pairs if spec_id(self._judged(name, seed)) not in there]
        return sum(pace[name] for name in missing) / min(self._jobs(), max(len(missing), 1))

    def first_look_seconds(self) -> float:
        """Return about how long it takes from here to the first look."""
        seeds = list(self.study.judged)[:4]
        if self.rates:
            return self.price([(name, seed) for name in self.rates for seed in seeds])
        tries = sum(1.5 * len(arm_rates(self.study, spec)) + len(seeds) for spec in self.arms.values())
        return max(0.0, tries - len(self.finished())) * fmean(self._pace().values()) / self._jobs()

    def _jobs(self) -> int:
        return self.crew.jobs if isinstance(self.crew, Workers) else getattr(self.crew, "_max_workers", 1)

    def _pace(self) -> dict[str, float]:
        """Return arm -> mean seconds of its runs, the judged ones if there are any; of all arms' if it has none."""
        runs = [run for run in self.finished() if run.status in DONE]
        usual = fmean(run.seconds for run in runs) if runs else 1.0
        pace = {}
        for name, knobs in self.knobs.items():
            own = [run for run in runs if all(run.spec[knob] == value for knob, value in knobs.items())]
            judged = [run for run in own if run.spec["seed"] >= self.study.tried]
            pace[name] = fmean(run.seconds for run in judged or own) if own else usual
        return pace

    def ids(self) -> list[str]:
        """Return the ids of all runs asked for so far."""
        return [spec_id(spec) for spec in self.specs]

    def finished(self) -> list[Run]:
        """Return those that were run."""
        return self.store.runs(self.ids())

    def _light(self, name: str) -> dict[str, Any]:
        spec = self.arms[name]
        return {**spec, "measure_at": [0, spec["steps"]], "measure_batch": 0}

    def _judged(self, name: str, seed: int) -> dict[str, Any]:
        full = seed - self.study.tried < MEASURED_SEEDS
        spec = self.arms[name] if full else self._light(name)
        return {**spec, "lr": self.rates[name], "seed": seed}

    def _scores(self, specs: Mapping[T, dict[str, Any]], reading: str, label: str) -> dict[T, float]:
        wanted = list(specs.values())
        self.specs += [spec for spec in wanted if spec not in self.specs]
        how: dict[str, Any] = {"executor": self.crew, "progress": self.progress, "deadline": self.deadline}
        sweep(wanted, self.store, label=label, **how)
        runs = {spec_id(run.spec): run for run in self.store.runs([spec_id(spec) for spec in specs.values()])}
        there = {key: runs[spec_id(spec)] for key, spec in specs.items() if spec_id(spec) in runs}
        values = {key: run.last(reading) if run.ok else None for key, run in there.items()}
        return {key: math.nan if value is None else value for key, value in values.items()}


@dataclass(frozen=True)
class ShardDone:
    """What one shard of a comparison did: runs run now, runs of this shard, round 1 to 3, and its store."""

    ran: int
    runs: int
    round: int
    store: Path

    def __str__(self) -> str:
        return f"round {self.round}: {self.runs} runs of this shard are in {self.store}, {self.ran} of them run now"


def compare_shard(
    shard: tuple[int, int],
    study: Study,
    *,
    out: str | Path = "normgauge-out",
    executor: Executor | int | None = None,
    progress: bool = True,
) -> ShardDone:
    """Run one of n parts of a comparison into a store of its own, for job arrays; `normgauge merge` joins the stores.

    The rates are chosen when all their runs are there. So a comparison has rounds: the shards of the first, a merge,
    and then `compare` on the joined store, which tries rates beyond the grid and runs the remaining seeds, or shards
    again on copies of it: one more round for the rates beyond the grid, if any, and one for the seeds.

    `shard` is `(i, n)`, see `normgauge.lab.runs.sweep.part_of`; the study, of `comparison_study`, is the same for all
    shards, and no two of them may share a folder `out`. Other arguments are those of `compare`.
    """
    plan, label = first_round(study), f"shard {shard[0]}/{shard[1]}"
    with Store(Path(out) / STORE_NAME) as store:
        number, specs = 1, plan
        for round_after in (_beyond_the_grid, _second_round):
            if not {spec_id(spec) for spec in plan} <= store.ids():
                break
            more = round_after(study, conclude(study, store, specs))
            if more or round_after is _second_round:
                number, plan, specs = number + 1, more, [*specs, *more]
        if number == 1:
            store.put_document(_blank_document(study))  # so that a merge knows what the runs are about
        ran = sweep(plan, store, executor=executor, shard=shard, progress=progress, label=label)
        return ShardDone(ran, len(part_of(plan, shard)), number, store.path)


def _beyond_the_grid(study: Study, first: Comparison) -> list[dict[str, Any]]:
    """Return one more rate for each arm whose best one is the smallest or largest of the optimizer's own grid.

    A grid of two has nothing between its ends, so that every choice would extend it: it is left as it is.
    """
    more = []
    for arm in first.document.arms:
        spec = {**study.fixed, **arm.knobs}
        rates = arm_rates(study, spec)
        further = setting_beyond(rates, arm.setting.get("lr")) if is_own_grid(study, rates, spec) else None
        if further is not None:
            more += [{**spec, "lr": further, "seed": seed} for seed in range(study.tried)]
    return sorted(more, key=lambda spec: int(spec["seed"]))


def _second_round(study: Study, first: Comparison) -> list[dict[str, Any]]:
    return study.confirmation([{**arm.knobs, **arm.setting} for arm in first.document.arms if arm.setting])


def conclude(
    study: Study,
    store: Store,
    specs: Sequence[dict[str, Any]],
    *,
    ended: RaceEnd | None = None,
    minutes: float | None = None,
    priced: bool = False,
) -> Comparison:
    """Judge the stored runs of these specs, and write what was found beside them.

    `ended` says how a race ended, `minutes` what budget it had; `priced` measures what a step of each arm costs, which
    takes some seconds.
    """
    ids = tuple(spec_id(spec) for spec in specs)
    runs = store.runs(ids)
    dataset = equip(datasets.load(study.fixed["data"]), study.fixed)
    terms: dict[str, Any] = {"tuning_seeds": study.tried, "exam": Exam.of(dataset), "rates": study.nuisance["lr"]}
    terms |= {"asked": study.scientific, "primary": primary_metric(dataset, study.fixed), "ended": ended}
    found = judge(runs, **terms)
    if priced:
        lines = [arm for arm in found.arms if arm.setting]
        costs = measure_costs({arm.title: {**study.fixed, **arm.knobs, **arm.setting, "seed": 0} for arm in lines})
        found = judge(runs, **terms, costs=costs)
    blank = _blank_document(study, minutes, None if ended is None else ended.margin)
    metrics = tuple(dict.fromkeys((terms["primary"], *METRICS)))
    document = replace(blank, metrics=metrics, runs=ids, **vars(found))
    store.put_document(document)
    return Comparison(document, store.path, Counter(run.status for run in runs))


def _blank_document(study: Study, minutes: float | None = None, margin: float | None = None) -> ComparisonDocument:
    about: dict[str, Any] = {"provenance": provenance(), "command": command_of(study, minutes, margin)}
    finished = datetime.now(UTC).isoformat(timespec="seconds")
    return ComparisonDocument(study.describe(), METRICS, (), "", False, (), finished=finished, **about)
