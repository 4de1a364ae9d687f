"""Name -> experiment, and the task that workers are given: a run's spec names the study it belongs to."""

from __future__ import annotations

import importlib
from functools import cache

from normgauge.errors import NormgaugeError, explain, unknown_name
from normgauge.lab.runs.run import guarded
from normgauge.papers.experiment import Experiment
from normgauge.papers.shelf import PAPERS
from normgauge.records import Run, Spec

_EXPERIMENTS: dict[str, Experiment] = {}


def register(experiment: Experiment) -> Experiment:
    """Add an experiment to the list of `normgauge reproduce`.

    Raises:
        NormgaugeError: when the name is taken.
    """
    if experiment.name in _EXPERIMENTS:
        raise NormgaugeError(
            explain("register", "an experiment's name is its own", experiment.name, "Choose another name")
        )
    _EXPERIMENTS[experiment.name] = experiment
    return experiment


@cache
def index() -> dict[str, str]:
    """Return study -> its module, by file names alone: nothing is imported."""
    modules = (module for paper in PAPERS.values() for module in paper.modules("studies"))
    return {module.rpartition(".")[2].replace("_", "-"): module for module in modules}


def experiments() -> dict[str, Experiment]:
    """Return every experiment by name, in the order of papers and files."""
    for name in index():
        find(name)
    return dict(sorted(_EXPERIMENTS.items(), key=lambda item: (item[1].papers, item[0])))


def find(name: str) -> Experiment:
    """Return an experiment by name; its file is imported, and no other study's.

    Raises:
        UnknownNameError: for a name that is not known, with the nearest one.
    """
    if name in index():
        importlib.import_module(index()[name])
    if name not in _EXPERIMENTS:
        raise unknown_name("study", name, {*index(), *_EXPERIMENTS})
    return _EXPERIMENTS[name]


def execute(spec: Spec) -> Run:
    """Run one spec of a study and never raise: what goes wrong becomes the run's status and sentence."""
    run = Run(dict(spec))
    return guarded(run, lambda: find(spec["study"]).run(spec, run.record))
