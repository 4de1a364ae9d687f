"""S2 Figures 1 and 3: norms of weights over training, their product, and what rescaling does to it."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from normgauge.charts import curves
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, differences, empirical, finding
from normgauge.papers.experiment import Experiment, Figure
from normgauge.papers.studies import register
from normgauge.papers.than2025.studies._layer_sizes import FACTOR, train_and_watch

CITE = ("than2025",)
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


@empirical(
    "S2-E1",
    place="Fig 1, 2, sec 4.2",
    printed="training a 10-layer ReLU net / ResNet18 on CIFAR-10: all weight norms > 1, product up to 1e50; product of "
    "1/sigma ~ 1e-25",
    study="weight-norms",
    criterion="after training: the smallest weight norm above 1 in both models; in ResNet18 the product of the norms "
    "above 10^25 and that of 1/sigma below 10^-12.5 (half the printed exponents)",
    cite=CITE,
    note="Rows: `model` (relu10, resnet18), `smallest_weight_norm`, `log10_norm_product`, `log10_sigma_product`. The "
    "paper does not say which norm of a convolution's weights it takes; the operator norm is meant here. A large "
    "product bounds nothing about the trained function: with BN it does not change when a weight is multiplied "
    "(S2-T9).",
)
def _products(table: StudyTable) -> Margins:
    norms, deviations = (
        table.by_seed(f"log10_{name}_product", model="resnet18").values() for name in ("norm", "sigma")
    )
    return {
        **{f"{model}: smallest weight norm minus 1": _above_1(table, model) for model in ("relu10", "resnet18")},
        "log10 of the product of norms minus 25": [value - 25 for value in norms],
        "log10 of the product of sigma minus 12.5": [value - 12.5 for value in deviations],
    }


@finding(
    "weight-norms",
    printed="the product of the weights' norms grows in training, and EfficientNet's norms end above 1 too",
    criterion="of every network the product of the operator norms is larger after training than before; in "
    "EfficientNet the smallest weight norm is above 1",
)
def _growth(table: StudyTable) -> Margins:
    margins = {
        f"{model}: growth of log10 of the product of norms": differences(
            *(table.by_seed(f"{when}log10_norm_product", model=model) for when in ("", "first_"))
        )
        for model in _models(table)
    }
    if table.where(model="efficientnet"):
        margins["efficientnet: smallest operator norm of a layer minus 1"] = _above_1(table, "efficientnet")
    return margins


def _above_1(table: StudyTable, model: str) -> list[float]:
    return [value - 1 for value in table.by_seed("smallest_weight_norm", model=model).values()]


def figures(table: StudyTable) -> list[Figure]:
    """Draw the products over training, and the layers of one run."""
    products = table.band("log10_norm_product", "model")
    drawn = [
        Figure(
            "products",
            curves(products, y="mean", low="low", high="high", y_title="log10 of the product of norms"),
            "Product of the operator norms of all layers but the last; the band is the range over seeds.",
        )
    ]
    for model in _models(table):
        rows = [
            {"series": row["layer"], "step": row["step"], "value": row["value"]}
            for row in table.curve("layer_norm", model=model, seed=0)
        ]
        kept = sorted({row["series"] for row in rows})[:11]
        shown = [row for row in rows if row["series"] in kept]
        drawn.append(
            Figure(f"layers-{model}", curves(shown, y_title="operator norm"), f"{model}, one seed: the first layers.")
        )
    return drawn


def remarks(table: StudyTable) -> list[str]:
    """Give the products, and what multiplying weights before normalizers does."""
    lines = []
    for model in _models(table):
        operator, frobenius = (table.mean(f"log10_{kind}_product", model=model).mean for kind in ("norm", "frobenius"))
        lines.append(
            f"{model}: the product of operator norms ends at 10^{operator:.1f}, that of Frobenius norms at "
            f"10^{frobenius:.1f} (the paper does not say which norm it takes)."
        )
        moved = [
            row["rescaled_log10_norm_product"] - row["log10_norm_product"]
            for row in table.where(model=model)
            if row.get("rescaled_log10_norm_product") is not None
        ]
        change = max(row["rescaled_output_change"] for row in table.where(model=model))
        if moved and max(moved) > 0.5:
            lines.append(
                f"{model}: multiplying every weight before a normalizer by {FACTOR:g} multiplies the product by "
                f"10^{max(moved):.1f} and changes the outputs by {change:.1g} (relative, through eps alone): the "
                "product says nothing about the function."
            )
    return lines


def _models(table: StudyTable) -> list[str]:
    return [model for model in ARCHITECTURES if table.where(model=model)]


register(
    Experiment(
        name="weight-norms",
        papers=("S2",),
        place="Fig. 1, 3, sec. 4.2",
        question="How large do the weights' norms and their product become, and does the product mean anything?",
        finding="All weight norms grow well above 1; their product reaches 10^50 in ResNet-18.",
        proxy="ResNet-18 with 8 to 64 channels instead of 64 to 512, EfficientNet a quarter as wide as B0 instead of "
        "B3, 4,000 images of CIFAR-10, one to a few epochs of Adam instead of 100; the ReLU net is the published one.",
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
        figures=figures,
        remarks=remarks,
        columns=(
            "smallest_weight_norm",
            "log10_norm_product",
            "log10_frobenius_product",
            "rescaled_log10_norm_product",
            "rescaled_output_change",
            "train_accuracy",
        ),
        data=("cifar10",),
        minutes={"small": 2.3},
        cite=CITE,
    )
)
