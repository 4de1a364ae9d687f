"""Where the verbs print: words wrap at the terminal's width and never inside; a pipe or file gets lines as they are."""

import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import typer
from rich.console import Console
from rich.highlighter import RegexHighlighter
from rich.theme import Theme
from typer.core import TyperGroup

from normgauge.records import text_width


class _Verdicts(RegexHighlighter):
    """Colours verdicts and severities, which stand there as words too."""

    base_style = "verdict."
    highlights = [  # noqa: RUF012 (rich declares it so)
        r"(?P<good>\bholds\b(?! with)|\breproduced\b(?=[.,;)\s]|$))",
        r"(?m)(?P<warn>\bholds with correction\b|\btoo small to tell\b|\bpremise absent\b|^WARNING\b)",
        r"(?m)(?P<bad>\bfalse as stated\b|\bcontradicted\b|\bfails\b|^ERROR\b|^error:)",
        r"(?m)(?P<mute>\bnot run\b|^INFO\b)",
    ]


def console(*, stderr: bool = False) -> Console:
    """Return a console for plain text; notes go to stderr, answers to stdout; colour on terminals, without NO_COLOR."""
    theme = Theme({"verdict.good": "green", "verdict.warn": "yellow", "verdict.bad": "bold red", "verdict.mute": "dim"})
    return Console(stderr=stderr, soft_wrap=text_width() is None, highlighter=_Verdicts(), markup=False, theme=theme)


@contextmanager
def judging_bar(notes: Console, total: int) -> Iterator[Callable[[str, int, int], None]]:
    """Yield what shows how far the judges are: a bar on a terminal, a line for every quarter elsewhere."""
    from rich.progress import Progress

    if not notes.is_terminal:
        quarters = {math.ceil(total * k / 4) for k in (1, 2, 3, 4)}
        yield lambda name, done, total: notes.print(f"judged {done} of {total}") if done in quarters else None
        return
    with Progress(console=notes, transient=True) as bar:
        task = bar.add_task("judging", total=total)
        yield lambda name, done, total: bar.update(task, completed=done, description=name)


class FullSentences(TyperGroup):
    """A group of commands whose list gives the whole first sentence of each."""

    def format_commands(self, ctx: typer.Context, formatter: object) -> None:  # type: ignore[override]
        """Write each command with its sentence."""
        with formatter.section("Commands"):  # type: ignore[attr-defined]
            sentences = {name: (command.help or "").split("\n\n")[0] for name, command in self.commands.items()}
            formatter.write_dl([(name, " ".join(text.split())) for name, text in sentences.items()])  # type: ignore[attr-defined]
