"""What a step of training costs: time, measured with the arms taking turns, and the memory it holds."""

from __future__ import annotations

import time
from collections.abc import Mapping
from contextlib import suppress

import torch
from torch import Tensor, nn

from normgauge.lab import data as datasets
from normgauge.lab.runs.recipe import equip, make_optimizer, make_schedule, own_step
from normgauge.lab.runs.run import build_arm, run_climate
from normgauge.lab.runs.train import train
from normgauge.records import Spec
from normgauge.stats import Interval, interval

#: Steps timed at once, how often each arm has its turn at most, and about how many seconds all arms may take.
STEPS, TURNS, SECONDS = 3, 9, 4.0


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
    return {
        name: {"step_time": interval(times[name], bounds=(0, None)), "memory": interval([memory[name]])}
        for name in arms
    }


def _take_steps(spec: Spec, data: datasets.Dataset, network: nn.Module, optimizer: torch.optim.Optimizer) -> None:
    train(
        network,
        data,
        optimizer,
        steps=STEPS,
        batch=int(spec["batch"]),
        seed=int(spec["seed"]),
        augment=bool(spec.get("augment")),
        schedule=make_schedule(spec),
        clip=spec.get("clip"),
        step=own_step(network, data, optimizer, spec),
    )


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
    for part in getattr(optimizer, "parts", ()):
        state += [value for values in part.state.values() for value in values.values() if isinstance(value, Tensor)]
    return 2 * sum(own.values()) + most + sum(value.nbytes for value in state)
