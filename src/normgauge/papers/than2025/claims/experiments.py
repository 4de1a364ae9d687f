"""S2 (Than 2025), the experiment: what Figures 1 and 2 say, and the criterion fixed before running it."""

from __future__ import annotations

from normgauge.papers.court.registry import empirical
from normgauge.papers.court.tables import Margins, Rows, by_seed

CITE = ("than2025",)


@empirical(
    "S2-E1",
    place="Fig 1, 2, sec 4.2",
    printed="training a 10-layer ReLU net / ResNet18 on CIFAR-10: all weight norms > 1, product up to 1e50; product "
    "of 1/sigma ~ 1e-25",
    study="weight-norms",
    criterion="after training: the smallest weight norm above 1 in both models; in ResNet18 the product of the norms "
    "above 10^25 and that of 1/sigma below 10^-12.5 (half the printed exponents)",
    cite=CITE,
    note="Rows: `model` (relu10, resnet18), `smallest_weight_norm`, `log10_norm_product`, `log10_sigma_product`. The "
    "paper does not say which norm of a convolution's weights it takes; the operator norm is meant here. A large "
    "product bounds nothing about the trained function: with BN it does not change when a weight is multiplied "
    "(S2-T9).",
)
def _products(rows: Rows) -> Margins:
    deep = {name: by_seed(rows, name, model="resnet18") for name in ("log10_norm_product", "log10_sigma_product")}
    margins = {
        f"{model}: smallest weight norm minus 1": [
            value - 1 for value in by_seed(rows, "smallest_weight_norm", model=model).values()
        ]
        for model in ("relu10", "resnet18")
    }
    margins["log10 of the product of norms minus 25"] = [v - 25 for v in deep["log10_norm_product"].values()]
    margins["log10 of the product of sigma minus 12.5"] = [v - 12.5 for v in deep["log10_sigma_product"].values()]
    return margins
