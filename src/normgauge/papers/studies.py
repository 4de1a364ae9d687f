"""Name -> experiment, and the task that workers are given: a run's spec names the study it belongs to."""

import importlib
from collections.abc import Callable

from normgauge.errors import NormgaugeError, unknown_name
from normgauge.lab.runs.run import guard_run
from normgauge.papers.court import empirical
from normgauge.papers.court.contrast import read_contrast
from normgauge.papers.experiment import Execute, Experiment, read_sizes
from normgauge.papers.figures import read_figure
from normgauge.papers.shelf import studies, study_words
from normgauge.records import Run, Spec

_EXPERIMENTS: dict[str, Experiment] = {}


def register(name: str) -> Callable[[Execute], Execute]:
    """Add an experiment to those of `normgauge reproduce`; the decorated function is what is done in a run.

    What is asked, compared and drawn, and how it runs at each size, is in its paper's `studies.toml`.

    Raises:
        NormgaugeError: when the name is taken.
    """
    if name in _EXPERIMENTS:
        raise NormgaugeError("register", "an experiment's name is its own", name, "Choose another name")
    words = dict(study_words()[name])
    for id, told in words.pop("criteria").items():
        if "contrasts" in told:
            rules = {key: [read_contrast(each) for each in told.get(key, ())] for key in ("contrasts", "premise")}
            empirical(id, name, **rules)
    words |= {"sizes": read_sizes(name, words.pop("parts")), "figures": tuple(map(read_figure, words.pop("figures")))}

    def enter(run: Execute) -> Execute:
        _EXPERIMENTS[name] = Experiment(name=name, run=run, **words)
        return run

    return enter


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
