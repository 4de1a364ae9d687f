"""S2 Figures 2 and 3: variances before normalizers or activations, their product, and what rescaling does to it."""

from __future__ import annotations

from normgauge.papers.language import EACH, SMALLEST, Contrast, Figure, finding, register
from normgauge.papers.than2025.studies._layer_sizes import train_and_watch
from normgauge.papers.than2025.studies.weight_norms import published_studies, studies

_SMALL = {"relu10": 150, "resnet18": 150}


finding(
    "variances",
    contrasts=(
        Contrast(
            "",
            {"reading": "log10_sigma_product"},
            {"reading": "first_log10_sigma_product"},
            least=0.3,
            at={"model": EACH},
        ),
        Contrast("log10_sigma_product", {}, least=0, at={"model": EACH}),
    ),
)

register(
    "variances",
    sizes={
        "smoke": studies("variances", ["resnet18"], data="digits", steps={"resnet18": 3}, batch=32, seeds=3),
        "small": studies("variances", list(_SMALL), data="cifar10:4000/500/500", steps=_SMALL, batch=32, seeds=3),
        "paper": published_studies("variances"),
    },
    run=train_and_watch,
    figures=(
        Figure("log10_sigma_product", series=("model",)),
        Figure("layer_deviation", series=("layer",), where={"model": EACH, "seed": SMALLEST}),
    ),
)
