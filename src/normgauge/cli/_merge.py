"""`normgauge merge`: join the stores of shards."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated

import typer


def merge(
    stores: Annotated[list[Path], typer.Argument(help="Stores (runs.sqlite) or folders that hold one.")],
    out: Annotated[Path, typer.Option(help="The folder to join them in.")] = Path("normgauge-out"),
) -> None:
    """Join the stores of shards: every run once; merging again changes nothing."""
    from normgauge.lab import merge as join

    typer.echo(join(stores, out))
