"""S0 Experiment 1: the path of a two-dimensional weight vector with and without batch normalization."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normgauge.charts import against, curves
from normgauge.errors import NonFiniteError
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, empirical
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.rng import generator

CITE = ("akbar2025",)
NORMS = ("none", "batch")
STARTS = {"small": 0.3, "large": 3.0}


def run(spec: Spec, record: Record) -> None:
    """Descend the logistic loss of w.x (or its batch-normalized value) from 90 degrees off the separating direction."""
    inputs, labels, separating = _separable(int(spec["seed"]), int(spec["samples"]))
    start = STARTS[spec["start"]] * torch.stack([-separating[1], separating[0]])
    weight = start.clone().requires_grad_()
    change, growth, first = 0.0, 0.0, float(start.norm())
    stride = max(1, int(spec["steps"]) // 60)
    for step in range(int(spec["steps"]) + 1):
        if step % stride == 0 or step == spec["steps"]:
            _record_point(record, step, weight.detach(), separating, first)
        if step == spec["steps"]:
            break
        (gradient,) = torch.autograd.grad(_loss(inputs @ weight, labels, spec["norm"]), weight)
        with torch.no_grad():
            weight -= float(spec["lr"]) * gradient
        growth += float(spec["lr"]) ** 2 * float(gradient.square().sum())
        change = max(change, abs(float(weight.detach().norm()) / first - 1))
        if not math.isfinite(change):
            raise NonFiniteError(f"trajectories: the weights were not finite at step {step + 1}")
    record(int(spec["steps"]), "norm_change", change)
    law = abs(math.sqrt(first**2 + growth) / float(weight.detach().norm()) - 1)
    record(int(spec["steps"]), "law_error", law)  # |w_t|^2 = |w_0|^2 + eta^2 sum |g|^2 holds with BN alone


def _separable(seed: int, samples: int) -> tuple[Tensor, Tensor, Tensor]:
    """Return points on both sides of a random line through 0, at least 0.3 away from it."""
    source = generator(seed)
    angle = 2 * math.pi * torch.rand((), generator=source, dtype=torch.float64)
    separating = torch.stack([angle.cos(), angle.sin()])
    inputs = torch.randn(samples, 2, generator=source, dtype=torch.float64)
    labels = torch.where(inputs @ separating > 0, 1.0, -1.0).to(torch.float64)
    return inputs + 0.3 * labels[:, None] * separating, labels, separating


def _loss(scores: Tensor, labels: Tensor, norm: str) -> Tensor:
    if norm == "batch":
        scores = (scores - scores.mean()) / (scores.var(unbiased=False) + 1e-12).sqrt()
    return torch.nn.functional.softplus(-labels * scores).mean()


def _record_point(record: Record, step: int, weight: Tensor, separating: Tensor, first: float) -> None:
    cosine = float(weight @ separating / weight.norm())
    record(step, "x", float(weight[0]) / first)
    record(step, "y", float(weight[1]) / first)
    record(step, "relative_norm", float(weight.norm()) / first)
    record(step, "angle", math.degrees(math.acos(max(-1.0, min(1.0, cosine)))))


@empirical(
    "S0-E1",
    place="Experiment 1, sec 5.2",
    printed="2-D separable task, BN: |w| changes < 1 %, the path is a circular arc; without BN |w| moves",
    study="trajectories",
    criterion="from small and from large starts: |w| changes by less than 1 % with BN, and by more than 1 % without",
    cite=CITE,
    note="With BN the change is eta^2 |grad|^2 per step (S0-5.1iii), so it depends on the rate and the start's norm.",
)
def _circle(table: StudyTable) -> Margins:
    margins = {}
    for start in STARTS:
        with_bn, without = (table.by_seed("norm_change", norm=norm, start=start) for norm in ("batch", "none"))
        margins[f"{start} start: 0.01 - change with BN"] = [0.01 - value for value in with_bn.values()]
        margins[f"{start} start: change without BN - 0.01"] = [value - 0.01 for value in without.values()]
    return margins


def figures(table: StudyTable) -> list[Figure]:
    """Draw paths in the plane and norms over steps."""
    paths = []
    for seed in sorted({row["seed"] for row in table.rows})[:1]:
        for norm in NORMS:
            for start in STARTS:
                knobs = {"norm": norm, "start": start, "seed": seed}
                xs, ys = (table.curve(axis, **knobs) for axis in ("x", "y"))
                paths += [
                    {"series": f"{norm}, {start} start", "x": a["value"], "y": b["value"]}
                    for a, b in zip(xs, ys, strict=True)
                ]
    norms = table.band("relative_norm", lambda row: f"{row['norm']}, {row['start']} start")
    return [
        Figure(
            "paths",
            against(paths, x="x", y="y", x_scale="linear", y_scale="linear", x_title="w1 / |w0|", y_title="w2 / |w0|"),
            "Paths of w / |w0| of one seed: with BN they stay on the unit circle.",
        ),
        Figure(
            "norms",
            curves(norms, x="step", y="mean", low="low", high="high", y_title="|w| / |w0|"),
            "Norm of the weights over training; the band is the range over seeds.",
        ),
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say how far the norm moved and how well the exact law holds."""
    lines = []
    for start in STARTS:
        moved = {norm: table.mean("norm_change", norm=norm, start=start) for norm in NORMS}
        lines.append(
            f"From a {start} start |w| changes by {100 * moved['batch'].mean:.3g} % with BN and by "
            f"{100 * moved['none'].mean:.3g} % without (means over {moved['batch'].n} seeds)."
        )
    worst = max(row["law_error"] for row in table.where(norm="batch"))
    lines.append(f"|w_t|^2 = |w_0|^2 + eta^2 sum |g|^2 holds with BN to {worst:.1g} (relative).")
    return lines


def _study(seeds: int, steps: int) -> Study:
    return Study(
        "trajectories",
        "Does the weight move on a circle with BN?",
        scientific={"norm": list(NORMS), "start": list(STARTS)},
        fixed={"samples": 100, "steps": steps, "lr": 0.1},
        seeds=seeds,
    )


register(
    Experiment(
        name="trajectories",
        papers=("S0",),
        place="Experiment 1, sec. 5.2, Fig. 5.1, 8.1",
        question="On a separable task in the plane, does BN keep |w| constant while the direction turns?",
        finding="With BN |w| changes by less than 1 % and the path is a circular arc; without BN the norm moves.",
        proxy="The published setting is a toy; size, rate and steps are not given. Ours: 100 points, rate 0.1.",
        sizes={"smoke": _study(3, 60), "small": _study(10, 600), "paper": _study(10, 600)},
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("norm_change", "angle", "law_error"),
        minutes={"small": 0.1},
        cite=CITE,
    )
)
