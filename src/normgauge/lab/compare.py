"""The main job: one network under several normalizers, over learning rates and seeds, in one store."""

from __future__ import annotations

import math
import shlex
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import Executor
from dataclasses import dataclass, replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from normgauge.documents import ComparisonDocument
from normgauge.errors import InputError, unknown_name
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.comparison import METRICS, Comparison, judge
from normgauge.lab.imports import name_of
from normgauge.lab.runs.digests import own_digests
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.replicas import STATISTICS
from normgauge.lab.runs.sweep import part_of, sweep
from normgauge.lab.sentence import Exam
from normgauge.lab.study import Study
from normgauge.store import STORE_NAME, Store, spec_id

DEFAULT_NORMS = ("none", "batch", "layer", "group", "instance", "weight")
# What each size fixes: smoke proves that everything works, small gives an answer in under three minutes.
SIZES: dict[str, dict[str, Any]] = {
    "smoke": {"rates": (0.1, 1.0), "seeds": 2, "tuning_seeds": 1, "steps": 12, "measured": 2},
    "small": {"rates": (0.03, 0.1, 0.3, 1.0, 3.0), "seeds": 8, "tuning_seeds": 2, "steps": 80, "measured": 4},
}


def comparison_study(
    *,
    model: str | Callable[..., Any] = "vgg",
    data: str | Callable[..., Any] | None = None,
    norms: Sequence[str] = DEFAULT_NORMS,
    rates: Sequence[float] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    size: str = "small",
    ddp: int = 1,
    statistics: str = "replica",
) -> Study:
    """Return the study `compare` runs, after checking every name and number in it.

    Args:
        model: mlp, vgg, resnet, dln, or a function `factory(norm) -> nn.Module` of a module, or its name
            `package.module:factory`. Its source belongs to the identity of the runs: see `lab.imports.code_digests`.
        data: a name, path or function as `normgauge.lab.data.load` takes it; by default gaussian for dln, else digits.
            The arrays of a path or function belong to the identity of the runs.
        norms: names of the normalizer registry.
        rates: learning rates of SGD, tuned for each normalizer; where the best of the size's own grid of three or more
            is its smallest or largest, one more beyond it is tried. Rates of your own are taken as they are.
        seeds: how many seeds at each normalizer's best rate; the rates themselves are tried on two of them.
        steps: how many steps of SGD.
        batch: the batch size; full batch for the Gaussian regression, else 128.
        size: "smoke" or "small", which gives what is not said.
        ddp: processes that share each run's batches.
        statistics: with `ddp` > 1, "replica" (each process its own batch statistics) or "synced" (those of all).

    Raises:
        UnknownNameError: for a model, data set or normalizer that is not known.
        InputError: for numbers out of range.
    """
    if size not in SIZES:
        raise unknown_name("size", size, SIZES)
    if statistics not in STATISTICS:
        raise unknown_name("statistics", statistics, STATISTICS)
    model = name_of(model) if callable(model) else model
    data = name_of(data) if callable(data) else data
    preset = SIZES[size]
    dataset = datasets.load(data or ("gaussian" if model == "dln" else "digits"))
    chosen = tuple(float(rate) for rate in (rates or preset["rates"]))
    count = preset["steps"] if steps is None else steps
    if not all(0 < rate < math.inf for rate in chosen) or count < 1 or (batch is not None and batch < 2):
        raise InputError(
            "compare",
            "rates are positive and finite, steps at least 1, the batch at least 2",
            f"rates={list(chosen)}, steps={count}, batch={batch}",
            "Correct the option",
        )
    whole = batch or (len(dataset.train[1]) if dataset.task == "regression" else min(128, len(dataset.train[1])))
    if ddp > 1 and (whole < ddp or whole % ddp):
        rule = "the batch is a multiple of the number of processes that share it"
        raise InputError("compare", rule, f"batch={whole}, ddp={ddp}", f"Pass --batch {ddp * (whole // ddp or 1)}")
    for norm in dict.fromkeys(norms):
        models.build(model, norm, dataset.shape, dataset.classes, seed=0)  # fail before the first run, by name
    samples = len(dataset.train[1])
    repeats = preset["seeds"] if seeds is None else seeds
    regression = dataset.task == "regression"
    return Study(
        name="compare",
        title=f"Which normalizer for {model} on {dataset.name}?",
        question=f"How do training, curvature and landscape of {model} on {dataset.name} depend on the normalizer?",
        scientific={"norm": list(dict.fromkeys(norms))},
        nuisance={"lr": list(chosen)},
        fixed={
            "model": model,
            "data": dataset.name,
            "optimizer": "sgd",
            "steps": count,
            "batch": whole,
            "measure_at": measuring_steps(count, preset["measured"]),
            "measure_batch": min(64, samples),
            "target_loss": 1.0 if regression else 0.5,
            **({"ddp": ddp, "statistics": statistics} if ddp > 1 else {}),
            **own_digests(model, dataset),
        },
        seeds=repeats,
        tuning_seeds=min(preset["tuning_seeds"], repeats),
        cite=("santurkar2018", "ioffe2015"),
    )


def measuring_steps(steps: int, count: int) -> list[int]:
    """Return `count` steps at which to measure: the start, the end, and more of them early, when most happens.

    Examples:
        >>> measuring_steps(80, 5)
        [0, 5, 20, 45, 80]
    """
    return sorted({round(steps * (index / (count - 1)) ** 2) for index in range(count)})


def compare(
    *,
    model: str | Callable[..., Any] = "vgg",
    data: str | Callable[..., Any] | None = None,
    norms: Sequence[str] = DEFAULT_NORMS,
    rates: Sequence[float] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    size: str = "small",
    ddp: int = 1,
    statistics: str = "replica",
    out: str | Path = "normgauge-out",
    executor: Executor | int | None = None,
    progress: bool = True,
) -> Comparison:
    """Train the same network under several normalizers and say which one to use here, or that one cannot tell.

    Each normalizer's learning rate is tuned on validation data; arms are compared on test data, paired by seed.
    Finished runs are kept in `out/runs.sqlite`: call again with the same settings and only what is missing runs.

    Kind: estimate, with 95 % intervals over seeds. Cost: norms x (2 rates + seeds - 2) runs, and 2 for each
    normalizer whose best rate was at the edge of the grid.

    Args:
        model: mlp, vgg, resnet, dln, or a function `factory(norm) -> nn.Module` of a module, or its name
            `package.module:factory`. Its source belongs to the identity of the runs: see `lab.imports.code_digests`.
        data: a name, path or function as `normgauge.lab.data.load` takes it; by default gaussian for dln, else digits.
            The arrays of a path or function belong to the identity of the runs.
        norms: names of the normalizer registry.
        rates: learning rates of SGD, tuned for each normalizer; where the best of the size's own grid of three or more
            is its smallest or largest, one more beyond it is tried. Rates of your own are taken as they are.
        seeds: how many seeds at each normalizer's best rate; the rates themselves are tried on two of them.
        steps: how many steps of SGD.
        batch: the batch size; full batch for the Gaussian regression, else 128.
        size: "smoke" or "small", which gives what is not said.
        ddp: processes that share each run's batches.
        statistics: with `ddp` > 1, "replica" (each process its own batch statistics) or "synced" (those of all).
        out: the folder of the store.
        executor: a `concurrent.futures.Executor`, a number of processes, or `None` for one per core.
        progress: show a progress bar on stderr.

    Returns:
        The comparison: print it, or take `.frame()`, `.chart()`, `.answer`.
    """
    study = comparison_study(
        model=model,
        data=data,
        norms=norms,
        rates=rates,
        seeds=seeds,
        steps=steps,
        batch=batch,
        size=size,
        ddp=ddp,
        statistics=statistics,
    )
    with Store(Path(out) / STORE_NAME) as store:
        sweep(study, store, executor=executor, progress=progress, label="tuning the rates")
        specs = study.plan()
        for label, round_after in (("beyond the grid", _beyond_the_grid), ("more seeds", _second_round)):
            more = round_after(study, conclude(study, store, specs))
            if more:
                sweep(more, store, executor=executor, progress=progress, label=label)
                specs += more
        return conclude(study, store, specs)


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
    *,
    model: str | Callable[..., Any] = "vgg",
    data: str | Callable[..., Any] | None = None,
    norms: Sequence[str] = DEFAULT_NORMS,
    rates: Sequence[float] | None = None,
    seeds: int | None = None,
    steps: int | None = None,
    batch: int | None = None,
    size: str = "small",
    ddp: int = 1,
    statistics: str = "replica",
    out: str | Path = "normgauge-out",
    executor: Executor | int | None = None,
    progress: bool = True,
) -> ShardDone:
    """Run one of n parts of a comparison into a store of its own, for job arrays; `normgauge merge` joins the stores.

    The rates are chosen when all their runs are there. So a comparison has rounds: the shards of the first, a merge,
    and then `compare` on the joined store, which tries rates beyond the grid and runs the remaining seeds, or shards
    again on copies of it: one more round for the rates beyond the grid, if any, and one for the seeds.

    Args:
        shard: `(i, n)`; see `normgauge.lab.runs.sweep.part_of`.
        model: as in `compare`, and the same for all shards; so are the settings that follow.
        data: as in `compare`.
        norms: as in `compare`.
        rates: as in `compare`.
        seeds: as in `compare`.
        steps: as in `compare`.
        batch: as in `compare`.
        size: as in `compare`.
        ddp: as in `compare`.
        statistics: as in `compare`.
        out: the folder of this shard's store; no two shards may share one.
        executor: as in `compare`.
        progress: show a progress bar on stderr.
    """
    study = comparison_study(
        model=model,
        data=data,
        norms=norms,
        rates=rates,
        seeds=seeds,
        steps=steps,
        batch=batch,
        size=size,
        ddp=ddp,
        statistics=statistics,
    )
    plan, label = study.plan(), f"shard {shard[0]}/{shard[1]}"
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
    """Return one more rate for each normalizer whose best one is the smallest or largest of the size's own grid.

    A grid of two has nothing between its ends, so that every choice would extend it: it is left as it is.
    """
    grid = sorted(study.nuisance["lr"])
    if len(grid) < 3 or tuple(grid) != SIZES[_size_of(study)]["rates"]:
        return []
    # the grid goes on in the rhythm of its last two steps: 0.3, 1, 3 is followed by 10
    beyond = {grid[0]: grid[1] * grid[0] / grid[2], grid[-1]: grid[-2] * grid[-1] / grid[-3]}
    return [
        {**study.fixed, "norm": norm, "lr": float(f"{beyond[setting['lr']]:.2g}"), "seed": seed}
        for seed in range(study.tried)
        for norm, setting in first.chosen.items()
        if setting["lr"] in beyond
    ]


def _second_round(study: Study, first: Comparison) -> list[dict[str, Any]]:
    return study.confirmation([{"norm": norm, **setting} for norm, setting in first.chosen.items()])


def conclude(study: Study, store: Store, specs: Sequence[dict[str, Any]]) -> Comparison:
    """Judge the stored runs of these specs, and write what was found beside them."""
    ids = tuple(spec_id(spec) for spec in specs)
    runs = store.runs(ids)
    exam = Exam.of(datasets.load(study.fixed["data"]))
    arms, answer, decided = judge(runs, tuning_seeds=study.tried, exam=exam, rates=study.nuisance["lr"])
    document = replace(_blank_document(study), arms=arms, answer=answer, decided=decided, runs=ids)
    store.put_document(document)
    return Comparison(document, store.path, Counter(run.status for run in runs))


def _blank_document(study: Study) -> ComparisonDocument:
    return ComparisonDocument(
        question=study.describe(),
        metrics=METRICS,
        arms=(),
        answer="",
        decided=False,
        runs=(),
        provenance=provenance(),
        command=command_of(study),
        finished=datetime.now(UTC).isoformat(timespec="seconds"),
    )


def _size_of(study: Study) -> str:
    """Return the size whose presets the study has where no option says otherwise: measured steps and tuning seeds."""
    steps, measured = study.fixed["steps"], list(study.fixed["measure_at"])
    return next(
        size
        for size, preset in SIZES.items()
        if measuring_steps(steps, preset["measured"]) == measured
        and min(preset["tuning_seeds"], study.seeds) == study.tried
    )


def command_of(study: Study) -> str:
    """Return the command that runs this comparison again, from any machine that has the model and the data."""
    fixed = study.fixed
    words = {
        "--model": fixed["model"],
        "--data": fixed["data"],
        "--norms": ",".join(study.scientific["norm"]),
        "--rates": ",".join(f"{rate:g}" for rate in study.nuisance["lr"]),
        "--seeds": str(study.seeds),
        "--steps": str(fixed["steps"]),
        "--batch": str(fixed["batch"]),
        "--size": _size_of(study),
    }
    if "ddp" in fixed:
        words |= {"--ddp": str(fixed["ddp"]), "--statistics": fixed["statistics"]}
    return "normgauge compare " + " ".join(f"{option} {shlex.quote(value)}" for option, value in words.items())
