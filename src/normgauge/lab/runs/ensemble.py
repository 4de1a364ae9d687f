"""Many tiny runs as one batched ensemble: each member with its own rate and seed, equal to runs one by one."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import InputError, MissingDataError, ModelError, NonFiniteError, NormgaugeError, explain
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.runs.probes import measure_network
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.run import Outcome, execute
from normgauge.lab.runs.stacking import Stack
from normgauge.lab.runs.train import DIVERGENCE_FACTOR, Batches
from normgauge.rng import preserved_rng
from normgauge.store import canonical

# What a spec may say for its run to be stacked; anything else may mean a training loop that is not this one.
_RUN = ("model", "norm", "data", "optimizer", "lr", "seed", "steps", "batch")
_READ = ("measure_at", "measure_batch", "target_loss")
STACKABLE = frozenset([*_RUN, *_READ])
# Activations of one layer that are trained at once: more of them leave the cache and every pass gets slower.
CACHE_BYTES = 2**20

Watch = Callable[[int, int, nn.Module], None]


@dataclass
class MemberFit:
    """What training did to one member: the loss of every step, and the step at which it diverged, if it did."""

    losses: list[float] = field(default_factory=list)
    diverged_at: int | None = None

    @property
    def diverged(self) -> bool:
        """Whether the loss left every reasonable range."""
        return self.diverged_at is not None


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
) -> list[MemberFit]:
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
        got = f"{len(networks)}, {len(rates)} and {len(seeds)}"
        raise InputError(explain("fit_ensemble", "one rate and one seed for each network", got, "Give as many of each"))
    results = [MemberFit() for _ in networks]
    together = _together(networks, min(batch, len(dataset.train[1])), dataset)
    for start in range(0, len(networks), together):
        part = slice(start, start + together)
        chunk = _Chunk(list(range(len(networks)))[part], networks, dataset, rates, seeds, batch, results)
        chunk.train(steps, at, watch)
    return results


class _Chunk:
    """Members that are trained at once, and which of them are still alive."""

    def __init__(
        self,
        members: list[int],
        networks: Sequence[nn.Module],
        dataset: datasets.Dataset,
        rates: Sequence[float],
        seeds: Sequence[int],
        batch: int,
        results: list[MemberFit],
    ) -> None:
        self.alive, self.networks, self.results, self.dataset = members, networks, results, dataset
        self.stack = Stack([networks[member] for member in members])
        self.inputs, self.targets = dataset.train[0].flatten(1), dataset.train[1]
        self.rates = torch.tensor([float(rates[member]) for member in members], dtype=self.inputs.dtype)
        self.streams = [Batches(len(self.targets), batch, int(seeds[member])) for member in members]

    def train(self, steps: int, at: Collection[int], watch: Watch | None) -> None:
        for step in range(steps + 1):
            if watch is not None and step in at:
                for place, member in enumerate(self.alive):
                    watch(member, step, self.stack.write(place, self.networks[member]))
            if step == steps or not self.alive:
                break
            self._judge(self._step().tolist(), step)
        self._write_back(range(len(self.alive)))

    def _step(self) -> Tensor:
        """Take one step of SGD with every member, and return their losses."""
        rows = torch.stack([next(stream) for stream in self.streams])
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
        return losses.detach()

    def _judge(self, losses: list[float], step: int) -> None:
        staying = []
        for place, (member, loss) in enumerate(zip(self.alive, losses, strict=True)):
            result = self.results[member]
            result.losses.append(loss)
            if math.isfinite(loss) and loss <= DIVERGENCE_FACTOR * max(result.losses[0], 1.0):
                staying.append(place)
            else:
                result.diverged_at = step + 1
        if len(staying) < len(self.alive):
            self._write_back(set(range(len(self.alive))) - set(staying))
            chosen = torch.tensor(staying, dtype=torch.int64)
            self.stack.keep(chosen)
            self.rates = self.rates[chosen]
            self.streams = [self.streams[place] for place in staying]
            self.alive = [self.alive[place] for place in staying]

    def _write_back(self, places: Collection[int]) -> None:
        for place in places:
            self.stack.write(place, self.networks[self.alive[place]])


def train_ensemble(
    specs: Sequence[Mapping[str, Any]],
    *,
    measure: Callable[..., None] | None = measure_network,
) -> list[Outcome]:
    """Run specs as `normgauge.lab.runs.run.execute` does, those together that differ by rate and seed only.

    Args:
        specs: model, norm, data, lr, seed, steps, batch, measure_at, measure_batch, target_loss. A spec whose network
            cannot be stacked, or that says more than this, is run on its own.
        measure: `measure(record, network, dataset, spec, step)` at the scheduled steps; `None` records losses only.

    Returns:
        The outcomes in the order of the specs, never an exception. Seconds are shared evenly in a group.

    Examples:
        >>> spec = {"model": "dln", "norm": "batch", "data": "gaussian", "steps": 3, "batch": 32, "measure_at": [],
        ...         "measure_batch": 32, "target_loss": 1.0, "seed": 0}
        >>> [outcome.status for outcome in train_ensemble([{**spec, "lr": 1e-4}, {**spec, "lr": 1e3}])]
        ['ok', 'diverged']
    """
    groups: dict[str, list[int]] = {}
    for place, spec in enumerate(specs):
        shared = {key: value for key, value in spec.items() if key not in ("lr", "seed")}
        groups.setdefault(canonical(shared), []).append(place)
    outcomes: dict[int, Outcome] = {}
    for places in groups.values():
        members = [specs[place] for place in places]
        outcomes.update(zip(places, _run_group(members, measure), strict=True))
    return [outcomes[place] for place in range(len(specs))]


def _run_group(specs: Sequence[Mapping[str, Any]], measure: Callable[..., None] | None) -> list[Outcome]:
    """Run specs that differ by rate and seed only; what cannot be stacked is run one by one."""
    first = specs[0]
    if len(specs) == 1 or not set(first) <= STACKABLE or first.get("optimizer", "sgd") != "sgd":
        return [execute(spec) for spec in specs]
    begin = time.perf_counter()
    outcomes = [Outcome(dict(spec)) for spec in specs]
    try:
        with preserved_rng():
            _train_group(outcomes, measure)
    except (MissingDataError, ModelError):
        return [execute(spec) for spec in specs]
    except NormgaugeError as error:
        for outcome in outcomes:
            outcome.status, outcome.sentence = "error", str(error)
    for outcome in outcomes:
        outcome.seconds = (time.perf_counter() - begin) / len(outcomes)
        outcome.provenance = provenance()
    return outcomes


def _train_group(outcomes: list[Outcome], measure: Callable[..., None] | None) -> None:
    spec = outcomes[0].spec
    dataset = datasets.load(spec["data"])
    networks = []
    for outcome in outcomes:
        torch.manual_seed(int(outcome.spec["seed"]))
        networks.append(
            models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(outcome.spec["seed"]))
        )

    def watch(member: int, step: int, network: nn.Module) -> None:
        outcome = outcomes[member]
        if measure is None or outcome.status != "ok":
            return
        try:
            measure(outcome.record, network, dataset, outcome.spec, step)
        except NonFiniteError as error:
            outcome.status, outcome.sentence = "diverged", str(error)

    fits = fit_ensemble(
        networks,
        dataset,
        rates=[float(outcome.spec["lr"]) for outcome in outcomes],
        seeds=[int(outcome.spec["seed"]) for outcome in outcomes],
        steps=int(spec["steps"]),
        batch=int(spec["batch"]),
        at={int(step) for step in spec["measure_at"]},
        watch=watch,
    )
    for outcome, fit in zip(outcomes, fits, strict=True):
        _conclude(outcome, fit)


def _conclude(outcome: Outcome, fit: MemberFit) -> None:
    """Write what `execute` writes at the end of a run: divergence, or when the target loss was reached."""
    if outcome.status != "ok":
        return
    if fit.diverged_at is not None:
        outcome.status = "diverged"
        outcome.sentence = (
            f"the training loss was {fit.losses[-1]:.3g} at step {fit.diverged_at}, {fit.losses[0]:.3g} at the first"
        )
        return
    target, reached = float(outcome.spec["target_loss"]), math.nan
    for step in range(1, len(fit.losses) + 1):
        recent = fit.losses[max(0, step - 10) : step]
        if sum(recent) / len(recent) <= target:
            reached = step
            break
    outcome.record(int(outcome.spec["steps"]), "steps_to_target", reached, status="nonconverged")


def _losses(dataset: datasets.Dataset, outputs: Tensor, targets: Tensor) -> Tensor:
    """Return each member's loss from outputs `(members, features, batch)` and targets `(members, batch, ...)`."""
    if dataset.task == "classification":
        return nn.functional.cross_entropy(outputs, targets, reduction="none").mean(dim=1)
    return (outputs - targets.transpose(1, 2)).square().sum(dim=1).mean(dim=1)


def _together(networks: Sequence[nn.Module], batch: int, dataset: datasets.Dataset) -> int:
    """Return how many members' activations of one layer fit the cache."""
    linear = [part for network in networks[:1] for part in network.modules() if isinstance(part, nn.Linear)]
    widest = max([part.out_features for part in linear], default=1)
    return max(1, CACHE_BYTES // (widest * batch * dataset.train[0].element_size()))
