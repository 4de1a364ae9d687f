"""Fig. 3: norms of normalized weights over training, with and without weight decay, against law and equilibrium."""

from __future__ import annotations

import math

import torch
from torch import nn

from normgauge.errors import NonFiniteError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.models.normalized import direction_weight, joint_norm, joint_parameters, normalized_layers
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import EACH, Contrast, Figure, Record, Spec, empirical, fit, grid, register
from normgauge.theory.norm_growth import after_sgd_step
from normgauge.theory.weight_dynamics import sgd_equilibrium

NORMS = ("batch", "group", "layer", "weight")
WATCHED = 1  # the second normalized layer: the first of the first block, as in the paper


def run(spec: Spec, record: Record) -> None:
    """Train with SGD without momentum (for which the law is exact) and follow one layer's weights at every step."""
    dataset = datasets.load(spec["data"])
    seed, steps, rate = int(spec["seed"]), int(spec["steps"]), float(spec["lr"])
    decay = float(spec["decay"]) if spec["decayed"] else 0.0
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, seed)
    part = normalized_layers(network)[WATCHED]
    weight, together = direction_weight(part), joint_parameters(part)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, weight_decay=decay)
    norms: list[float] = []
    products: list[float] = []
    law = joint_norm(together) ** 2

    def watch(step: int, _: nn.Module) -> None:
        norms.append(joint_norm([weight]))
        if not math.isfinite(norms[-1]):
            raise NonFiniteError(f"norm-growth: the weights were not finite at step {step}")
        if step % max(1, steps // 50) == 0 or step == steps:
            record(step, "watched_norm", norms[-1])

    def follow_law(step: int, loss: float) -> None:
        nonlocal law
        slope = joint_norm([p.grad for p in together if p.grad is not None])
        law = float(after_sgd_step((1 - rate * decay) ** 2 * law, slope**2, rate))
        products.append(slope**2 * joint_norm(together) ** 2)

    done = fit(
        spec, network, dataset, optimizer, at=range(steps + 1), watch=watch, on_gradient=follow_law, ceiling=math.inf
    )
    done.whole()
    third = max(1, steps // 3)
    record(steps, "norm_growth", norms[-1] / norms[0] - 1)
    record(steps, "late_norm_growth", norms[-1] / norms[-1 - third] - 1)
    record(steps, "law_error", abs(math.sqrt(law) / joint_norm(together) - 1))
    if decay:
        record(steps, "equilibrium", sgd_equilibrium(rate, decay, sum(products[-third:]) / third).norm)
        record(steps, "joint_norm", joint_norm(together))
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)


CIFAR = {"model": "vgg8", "data": "cifar10:10000/1000/2000", "batch": 32, "lr": 0.1}

empirical(
    "S4-E1",
    "norm-growth",
    contrasts=(
        Contrast("norm_growth", {"decayed": False}, least=0.05, at={"norm": EACH}),
        Contrast(
            "late_norm_growth",
            less={"decayed": True},
            least=-0.05,
            at={"norm": EACH},
            of=lambda row: abs(row["late_norm_growth"]),
        ),
    ),
    premise=(Contrast("test_accuracy", {"decayed": True}, {"decayed": False}, least=-0.03, over=("norm",)),),
)

register(
    "norm-growth",
    sizes=grid(
        "norm-growth",
        {"norm": NORMS, "decayed": [False, True]},
        smoke={"model": "mlp", "data": "digits", "batch": 32, "steps": 20, "lr": 0.3, "decay": 1e-2},
        small={**CIFAR, "seeds": 5, "steps": 2000, "decay": 5e-3},
        medium={**CIFAR, "seeds": 6, "steps": 10000, "decay": 2e-3},
        paper={"model": "resnet101", "data": "cifar10", "batch": 128, "steps": 78000, "lr": 1e-3, "decay": 5e-4},
    ),
    run=run,
    figures=(
        Figure("watched_norm", where={"decayed": EACH}),
        Figure("joint_norm", x="equilibrium", where={"decayed": True}),
    ),
)
