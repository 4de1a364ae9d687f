"""S2 Figures 2 and 3: variances before normalizers or activations, their product, and what rescaling does to it."""

from __future__ import annotations

from normgauge.papers.court import EACH, SMALLEST, Contrast, finding
from normgauge.papers.experiment import Experiment
from normgauge.papers.figures import Figure
from normgauge.papers.studies import register
from normgauge.papers.than2025.studies._layer_sizes import train_and_watch
from normgauge.papers.than2025.studies.weight_norms import published_studies, studies

_SMALL = {"relu10": 150, "resnet18": 150}


finding(
    "variances",
    printed="variances start small and grow far above 1, so that the product of 1/sigma reduces",
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
    control="the same network before training",
)

register(
    Experiment(
        name="variances",
        papers=("S2",),
        place="Fig. 2, 3, sec. 4.2",
        question="How large do the variances before normalizers become, and does the product of 1/sigma mean anything?",
        finding="Variances start small and grow far above 1; in ResNet-18 the product of 1/sigma is about 10^-25.",
        proxy="As weight-norms: a narrow ResNet-18 on 4,000 images of CIFAR-10 for 150 steps; the paper's "
        "EfficientNet is left out.",
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
        data=("cifar10",),
        minutes={"small": 0.8},
    )
)
