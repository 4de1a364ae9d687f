"""Name -> experiment, and the task that workers are given: a run's spec names the study it belongs to."""

from __future__ import annotations

import importlib
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace

from normgauge.errors import NormgaugeError, unknown_name
from normgauge.lab.runs.run import guard_run
from normgauge.lab.study import Study
from normgauge.papers.experiment import Experiment, Record
from normgauge.papers.figures import Figure
from normgauge.papers.shelf import studies, study_words
from normgauge.records import Run, Spec

_EXPERIMENTS: dict[str, Experiment] = {}


def register(
    name: str,
    *,
    sizes: Mapping[str, Study | Sequence[Study]],
    run: Callable[[Spec, Record], None],
    figures: tuple[Figure, ...],
    choose_by: str = "",
    choose_higher: bool = True,
) -> Experiment:
    """Add an experiment to those of `normgauge reproduce`; what is said of it is in its paper's `studies.toml`.

    Raises:
        NormgaugeError: when the name is taken.
    """
    if name in _EXPERIMENTS:
        raise NormgaugeError("register", "an experiment's name is its own", name, "Choose another name")
    words = {key: value for key, value in study_words()[name].items() if key != "criteria"}
    notes = words.pop("figures", {})
    shown = tuple(replace(figure, note=notes.get(figure.first, figure.note)) for figure in figures)
    made = Experiment(
        name=name, sizes=sizes, run=run, figures=shown, choose_by=choose_by, choose_higher=choose_higher, **words
    )
    _EXPERIMENTS[name] = made
    return made


def experiments() -> dict[str, Experiment]:
    """Return every experiment by name, in the order of papers and files."""
    for name in studies():
        find(name)
    return dict(sorted(_EXPERIMENTS.items(), key=lambda item: (item[1].papers, item[0])))


def find(name: str) -> Experiment:
    """Return an experiment by name; its file is imported, and no other study's.

    Raises:
        UnknownNameError: for a name that is not known, with the nearest one.
    """
    if name in studies():
        importlib.import_module(studies()[name])
    if name not in _EXPERIMENTS:
        raise unknown_name("study", name, {*studies(), *_EXPERIMENTS})
    return _EXPERIMENTS[name]


def execute(spec: Spec) -> Run:
    """Run one spec of a study and never raise: what goes wrong becomes the run's status and sentence."""
    run = Run(dict(spec))
    return guard_run(run, lambda: find(spec["study"]).run(spec, run.record))
