"""Where the verbs print: words wrap at the terminal's width and never inside; a pipe or file gets lines as they are."""

from __future__ import annotations

import typer
from rich.console import Console
from typer.core import TyperGroup

from normgauge.records import text_width


def console(*, stderr: bool = False) -> Console:
    """Return a console for plain text; notes go to stderr, answers to stdout."""
    return Console(stderr=stderr, soft_wrap=text_width() is None, highlight=False, markup=False)


class FullSentences(TyperGroup):
    """A group of commands whose list gives the whole first sentence of each."""

    def format_commands(self, ctx: typer.Context, formatter: object) -> None:  # type: ignore[override]
        """Write each command with its sentence."""
        with formatter.section("Commands"):  # type: ignore[attr-defined]
            sentences = {name: (command.help or "").split("\n\n")[0] for name, command in self.commands.items()}
            formatter.write_dl([(name, " ".join(text.split())) for name, text in sentences.items()])  # type: ignore[attr-defined]
