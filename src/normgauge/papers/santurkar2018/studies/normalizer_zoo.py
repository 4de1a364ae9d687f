"""Every registered normalizer on one task, and which of its properties predict the result.

Santurkar et al. 2018, sec. 3.3, and Akbar 2025, sec. 9.5.
"""

from __future__ import annotations

from collections.abc import Callable
from statistics import fmean

import torch

from normgauge.lab import data, models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.nn import registry
from normgauge.nn.registry import Declaration
from normgauge.papers.language import Contrast, Figure, Record, Spec, finding, fit, grid, register

RATES = (0.03, 0.1, 0.3, 1.0)
# StatNorm's design space: which centre, which scale, over which axes (names of the registry's points)
DESIGN = tuple(
    f"stat:axes={axes},center={center},scale={scale}"
    for axes, center, scale in (
        ("batch", "median", "l1"),
        ("batch", "mean", "linf"),
        ("batch", "none", "rms"),
        ("layer", "median", "std"),
        ("group", "mean", "l1"),
    )
)
PROPERTIES: dict[str, Callable[[Declaration], bool]] = {
    "weights scale-invariant": lambda d: any(i.of == "weights" and i.kind == "scale" for i in d.invariances),
    "acts on activations": lambda d: d.placement == "activation",
    "statistics of the batch": lambda d: d.statistics == "batch",
    "centres its input": lambda d: any(i.of == "input" and i.kind == "shift" for i in d.invariances),
    "free of noise": lambda d: not d.noise,
}


def run(spec: Spec, record: Record) -> None:
    """Train the same network under one normalizer at one rate."""
    dataset = data.load(spec["data"])
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    steps = int(spec["steps"])
    result = fit(spec, network, dataset, optimizer)
    for split in ("validation", "test"):
        record(steps, f"{split}_accuracy", evaluate(network, dataset, split).accuracy)
    record(steps, "train_loss", fmean(result.losses[-10:]))
    result.whole()


# Of the register, all but the forms for transformers, which are not about an MLP on images.
FOR_TRANSFORMERS = ("rms_", "qk_", "scale_norm", "unit_stream", "unit_columns", "hyperball", "dyt", "derf")
REGISTERED = tuple(norm for norm in registry.names() if not norm.startswith(FOR_TRANSFORMERS))
COMPARED = tuple(norm for norm in (*REGISTERED, *DESIGN) if norm not in ("instance", "weight_standardization"))
FIXED = {"model": "mlp", "data": "digits", "batch": 128}

finding(
    "normalizer-zoo",
    contrasts=[
        Contrast(
            "test_accuracy",
            {"norm": tuple(norm for norm in COMPARED if has(registry.get(norm)))},
            {"norm": tuple(norm for norm in COMPARED if not has(registry.get(norm)))},
            least=0.005,
            over=("norm",),
            name=f"test accuracy: {name} minus the others, mean over normalizers",
        )
        for name, has in PROPERTIES.items()
    ],
)

register(
    "normalizer-zoo",
    sizes=grid(
        "normalizer-zoo",
        {"norm": (*REGISTERED, *DESIGN)},
        {"lr": RATES},
        smoke={
            **FIXED,
            "norm": ("none", "batch", "rms", "weight", "noisy_batch"),
            "lr": (0.1, 1.0),
            "tuning_seeds": 1,
            "steps": 10,
        },
        small={**FIXED, "seeds": 6, "tuning_seeds": 1, "steps": 100},
        paper={**FIXED, "seeds": 5, "steps": 15_000, "data": "cifar10"},
    ),
    run=run,
    figures=(Figure("test_accuracy", kind="intervals"),),
    choose_by="validation_accuracy",
)
