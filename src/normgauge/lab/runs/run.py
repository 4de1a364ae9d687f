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
from normgauge.lab.runs.recipe import equip, make_optimizer, make_schedule, own_step
from normgauge.lab.runs.replicas import Replica, launch, replica_step
from normgauge.lab.runs.train import Step, Training, train
from normgauge.records import Run, Spec
from normgauge.rng import preserved_rng

#: network, data, optimizer, spec -> a step of one's own for `train`.
MakeStep: TypeAlias = Callable[[nn.Module, datasets.Dataset, torch.optim.Optimizer, Spec], Step | None]


def execute(spec: Spec) -> Run:
    """Run one spec and never raise: what goes wrong becomes the run's status and sentence."""
    run = Run(dict(spec))
    if int(spec.get("ddp", 1)) > 1:
        return guard_run(run, lambda: launch(run, f"from {__name__} import be_replica; be_replica()"))
    return guard_run(run, lambda: carry_out(run))


def guard_run(run: Run, action: Callable[[], None]) -> Run:
    """Do the action with the spec's seed and turn what goes wrong into the run's status and sentence."""
    begin = time.perf_counter()
    try:
        with run_climate(run.spec):
            action()
    except MissingDataError as error:
        run.status, run.sentence = "skipped", f"not run: no data. {error}"
    except NonFiniteError as error:
        run.status, run.sentence = "diverged", str(error)
    except NormgaugeError as error:
        run.status, run.sentence = "error", str(error)
    except Exception as error:  # noqa: BLE001 (a sweep must not die from one run)
        run.status, run.sentence = "error", describe_error(error)
    run.seconds = time.perf_counter() - begin
    run.provenance = provenance()
    return run


@contextmanager
def run_climate(spec: Spec) -> Iterator[None]:
    """Give torch the spec's precision and seed, and one thread: a run depends on its spec alone, not on its caller."""
    dtype = torch.get_default_dtype()
    try:
        torch.set_default_dtype(getattr(torch, str(spec.get("dtype", "float32"))))
        with preserved_rng(), one_thread():
            torch.manual_seed(int(spec["seed"]))
            yield
    finally:
        torch.set_default_dtype(dtype)


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
    """Train as the run's spec says, writing readings and status into it."""
    spec = run.spec
    dataset = equip(datasets.load(spec["data"]), spec)
    check_digests(spec, dataset)
    network = build_arm(spec, dataset)
    optimizer = make_optimizer(network, spec, dataset)

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
        augment=bool(spec.get("augment")),
        schedule=make_schedule(spec),
        clip=spec.get("clip"),
        step=(make_step or own_step)(network, dataset, optimizer, spec),
        share=spec.get("measure_share"),
    )
    conclude(run, training)


def build_arm(spec: Spec, dataset: datasets.Dataset, seed: int | None = None) -> nn.Module:
    """Return the network of a spec, with the knobs of the factory that are arms."""
    knobs = {knob: spec[knob] for knob in spec.get("factory_knobs", ())}
    seed = int(spec["seed"]) if seed is None else seed
    example = dataset.train[0][:8]
    return models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, seed, example=example, **knobs)


def conclude(run: Run, training: Training) -> None:
    """Write what training came to: divergence, or when the target loss was reached."""
    if training.diverged:
        run.status = "diverged"
        run.sentence = (
            f"the training loss was {training.losses[-1]:.3g} at step {training.diverged_at}, "
            f"{training.losses[0]:.3g} at the first"
        )
        return
    if run.spec["target_loss"] is None:
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
