"""The `normgauge` command: verbs, exit codes, and errors as sentences instead of stack traces."""

from __future__ import annotations

import sys
from typing import Annotated

import typer
from rich.console import Console

from normgauge.cli._claims import claims
from normgauge.cli._compare import compare
from normgauge.cli._data import data
from normgauge.cli._report import report
from normgauge.cli._reproduce import reproduce
from normgauge.cli._symmetries import symmetries
from normgauge.errors import NormgaugeError

app = typer.Typer(
    name="normgauge",
    help="See what normalization did to your network, and which normalizer to use.",
    no_args_is_help=True,
    add_completion=False,
    pretty_exceptions_enable=False,
    rich_markup_mode=None,
)
app.command()(compare)
app.command()(data)
app.command()(symmetries)
app.command()(claims)
app.command()(reproduce)
app.command()(report)


def _show_version(wanted: bool) -> None:
    if wanted:
        from normgauge import __version__

        typer.echo(f"normgauge {__version__}")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the version and exit.")
    ] = False,
) -> None:
    """See what normalization did to your network, and which normalizer to use."""


def main() -> None:
    """Run the command line: exit code 0 fine, 1 findings or refuted expectation, 2 wrong use, 130 interrupted."""
    try:
        app()
    except NormgaugeError as error:
        Console(stderr=True, soft_wrap=True).print(f"error: {error}", markup=False, highlight=False, style="red")
        sys.exit(2)
    except KeyboardInterrupt:
        sys.exit(130)
