"""`normgauge claims`: the ledger of the papers' claims, judged here and now."""

import os
from pathlib import Path
from typing import Annotated

import typer

from normgauge.cli._console import console, judging_bar
from normgauge.records import text_width, wrap_words


def claims(
    id: Annotated[list[str] | None, typer.Option(help="Show this claim in full (repeatable), as S1-T4.1.")] = None,
    paper: Annotated[str | None, typer.Option(help="Only this paper: S0, S1, S2, S3, S4; or P, practice.")] = None,
    index: Annotated[bool, typer.Option("--index", help="List what the papers number, and where it is here.")] = False,
    html: Annotated[Path | None, typer.Option(help="Write the claims as one browsable page to this file.")] = None,
    json: Annotated[bool, typer.Option("--json", help="Print a JSON list on stdout and nothing else.")] = False,
    runs: Annotated[Path | None, typer.Option("--from", help="Your own runs [default: normgauge-studies].")] = None,
    shipped: Annotated[bool, typer.Option("--shipped", help="Judge from the shipped runs only.")] = False,
    seed: Annotated[int, typer.Option(help="From which the judges draw their instances.")] = 0,
    workers: Annotated[int, typer.Option(help="Processes; 0 takes one per core.")] = 0,
) -> None:
    """Judge what the papers say: printed, corrected, and the numbers that decide (exit code 1 if a judge fails).

    Experiments are judged from the runs that ship with normgauge, and from your own: those supersede the shipped ones
    at equal or larger size, otherwise both are shown.
    """
    from normgauge.errors import InputError
    from normgauge.papers.court import DEFAULT_FOLDER, ledger

    if shipped and runs is not None:
        raise InputError("claims", "either --from or --shipped", "both", "Leave one out")
    if runs is None and not shipped and Path(DEFAULT_FOLDER).is_dir():
        runs = Path(DEFAULT_FOLDER)
    if index:
        from normgauge.papers.index import index_json, index_text, read_index

        if id or html is not None:
            raise InputError("claims --index", "it goes with --paper and --json", "--id or --html", "Leave it out")
        entries = read_index(paper)
        named = {name for entry in entries for name in entry.claims}
        book = ledger(ids=sorted(named), seed=seed, runs=runs)
    else:
        book = ledger(paper=paper, ids=id or None, seed=seed, runs=runs)
    notes = console(stderr=True)
    for sentence in book.trouble:
        notes.print(sentence)
    with judging_bar(notes, len(book)) as progress:
        book = book.judge(workers=(workers or os.cpu_count() or 1) if len(book) > 4 else 1, progress=progress)
    if html is not None:
        from normgauge.documents import write_whole
        from normgauge.report import ledger_page

        write_whole(html, ledger_page(book))
    if index:
        typer.echo((index_json if json else index_text)(entries, book))
    elif json:
        typer.echo(book.json())
    elif html is not None:
        typer.echo(html)
    elif id:
        told = "\n\n".join(book.explain(claim.id) for claim in book)
        console().print(wrap_words(told, text_width()))
    else:
        console().print(str(book))
    if any(claim.status == "error" for claim in book):
        raise typer.Exit(1)
