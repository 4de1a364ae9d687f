"""Time of one optimizer step relative to torch's fused SGD and Adam: medians of interleaved ratios, one thread.

Run with `python benchmarks/optimizers.py`; writes benchmarks/results/optimizers.json. Every round steps every optimizer
once, baselines first, so that a slow moment of the machine falls on all; a ratio is taken within its round. CPU time of
the thread is the main clock (on a shared machine the wall clock mostly measures the neighbours); wall ratios are
written too. Peers (geoopt, adamp) are measured where they are installed. Gradients are random, with a radial part, but
for the rows named "tangent": there they are made tangent before each step, outside the clock, as those of a loss that
does not depend on the norms are.
"""

from __future__ import annotations

import argparse
import functools
import json
import platform
import statistics
import time
from collections.abc import Callable
from pathlib import Path

import torch
from torch import nn

from normgauge import optim
from normgauge.records import format_table

STAGES = ((64, 64, 2), (64, 128, 2), (128, 256, 2), (256, 512, 2))
PEERS = ("geoopt RiemannianSGD", "geoopt RiemannianAdam", "adamp AdamP", "adamp SGDP")
TARGETS = {  # name -> (baseline, target)
    "SphereSGD": ("torch SGD fused", 2.0),
    "SphereSGD tangent": ("torch SGD fused", 2.0),
    "GeodesicSGD": ("torch SGD fused", 3.2),
    "SphereAdam": ("torch Adam fused", 2.0),
    "GeodesicAdam": ("torch Adam fused", 3.2),
    "ProjectedAdam": ("torch Adam fused", 3.7),
    "ProjectedSGD": ("torch SGD fused", None),
}
AGAINST = {  # name -> (peer, how many times faster)
    "SphereSGD": ("geoopt RiemannianSGD", 6.0),
    "SphereSGD tangent": ("geoopt RiemannianSGD", 6.0),
    "GeodesicSGD": ("geoopt RiemannianSGD", 6.0),
    "SphereAdam": ("geoopt RiemannianAdam", 6.0),
    "GeodesicAdam": ("geoopt RiemannianAdam", 6.0),
    "ProjectedAdam": ("adamp AdamP", 4.0),
    "ProjectedSGD": ("adamp SGDP", None),
}


def resnet18_shapes() -> list[tuple[int, ...]]:
    """Return the shapes of the 20 convolutions of ResNet-18."""
    shapes: list[tuple[int, ...]] = [(64, 3, 7, 7)]
    for before, after, blocks in STAGES:
        for block in range(blocks):
            first = before if block == 0 else after
            shapes += [(after, first, 3, 3), (after, after, 3, 3)]
            if first != after:
                shapes.append((after, first, 1, 1))
    return shapes


PROBLEMS = {"resnet18 convolutions": resnet18_shapes(), "200 of 64x64": [(64, 64)] * 200}


def parameters(shapes: list[tuple[int, ...]]) -> list[nn.Parameter]:
    """Return parameters with gradients."""
    params = [nn.Parameter(0.05 * torch.randn(shape)) for shape in shapes]
    for param in params:
        param.grad = 0.01 * torch.randn_like(param)
    return params


def make_tangent(params: list[nn.Parameter]) -> None:
    """Take the radial part out of every row's gradient."""
    for param in params:
        rows, slope = param.detach().flatten(1), param.grad.flatten(1)
        radial = (rows * slope).sum(1, keepdim=True) / rows.square().sum(1, keepdim=True)
        param.grad = (slope - rows * radial).view_as(param)


def contestants(
    shapes: list[tuple[int, ...]],
) -> tuple[dict[str, Callable[[], object]], dict[str, Callable[[], object]]]:
    """Return a step function per optimizer, each on its own parameters, and what to do before some."""
    before: dict[str, Callable[[], object]] = {}
    steps: dict[str, Callable[[], object]] = {
        "torch SGD fused": torch.optim.SGD(parameters(shapes), lr=0.1, momentum=0.9, fused=True).step,
        "torch Adam fused": torch.optim.Adam(parameters(shapes), lr=1e-3, fused=True).step,
    }
    for name in TARGETS:
        options = {"lr": 0.1, "momentum": 0.9} if "SGD" in name else {"lr": 1e-3}
        params = parameters(shapes)
        steps[name] = getattr(optim, name.split()[0])(params, **options).step
        if name.endswith("tangent"):
            before[name] = functools.partial(make_tangent, params)
    try:
        import geoopt

        for name, options in (("RiemannianSGD", {"lr": 0.1, "momentum": 0.9}), ("RiemannianAdam", {"lr": 1e-3})):
            points = []
            for param in parameters(shapes):  # geoopt's sphere is the last axis, so weights must be flat there
                flat = nn.functional.normalize(param.detach().flatten(1), dim=1)
                points.append(geoopt.ManifoldParameter(flat, manifold=geoopt.Sphere()))
                points[-1].grad = 0.01 * torch.randn_like(flat)
            steps[f"geoopt {name}"] = getattr(geoopt.optim, name)(points, **options).step
    except ImportError:
        print("geoopt is not installed")
    try:
        import adamp

        steps["adamp AdamP"] = adamp.AdamP(parameters(shapes), lr=1e-3).step
        steps["adamp SGDP"] = adamp.SGDP(parameters(shapes), lr=0.1, momentum=0.9).step
    except ImportError:
        print("adamp is not installed")
    return steps, before


def measure(shapes: list[tuple[int, ...]], rounds: int) -> list[dict[str, object]]:
    """Return a row per optimizer: milliseconds, ratios to its baseline and to its peer."""
    steps, before = contestants(shapes)
    cpu: dict[str, list[float]] = {name: [] for name in steps}
    wall: dict[str, list[float]] = {name: [] for name in steps}
    for number in range(rounds + 2):
        for name, step in steps.items():
            if name in before:
                before[name]()
            a, b = time.thread_time(), time.perf_counter()
            step()
            if number >= 2:
                cpu[name].append(time.thread_time() - a)
                wall[name].append(time.perf_counter() - b)
    rows = []
    for name in steps:
        baseline, target = TARGETS.get(name, ("torch Adam fused" if "Adam" in name else "torch SGD fused", None))
        ratio = statistics.median(x / y for x, y in zip(cpu[name], cpu[baseline], strict=True))
        row: dict[str, object] = {"optimizer": name, "cpu_ms": 1e3 * statistics.median(cpu[name]), "baseline": baseline}
        row |= {"ratio": ratio, "target": target, "met": None if target is None else ratio <= target}
        row["ratio_of_minima"] = min(cpu[name]) / min(cpu[baseline])
        row["wall_ratio"] = statistics.median(x / y for x, y in zip(wall[name], wall[baseline], strict=True))
        peer, times = AGAINST.get(name, ("", None))
        if peer in cpu:
            row["peer"] = peer
            row["times_faster"] = statistics.median(y / x for x, y in zip(cpu[name], cpu[peer], strict=True))
            row["wanted"] = times
        rows.append(row)
    return rows


def main() -> None:
    """Measure both problems, print the tables, write the JSON."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--rounds", type=int, default=15)
    arguments = parser.parse_args()
    torch.set_num_threads(1)
    torch.manual_seed(0)
    machine = f"{platform.processor() or platform.machine()}, 1 thread, torch {torch.__version__}"
    results = {name: measure(shapes, arguments.rounds) for name, shapes in PROBLEMS.items()}
    for name, rows in results.items():
        print(format_table(rows, title=name, footer=machine))
    path = Path(__file__).parent / "results" / "optimizers.json"
    path.parent.mkdir(exist_ok=True)
    document = {"machine": machine, "rounds": arguments.rounds, "clock": "thread CPU time", "problems": results}
    path.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
