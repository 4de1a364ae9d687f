"""Settings of a user's own training tried on held-out data: normalizer, rate and decay, run by run, kept in a file."""

import copy
import hashlib
import inspect
import json
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn

from normgauge.documents import write_whole
from normgauge.errors import DataError, InputError, NormgaugeError
from normgauge.lab.data import Dataset, load
from normgauge.lab.race import in_words
from normgauge.lab.runs.train import train
from normgauge.objective import Objective, join_batches, take_rows
from normgauge.rng import generator
from normgauge.surgery import swap_norms

HELD = 4  # one sample in four is held out where the data have no validation split
MOST = 20_000  # samples that are taken of a loader
Pair = tuple[Tensor, Tensor]


class Setting(NamedTuple):
    """What a run is trained with; `rate` and `decay` stand for those of the first group, others keep their ratio."""

    norm: str
    rate: float
    decay: float
    batch: int = 0

    def __str__(self) -> str:
        return f"{self.norm}, lr {self.rate:.3g}, decay {self.decay:.3g}" + (f", batch {self.batch}" * bool(self.batch))


class Budget:
    """Seconds or runs that may be spent: "5 minutes", "90 s", "40 runs", or a number of seconds.

    Examples:
        >>> Budget("2 minutes").seconds, Budget("40 runs").runs, Budget(30).seconds
        (120.0, 40.0, 30.0)
    """

    def __init__(self, words: str | float) -> None:
        number, _, unit = str(words).strip().partition(" ")
        units = {"": 1, "s": 1, "second": 1, "min": 60, "minute": 60, "h": 3600, "hour": 3600, "run": 0}
        try:
            amount, scale = float(number), units[unit.strip() if len(unit) < 2 else unit.strip().rstrip("s")]
            if not 0 <= amount < math.inf:
                raise ValueError
        except (ValueError, KeyError):
            step = "Write '5 minutes' or '40 runs'"
            raise InputError("advise", "a budget is a time or a number of runs", repr(words), step) from None
        self.runs, self.seconds = (amount, math.inf) if not scale else (math.inf, amount * scale)
        self.spent, self.begin = 0, time.monotonic()

    def left(self, pace: float) -> float:
        """Return how many runs of `pace` seconds are left."""
        rest = self.seconds - (time.monotonic() - self.begin)
        return max(0.0, min(self.runs - self.spent, math.floor(rest / max(pace, 1e-9)) if rest < math.inf else rest))


@dataclass
class Trials:
    """A network, data and an optimizer, and every run of them so far."""

    subject: Any  # a model, or `factory(norm)`
    data: tuple[Pair, Pair]  # training and held-out split
    optimizer: Any  # a torch optimizer of the model, or `optimizer(model)`; AdamW as torch makes it if `None`
    loss: Callable[[Any, Any], Tensor]  # `loss(output, target)`
    steps: int  # of a run
    batch: int  # samples per step
    norm: str  # the normalizer as given; "as given" for a model
    budget: Budget  # what may be spent
    file: Path | None = None  # where runs are kept
    # (setting, seed) -> points of accuracy (without classes: minus the loss); nan where a run diverged
    scores: dict[tuple[Setting, int], float] = field(default_factory=dict)
    seconds: float = 0.0

    def __post_init__(self) -> None:
        self.network = self.build(self.norm, 0)
        self.template = self.make_optimizer(self.network)
        head = self.template.param_groups[0]
        self.given = Setting(self.norm, float(head["lr"]), float(head.get("weight_decay") or 0.0))
        if not self.given.rate > 0:
            raise InputError("advise", "the learning rate is positive", str(self.given.rate), "Pass optimizer=")
        if self.file is not None and self.file.exists():
            kept = json.loads(self.file.read_text(encoding="utf-8")).get(self.identity, [])
            self.scores = {(Setting(*s), seed): math.nan if v is None else v for s, seed, v in kept}

    @cached_property
    def identity(self) -> str:
        """What the runs depend on besides their setting: architecture, data, optimizer, steps, batch."""
        parts = [str(part.double().sum()) + str(tuple(part.shape)) for split in self.data for part in split]
        groups = [{k: v for k, v in g.items() if k != "params"} for g in self.template.param_groups]
        words = [str(self.network), type(self.template).__name__, str(groups), f"{self.steps} {self.batch}", *parts]
        return hashlib.sha256("\n".join(words).encode()).hexdigest()[:16]

    def build(self, norm: str, seed: int) -> nn.Module:
        """Return the network under a normalizer: from the factory with the seed's weights, or a copy of the model."""
        torch.manual_seed(seed)
        if not isinstance(self.subject, nn.Module):
            made = self.subject(norm) if _takes_norm(self.subject) else self.subject()
            if not isinstance(made, nn.Module):
                step = "Return the model"
                raise InputError("advise", "the factory returns a torch.nn.Module", type(made).__name__, step)
            if _takes_norm(self.subject) or norm == self.norm:
                return made
        else:
            made = copy.deepcopy(self.subject)
            if norm == self.norm:
                return made
        done = swap_norms(made, norm, example=take_rows(self.data[0][0], torch.arange(min(8, self.batch))))
        if done.refused or str(done.model) == str(made):
            why = done.refused[0][1] if done.refused else "it has no normalizer to replace; pass factory(norm)"
            raise InputError("advise", f"the model can take {norm!r}", why, "Pass factory(norm)")
        return done.model

    def make_optimizer(self, network: nn.Module, setting: Setting | None = None) -> torch.optim.Optimizer:
        """Return the optimizer of a network: groups as given, by names, with the setting's rate and decay."""
        if self.optimizer is None:
            made: Any = torch.optim.AdamW(network.parameters())
        elif isinstance(self.optimizer, torch.optim.Optimizer):
            if not isinstance(self.subject, nn.Module):
                rule, step = "with a factory the optimizer is a function of the model", "Pass lambda model: ..."
                raise InputError("advise", rule, type(self.optimizer).__name__, step)
            names = {id(p): name for name, p in self.subject.named_parameters()}
            groups = [dict(group) for group in self.optimizer.param_groups]
            own = [{names.get(id(p)) for p in group["params"]} for group in groups]
            places: list[list[nn.Parameter]] = [[] for _ in groups]
            for name, parameter in network.named_parameters():
                places[next((k for k, some in enumerate(own) if name in some), 0)].append(parameter)
            kind: Any = type(self.optimizer)
            made = kind([{**g, "params": some} for g, some in zip(groups, places, strict=True) if some])
        else:
            made = self.optimizer(network)
            if not isinstance(made, torch.optim.Optimizer):
                step = "Return it"
                raise InputError("advise", "optimizer(model) is a torch optimizer", type(made).__name__, step)
        if setting is not None:
            for group in made.param_groups:
                group["lr"] = group["lr"] * setting.rate / self.given.rate
                decay = float(group.get("weight_decay") or 0.0)
                group["weight_decay"] = setting.decay * (decay / self.given.decay if self.given.decay else 1.0)
        return made

    def objective(self, batches: int = 1) -> Objective:
        """Return the loss of the network as given on some training batches."""
        order = torch.randperm(len(self.data[0][1]), generator=generator(0)).split(self.batch)[:batches]
        picked = [tuple(take_rows(part, rows) for part in self.data[0]) for rows in order]
        return Objective(self.network, self.loss, picked, mode="train")

    @property
    def pace(self) -> float:
        """Seconds of a run."""
        return self.seconds / max(self.budget.spent, 1)

    def measure(self, wanted: Sequence[tuple[Setting, int]]) -> dict[tuple[Setting, int], float]:
        """Run what is not kept while the budget lasts, and return the scores there are."""
        for key in wanted:
            if key not in self.scores and self.budget.left(self.pace) >= 1:
                begin = time.monotonic()
                self.scores[key] = self._run(*key)
                self.budget.spent, self.seconds = self.budget.spent + 1, self.seconds + time.monotonic() - begin
                if self.file is not None:
                    whole = json.loads(self.file.read_text(encoding="utf-8")) if self.file.exists() else {}
                    rows = [[list(s), seed, None if math.isnan(v) else v] for (s, seed), v in self.scores.items()]
                    write_whole(self.file, json.dumps({**whole, self.identity: rows}))
        return {key: self.scores[key] for key in wanted if key in self.scores}

    def _run(self, setting: Setting, seed: int) -> float:
        network = self.build(setting.norm, seed)
        optimizer = self.make_optimizer(network, setting)
        batch = setting.batch or self.batch
        try:
            done = train(network, self.data[0], optimizer, steps=self.steps, batch=batch, seed=seed, loss=self.loss)
        except (RuntimeError, ValueError) as error:
            if isinstance(error, NormgaugeError):
                raise
            said = str(error).partition("\n")[0]
            raise InputError("advise", "the network trains on these data", said, "Correct it") from error
        return math.nan if done.diverged else self.score(network)

    def score(self, network: nn.Module) -> float:
        """Return the points of accuracy on held-out data, or minus the loss where targets are no classes."""
        inputs, targets = self.data[1]
        pieces = []
        with torch.no_grad():
            network.eval()
            for rows in torch.arange(len(targets)).split(256):
                some, want = take_rows(inputs, rows), targets[rows]
                out = network(some)
                pieces.append((_right(out, want) if self.classes else -float(self.loss(out, want)), len(rows)))
        value = sum(piece * count for piece, count in pieces) / len(targets)
        return value if math.isfinite(value) else math.nan

    @cached_property
    def classes(self) -> bool:
        """Whether the targets are labels."""
        return not self.data[1][1].is_floating_point() and self.data[1][1].dtype is not torch.bool

    def cost(self, runs: int) -> str:
        """Return what some runs cost in words."""
        return f"{runs} runs, about {in_words(runs * self.pace)}"


def _right(output: Tensor, targets: Tensor) -> float:
    """Return the points of accuracy; classes stand second, or last in sequences."""
    axis = 1 if targets.shape == output.shape[:1] + output.shape[2:] else -1
    return 100 * float((output.argmax(axis) == targets).double().mean())


def _takes_norm(factory: Callable[..., Any]) -> bool:
    required = inspect.signature(factory).parameters.values()
    return any(p.kind in (p.POSITIONAL_ONLY, p.POSITIONAL_OR_KEYWORD, p.VAR_POSITIONAL) for p in required)


def default_norm(subject: Any) -> str:
    """Return the normalizer as given: what the factory's argument is by default, "batch" where it has none."""
    if isinstance(subject, nn.Module) or not _takes_norm(subject):
        return "as given"
    first = next(iter(inspect.signature(subject).parameters.values()))
    return first.default if isinstance(first.default, str) else "batch"


def split_data(data: Any, batch: int | None) -> tuple[tuple[Pair, Pair], int]:
    """Return training and held-out samples, and the batch size: the loader's own, else at most 64.

    Raises:
        DataError: for data that are no pairs of inputs and targets, too few of them, or not finite.
    """
    if isinstance(data, str):
        data = load(data)
    if isinstance(data, Dataset):
        parts: Any = (data.train, data.validation)
        size = batch or 64
    else:
        pair = isinstance(data, (tuple, list)) and len(data) == 2 and all(isinstance(part, Tensor) for part in data)
        batches: list[Any] = [tuple(data)] if pair else []
        for item in () if pair or isinstance(data, Tensor) or not hasattr(data, "__iter__") else data:
            batches.append(tuple(item) if isinstance(item, (tuple, list)) else (item,))
            if sum(len(one[-1]) for one in batches) >= MOST:
                break
        if not batches or any(len(one) != 2 or not isinstance(one[0], Tensor) for one in batches):
            step = "Pass (inputs, targets), a loader of such batches, or a name"
            raise DataError("advise", "data are pairs of two tensors", str(type(data).__name__), step)
        whole = join_batches(batches)
        size = batch or (len(batches[0][1]) if not pair else min(64, max(2, len(whole[1]) // 8)))
        order = torch.randperm(len(whole[1]), generator=generator(0))[:MOST]
        held = len(order) // HELD
        parts = tuple(tuple(take_rows(part, rows) for part in whole) for rows in (order[held:], order[:held]))
    if min(len(part[1]) for part in parts) < 8:
        step = "Pass 32 samples or more"
        raise DataError("advise", "training and held-out data have 8 samples each", str(len(parts[1][1])), step)
    broken = [t for part in parts for t in part if t.is_floating_point() and not bool(t.isfinite().all())]
    if broken:
        count = sum(int((~t.isfinite()).sum()) for t in broken)
        raise DataError("advise", "data are finite", f"{count} values that are not", "Remove or replace them")
    return parts, min(size, len(parts[0][1]))
