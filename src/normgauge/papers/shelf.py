"""Which papers there are: the letter their ids begin with, the folder that holds them, the name people call them by."""

from __future__ import annotations

from dataclasses import dataclass
from importlib.abc import Traversable
from importlib.resources import files


@dataclass(frozen=True, slots=True)
class Paper:
    """One paper.

    Attributes:
        id: what the ids of its claims begin with.
        key: its folder here, and its key in the bibliography.
        name: author and year, as people say it.
    """

    id: str
    key: str
    name: str

    @property
    def folder(self) -> Traversable:
        """Where its claims, studies, tables and formulas are."""
        return files("normgauge.papers") / self.key

    def modules(self, room: str) -> list[str]:
        """Return the modules of its `claims` or `studies`, sorted; what begins with an underscore is none."""
        names = (entry.name for entry in (self.folder / room).iterdir())
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
    )
}
