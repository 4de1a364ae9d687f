"""`normgauge compare`: the main job."""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from contextlib import nullcontext
from functools import partial
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from normgauge.cli._console import console
from normgauge.cli._watch import serve_live
from normgauge.errors import InputError, NormgaugeError, require
from normgauge.records import plain

if TYPE_CHECKING:
    from normgauge.lab import Comparison
    from normgauge.lab.compare import ShardDone

OPTIMIZERS = ("sgd", "momentum", "adamw", "muon", "sphere-sgd", "sphere-adam")
NORMS = "Normalizers, by commas; `all`; `as built` for no factory [default: none,batch,layer,group,instance,weight]."
ARM = "knob=value,value: compare these too, as optimizer=sgd,adamw, clip=none,1 or place=pre,post; again for more."
DATA = "digits, text, gaussian; cifar10, cifar100, fashion-mnist (`normgauge data`), cifar10:10000/1000/2000 for so "
DATA += "many; a folder of images; or package.module:function [default: digits; gaussian for dln, text for gpt]."


def compare(
    model: Annotated[str, typer.Option(help="vgg, mlp, resnet, dln, gpt, package.module:factory, or net.pt.")] = "vgg",
    data: Annotated[str | None, typer.Option(help=DATA)] = None,
    norms: Annotated[str | None, typer.Option(help=NORMS)] = None,
    rates: Annotated[str | None, typer.Option(help="Learning rates to tune over, comma-separated.")] = None,
    seeds: Annotated[int | None, typer.Option(min=1, help="Seeds per setting.")] = None,
    steps: Annotated[int | None, typer.Option(min=1, help="Steps per run.")] = None,
    batch: Annotated[int | None, typer.Option(min=2, help="Batch size.")] = None,
    minutes: Annotated[float | None, typer.Option(help="Race: add seeds until it is decided or this is spent.")] = None,
    margin: Annotated[float | None, typer.Option(help="Of a race: a difference that does not matter.")] = None,
    optimizer: Annotated[str, typer.Option(help=f"{', '.join(OPTIMIZERS)}, or package.module:function.")] = "sgd",
    weight_decay: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    momentum: Annotated[float | None, typer.Option(help="Of the optimizer.")] = None,
    schedule: Annotated[str, typer.Option(help="constant, cosine, step, warmup or warmup-cosine.")] = "constant",
    clip: Annotated[float | None, typer.Option(help="Largest norm of the gradient.")] = None,
    augment: Annotated[bool, typer.Option("--augment", help="Shift and flip images.")] = False,
    train_step: Annotated[str | None, typer.Option(help="package.module:step(network, batch, optimizer).")] = None,
    loss: Annotated[str | None, typer.Option(help="package.module:loss(outputs, targets).")] = None,
    metric: Annotated[str | None, typer.Option(help="package.module:metric(outputs, targets), to judge by.")] = None,
    better: Annotated[str, typer.Option(help="higher or lower, of the metric.")] = "higher",
    arm: Annotated[list[str] | None, typer.Option(help=ARM)] = None,
    size: Annotated[str, typer.Option(help="smoke proves it works; small answers in minutes.")] = "small",
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes [default: one per core].")] = None,
    cluster: Annotated[str | None, typer.Option(help="Address of a Dask scheduler that runs them instead.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only the i-th of n parts; join with normgauge merge.")] = None,
    ddp: Annotated[int, typer.Option(min=1, help="Processes that share each run's batches.")] = 1,
    statistics: Annotated[str, typer.Option(help="With --ddp: replica or synced batch statistics.")] = "replica",
    live: Annotated[bool, typer.Option("--live", help="Serve the page on this machine while runs finish.")] = False,
    out: Annotated[Path, typer.Option(help="Folder for the store and report.html.")] = Path("normgauge-out"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")] = False,
) -> None:
    """Train one network under several normalizers, optimizers or other knobs, and say which one to use here.

    Finished runs are kept in OUT/runs.sqlite: interrupt at any time and run the same command again to go on.
    """
    from normgauge.lab import Recipe, compare_shard
    from normgauge.lab import compare as run_comparison
    from normgauge.lab.compare import ShardDone
    from normgauge.lab.question import comparison_study
    from normgauge.lab.runs.executors import cluster_executor
    from normgauge.lab.runs.sweep import parse_shard
    from normgauge.report import page_of_store
    from normgauge.store import STORE_NAME

    check_folder(out)
    if shard is not None and minutes is not None:
        rule, step = "a race decides as it goes, so that it has no shards", "Leave out --shard or --minutes"
        raise InputError("--shard", rule, "both", step)
    for package in ("altair", "vl_convert"):
        require(package, "lab", "normgauge compare")  # before the runs, not after them
    notes = console(stderr=True)
    own: dict[str, Any] = {"train_step": train_step, "loss": loss, "metric": metric, "better": better}
    own |= {"optimizer": optimizer, "weight_decay": weight_decay, "momentum": momentum}
    recipe = Recipe(schedule=schedule, clip=clip, augment=augment, **own)
    asked: dict[str, Any] = {"model": model, "data": data, "norms": None if norms is None else _names(norms)}
    asked |= {"rates": _numbers(rates), "seeds": seeds, "steps": steps, "batch": batch, "size": size, "ddp": ddp}
    asked |= {"statistics": statistics, "recipe": recipe, "arms": dict(map(_arm, arm or ()))}
    serving = serve_live(partial(_live_page, out / STORE_NAME), notes.print) if live else nullcontext()
    result: Comparison | ShardDone
    try:
        with cluster_executor(cluster) if cluster else nullcontext(jobs) as executor, serving:
            if shard is None:
                result = run_comparison(**asked, minutes=minutes, margin=margin, out=out, executor=executor)
            else:
                result = compare_shard(parse_shard(shard), comparison_study(**asked), out=out, executor=executor)
    except KeyboardInterrupt:
        notes.print(f"\nInterrupted. Finished runs are in {out}; run the same command again to go on from there.")
        raise typer.Exit(130) from None
    if isinstance(result, ShardDone):
        typer.echo(result)
        raise typer.Exit(1 if tell_failures(result.store, notes.print) else 0)
    if not as_json:  # the answer first: whatever becomes of the page, it is there
        console().print(str(result))
        trouble = ", ".join(f"{count} {status}" for status, count in result.counts.items() if status != "ok")
        notes.print(f"\n{result.counts.get('ok', 0)} runs ok{', ' + trouble if trouble else ''}.")
    failures = tell_failures(result.store, notes.print, result.document.runs)
    page: Path | None = None
    try:
        page = page_of_store(result.store, out / "report.html")
    except (OSError, NormgaugeError) as error:
        notes.print(f"The page was not written: {error} The runs are in {result.store}; see normgauge report --help.")
    if as_json:
        document = {name: getattr(result, name) for name in ("rows", "answer", "decided", "counts", "store")}
        document |= {"failures": failures, "report": page}
        typer.echo(json.dumps(plain(document), indent=2))
    elif page is not None:
        notes.print(f"Open {page} for curves, settings and every run.")
    if failures or page is None:
        raise typer.Exit(1)


def tell_failures(store: Path, tell: Callable[[str], object], ids: Sequence[str] | None = None) -> list[str]:
    """Name the stored runs that failed, those of one reason in one line, and say how to go on; return the lines."""
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
    lines += ["The same command tries them again."] if lines else []
    for line in lines:
        tell(line)
    return lines


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


def _arm(text: str) -> tuple[str, list[Any]]:
    """Read `knob=value,value`: numbers, true, false and none as such, all else as words."""
    knob, _, values = text.partition("=")
    parts = [part.strip() for part in values.split(",") if part.strip()]
    if not knob.strip() or not parts:
        raise InputError("--arm", "knob=value,value", repr(text), "Write --arm optimizer=sgd,adamw, for instance")
    words: dict[str, Any] = {"none": None, "true": True, "false": False}
    return knob.strip(), [words[part] if part in words else _number(part) for part in parts]


def _number(part: str) -> Any:
    for kind in (int, float):
        try:
            return kind(part)
        except ValueError:
            continue
    return part


def _live_page(store: Path) -> str:
    """Return the page of a store as it stands, which loads itself anew."""
    from normgauge.report import live_page

    if not store.exists():
        return "<!doctype html><meta http-equiv=refresh content=2><title>normgauge</title>No run has finished yet."
    return live_page(store, seconds=10)


def _numbers(text: str | None) -> list[float] | None:
    if text is None:
        return None
    try:
        return [float(part) for part in text.split(",") if part.strip()] or None
    except ValueError as error:
        rule, step = "learning rates are numbers separated by commas", "Write --rates 0.1,0.3,1"
        raise InputError("--rates", rule, repr(text), step) from error
