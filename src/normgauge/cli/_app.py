"""The `normgauge` command: verbs, exit codes, and errors as sentences instead of stack traces."""

import os
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from importlib import metadata
from typing import Annotated, Any

import typer

from normgauge.cli._advise import advise
from normgauge.cli._claims import claims
from normgauge.cli._compare import compare
from normgauge.cli._console import FullSentences, console
from normgauge.cli._data import data
from normgauge.cli._doctor import doctor
from normgauge.cli._report import merge, report
from normgauge.cli._reproduce import reproduce
from normgauge.cli._surgery import surgery
from normgauge.cli._symmetries import symmetries
from normgauge.cli._watch import watch
from normgauge.errors import NormgaugeError

look: dict[str, Any] = {"add_completion": False, "pretty_exceptions_enable": False, "rich_markup_mode": None}
app = typer.Typer(name="normgauge", cls=FullSentences, no_args_is_help=True, **look)
VERBS: tuple[Callable[..., None], ...] = (doctor, advise, compare, data, merge, symmetries, surgery, claims, reproduce)
VERBS += (report, watch)
for verb in VERBS:
    app.command()(verb)


def _show_version(wanted: bool) -> None:
    if wanted:
        from normgauge import __version__

        python = ".".join(map(str, sys.version_info[:3]))
        typer.echo(f"normgauge {__version__} (torch {metadata.version('torch')}, Python {python})")
        raise typer.Exit


@app.callback()
def options(
    version: Annotated[
        bool, typer.Option("--version", callback=_show_version, is_eager=True, help="Show the versions and exit.")
    ] = False,
) -> None:
    """See what normalization did to your network, and which normalizer to use."""


def main() -> None:
    """Run the command line.

    Exit code 0 fine, 1 findings, refuted expectation or failed runs, 2 wrong use, 130 interrupted (143 by SIGTERM).
    """
    with _signals() as received:
        try:
            app()
        except NormgaugeError as error:
            console(stderr=True).print(f"error: {error}", style="red")
            sys.exit(2)
        except (KeyboardInterrupt, SystemExit) as stop:
            if received and getattr(stop, "code", 130) == 130:
                exec("")  # forgets an interrupt that came inside of another exec: Python would die of it at exit
                sys.exit(128 + received[0])
            raise


@contextmanager
def _signals() -> Iterator[list[int]]:
    """Let SIGTERM clean up as Ctrl-C does, and let a second signal end the process at once: its workers end with it."""
    received: list[int] = []

    def stop(number: int, frame: object) -> None:
        received.append(number)
        if len(received) > 1:
            os._exit(128 + received[0])
        raise KeyboardInterrupt

    if threading.current_thread() is not threading.main_thread():  # others may not touch signals
        yield received
        return
    before = {number: signal.signal(number, stop) for number in (signal.SIGINT, signal.SIGTERM)}
    try:
        yield received
    finally:
        for number, handler in before.items():  # once stopped, a late signal must neither print nor kill
            signal.signal(number, signal.SIG_IGN if received else handler)
