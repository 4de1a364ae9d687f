"""`Experiment`: a study of a paper as data: what it asks, how it runs at each size, what its page shows."""

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from math import prod
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer

from normgauge.documents import NEEDED, SIZES, About
from normgauge.errors import InputError, unknown_name
from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import Training, train
from normgauge.lab.study import Study
from normgauge.papers.court import criteria
from normgauge.papers.figures import Figure
from normgauge.papers.shelf import PAPERS
from normgauge.records import Spec

#: `record(step, name, value, layer=, kind=)` writes a reading; the last value of each name is the run's result.
Record = Callable[..., None]
Execute = Callable[[Spec, Record], None]


@dataclass(frozen=True)
class Experiment:
    """A named study of a paper: what it asks, what the paper found, how it runs at each size, how it is shown.

    All but `run` is declared in its paper's `studies.toml`, its criteria too; seeds that knobs are tuned on are never
    judged. `run` raises `NonFiniteError` when it diverged; what was recorded stays.

    Raises:
        InputError: when a size is missing, or knobs are tuned and nothing says by what.
    """

    name: str  # what `normgauge reproduce NAME` is told
    papers: tuple[str, ...]  # `S0` ... `S4`
    place: str  # in them
    question: str
    finding: str  # what the paper says came out
    proxy: str  # how the small size differs from the published setting
    sizes: Mapping[str, Study | Sequence[Study]]  # several where arms have different knobs
    run: Execute
    figures: tuple[Figure, ...]  # the pictures of its page, beside the one that decides
    choose_by: str = ""  # the reading that tuned knobs are chosen by, on validation data
    choose_higher: bool = True
    data: tuple[str, ...] = ()  # sets it needs at small and paper size
    minutes: Mapping[str, float] = field(default_factory=dict)  # on two cores, per size

    def __post_init__(self) -> None:
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
        own: dict[str, Any] = {name: getattr(self, name) for name in ("place", "question", "finding", "proxy")}
        return About(
            **own,
            papers=tuple(PAPERS[paper].name for paper in self.papers),
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


def read_sizes(name: str, parts: Sequence[Spec]) -> dict[str, list[Study]]:
    """Return size -> studies, as `studies.toml` tells them: parts with arms, tuned knobs, and what all sizes share.

    A size may give an arm's knob or a tuned one other values. `seeds` (3 unless told) are judged and `tuning_seeds`
    (2) tuned on.

    Examples:
        >>> part = {"arms": {"norm": ["none", "batch"]}, "tuned": {"lr": [0.1, 1]}, "small": {"seeds": 4, "steps": 9}}
        >>> (study,) = read_sizes("s", [part])["small"]
        >>> study.fixed, study.tried
        ({'steps': 9}, 2)
    """
    sizes: dict[str, list[Study]] = {}
    for part in parts:
        for size in (size for size in SIZES if size in part):
            own = {**part.get("all", {}), **part[size]}
            seeds, tries = own.pop("seeds", 3), own.pop("tuning_seeds", 2)
            arms, tuned = (
                {knob: own.pop(knob, values) for knob, values in part.get(role, {}).items()}
                for role in ("arms", "tuned")
            )
            tries = min(tries, seeds) if prod(map(len, tuned.values())) > 1 else None
            sizes.setdefault(size, []).append(Study(name, "", arms, tuned, own, seeds=seeds, tuning_seeds=tries))
    return sizes


def build(spec: Spec, **named: str) -> tuple[nn.Module, Dataset]:
    """Return the network and the data of a run's spec; `model` and `norm` may be named beside it."""
    dataset, told = data.load(spec["data"]), {**spec, **named}
    return models.build(told["model"], told["norm"], dataset.shape, dataset.classes, int(spec["seed"])), dataset


def record_accuracies(record: Record, step: int, network: nn.Module, dataset: Dataset, *splits: str) -> None:
    """Record the accuracy on some splits, with stored statistics."""
    for split in splits:
        record(step, f"{split}_accuracy", evaluate(network, dataset, split).accuracy)


def fit(
    spec: Spec, network: nn.Module, data: Dataset | tuple[Tensor, Tensor], optimizer: Optimizer, **more: Any
) -> Training:
    """Train by `lab.runs.train.train` with the steps, batch and seed of a run's spec, or those of `more`."""
    usual: dict[str, Any] = {name: int(spec[name]) for name in ("steps", "batch", "seed") if name not in more}
    return train(network, data, optimizer, **usual, **more)
