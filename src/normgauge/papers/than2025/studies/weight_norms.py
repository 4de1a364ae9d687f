"""S2 Figures 1 and 3: norms of weights over training, their product, and what rescaling does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normgauge.lab.study import Study
from normgauge.papers.language import EACH, SMALLEST, Contrast, Figure, each_but, empirical, finding, register
from normgauge.papers.than2025.studies._layer_sizes import train_and_watch

# model of the claim -> (architecture at small size, at paper size, normalizer)
ARCHITECTURES = {
    "relu10": ("relu10", "relu10", "none"),
    "resnet18": ("resnet18_narrow", "resnet18", "batch"),
    "efficientnet": ("efficientnet_narrow", "efficientnet_b3", "batch"),
}


def studies(
    name: str,
    chosen: Sequence[str],
    *,
    data: str,
    steps: Mapping[str, int],
    batch: int,
    seeds: int,
    paper: bool = False,
) -> list[Study]:
    """Return one study per model: they differ in architecture and normalizer."""
    return [
        Study(
            f"{name} {model}",
            "How do norms and variances grow in training?",
            scientific={"model": [model]},
            fixed={
                "architecture": ARCHITECTURES[model][1 if paper else 0],
                "norm": ARCHITECTURES[model][2],
                "data": data,
                "steps": steps[model],
                "batch": batch,
                "lr": 1e-3,
            },
            seeds=seeds,
        )
        for model in chosen
    ]


def published_studies(name: str) -> list[Study]:
    """Return the paper's setting: all architectures at full width, 100 epochs of batch 128 on CIFAR-10."""
    steps = dict.fromkeys(ARCHITECTURES, 39_100)
    return studies(name, list(ARCHITECTURES), data="cifar10", steps=steps, batch=128, seeds=3, paper=True)


empirical(
    "S2-E1",
    "weight-norms",
    contrasts=(
        Contrast("smallest_weight_norm", {}, least=1, at={"model": "relu10"}),
        Contrast("smallest_weight_norm", {}, least=1, at={"model": "resnet18"}),
        Contrast("log10_norm_product", {}, least=25, at={"model": "resnet18"}),
        Contrast("log10_frobenius_product", {}, least=25, at={"model": "resnet18"}),
        Contrast("log10_sigma_product", {}, least=12.5, at={"model": "resnet18"}),
    ),
    premise=(Contrast("train_accuracy", {}, least=0.9, at={"model": "resnet18"}),),
)

finding(
    "weight-norms",
    contrasts=(
        Contrast(
            "",
            {"reading": "log10_norm_product"},
            {"reading": "first_log10_norm_product"},
            least=0.3,
            at={"model": each_but("efficientnet")},
        ),
    ),
)

register(
    "weight-norms",
    sizes={
        "smoke": studies("weight-norms", ["resnet18"], data="digits", steps={"resnet18": 3}, batch=32, seeds=3),
        "small": studies(
            "weight-norms",
            list(ARCHITECTURES),
            data="cifar10:4000/500/500",
            steps={"relu10": 150, "resnet18": 150, "efficientnet": 40},
            batch=64,
            seeds=4,
        ),
        "paper": published_studies("weight-norms"),
    },
    run=train_and_watch,
    figures=(
        Figure("log10_norm_product", series=("model",)),
        Figure("train_accuracy_now", series=("model",)),
        Figure("layer_norm", series=("layer",), where={"model": EACH, "seed": SMALLEST}),
    ),
)
