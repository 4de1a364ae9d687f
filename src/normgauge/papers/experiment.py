"""`Experiment`: a study of a paper as data: what it asks, how it runs at each size, what its page shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normgauge.documents import NEEDED, SIZES, About
from normgauge.errors import InputError, unknown_name
from normgauge.lab.data import Dataset
from normgauge.lab.runs.train import Training, train
from normgauge.lab.study import Study
from normgauge.papers.court import criteria
from normgauge.papers.figures import Figure
from normgauge.papers.shelf import PAPERS
from normgauge.records import Spec

Record = Callable[..., None]


@dataclass(frozen=True)
class Experiment:
    """A named study of a paper: what it asks, what the paper found, how it runs at each size, how it is shown.

    All but `run` is declared in its paper's `studies.toml`, its criteria too; seeds that knobs are tuned on are never
    judged.

    Args:
        name: what `normgauge reproduce NAME` is told.
        papers: `S0` ... `S4`; `place` in them, `question`, `finding` (what the paper says came out).
        proxy: how the small size differs from the published setting.
        sizes: size -> one study, or several where arms have different knobs.
        run: `run(spec, record)`: one run; `record(step, name, value, layer=, kind=)` writes readings, the last value
            of each name is the run's result. It raises `NonFiniteError` when it diverged; what was recorded stays.
        figures: the pictures of its page, beside the one that decides.
        choose_by: the reading that tuned knobs are chosen by (on validation data), the larger the better or not.
        data: data sets it needs at small and paper size; `minutes`: on two cores, per size.

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
    figures: tuple[Figure, ...]
    choose_by: str = ""
    choose_higher: bool = True
    data: tuple[str, ...] = ()
    minutes: Mapping[str, float] = field(default_factory=dict)

    def __post_init__(self) -> None:
        """Refuse an experiment that could not be run at a promised size."""
        missing = [size for size in NEEDED if size not in self.sizes]
        tuned = any(study.nuisance for size in self.sizes for study in self.parts(size))
        if missing or (tuned and not self.choose_by):
            lack = f"no {', '.join(missing)}" if missing else "tuned knobs and an empty choose_by"
            rule = "an experiment has a smoke, a small and a paper size, and says by what its knobs are tuned"
            raise InputError(f"Experiment({self.name})", rule, lack, "Add it")

    def parts(self, size: str) -> tuple[Study, ...]:
        """Return the studies of a size.

        Raises:
            UnknownNameError: for a size it does not have.
        """
        if size not in self.sizes:
            raise unknown_name("size", size, [size for size in SIZES if size in self.sizes])
        parts = self.sizes[size]
        listed = (parts,) if isinstance(parts, Study) else tuple(parts)
        return tuple(replace(p, held_out=prod(map(len, map(list, p.nuisance.values()))) > 1) for p in listed)

    def about(self, size: str) -> About:
        """Return what its page says whatever the runs say."""
        contrasts = (each for claim in criteria(self.name) for each in (*claim.premise, *claim.contrasts))
        parts = self.parts(size)
        knobs = [k for p in parts for k in p.scientific] + [k for p in parts for k in p.nuisance]
        return About(
            papers=tuple(PAPERS[paper].name for paper in self.papers),
            place=self.place,
            question=self.question,
            finding=self.finding,
            proxy=self.proxy,
            knobs=tuple(dict.fromkeys(knobs)),
            columns=tuple(dict.fromkeys(name for each in contrasts for name in each.readings)),
            protocol=tuple(self._protocol(size)),
            command=f"normgauge reproduce {self.name} --size {size}",
        )

    def _protocol(self, size: str) -> list[str]:
        """Say how arms are tuned and judged, and what each criterion is controlled by."""
        lines = []
        for part in self.parts(size):
            if part.held_out:
                by = f"{'largest' if self.choose_higher else 'smallest'} mean {self.choose_by.replace('_', ' ')}"
                seeds = f"on {part.tried} seed{'s' * (part.tried > 1)} that no verdict rests on"
                lines.append(f"{', '.join(part.nuisance)} tuned for every arm by the {by} {seeds}.")
        lines.append("Arms share seeds and are compared seed by seed; runs that failed are counted and not measured.")
        lines += [f"{claim.id}, control: {claim.control}" for claim in criteria(self.name)]
        return list(dict.fromkeys(lines))


def grid(
    name: str, arms: Mapping[str, Sequence[Any]], tuned: Mapping[str, Sequence[Any]] | None = None, **sizes: Spec
) -> dict[str, Study]:
    """Return size -> study: the arms, the knobs tuned for each of them, and per size what is fixed.

    A size may give an arm's knob or a tuned one other values. `seeds` (3 unless told) are judged and `tuning_seeds`
    (2) tuned on.

    Args:
        name: of the study.
        arms: knob -> values compared.
        tuned: knob -> values tuned.
        **sizes: size -> its knobs.

    Examples:
        >>> sizes = grid("s", {"norm": ["none", "batch"]}, {"lr": [0.1, 1]}, small={"seeds": 4, "steps": 9})
        >>> sizes["small"].fixed, sizes["small"].tried
        ({'steps': 9}, 2)
    """
    studies = {}
    for size, knobs in sizes.items():
        own = dict(knobs)
        seeds, tries = own.pop("seeds", 3), own.pop("tuning_seeds", 2)
        scientific = {knob: own.pop(knob, values) for knob, values in arms.items()}
        nuisance = {knob: own.pop(knob, values) for knob, values in (tuned or {}).items()}
        several = prod(len(list(values)) for values in nuisance.values()) > 1
        studies[size] = Study(
            name, "", scientific, nuisance, own, seeds=seeds, tuning_seeds=min(tries, seeds) if several else None
        )
    return studies


def read_sizes(name: str, parts: Sequence[Spec]) -> dict[str, list[Study]]:
    """Return size -> studies, as `studies.toml` tells them: parts with arms and tuned knobs, what all sizes share."""
    sizes: dict[str, list[Study]] = {}
    for part in parts:
        own = {size: {**part.get("all", {}), **part[size]} for size in SIZES if size in part}
        for size, study in grid(name, part["arms"], part.get("tuned"), **own).items():
            sizes.setdefault(size, []).append(study)
    return sizes


def fit(
    spec: Spec, network: nn.Module, data: Dataset | tuple[Tensor, Tensor], optimizer: Optimizer, **more: Any
) -> Training:
    """Train by `lab.runs.train.train` for the steps, with the batch and the seed that a run's spec has."""
    steps, batch, seed = (int(spec[name]) for name in ("steps", "batch", "seed"))
    return train(network, data, optimizer, steps=steps, batch=batch, seed=seed, **more)
