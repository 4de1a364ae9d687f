"""`normgauge report`: redraw the page from a store, without models or data."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer

from normgauge.errors import StoreError, explain


def report(
    store: Annotated[Path, typer.Argument(help="A store (runs.sqlite) or the folder that holds one.")],
    out: Annotated[Path | None, typer.Option(help="The page to write; report.html beside the store by itself.")] = None,
) -> None:
    """Write the HTML page of stored runs: self-contained, opens by double click."""
    from normgauge.report import page_of_store
    from normgauge.store import STORE_NAME

    path = store / STORE_NAME if store.is_dir() else store
    if not path.exists():
        raise StoreError(
            explain("report", "STORE is a file runs.sqlite or its folder", str(store), "Run normgauge compare first")
        )
    typer.echo(page_of_store(path, out or path.with_name("report.html")))
