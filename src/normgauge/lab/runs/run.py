"""Train one network as its spec says, measuring on schedule; divergence and errors are values, not exceptions."""

from __future__ import annotations

import math
import time
import traceback
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from normgauge.errors import MissingDataError, NonFiniteError, NormgaugeError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.runs.layout import Layout
from normgauge.lab.runs.probes import measure_network
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.train import DIVERGENCE_FACTOR, Batches, MeasuringShare
from normgauge.records import Status
from normgauge.rng import preserved_rng


@dataclass
class Outcome:
    """What became of one run: status, a sentence, readings by step, seconds, and where it ran."""

    spec: dict[str, Any]
    status: Status = "ok"
    sentence: str = ""
    readings: list[dict[str, Any]] = field(default_factory=list)
    seconds: float = 0.0
    provenance: dict[str, Any] = field(default_factory=dict)

    def record(
        self,
        step: int,
        name: str,
        value: float,
        *,
        layer: str | None = None,
        kind: str = "exact",
        status: Status = "ok",
    ) -> None:
        """Add one reading; a value that is not finite is kept as a hole with `status` (diverged if it says ok)."""
        finite = math.isfinite(value)
        hole = "diverged" if status == "ok" else status
        self.readings.append(
            {
                "step": step,
                "name": name,
                "layer": layer,
                "value": value if finite else None,
                "kind": kind,
                "status": "ok" if finite else hole,
            }
        )


def execute(spec: Mapping[str, Any]) -> Outcome:
    """Run one spec and never raise: what goes wrong becomes the outcome's status and sentence.

    Args:
        spec: model, norm, data, lr, seed, steps, batch, measure_at (steps), measure_batch, target_loss; and for a run
            split over processes ddp (how many) and statistics ("replica" or "synced").

    Returns:
        The outcome, with a status of ok, diverged (the loss left every reasonable range), skipped (its data are not on
        this machine) or error.
    """
    if int(spec.get("ddp", 1)) > 1:
        from normgauge.lab.runs.replicas import execute_split

        return execute_split(spec)
    outcome = Outcome(dict(spec))
    return guarded(outcome, lambda: train(outcome))


def guarded(outcome: Outcome, action: Callable[[], None]) -> Outcome:
    """Run the action with the spec's seed and turn what goes wrong into the outcome's status and sentence."""
    begin = time.perf_counter()
    dtype = torch.get_default_dtype()
    try:
        # a run depends on its spec alone, not on the caller's settings
        torch.set_default_dtype(getattr(torch, str(outcome.spec.get("dtype", "float32"))))
        with preserved_rng():
            torch.manual_seed(int(outcome.spec["seed"]))
            action()
    except MissingDataError as error:
        outcome.status, outcome.sentence = "skipped", f"not run: no data. {error}"
    except NonFiniteError as error:
        outcome.status, outcome.sentence = "diverged", str(error)
    except NormgaugeError as error:
        outcome.status, outcome.sentence = "error", str(error)
    except Exception as error:  # noqa: BLE001 (a sweep must not die from one run)
        last = traceback.extract_tb(error.__traceback__)[-1]
        outcome.status = "error"
        outcome.sentence = f"{type(error).__name__}: {error} (in {last.name}, line {last.lineno})"
    finally:
        torch.set_default_dtype(dtype)
    outcome.seconds = time.perf_counter() - begin
    outcome.provenance = provenance()
    return outcome


class Trainer:
    """One network under SGD as its spec says: a step on rows of the training data, and a measurement."""

    def __init__(self, network: nn.Module, dataset: datasets.Dataset, spec: Mapping[str, Any]) -> None:
        self.network, self.dataset, self.spec = network, dataset, spec
        self.optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
        self.layout = Layout(network, dataset.train[0])

    def step(self, rows: Tensor) -> float:
        """Take one step on these rows and return the loss before it."""
        self.network.train()
        self.optimizer.zero_grad()
        inputs, targets = self.layout.inputs(self.dataset.train[0][rows]), self.dataset.train[1][rows]
        loss = self.dataset.loss(self.network(inputs), targets)
        loss.backward()
        self.optimizer.step()
        return float(loss.detach())

    def measure(self, outcome: Outcome, step: int) -> None:
        """Record every quantity of the network as it is now."""
        with self.layout.measuring():
            measure_network(outcome.record, self.network, self.dataset, self.spec, step)


def train(outcome: Outcome, make: Callable[..., Trainer] = Trainer) -> None:
    """Train as the outcome's spec says, writing readings and status into it."""
    spec = outcome.spec
    dataset = datasets.load(spec["data"])
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    trainer = make(network, dataset, spec)
    batches = Batches(len(dataset.train[1]), int(spec["batch"]), int(spec["seed"]))
    with trainer.layout.training():
        _train(outcome, trainer, batches)


def _train(outcome: Outcome, trainer: Trainer, batches: Batches) -> None:
    spec = outcome.spec
    schedule = {int(step) for step in spec["measure_at"]}
    measuring = MeasuringShare(spec.get("measure_share"))
    recent: list[float] = []
    first, reached = math.nan, None
    for step in range(int(spec["steps"]) + 1):
        if step in schedule and measuring.allows(essential=step in (0, int(spec["steps"]))):
            with measuring.timed():
                trainer.measure(outcome, step)
        if step == int(spec["steps"]):
            break
        loss = trainer.step(next(batches))
        first = loss if step == 0 else first
        recent = [*recent[-9:], loss]
        if reached is None and sum(recent) / len(recent) <= float(spec["target_loss"]):
            reached = step + 1
        if not math.isfinite(loss) or loss > DIVERGENCE_FACTOR * max(first, 1.0):
            outcome.status = "diverged"
            outcome.sentence = f"the training loss was {loss:.3g} at step {step + 1}, {first:.3g} at the first"
            return
    outcome.record(
        int(spec["steps"]), "steps_to_target", math.nan if reached is None else reached, status=_when(reached)
    )


def _when(reached: int | None) -> Status:
    return "nonconverged" if reached is None else "ok"
