"""Do what a spec says: train and measure, in this process or split over several; trouble is a value, no exception."""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TypeAlias

import torch
from torch import nn

from normgauge.errors import MissingDataError, NonFiniteError, NormgaugeError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.imports import describe_error
from normgauge.lab.runs.digests import check_digests
from normgauge.lab.runs.probes import measure_network
from normgauge.lab.runs.provenance import provenance
from normgauge.lab.runs.replicas import Replica, launch, replica_step
from normgauge.lab.runs.train import Step, Training, train
from normgauge.records import Run, Spec
from normgauge.rng import preserved_rng

#: network, data, optimizer, spec -> a step of one's own for `train`.
MakeStep: TypeAlias = Callable[[nn.Module, datasets.Dataset, torch.optim.Optimizer, Spec], Step]


def execute(spec: Spec) -> Run:
    """Run one spec and never raise: what goes wrong becomes the run's status and sentence."""
    run = Run(dict(spec))
    if int(spec.get("ddp", 1)) > 1:
        return guard_run(run, lambda: launch(run, f"from {__name__} import be_replica; be_replica()"))
    return guard_run(run, lambda: carry_out(run))


def guard_run(run: Run, action: Callable[[], None]) -> Run:
    """Do the action with the spec's seed and turn what goes wrong into the run's status and sentence."""
    begin = time.perf_counter()
    dtype = torch.get_default_dtype()
    try:
        # a run depends on its spec alone, not on the caller's settings
        torch.set_default_dtype(getattr(torch, str(run.spec.get("dtype", "float32"))))
        with preserved_rng(), one_thread():
            torch.manual_seed(int(run.spec["seed"]))
            action()
    except MissingDataError as error:
        run.status, run.sentence = "skipped", f"not run: no data. {error}"
    except NonFiniteError as error:
        run.status, run.sentence = "diverged", str(error)
    except NormgaugeError as error:
        run.status, run.sentence = "error", str(error)
    except Exception as error:  # noqa: BLE001 (a sweep must not die from one run)
        run.status, run.sentence = "error", describe_error(error)
    finally:
        torch.set_default_dtype(dtype)
    run.seconds = time.perf_counter() - begin
    run.provenance = provenance()
    return run


@contextmanager
def one_thread() -> Iterator[None]:
    """Give torch one thread inside: sums depend on how many there are, and runs must not depend on where they run."""
    threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(threads)


def carry_out(run: Run, make_step: MakeStep | None = None, *, measured: bool = True) -> None:
    """Train by SGD as the run's spec says, writing readings and status into it."""
    spec = run.spec
    dataset = datasets.load(spec["data"])
    check_digests(spec, dataset)
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))

    def watch(step: int, network: nn.Module) -> None:
        measure_network(run.record, network, dataset, spec, step)

    training = train(
        network,
        dataset,
        optimizer,
        steps=int(spec["steps"]),
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        at={int(step) for step in spec["measure_at"]},
        watch=watch if measured else None,
        step=None if make_step is None else make_step(network, dataset, optimizer, spec),
        share=spec.get("measure_share"),
    )
    conclude(run, training)


def conclude(run: Run, training: Training) -> None:
    """Write what training came to: divergence, or when the target loss was reached."""
    if training.diverged:
        run.status = "diverged"
        run.sentence = (
            f"the training loss was {training.losses[-1]:.3g} at step {training.diverged_at}, "
            f"{training.losses[0]:.3g} at the first"
        )
        return
    reached = training.steps_to(float(run.spec["target_loss"]))
    value = math.nan if reached is None else reached
    run.record(int(run.spec["steps"]), "steps_to_target", value, status="nonconverged")


def be_replica() -> None:
    """Take part in a split run as one of the processes that `launch` started."""
    with Replica() as replica:
        run = Run(replica.spec)
        guard_run(run, lambda: carry_out(run, replica_step, measured=replica.rank == 0))
        replica.hand_over(run)
