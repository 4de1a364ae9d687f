"""S2 Figures 1 and 3: norms of weights over training, their product, and what rescaling does to it."""

from collections.abc import Mapping, Sequence

from normgauge.lab.study import Study
from normgauge.papers.language import register
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


register("weight-norms", run=train_and_watch)
