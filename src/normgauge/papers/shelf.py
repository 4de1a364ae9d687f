"""Which papers there are: the letter their ids begin with, the folder that holds them, the name people call them by."""

import tomllib
from dataclasses import dataclass
from functools import cache
from importlib.abc import Traversable
from importlib.resources import files
from typing import Any

from normgauge.references import bibliography, title


@dataclass(frozen=True, slots=True)
class Paper:
    """One paper, or the sentences of today's practice, which are judged the same way and have no studies."""

    id: str  # what the ids of its claims begin with
    key: str  # its folder here, and its key in the bibliography
    name: str  # author and year, as people say it

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


_SHELF = (
    Paper("S0", "akbar2025", "Akbar 2025"),
    Paper("S1", "santurkar2018", "Santurkar et al. 2018"),
    Paper("S2", "than2025", "Than 2025"),
    Paper("S3", "batchnorm_article", "the encyclopedia article"),
    Paper("S4", "sun2020", "Sun et al. 2020"),
    Paper("P", "practice", "practice today"),
)
PAPERS = {paper.id: paper for paper in _SHELF}


@cache
def studies() -> dict[str, str]:
    """Return study -> its module, by file names alone."""
    modules = (module for paper in PAPERS.values() for module in paper.modules("studies"))
    return {module.rpartition(".")[2].replace("_", "-"): module for module in modules}


@cache
def study_words() -> dict[str, dict[str, Any]]:
    """Return study -> what is said of it, from its paper's `studies.toml`: no study is imported to be read about.

    `papers` (letters), `place`, `question`, `finding`, `proxy`, `data` (sets it needs), `minutes` (per size, on two
    cores), `parts` (arms and sizes), `figures`, and `criteria`: id -> sentences and contrasts.
    """
    words: dict[str, dict[str, Any]] = {}
    for paper in PAPERS.values():
        if (paper.folder / "studies.toml").is_file():
            told = tomllib.loads((paper.folder / "studies.toml").read_text(encoding="utf-8"))
            setting = told.pop("setting", "")
            for name, table in told.items():
                proxy = table["proxy"].replace("{setting}", setting)
                lists = {key: tuple(table.get(key, ())) for key in ("papers", "data")}
                words[name] = {"minutes": {}, **table, **lists, "proxy": proxy}
    return dict(sorted(words.items(), key=lambda item: (item[1]["papers"], item[0])))
