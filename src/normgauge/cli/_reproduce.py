"""`normgauge reproduce`: the papers' experiments, listed or run."""

from __future__ import annotations

import json
from concurrent.futures import Executor
from pathlib import Path
from typing import TYPE_CHECKING, Annotated

import typer

from normgauge.cli._compare import check_folder, tell_failures
from normgauge.cli._console import console
from normgauge.errors import NormgaugeError, require

if TYPE_CHECKING:
    from normgauge.lab.runs.executors import Workers
    from normgauge.lab.runs.progress import StudiesBar


def reproduce(
    name: Annotated[str | None, typer.Argument(help="A study; without it the list of all.")] = None,
    size: Annotated[str, typer.Option(help="smoke: seconds; small: minutes; paper: the published setting.")] = "small",
    every: Annotated[bool, typer.Option("--all", help="Run every study, one after the other.")] = False,
    jobs: Annotated[int | None, typer.Option(min=1, help="Worker processes [default: one per core].")] = None,
    cluster: Annotated[str | None, typer.Option(help="Address of a Dask scheduler, as tcp://host:8786.")] = None,
    shard: Annotated[str | None, typer.Option(help="i/n: only this part of the runs, for job arrays.")] = None,
    out: Annotated[Path, typer.Option(help="Folder for stores and pages.")] = Path("normgauge-studies"),
    as_json: Annotated[bool, typer.Option("--json", help="Print one JSON document on stdout, nothing else.")] = False,
) -> None:
    """Run an experiment of the papers, judge the claims that depend on it, and write its page.

    Finished runs are kept in OUT/NAME-SIZE/runs.sqlite: interrupt at any time and run the same command again.
    """
    if name is None and not every:
        _list(as_json)
        return
    from normgauge.lab.runs.executors import Workers, cluster_executor
    from normgauge.lab.runs.sweep import parse_shard

    check_folder(out)
    for package in ("altair", "vl_convert"):
        require(package, "lab", "normgauge reproduce")  # before the runs, not after them
    part = None if shard is None else parse_shard(shard)
    with cluster_executor(cluster) if cluster else Workers(jobs) as executor:
        if every:
            documents = _reproduce_all(size, executor, part, out, quiet=as_json)
        else:
            documents = [_reproduce_one(str(name), size, executor, part, out, quiet=as_json, bar=None)]
    if as_json:
        typer.echo(json.dumps(documents if every else documents[0], indent=2, default=str))
    if any(document.get("failures") or document.get("page", "") is None for document in documents):
        raise typer.Exit(1)


def _reproduce_all(
    size: str, executor: Executor | Workers, shard: tuple[int, int] | None, out: Path, *, quiet: bool
) -> list[dict[str, object]]:
    from normgauge.lab.runs.progress import StudiesBar, note_session
    from normgauge.papers.studies import experiments

    studies = experiments()
    documents = []
    with StudiesBar({study: item.minutes.get(size, 1.0) for study, item in studies.items()}) as bar:
        for study, item in studies.items():
            parts = item.parts(size)
            runs = sum(part.runs for part in parts)
            if shard is not None:  # the second round waits for all shards
                runs = sum(len(part.plan()) for part in parts) // shard[1]
            with bar.study(study, runs):
                documents.append(_reproduce_one(study, size, executor, shard, out, quiet=quiet, bar=bar))
        done = sum("status" not in document for document in documents)
        took = f"{bar.ran} runs in {bar.minutes:.1f} min, the others were there."
        bar.note(f"{done} of {len(studies)} studies done; {took}")
    note_session(out, size, done, bar, getattr(executor, "jobs", None))
    return documents


def _reproduce_one(
    study: str,
    size: str,
    executor: Executor | Workers,
    shard: tuple[int, int] | None,
    out: Path,
    *,
    quiet: bool,
    bar: StudiesBar | None,
) -> dict[str, object]:
    from normgauge.errors import DataError
    from normgauge.papers.reproduce import reproduce as run
    from normgauge.papers.reproduce import reproduce_shard
    from normgauge.records import plain
    from normgauge.report import Picture, write_study

    note = bar.note if bar else console(stderr=True).print
    progress = bar or True
    try:
        if shard is not None:
            store = reproduce_shard(study, shard, size=size, out=out, executor=executor, progress=progress)
            note(f"Shard done: {store}. Join the shards: normgauge merge STORE... --out {out}/{study}-{size}")
            return {"study": study, "store": str(store), "failures": tell_failures(store, note)}
        result = run(study, size=size, out=out, executor=executor, progress=progress)
    except DataError as error:
        if bar is None:
            raise
        note(f"{study}: not run: no data. {error}")
        return {"study": study, "status": "not run: no data", "sentence": str(error)}
    except KeyboardInterrupt:
        note(f"\nInterrupted. Finished runs are in {out}; run the same command again to go on from there.")
        raise typer.Exit(130) from None
    if not quiet:  # the answer first: whatever becomes of the page, it is there
        console().print(str(result) + "\n")
    failures = tell_failures(result.store, note)
    page: Path | None = None
    try:
        pictures = [Picture(*entry) for entry in result.pictures()]
        page = write_study(result.about, result.document(), pictures, result.store.parent)
    except (OSError, NormgaugeError) as error:
        note(f"The page was not written: {error} The runs are in {result.store}: the same command tries again.")
    if page is not None and not quiet:
        note(f"Open {page} for figures and numbers; `normgauge claims` knows these runs now.")
    answer = {**plain(result.about), **plain(result.document()), "failures": failures}
    return {**answer, "page": None if page is None else str(page), "store": str(result.store)}


def _list(as_json: bool) -> None:
    from normgauge.papers.shelf import PAPERS, study_words
    from normgauge.records import format_table

    rows = [
        {
            "study": name,
            "paper": ", ".join(PAPERS[paper].name for paper in told["papers"]),
            "place": told["place"],
            "question": told["question"],
            "small": f"{told['minutes']['small']:g} min" if "small" in told["minutes"] else "-",
            "data": ", ".join(told["data"]) or "-",
        }
        for name, told in study_words().items()
    ]
    if as_json:
        typer.echo(json.dumps(rows, indent=2))
        return
    told = [f"{row['question']} ({row['paper']}, {row['place']})" for row in rows]
    rows = [
        {k: row[k] for k in ("study", "small", "data")} | {"question": q} for row, q in zip(rows, told, strict=True)
    ]
    footer = "Run one with `normgauge reproduce NAME`; minutes are of the small size on two cores."
    typer.echo(format_table(rows, title="Experiments of the papers", footer=footer))
