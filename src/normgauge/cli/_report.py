"""`normgauge report` redraws the page of a store, without models or data; `normgauge merge` joins those of shards."""

from pathlib import Path
from typing import Annotated

import typer

from normgauge.errors import StoreError


def report(
    store: Annotated[Path, typer.Argument(help="A store (runs.sqlite) or the folder that holds one.")],
    against: Annotated[Path | None, typer.Option(help="An earlier store: what changed, and is it real?")] = None,
    out: Annotated[Path | None, typer.Option(help="The page to write [default: report.html beside the store].")] = None,
) -> None:
    """Write the HTML page of stored runs: self-contained, opens by double click."""
    from normgauge.report import changes_between, page_of_store

    path = _store_file(store)
    changes = None if against is None else changes_between(path, _store_file(against))
    if changes is not None:
        typer.echo(changes)
    page = path.parent / "report.html" if out is None else out
    typer.echo(page_of_store(path, page / "report.html" if page.is_dir() else page, changes))


def _store_file(place: Path) -> Path:
    from normgauge.store import STORE_NAME

    path = place / STORE_NAME if place.is_dir() else place
    if not path.exists():
        rule, step = "STORE is a file runs.sqlite or its folder", "Run normgauge compare first"
        raise StoreError("report", rule, str(place), step)
    return path


def merge(
    stores: Annotated[list[Path], typer.Argument(help="Stores (runs.sqlite) or folders that hold one.")],
    out: Annotated[Path, typer.Option(help="The folder to join them in.")] = Path("normgauge-out"),
) -> None:
    """Join the stores of shards: every run once; merging again changes nothing."""
    from normgauge.lab import merge as join

    typer.echo(join(stores, out))
