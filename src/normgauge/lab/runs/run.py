"""Do what a spec says: train and measure, in this process or split over several; trouble is a value, no exception."""

import math
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager, suppress
from typing import Any, TypeAlias

import torch
from torch import Tensor, nn

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
from normgauge.stats import Interval, interval

#: network, data, optimizer, spec -> a step of one's own for `train`.
MakeStep: TypeAlias = Callable[[nn.Module, datasets.Dataset, torch.optim.Optimizer, Spec], Step | None]
#: Steps timed at once, how often each arm has its turn at most, and about how many seconds all arms may take.
STEPS, TURNS, SECONDS = 3, 9, 4.0


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

    at = {int(step) for step in spec["measure_at"]}
    step = (make_step or own_step)(network, dataset, optimizer, spec)
    conclude(run, follow(spec, network, dataset, optimizer, at=at, watch=watch if measured else None, step=step))


def follow(spec: Spec, network: nn.Module, data: datasets.Dataset, optimizer: Any, **more: Any) -> Training:
    """Train as a spec says, with what else `train` takes."""
    usual: dict[str, Any] = {name: int(spec[name]) for name in ("steps", "batch", "seed")}
    usual |= {"augment": bool(spec.get("augment")), "schedule": make_schedule(spec), "clip": spec.get("clip")}
    return train(network, data, optimizer, **{**usual, **more})


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
        first, last = training.losses[0], training.losses[-1]
        run.sentence = f"the training loss was {last:.3g} at step {training.diverged_at}, {first:.3g} at the first"
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


def measure_costs(specs: Mapping[str, Spec], seconds: float = SECONDS) -> dict[str, dict[str, Interval]]:
    """Return arm -> `step_time` in ms, by one thread, and `memory` in MB.

    Memory is that of parameters, gradients, what the optimizer remembers, and what the forward pass of a batch keeps
    for the backward pass; buffers of the kernels are not in it.

    An arm whose step raises has none. Kind: estimate; the interval of the time is over turns. Cost: 30 steps per arm.
    """
    arms, times, memory = {}, dict[str, list[float]](), dict[str, float]()
    for name, spec in specs.items():
        with run_climate(spec), suppress(Exception):  # its runs have said why
            data = equip(datasets.load(spec["data"]), spec)
            network = build_arm(spec, data)
            optimizer = make_optimizer(network, spec, data)
            memory[name] = _held_bytes(spec, data, network, optimizer) / 1e6
            arms[name], times[name] = (spec, data, network, optimizer), []
    end = time.perf_counter() + seconds
    for turn in range(TURNS):
        for name, arm in arms.items():
            with run_climate(arm[0]):
                begin = time.perf_counter()
                _take_steps(*arm)
                times[name].append(1000 * (time.perf_counter() - begin) / STEPS)
        if time.perf_counter() > end and turn:
            break
    spans = {name: interval(times[name], bounds=(0, None)) for name in arms}
    return {name: {"step_time": spans[name], "memory": interval([memory[name]])} for name in arms}


def _take_steps(spec: Spec, data: datasets.Dataset, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    follow(spec, network, data, optimizer, steps=STEPS, step=own_step(network, data, optimizer, spec))


def _held_bytes(spec: Spec, data: datasets.Dataset, network: nn.Module, optimizer: torch.optim.Optimizer) -> int:
    """Return the bytes behind a step, and take some to warm up."""
    own = {p.untyped_storage().data_ptr(): p.untyped_storage().nbytes() for p in network.parameters()}
    kept: dict[int, int] = {}
    most = 0

    def pack(tensor: Tensor) -> Tensor:
        nonlocal most
        place = tensor.untyped_storage().data_ptr()
        if place not in own:
            kept[place] = tensor.untyped_storage().nbytes()
        most = max(most, sum(kept.values()))
        return tensor

    def unpack(tensor: Tensor) -> Tensor:
        kept.clear()  # the backward pass has begun
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(pack, unpack):
        _take_steps(spec, data, network, optimizer)
    state = [value for values in optimizer.state.values() for value in values.values() if isinstance(value, Tensor)]
    return 2 * sum(own.values()) + most + sum(value.nbytes for value in state)
