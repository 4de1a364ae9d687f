"""S2 Corollaries 10 and 11, Theorems 6 and 9: brackets of the Lipschitz constant beside the printed products."""

from __future__ import annotations

import math

import torch
from torch import Tensor, nn

from normgauge.charts import bars
from normgauge.lab import models
from normgauge.lab.study import Study
from normgauge.measure.lipschitz.lipschitz import lipschitz
from normgauge.nn import cascade
from normgauge.papers.court import Margins, StudyTable, differences, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.papers.than2025.studies._printed_products import NORMS, WORDS, printed_products, train_network
from normgauge.records import Spec
from normgauge.rng import generator

RADIUS = 0.1  # of the balls around the data, as a share of the radius of the ball that holds the data
NORMALIZED = tuple(norm for norm in NORMS if norm != "none")
SENSES = {
    "steepest": "steepest point",
    "at_data": "bound at data",
    "on_ball": "bound on balls",
    "everywhere": "bound everywhere",
    "printed": "printed product",
}


def run(spec: Spec, record: Record) -> None:
    """Bracket the network at its start, where all arms have the same weights, and after training."""
    training = train_network(spec, record)
    data = training.dataset.train[0][: int(spec["samples"])]
    last = int(spec["steps"])
    for step, prefix, network in ((0, "first_", training.start), (last, "", training.end)):
        for name, value in measure_capacity(network, data, training.reach).items():
            record(last, f"{prefix}log10_{name}", value)
            if name in SENSES and step != last:
                record(step, f"log10_{name}", value)
    sizes = [10**value for value in printed_products(training.end, data).weights]
    attained = lipschitz(
        cascade([4] * (len(sizes) + 1), sizes, dtype=torch.float64), torch.ones(1, 4).double(), climbs=0
    )
    record(last, "theorem_6_misfit", abs(attained.log10_lower - sum(map(math.log10, sizes))))


def measure_capacity(network: nn.Module, data: Tensor, reach: float = 1.0) -> dict[str, float]:
    """Return log10 of the bracket's ends in three senses, and of the printed products."""
    ball = lipschitz(network, data, radius=RADIUS * reach, climbs=3)
    anywhere = lipschitz(network, torch.cat([data, suspects(network, data)]), climbs=3)
    printed = printed_products(network, data)
    assert ball.log10_on_ball is not None  # it was asked for with a radius
    return {
        "steepest": max(anywhere.log10_lower, ball.log10_lower),
        "steepest_on_ball": ball.log10_lower,
        "at_data": ball.log10_at_data,
        "on_ball": ball.log10_on_ball,
        "everywhere": anywhere.log10_global,
        "weight_product": printed.weight_product,
        "normalizers": printed.normalizers,
        "printed": printed.bound,
        "printed_power": printed.power,
        "printed_defined": printed.defined,
        "printed_scaled": printed.scaled,
    }


def suspects(network: nn.Module, data: Tensor) -> Tensor:
    """Return inputs where a normalizer by sample divides by little: near 0, and where the first layer is constant.

    All arms get them. A trained bias moves the steep point away from 0; `P (W x + b) = 0`, P the projection that
    takes the mean off, has a solution where W has as many columns as rows.
    """
    noise = torch.randn((4, *data.shape[1:]), generator=generator(0)).to(data)
    points = [1e-5 * noise[:3]]
    first = next(part.layer for part in network.modules() if isinstance(part, models.Normalized))
    if isinstance(first, nn.Linear):
        weight = first.weight.detach().double()
        bias = torch.zeros(len(weight)).double() if first.bias is None else first.bias.detach().double()
        point = -torch.linalg.pinv(weight - weight.mean(0)) @ (bias - bias.mean())
        points.append(point.to(data).reshape(1, *data.shape[1:]) + 1e-6 * noise[3:])
    return torch.cat(points)


@finding(
    "capacity",
    printed="BN and LN make a network's Lipschitz constant smaller, and the printed products bound it",
    criterion="after training, for every model with BN and with LN: the bound on all inputs and the steepest point "
    "found are below the plain network's, and the printed product is above the steepest point",
)
def _smoother(table: StudyTable) -> Margins:
    margins = {}
    for model in _models(table):
        for norm in NORMALIZED:
            word = f"{model}: log10 of the plain network's minus {WORDS[norm]}'s"
            for sense in ("everywhere", "steepest"):
                margins[f"{word}, {SENSES[sense]}"] = table.paired(f"log10_{sense}", "none", norm, model=model)
            margins[f"{model}: log10 of {WORDS[norm]}'s printed product over the steepest point"] = differences(
                *(table.by_seed(f"log10_{name}", model=model, norm=norm) for name in ("printed", "steepest"))
            )
    return margins


def figures(table: StudyTable) -> list[Figure]:
    """Draw the brackets beside the printed products, at the start and after training."""
    drawn = []
    for model in _models(table):
        for prefix, when in (("first_", "start"), ("", "end")):
            rows = [
                {
                    "sense": words,
                    "network": WORDS[norm],
                    "log10": table.mean(f"{prefix}log10_{sense}", model=model, norm=norm).mean,
                }
                for sense, words in SENSES.items()
                for norm in NORMS
            ]
            told = "with the same random weights" if prefix else "after training"
            drawn.append(
                Figure(
                    f"{model.replace(' ', '-')}-{when}",
                    bars(rows, x="sense", y="log10", series="network", x_title="", y_title="log10", width=620),
                    f"{model}, {told}: the steepest point found, what the constant is bounded by at the data, on "
                    f"balls of {RADIUS:.0%} of the largest input around them and on all inputs, and the printed "
                    "product (LN's with the deviations seen); means over seeds.",
                )
            )
    return drawn


def remarks(table: StudyTable) -> list[str]:
    """Say how large constants, bounds and products are, and which product fails as a bound."""
    lines = []
    for model in _models(table):
        for norm in NORMS:
            ends = {name: table.mean(f"log10_{name}", model=model, norm=norm).mean for name in (*SENSES, "normalizers")}
            factor = f" (normalizers alone 10^{ends['normalizers']:.2f})" if norm != "none" else ""
            lines.append(
                f"{model}, {WORDS[norm]}: the constant on all inputs lies between 10^{ends['steepest']:.2f} and "
                f"10^{ends['everywhere']:.2f}; at the data it is at most 10^{ends['at_data']:.2f}, on the balls "
                f"10^{ends['on_ball']:.2f}; the printed product is 10^{ends['printed']:.2f}{factor}."
            )
        for norm in NORMALIZED:
            lines.append(_broken(table, model, norm))
        same = {norm: table.mean("first_log10_steepest", model=model, norm=norm).mean for norm in NORMS}
        told = ", ".join(f"{WORDS[norm]} 10^{value:.2f}" for norm, value in same.items())
        lines.append(f"{model}, same random weights in all arms: steepest points {told}.")
    misfit = max(row["theorem_6_misfit"] for row in table.rows)
    lines.append(
        "Theorem 6: the network of scaled identities with the trained layers' norms attains the product of norms, to "
        f"{misfit:.1g} in log10; the trained plain networks stay "
        f"10^{_room(table):.2f} below theirs."
    )
    return lines


def _broken(table: StudyTable, model: str, norm: str) -> str:
    rows = table.where(model=model, norm=norm)
    over = [row["log10_steepest"] - row["log10_printed"] for row in rows]
    count = sum(value > 0 for value in over)
    first = sum(row["first_log10_steepest"] > row["first_log10_printed"] for row in rows)
    worst = f", by up to 10^{max(over):.2f}" if count else ""
    product = "Corollary 10 (1)" if norm == "batch" else "Corollary 11 with the deviations seen"
    return (
        f"{model}, {WORDS[norm]}: the printed product of {product} is exceeded by the steepest point of {count} of "
        f"{len(rows)} trained networks{worst}, and of {first} at the start."
    )


def _room(table: StudyTable) -> float:
    gaps = [row["log10_printed"] - row["log10_steepest"] for row in table.where(norm="none")]
    return sum(gaps) / len(gaps) if gaps else math.nan


def _models(table: StudyTable) -> list[str]:
    return list(dict.fromkeys(row["model"] for row in table.rows))


def _study(model: str, data: str, *, steps: int, batch: int, seeds: int, samples: int) -> Study:
    return Study(
        f"capacity {model}",
        "Do normalizers make the Lipschitz constant smaller?",
        scientific={"model": [model], "norm": list(NORMS)},
        fixed={"data": data, "steps": steps, "batch": batch, "samples": samples, "lr": 3e-3},
        seeds=seeds,
    )


register(
    Experiment(
        name="capacity",
        papers=("S2",),
        place="Cor. 10, 11, Thm 6, 9, sec. 4.2",
        question="Do BN and LN make the Lipschitz constant of a network smaller, and do the printed products bound it?",
        finding="By Corollaries 10 and 11 BN and LN reduce the Lipschitz constant by the product of 1/sigma, "
        "exponentially in depth where variances are large: normalized networks are smoother.",
        proxy="The paper multiplies observed norms and variances of ResNet-18 and measures no constant. Ours: an "
        "MLP of three hidden layers of 64 and a VGG of four convolutions, 100 and 40 steps of Adam (rate 0.003 in "
        "all arms) on digits in the unit ball, and for the MLP also in a ball of radius 10 (mlp x10), where variances "
        "are 100 times as large; scale and shift, which the paper leaves out, are there and count in the bounds but "
        "not in the printed products. The paper size takes its ReLU net of ten layers and CIFAR-10.",
        sizes={
            "smoke": _study("mlp", "digits", steps=12, batch=64, seeds=3, samples=16),
            "small": [
                _study("mlp", "digits", steps=100, batch=64, seeds=5, samples=64),
                _study("mlp x10", "digits", steps=100, batch=64, seeds=5, samples=64),
                _study("vgg", "digits", steps=40, batch=64, seeds=3, samples=32),
            ],
            "paper": [
                _study(model, "cifar10", steps=39_100, batch=128, seeds=3, samples=128) for model in ("relu10", "vgg")
            ],
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=(
            "log10_steepest",
            "log10_at_data",
            "log10_on_ball",
            "log10_everywhere",
            "log10_weight_product",
            "log10_printed",
            "log10_printed_power",
            "log10_printed_defined",
            "log10_printed_scaled",
            "test_accuracy",
        ),
        data=("cifar10",),
        minutes={"small": 0.3},
        cite=("than2025",),
    )
)
