"""S2 Figures 2 and 3: variances before normalizers or activations, their product, and what rescaling does to it."""

from __future__ import annotations

from normgauge.charts import curves
from normgauge.papers.court import Margins, StudyTable, differences, finding
from normgauge.papers.experiment import Experiment, Figure
from normgauge.papers.studies import register
from normgauge.papers.than2025.studies._layer_sizes import FACTOR, train_and_watch
from normgauge.papers.than2025.studies.weight_norms import ARCHITECTURES, published_studies, studies


@finding(
    "variances",
    printed="variances start small and grow far above 1, so that the product of 1/sigma reduces",
    criterion="of every network the product of the deviations before normalizers (or activations) is larger after "
    "training than before, and ends above 1",
)
def _growth(table: StudyTable) -> Margins:
    margins = {}
    for model in _models(table):
        last, first = (table.by_seed(f"{when}log10_sigma_product", model=model) for when in ("", "first_"))
        margins[f"{model}: growth of log10 of the product of sigma"] = differences(last, first)
        margins[f"{model}: log10 of the product of sigma"] = list(last.values())
    return margins


def figures(table: StudyTable) -> list[Figure]:
    """Draw the products over training, and the layers of one run."""
    drawn = [
        Figure(
            "products",
            curves(
                table.band("log10_sigma_product", "model"),
                y="mean",
                low="low",
                high="high",
                y_title="log10 of the product of sigma",
            ),
            "Product over layers of the deviation before the normalizer (or activation); band: range over seeds.",
        )
    ]
    for model in _models(table):
        rows = [
            {"series": row["layer"], "step": row["step"], "value": row["value"] ** 2}
            for row in table.curve("layer_deviation", model=model, seed=0)
        ]
        kept = sorted({row["series"] for row in rows})[:11]
        shown = [row for row in rows if row["series"] in kept]
        caption = f"{model}, one seed: variance of the first layers' outputs over training."
        drawn.append(Figure(f"layers-{model}", curves(shown, y_title="variance", y_scale="log"), caption))
    return drawn


def remarks(table: StudyTable) -> list[str]:
    """Give the products and what rescaling does to them."""
    lines = []
    for model in _models(table):
        last, largest = (table.mean(name, model=model).mean for name in ("log10_sigma_product", "largest_deviation"))
        lines.append(f"{model}: the product of 1/sigma ends at 10^{-last:.1f}; the largest sigma is {largest:.3g}.")
        moved = [
            row["rescaled_log10_sigma_product"] - row["log10_sigma_product"]
            for row in table.where(model=model)
            if row.get("rescaled_log10_sigma_product") is not None
        ]
        if moved and max(moved) > 0.5:
            lines.append(
                f"{model}: multiplying every weight before a normalizer by {FACTOR:g} multiplies the product of sigma "
                f"by 10^{max(moved):.1f}, as it does the product of norms: only their ratio belongs to the function."
            )
    return lines


def _models(table: StudyTable) -> list[str]:
    return [model for model in ARCHITECTURES if table.where(model=model)]


_SMALL = {"relu10": 150, "resnet18": 150}
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
        figures=figures,
        remarks=remarks,
        columns=("largest_deviation", "log10_sigma_product", "rescaled_log10_sigma_product", "rescaled_output_change"),
        data=("cifar10",),
        minutes={"small": 0.8},
        cite=("than2025",),
    )
)
