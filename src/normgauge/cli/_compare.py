"""`normgauge compare`: the main job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normgauge.cli._console import console
from normgauge.errors import InputError, NormgaugeError, require
from normgauge.records import plain

if TYPE_CHECKING:
    from normgauge.lab import Comparison

DATA = (
    "digits, gaussian, cifar10, cifar100, fashion-mnist (see `normgauge data`), the path of a folder of images, or "
    "package.module:function; cifar10:10000/1000/2000 takes that many [default: digits, or gaussian for dln]."
)


def compare(
    model: Annotated[str, typer.Option(help="vgg, mlp, resnet, dln, or package.module:factory.")] = "vgg",
    data: Annotated[str | None, typer.Option(help=DATA)] = None,
    norms: Annotated[str, typer.Option(help="Normalizers, comma-separated; `all` for every registered one.")] = (
        "none,batch,layer,group,instance,weight"
    ),
    rates: Annotated[str | None, typer.Option(help="Learning rates to tune over, comma-separated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per setting.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps of SGD per run.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Batch size.")] = None,
    size: Annotated[str, typer.Option(help="smoke proves it works; small answers in minutes.")] = "small",
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes [default: one per core].")] = None,
    cluster: Annotated[str | None, typer.Option(help="Address of a Dask scheduler that runs them instead.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only the i-th of n parts; join with normgauge merge.")] = None,
    ddp: Annotated[int, typer.Option(min=1, help="Processes that share each run's batches.")] = 1,
    statistics: Annotated[str, typer.Option(help="With --ddp: replica or synced batch statistics.")] = "replica",
    out: Annotated[Path, typer.Option(help="Folder for the store and report.html.")] = Path("normgauge-out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")] = False,
) -> None:
    """Train one network under several normalizers and say which one to use here.

    Finished runs are kept in OUT/runs.sqlite: interrupt at any time and run the same command again to go on.
    """
    from normgauge.lab import compare as run_comparison
    from normgauge.lab import compare_shard
    from normgauge.lab.compare import ShardDone
    from normgauge.lab.runs.executors import cluster_executor
    from normgauge.lab.runs.sweep import parse_shard
    from normgauge.report import page_of_store

    check_folder(out)
    for package in ("altair", "vl_convert"):
        require(package, "lab", "normgauge compare")  # before the runs, not after them
    notes = console(stderr=True)
    job: Callable[..., Comparison | ShardDone]
    job = run_comparison if shard is None else partial(compare_shard, parse_shard(shard))
    try:
        with cluster_executor(cluster) if cluster else nullcontext(jobs) as executor:
            result = job(
                model=model,
                data=data,
                norms=_names(norms),
                rates=_numbers(rates),
                seeds=seeds,
                steps=steps,
                batch=batch,
                size=size,
                ddp=ddp,
                statistics=statistics,
                out=out,
                executor=executor,
            )
    except KeyboardInterrupt:
        notes.print(f"\nInterrupted. Finished runs are in {out}; run the same command again to go on from there.")
        raise typer.Exit(130) from None
    if isinstance(result, ShardDone):
        typer.echo(result)
        failures = list_failures(result.store)
        for failure in failures:
            notes.print(failure)
        raise typer.Exit(1 if failures else 0)
    failures = list_failures(result.store, result.document.runs)
    if not as_json:  # the answer first: whatever becomes of the page, it is there
        console().print(str(result))
        trouble = ", ".join(f"{count} {status}" for status, count in result.counts.items() if status != "ok")
        notes.print(f"\n{result.counts.get('ok', 0)} runs ok{', ' + trouble if trouble else ''}.")
    for failure in failures:
        notes.print(failure)
    page: Path | None = None
    try:
        page = page_of_store(result.store, out / "report.html")
    except (OSError, NormgaugeError) as error:
        notes.print(f"The page was not written: {error} The runs are in {result.store}; see normgauge report --help.")
    if as_json:
        document = {
            "rows": result.rows,
            "answer": result.answer,
            "decided": result.decided,
            "counts": result.counts,
            "failures": failures,
            "store": result.store,
            "report": page,
        }
        typer.echo(json.dumps(plain(document), indent=2))
    elif page is not None:
        notes.print(f"Open {page} for curves, settings and every run.")
    if failures or page is None:
        raise typer.Exit(1)


def list_failures(store: Path, ids: Sequence[str] | None = None) -> list[str]:
    """Name the stored runs that failed, those of one reason in one line, and say how to go on."""
    from normgauge.store import DONE, Store, spec_id

    reasons: dict[str, list[str]] = {}
    with Store(store, write=False) as opened:
        for run in opened.runs(ids):
            if run.status not in DONE:
                knobs = [knob for knob in ("study", "norm", "lr", "seed") if knob in run.spec]
                name = ", ".join(f"{knob} {run.spec[knob]}" for knob in knobs) or spec_id(run.spec)
                reasons.setdefault(f"{run.status}: {run.sentence}", []).append(name)
    lines = []
    for why, names in reasons.items():
        more = f" and {len(names) - 3} more" if len(names) > 3 else ""
        lines.append(f"{'; '.join(names[:3])}{more}: {why}")
    return [*lines, "The same command tries them again."] if lines else []


def check_folder(out: Path) -> None:
    """Refuse a file where a folder is meant, before anything runs."""
    blocked = next((part for part in (out, *out.parents) if part.exists()), None)
    if blocked is not None and not blocked.is_dir():
        rule = "the name of a folder, made if it is not there"
        raise InputError("--out", rule, f"the file {blocked}", "Name another one")


def _names(text: str) -> list[str]:
    from normgauge.nn import registry

    if text.strip() == "all":
        return list(registry.names())
    names = [name.strip() for name in text.split(",") if name.strip()]
    if not names:
        raise InputError("--norms", "name at least one normalizer", repr(text), f"Known: {', '.join(registry.names())}")
    return names


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",") if part.strip()] or None
    except ValueError as error:
        raise InputError(
            "--rates", "learning rates are numbers separated by commas", repr(text), "Write --rates 0.1,0.3,1"
        ) from error
