"""Which papers there are: the letter their ids begin with, the folder that holds them, the name people call them by."""

from __future__ import annotations

import ast
from dataclasses import dataclass, field
from functools import cache
from importlib.abc import Traversable
from importlib.resources import files
from typing import Any

from normgauge.references import bibliography, title


@dataclass(frozen=True, slots=True)
class Paper:
    """One paper, or the sentences of today's practice, which are judged the same way and have no studies.

    Attributes:
        id: what the ids of its claims begin with.
        key: its folder here, and its key in the bibliography.
        name: author and year, as people say it.
    """

    id: str
    key: str
    name: str

    @property
    def heading(self) -> str:
        """Its name, its letter and, where it is one text, its title."""
        return f"{self.name} ({self.id})" + (f": {title(self.key)}" if self.key in bibliography() else "")

    @property
    def folder(self) -> Traversable:
        """Where its claims, studies, tables and formulas are."""
        return files("normgauge.papers") / self.key

    def files(self, room: str) -> list[Traversable]:
        """Return what is in its `claims`, `studies` or `tables`: nothing where there is no such folder."""
        return list((self.folder / room).iterdir()) if (self.folder / room).is_dir() else []

    def modules(self, room: str) -> list[str]:
        """Return the modules of its `claims` or `studies`, sorted; what begins with an underscore is none."""
        names = [entry.name for entry in self.files(room)]
        stems = sorted(name.removesuffix(".py") for name in names if name.endswith(".py") and not name.startswith("_"))
        return [f"normgauge.papers.{self.key}.{room}.{stem}" for stem in stems]


PAPERS = {
    paper.id: paper
    for paper in (
        Paper("S0", "akbar2025", "Akbar 2025"),
        Paper("S1", "santurkar2018", "Santurkar et al. 2018"),
        Paper("S2", "than2025", "Than 2025"),
        Paper("S3", "batchnorm_article", "the encyclopedia article"),
        Paper("S4", "sun2020", "Sun et al. 2020"),
        Paper("P", "practice", "practice today"),
    )
}


@dataclass(frozen=True, slots=True)
class Listed:
    """A study as the list of `normgauge reproduce` shows it.

    Attributes:
        name: what the command is told.
        module: where it is written.
        papers: the letters of the papers it is about.
        place: section or figure.
        question: what it answers.
        data: data sets it needs.
        minutes: size -> minutes on two cores.
    """

    name: str
    module: str
    papers: tuple[str, ...]
    place: str
    question: str
    data: tuple[str, ...] = ()
    minutes: dict[str, float] = field(default_factory=dict)


@cache
def studies() -> dict[str, str]:
    """Return study -> its module, by file names alone."""
    modules = (module for paper in PAPERS.values() for module in paper.modules("studies"))
    return {module.rpartition(".")[2].replace("_", "-"): module for module in modules}


def list_studies() -> list[Listed]:
    """Return every study as it is listed, from the words of its declaration: no study is imported to be read about."""
    entries = []
    for name, module in studies().items():
        *_, key, room, stem = module.split(".")
        text = (files("normgauge.papers") / key / room / f"{stem}.py").read_text(encoding="utf-8")
        entries.append(Listed(name=name, module=module, **_read_declaration(text)))
    return sorted(entries, key=lambda study: (study.papers, study.name))


def _read_declaration(text: str) -> dict[str, Any]:
    """Return the plain values a file gives to `Experiment(...)`, of those a list shows."""
    wanted = {"papers", "place", "question", "data", "minutes"}
    calls = (node for node in ast.walk(ast.parse(text)) if isinstance(node, ast.Call))
    declaration = next(call for call in calls if isinstance(call.func, ast.Name) and call.func.id == "Experiment")
    return {word.arg: ast.literal_eval(word.value) for word in declaration.keywords if word.arg in wanted}
