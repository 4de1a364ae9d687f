"""Fig. 3: how much a layer's gradient turns when the layers before it have moved, with and without BN."""

from __future__ import annotations

import math
from statistics import fmean

import torch
from torch import nn

from normgauge.measure.signal.covariate_shift import covariate_shift
from normgauge.papers.language import EACH, Contrast, Figure, Record, Spec, empirical, finding, fit, register
from normgauge.papers.santurkar2018.studies._setting import (
    PUBLISHED_STEPS,
    batch_objective,
    layer_groups,
    prepare,
    spaced_steps,
    study,
)

NORMS = ("none", "batch")
MODELS = ("vgg", "dln")
# The same measurement for a tenth of the step: it tells whether the step or the network makes the gradients turn.
SHARES = {"": 1.0, "_tenth": 0.1}


def run(spec: Spec, record: Record) -> None:
    """Train, and measure S1's Definition 2.1 for one SGD step at spaced steps of training."""
    network, dataset = prepare(spec)
    rate = float(spec["lr"])
    history: dict[str, list[float]] = {}

    def watch(step: int, network: nn.Module) -> None:
        objective = batch_objective(network, dataset, spec)
        record(step, "loss", float(objective.loss()))
        for suffix, share in SHARES.items():
            layers = covariate_shift(objective, share * rate, groups=layer_groups(network)).layers
            later = [entry for entry in layers[1:] if entry.status == "ok"]  # nothing moves before the first layer
            if not later:
                continue
            values = {
                "cosine": fmean(entry.cosine for entry in later),
                "l2": fmean(entry.l2 for entry in later),
                "relative_l2": fmean(entry.l2 / entry.gradient_norm for entry in later),
            }
            for name, value in values.items():
                history.setdefault(name + suffix, []).append(value)
                record(step, f"{name}{suffix}_now", value)
            if not suffix:
                for entry in later:
                    record(step, "layer_cosine", entry.cosine, layer=entry.layer)
                    record(step, "layer_l2", entry.l2, layer=entry.layer)

    steps = int(spec["steps"])
    result = fit(
        spec,
        network,
        dataset,
        torch.optim.SGD(network.parameters(), lr=rate),
        at=spaced_steps(steps, int(spec["measures"])),
        watch=watch,
    )
    for name, values in history.items():
        record(steps, name, fmean(values))
    record(steps, "train_loss", fmean(result.losses[-10:]))
    result.whole()


empirical(
    "S1-ICS",
    "covariate-shift",
    contrasts=(
        Contrast(
            "cosine",
            less={"norm": "batch"},
            least=-0.3,
            at={"model": "dln"},
            of=lambda row: abs(row["cosine"]),
            name="|cosine| with BN (model dln)",
        ),
        Contrast("cosine", {"norm": "none"}, least=0.9, at={"model": "dln"}),
    ),
)

empirical(
    "S3-ICS",
    "covariate-shift",
    contrasts=(Contrast("cosine", {"norm": "none"}, {"norm": "batch"}, least=0.05, at={"model": EACH}),),
)

finding(
    "covariate-shift",
    contrasts=(
        Contrast("l2", {"norm": "batch"}, {"norm": "none"}, least=math.log10(1.25), at={"model": EACH}, log=True),
    ),
)

register(
    "covariate-shift",
    sizes={
        size: [
            study(
                "covariate-shift", size, model, NORMS, seeds=seeds, **PUBLISHED_STEPS[model] if size == "small" else {}
            )
            for model in MODELS
        ]
        for size, seeds in (("smoke", 1), ("small", 6), ("medium", 6), ("paper", 5))
    },
    run=run,
    figures=(
        Figure("cosine_now", where={"model": EACH}),
        Figure("l2_now", where={"model": EACH}),
        Figure("layer_cosine", x="layer", where={"model": EACH}),
    ),
)
