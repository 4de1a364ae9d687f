"""`normgauge report`: redraw the page from a store, without models or data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normgauge.errors import StoreError


def report(
    store: Annotated[Path, typer.Argument(help="A store (runs.sqlite) or the folder that holds one.")],
    out: Annotated[Path | None, typer.Option(help="The page to write [default: report.html beside the store].")] = None,
) -> None:
    """Write the HTML page of stored runs: self-contained, opens by double click."""
    from normgauge.report import page_of_store
    from normgauge.store import STORE_NAME

    path = store / STORE_NAME if store.is_dir() else store
    if not path.exists():
        raise StoreError(
            "report", "STORE is a file runs.sqlite or its folder", str(store), "Run normgauge compare first"
        )
    page = path.parent / "report.html" if out is None else out
    typer.echo(page_of_store(path, page / "report.html" if page.is_dir() else page))
