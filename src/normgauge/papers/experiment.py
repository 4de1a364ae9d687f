"""`Experiment`: a study of a paper at three sizes, with the paper's finding, its figures and remarks."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from normgauge.documents import SIZES, About
from normgauge.errors import InputError, explain, unknown_name
from normgauge.lab.study import Study
from normgauge.papers.shelf import PAPERS
from normgauge.records import Spec

if TYPE_CHECKING:
    import altair

    from normgauge.papers.court import StudyTable

Record = Callable[..., None]


@dataclass(frozen=True, slots=True)
class Figure:
    """One picture of a study's page: a short file name, the chart, and what to see in it."""

    name: str
    chart: altair.TopLevelMixin
    caption: str


@dataclass(frozen=True)
class Experiment:
    """A named study of a paper: what it asks, what the paper found, how it runs at three sizes, how it is shown.

    How it is judged stands above it in the same file: `empirical` and `finding` of the court, each criterion once.

    Args:
        name: what `normgauge reproduce NAME` is told.
        papers: `S0` ... `S4`.
        place: section or figure.
        question: what the study answers.
        finding: what the paper says came out.
        proxy: how the small size differs from the published setting.
        sizes: size -> one study, or several where arms have different knobs.
        run: `run(spec, record)`: one run; `record(step, name, value, layer=, kind=)` writes readings, the last value
            of each name is the run's result. It raises `NonFiniteError` when it diverged; what was recorded stays.
        figures: table -> the pictures of its page.
        remarks: table -> sentences with the numbers a reader wants; computed, never written in advance.
        columns: the readings shown in the page's table; all of them when empty.
        choose_by: the reading that tuned knobs are chosen by (on validation data).
        choose_higher: whether larger is better there.
        data: data sets it needs at small and paper size.
        minutes: measured or expected minutes on two cores, per size.
        cite: bibliography keys.

    Raises:
        InputError: when a size is missing, or knobs are tuned and nothing says by what.
    """

    name: str
    papers: tuple[str, ...]
    place: str
    question: str
    finding: str
    proxy: str
    sizes: Mapping[str, Study | Sequence[Study]]
    run: Callable[[Spec, Record], None]
    figures: Callable[[StudyTable], Sequence[Figure]]
    remarks: Callable[[StudyTable], Sequence[str]] = field(default=lambda table: ())
    columns: tuple[str, ...] = ()
    choose_by: str = ""
    choose_higher: bool = True
    data: tuple[str, ...] = ()
    minutes: Mapping[str, float] = field(default_factory=dict)
    cite: tuple[str, ...] = ()

    def __post_init__(self) -> None:
        """Refuse an experiment that could not be run at a promised size."""
        missing = [size for size in SIZES if size not in self.sizes]
        tuned = any(study.nuisance for size in self.sizes for study in self.parts(size))
        if missing or (tuned and not self.choose_by):
            lack = f"no {', '.join(missing)}" if missing else "tuned knobs and an empty choose_by"
            rule = "an experiment has a smoke, a small and a paper size, and says by what its knobs are tuned"
            raise InputError(explain(f"Experiment({self.name})", rule, lack, "Add it"))

    def parts(self, size: str) -> tuple[Study, ...]:
        """Return the studies of a size.

        Raises:
            UnknownNameError: for another word than smoke, small, paper.
        """
        if size not in self.sizes:
            raise unknown_name("size", size, SIZES)
        parts = self.sizes[size]
        return (parts,) if isinstance(parts, Study) else tuple(parts)

    def about(self, size: str, measured: Sequence[str] = ()) -> About:
        """Return what its page says whatever the runs say; `measured` readings are shown if it names no columns."""
        parts = self.parts(size)
        knobs = dict.fromkeys([k for p in parts for k in p.scientific] + [k for p in parts for k in p.nuisance])
        return About(
            papers=tuple(PAPERS[paper].name for paper in self.papers),
            place=self.place,
            question=self.question,
            finding=self.finding,
            proxy=self.proxy,
            knobs=tuple(knobs),
            columns=self.columns or tuple(measured),
            command=f"normgauge reproduce {self.name} --size {size}",
        )
