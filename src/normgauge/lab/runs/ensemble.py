"""Many tiny runs as one batched ensemble: each member with its own rate and seed, equal to runs one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass, field
from statistics import fmean

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, MissingDataError, ModelError, NonFiniteError, NormgaugeError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.runs.digests import CODE, DATA, check_digests
from normgauge.lab.runs.probes import measure_network
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.run import conclude, execute, one_thread
from normgauge.lab.runs.stacking import Stack
from normgauge.lab.runs.train import Batches, Training, train
from normgauge.records import Run, Spec
from normgauge.rng import preserved_rng
from normgauge.store import canonical

# What a spec may say for its run to be stacked; anything else may mean a training loop that is not this one.
_RUN = ("model", "norm", "data", "optimizer", "lr", "seed", "steps", "batch")
_READ = ("measure_at", "measure_batch", "target_loss")
STACKABLE = frozenset([*_RUN, *_READ, CODE, DATA])
# Activations of one layer that are trained at once: more of them leave the cache and every pass gets slower.
CACHE_BYTES = 2**20

Watch = Callable[[int, int, nn.Module], None]


def fit_ensemble(
    networks: Sequence[nn.Module],
    dataset: datasets.Dataset,
    *,
    rates: Sequence[float],
    seeds: Sequence[int],
    steps: int,
    batch: int,
    at: Collection[int] = (),
    watch: Watch | None = None,
) -> list[Training]:
    """Train several small networks of one structure together by SGD, in place.

    Member i takes `w_i <- w_i - rates[i] * grad loss_i` on the batches that `seeds[i]` orders, exactly as it would
    alone; only the order of sums differs. A member that diverges is taken out and does not disturb the others.

    Args:
        networks: see `normgauge.lab.runs.stacking.Stack`; they hold the trained parameters afterwards.
        dataset: the data, shared.
        rates: a learning rate for each member.
        seeds: of each member's order of batches.
        steps: how many.
        batch: samples per step; the whole training split if larger.
        at: steps at which `watch(member, step, network)` is called, before that step; `steps` is the end.
        watch: the measuring function; the network is a member's own, up to date.

    Returns:
        For each member its losses and whether it diverged.

    Raises:
        ModelError: for networks that cannot be stacked.
        InputError: when the numbers of networks, rates and seeds differ.
    """
    if not len(networks) == len(rates) == len(seeds):
        counts = f"{len(networks)}, {len(rates)} and {len(seeds)}"
        raise InputError("fit_ensemble", "one rate and one seed for each network", counts, "Give as many of each")
    together = _members_at_once(networks, min(batch, len(dataset.train[1])), dataset)
    members = [
        _Member(number, network, float(rate), Batches(len(dataset.train[1]), batch, int(seed)))
        for number, (network, rate, seed) in enumerate(zip(networks, rates, seeds, strict=True))
    ]
    for start in range(0, len(members), together):
        _Chunk(members[start : start + together], dataset).train(steps, at, watch)
    return [member.training for member in members]


@dataclass
class _Member:
    """One network of an ensemble: its rate, its order of batches, and what training did to it."""

    number: int
    network: nn.Module
    rate: float
    batches: Batches
    training: Training = field(default_factory=Training)


class _Chunk:
    """Members that are trained at once, and which of them are still alive."""

    def __init__(self, members: Sequence[_Member], dataset: datasets.Dataset) -> None:
        self.alive, self.dataset = list(members), dataset
        self.stack = Stack([member.network for member in members])
        self.inputs, self.targets = dataset.train[0].flatten(1), dataset.train[1]
        self.rates = torch.tensor([member.rate for member in members], dtype=self.inputs.dtype)

    def train(self, steps: int, at: Collection[int], watch: Watch | None) -> None:
        """Train all members until the last step, or until none is alive, and write them back."""

        def watch_all(step: int, _: nn.Module) -> None:
            for place, member in enumerate(self.alive):
                if watch is not None:
                    watch(member.number, step, self.stack.write(place, member.network))

        train(
            nn.ModuleList(member.network for member in self.alive),
            self.dataset,
            steps=steps,
            batch=None,  # members have orders of their own
            seed=0,
            at=at,
            watch=watch_all,
            step=lambda _: self._step(),
            until=lambda *_: not self.alive,
            ceiling=math.inf,  # each member is judged on its own
        )
        self._write_back(range(len(self.alive)))

    def _step(self) -> float:
        """Take one step of SGD with every member, part with those that diverged, and return the others' mean loss."""
        rows = torch.stack([next(member.batches) for member in self.alive])
        count, batch = rows.shape
        inputs = self.inputs[rows.flatten()].view(count, batch, -1).transpose(1, 2)
        losses = _losses(self.dataset, self.stack(inputs), self.targets[rows])
        parameters = self.stack.parameters()
        # Each loss depends on its own member only, so the gradient of the sum is each member's own gradient.
        gradients = torch.autograd.grad(losses.sum(), parameters)
        with torch.no_grad():
            rates = self.rates.view(-1, 1, 1)
            for parameter, gradient in zip(parameters, gradients, strict=True):
                parameter.addcmul_(gradient, rates, value=-1)
        for member, loss in zip(self.alive, losses.detach().tolist(), strict=True):
            member.training.add(loss)
        self._drop_diverged()
        return fmean(member.training.losses[-1] for member in self.alive) if self.alive else 0.0

    def _drop_diverged(self) -> None:
        """Write back the members that diverged, and go on without them."""
        staying = [place for place, member in enumerate(self.alive) if not member.training.diverged]
        if len(staying) < len(self.alive):
            self._write_back(set(range(len(self.alive))) - set(staying))
            chosen = torch.tensor(staying, dtype=torch.int64)
            self.stack.keep(chosen)
            self.rates = self.rates[chosen]
            self.alive = [self.alive[place] for place in staying]

    def _write_back(self, places: Collection[int]) -> None:
        for place in places:
            self.stack.write(place, self.alive[place].network)


def train_ensemble(specs: Sequence[Spec], *, measure: Callable[..., None] | None = measure_network) -> list[Run]:
    """Run specs as `normgauge.lab.runs.run.execute` does, those together that differ by rate and seed only.

    Args:
        specs: model, norm, data, lr, seed, steps, batch, measure_at, measure_batch, target_loss. A spec whose network
            cannot be stacked, or that says more than this, is run on its own.
        measure: `measure(record, network, dataset, spec, step)` at the scheduled steps; `None` records losses only.

    Returns:
        The runs in the order of the specs, never an exception. Seconds are shared evenly in a group.

    Examples:
        >>> spec = {"model": "dln", "norm": "batch", "data": "gaussian", "steps": 3, "batch": 32, "measure_at": [],
        ...         "measure_batch": 32, "target_loss": 1.0, "seed": 0}
        >>> [run.status for run in train_ensemble([{**spec, "lr": 1e-4}, {**spec, "lr": 1e3}])]
        ['ok', 'diverged']
    """
    groups: dict[str, list[int]] = {}
    for place, spec in enumerate(specs):
        shared = {key: value for key, value in spec.items() if key not in ("lr", "seed")}
        groups.setdefault(canonical(shared), []).append(place)
    runs: dict[int, Run] = {}
    for places in groups.values():
        members = [specs[place] for place in places]
        runs.update(zip(places, _run_group(members, measure), strict=True))
    return [runs[place] for place in range(len(specs))]


def _run_group(specs: Sequence[Spec], measure: Callable[..., None] | None) -> list[Run]:
    """Run specs that differ by rate and seed only; what cannot be stacked is run one by one."""
    first = specs[0]
    if len(specs) == 1 or not set(first) <= STACKABLE or first.get("optimizer", "sgd") != "sgd":
        return [execute(spec) for spec in specs]
    begin = time.perf_counter()
    runs = [Run(dict(spec)) for spec in specs]
    try:
        with preserved_rng(), one_thread():
            _train_group(runs, measure)
    except (MissingDataError, ModelError):
        return [execute(spec) for spec in specs]
    except NormgaugeError as error:
        for run in runs:
            run.status, run.sentence = "error", str(error)
    for run in runs:
        run.seconds = (time.perf_counter() - begin) / len(runs)
        run.provenance = provenance()
    return runs


def _train_group(runs: list[Run], measure: Callable[..., None] | None) -> None:
    spec = runs[0].spec
    dataset = datasets.load(spec["data"])
    check_digests(spec, dataset)
    networks = []
    for run in runs:
        torch.manual_seed(int(run.spec["seed"]))
        networks.append(
            models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(run.spec["seed"]))
        )

    def watch(member: int, step: int, network: nn.Module) -> None:
        run = runs[member]
        if measure is None or not run.ok:
            return
        try:
            measure(run.record, network, dataset, run.spec, step)
        except NonFiniteError as error:
            run.status, run.sentence = "diverged", str(error)

    trainings = fit_ensemble(
        networks,
        dataset,
        rates=[float(run.spec["lr"]) for run in runs],
        seeds=[int(run.spec["seed"]) for run in runs],
        steps=int(spec["steps"]),
        batch=int(spec["batch"]),
        at={int(step) for step in spec["measure_at"]},
        watch=watch,
    )
    for run, training in zip(runs, trainings, strict=True):
        if run.ok:
            conclude(run, training)


def _losses(dataset: datasets.Dataset, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each member's loss from outputs `(members, features, batch)` and targets `(members, batch, ...)`."""
    if dataset.task == "classification":
        return nn.functional.cross_entropy(outputs, targets, reduction="none").mean(dim=1)
    return (outputs - targets.transpose(1, 2)).square().sum(dim=1).mean(dim=1)


def _members_at_once(networks: Sequence[nn.Module], batch: int, dataset: datasets.Dataset) -> int:
    """Return how many members' activations of one layer fit the cache."""
    linear = [part for network in networks[:1] for part in network.modules() if isinstance(part, nn.Linear)]
    widest = max([part.out_features for part in linear], default=1)
    return max(1, CACHE_BYTES // (widest * batch * dataset.train[0].element_size()))
