"""Fig. 3: norms of normalized weights over training, with and without weight decay, against law and equilibrium."""

from __future__ import annotations

import math

import torch
from torch import nn

from normgauge.charts import against, curves
from normgauge.errors import NonFiniteError
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.models.normalized import (
    direction_weight,
    joint_norm,
    joint_parameters,
    normalized_layers,
)
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, empirical
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Row, Spec
from normgauge.stats import interval
from normgauge.theory.norm_growth import after_sgd_step
from normgauge.theory.weight_dynamics import sgd_equilibrium

CITE = ("sun2020",)
NORMS = ("batch", "group", "layer", "weight")
WATCHED = 1  # the second normalized layer: the first of the first block, as in the paper


def run(spec: Spec, record: Record) -> None:
    """Train with SGD without momentum (for which the law is exact) and follow one layer's weights at every step."""
    dataset = datasets.load(spec["data"])
    seed, steps, rate = int(spec["seed"]), int(spec["steps"]), float(spec["lr"])
    decay = float(spec["decay"]) if spec["decayed"] else 0.0
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, seed)
    part = normalized_layers(network)[WATCHED]
    weight, together = direction_weight(part), joint_parameters(part)
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, weight_decay=decay)
    norms: list[float] = []
    products: list[float] = []
    law = joint_norm(together) ** 2

    def watch(step: int, _: nn.Module) -> None:
        norms.append(joint_norm([weight]))
        if not math.isfinite(norms[-1]):
            raise NonFiniteError(f"norm-growth: the weights were not finite at step {step}")
        if step % max(1, steps // 50) == 0 or step == steps:
            record(step, "watched_norm", norms[-1])

    def follow_law(step: int, loss: float) -> None:
        nonlocal law
        slope = joint_norm([p.grad for p in together if p.grad is not None])
        law = float(after_sgd_step((1 - rate * decay) ** 2 * law, slope**2, rate))
        products.append(slope**2 * joint_norm(together) ** 2)

    done = train(
        network,
        dataset,
        optimizer,
        steps=steps,
        batch=int(spec["batch"]),
        seed=seed,
        at=range(steps + 1),
        watch=watch,
        on_gradient=follow_law,
        ceiling=math.inf,
    )
    if done.diverged:
        raise NonFiniteError(f"norm-growth: the weights were not finite at step {done.diverged_at}")
    third = max(1, steps // 3)
    record(steps, "norm_growth", norms[-1] / norms[0] - 1)
    record(steps, "late_norm_growth", norms[-1] / norms[-1 - third] - 1)
    record(steps, "law_error", abs(math.sqrt(law) / joint_norm(together) - 1))
    if decay:
        record(steps, "equilibrium", sgd_equilibrium(rate, decay, sum(products[-third:]) / third).norm)
        record(steps, "joint_norm", joint_norm(together))
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)


@empirical(
    "S4-E1",
    place="Fig 3",
    printed="ResNet-101: weight norms increase during training with BN, GN, LN, WN and stabilize with WD",
    study="norm-growth",
    criterion="for each normalizer: the norm of the watched weights ends above its start without decay, and over "
    "the last third of training it grows less with decay than without",
    cite=CITE,
    note="The paper: with weight decay the norm stabilizes early or even has a minor decrease.",
)
def _norms_grow(table: StudyTable) -> Margins:
    margins = {}
    for norm in NORMS:
        margins[f"{norm}: growth without decay"] = [*table.by_seed("norm_growth", norm=norm, decayed=False).values()]
        margins[f"{norm}: late growth, none minus decay"] = table.paired(
            "late_norm_growth", False, True, knob="decayed", norm=norm
        )
    return margins


def figures(table: StudyTable) -> list[Figure]:
    """Draw the norms over training, and where they end against the predicted equilibrium."""
    drawn = []
    for decayed in (False, True):
        band = table.band("watched_norm", "norm", decayed=decayed)
        chart = curves(
            band,
            y="mean",
            low="low",
            high="high",
            order=list(NORMS),
            y_title="norm of the watched weights",
            y_scale="linear",
        )
        name = "decay" if decayed else "plain"
        caption = f"Norm of the watched weights {'with' if decayed else 'without'} weight decay; range over seeds."
        drawn.append(Figure(name, chart, caption))
    points: list[Row] = []
    for norm in NORMS:
        alive = [row for row in table.where(norm=norm, decayed=True) if row["equilibrium"] > 0]
        goal, end = (interval([row[name] for row in alive]) for name in ("equilibrium", "joint_norm"))
        points.append({"series": norm, "equilibrium": goal.mean, "value": end.mean, "low": end.low, "high": end.high})
    ends = [pick(point["equilibrium"] for point in points) for pick in (min, max)]
    points += [{"series": "equal", "equilibrium": edge, "value": edge, "low": None, "high": None} for edge in ends]
    chart = against(
        points,
        x="equilibrium",
        low="low",
        high="high",
        x_title="equilibrium norm predicted from the gradients of the last third",
        y_title="norm at the end",
        x_scale="linear",
        y_scale="linear",
    )
    return [
        *drawn,
        Figure(
            "equilibrium",
            chart,
            "With decay: norm at the end against the predicted equilibrium (runs that died left out).",
        ),
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say growth, late growth, how exact the law is and how near the equilibrium."""
    lines = []
    for norm in NORMS:
        plain, calm = (table.mean("norm_growth", norm=norm, decayed=on).mean for on in (False, True))
        late, settled = (table.mean("late_norm_growth", norm=norm, decayed=on).mean for on in (False, True))
        error = max((row["law_error"] for row in table.where(norm=norm)), default=math.nan)
        held = table.where(norm=norm, decayed=True)
        shares = [row["joint_norm"] / row["equilibrium"] for row in held if row["equilibrium"] > 0]
        share = interval(shares).mean
        dead = len(held) - len(shares)
        accuracy = [table.mean("test_accuracy", norm=norm, decayed=on).mean for on in (False, True)]
        lines.append(
            f"{norm}: without decay the norm changes by {100 * plain:.3g} % over training ({100 * late:.3g} % in the "
            f"last third), with decay by {100 * calm:.3g} % ({100 * settled:.3g} %). The law |w'|^2 = "
            f"(1 - rate decay)^2 |w|^2 + rate^2 |g|^2 is met to {error:.1g} after all steps; with decay the norm ends "
            f"at {share:.3g} times the predicted equilibrium{_describe_dead(dead)}. Test accuracy {accuracy[0]:.3f} "
            f"without and {accuracy[1]:.3f} with decay."
        )
    lines.append(
        "Decay does not only stop the growth: from this start the equilibrium lies below and the norm falls to it; "
        "a start below it would grow."
    )
    return lines


def _describe_dead(count: int) -> str:
    return f" ({count} run died: no gradient reaches the layer, so there is none)" if count else ""


def _study(model: str, seeds: int, steps: int, **knobs: object) -> Study:
    fixed = {"model": model, "data": "digits", "batch": 32, "steps": steps, "lr": 0.3, "decay": 1e-2}
    return Study(
        "norm-growth",
        "Do the norms of normalized weights grow, and does weight decay hold them?",
        scientific={"norm": list(NORMS), "decayed": [False, True]},
        fixed={**fixed, **knobs},
        seeds=seeds,
    )


register(
    Experiment(
        name="norm-growth",
        papers=("S4",),
        place="sec. 2.5, Fig. 3",
        question="Do norms of weights grow under BN, GN, LN and WN, as the law says, and does weight decay stop it?",
        finding="The weight norms of all normalizers increase as training goes; with weight decay they stabilize early "
        "or even decrease a little.",
        proxy="Published: ResNet-101 on CIFAR-10, rate 1e-3, 200 epochs; the first convolution of the first block. "
        "Ours: a VGG of eight convolutions, 8 to 32 channels wide, on 10,000 images of CIFAR-10, its second "
        "convolution, SGD without momentum (the law is then exact) at rate 0.1, 600 steps of 32, decay 0.03 so that "
        "the equilibrium is within reach. An earlier version on digits was too small to tell.",
        sizes={
            "smoke": _study("mlp", 3, 20),
            "small": _study("vgg8", 5, 600, data="cifar10:10000/1000/2000", lr=0.1, decay=0.03),
            "paper": _study("resnet101", 3, 78000, data="cifar10", batch=128, lr=1e-3, decay=5e-4),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("norm_growth", "late_norm_growth", "law_error", "joint_norm", "equilibrium", "test_accuracy"),
        data=("cifar10",),
        minutes={"small": 4.2},
        cite=CITE,
    )
)
