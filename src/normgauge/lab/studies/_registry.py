"""Name -> experiment, and the task that workers are given: a run's spec names the study it belongs to."""

from __future__ import annotations

import importlib
import pkgutil
from collections.abc import Mapping
from typing import Any

from normgauge.errors import NormgaugeError, explain, unknown_name
from normgauge.lab.experiment import Experiment
from normgauge.lab.training import Outcome, guarded

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


def experiments() -> dict[str, Experiment]:
    """Return every experiment by name, in the order of papers and files."""
    package = importlib.import_module("normgauge.lab.studies")
    for module in sorted(pkgutil.iter_modules(package.__path__), key=lambda entry: entry.name):
        if not module.name.startswith("_"):
            importlib.import_module(f"normgauge.lab.studies.{module.name}")
    return dict(sorted(_EXPERIMENTS.items(), key=lambda item: (item[1].papers, item[0])))


def find(name: str) -> Experiment:
    """Return an experiment by name.

    Raises:
        UnknownNameError: for a name that is not known, with the nearest one.
    """
    known = experiments()
    if name not in known:
        raise unknown_name("study", name, known)
    return known[name]


def execute(spec: Mapping[str, Any]) -> Outcome:
    """Run one spec of a study and never raise: what goes wrong becomes the outcome's status and sentence."""
    outcome = Outcome(dict(spec))
    return guarded(outcome, lambda: find(spec["study"]).run(spec, outcome.record))
