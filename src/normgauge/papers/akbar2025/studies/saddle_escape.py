"""S0 sec. 5.1: steps to leave a constructed saddle, with and without BN, under batch noise and matched noise."""

from __future__ import annotations

import math

import torch
from torch import Tensor

from normgauge.charts import curves, intervals
from normgauge.errors import NonFiniteError
from normgauge.lab.runs.train import Batches
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.rng import generator

CITE = ("akbar2025",)
NORMS = ("none", "batch")
NOISES = ("none", "gradient", "sampling", "batch", "independent")
INPUTS, HIDDEN, SAMPLES = 10, 8, 512
OFFSET = 1e-6  # how far from the saddle all runs start, in a random direction
LEFT = 0.95  # left once the loss is below this share of the saddle's
EPS = 1e-5


class Saddle:
    """f(x) = v.tanh(n(W x)) at v = 0, with targets orthogonal to every hidden unit: a strict saddle of full batch.

    There the gradient is zero in v (orthogonality) and in W (v = 0); the mixed second derivative is not, so the loss
    falls to second order along a joint direction of W and v. n is batch normalization or nothing.
    """

    def __init__(self, norm: str, seed: int) -> None:
        source = generator(seed)
        self.normalized = norm == "batch"
        self.inputs = torch.randn(SAMPLES, INPUTS, generator=source, dtype=torch.float64)
        self.weight = torch.randn(HIDDEN, INPUTS, generator=source, dtype=torch.float64) / math.sqrt(INPUTS)
        pair = torch.randn(2, INPUTS, generator=source, dtype=torch.float64) / math.sqrt(INPUTS)
        raw = torch.tanh(2 * self.inputs @ pair.T).sum(1)  # what a few hidden units could learn
        hidden = self.hidden(self.weight, torch.arange(SAMPLES), whole=False)
        fitted = hidden @ torch.linalg.lstsq(hidden, raw[:, None]).solution
        rest = raw - fitted[:, 0]
        self.targets = rest / rest.square().mean().sqrt()

    def hidden(self, weight: Tensor, rows: Tensor, *, whole: bool) -> Tensor:
        """Return the hidden units of some rows, normalized by their own statistics or by those of all samples."""
        scores = self.inputs[rows] @ weight.T
        if self.normalized:
            other = self.inputs @ weight.T if whole else scores
            scores = (scores - other.mean(0)) / (other.var(0, unbiased=False) + EPS).sqrt()
        return torch.tanh(scores)

    def loss(self, weight: Tensor, output: Tensor, rows: Tensor, *, whole: bool = False) -> Tensor:
        """Return half the mean squared error on some rows."""
        return 0.5 * (self.hidden(weight, rows, whole=whole) @ output - self.targets[rows]).square().mean()


def run(spec: Spec, record: Record) -> None:
    """Descend from beside the saddle under one kind of noise and count the steps until the loss has fallen by 5 %."""
    seed, steps, noise = int(spec["seed"]), int(spec["steps"]), spec["noise"]
    saddle = Saddle(spec["norm"], seed)
    source = generator(7000 + seed)
    weight, output = (
        value + OFFSET * torch.randn(value.shape, generator=source, dtype=torch.float64)
        for value in (saddle.weight, torch.zeros(HIDDEN, dtype=torch.float64))
    )
    everything = torch.arange(SAMPLES)
    bottom = most_negative(saddle)
    record(0, "lambda_min", bottom)
    first = float(saddle.loss(weight, output, everything))
    batches = Batches(SAMPLES, int(spec["batch"]), seed)
    sizes = _noise_sizes(saddle, int(spec["batch"]))
    record(
        0, "noise_size", math.sqrt(sum(size**2 * n for size, n in zip(sizes, (weight.numel(), HIDDEN), strict=True)))
    )
    left = steps
    for step in range(steps + 1):
        now = float(saddle.loss(weight, output, everything))
        if not math.isfinite(now):
            raise NonFiniteError(f"saddle-escape: the loss was not finite at step {step}")
        if step % max(1, steps // 60) == 0:
            record(step, "loss", now / first)
        if now <= LEFT * first:
            left = step
            break
        rows = next(batches) if noise in ("sampling", "batch") else everything
        if noise == "independent":
            rows = torch.randperm(SAMPLES, generator=source)[: int(spec["batch"])]
        slopes = _gradient(saddle, weight, output, rows, whole=noise == "sampling")
        for value, slope, size in zip((weight, output), slopes, sizes, strict=True):
            value -= float(spec["lr"]) * slope
            if noise == "gradient":
                value -= float(spec["lr"]) * size * torch.randn(value.shape, generator=source, dtype=torch.float64)
    record(left, "steps_to_escape", max(left, 1))  # the budget where it never left
    record(left, "escaped", float(left < steps))


def _gradient(saddle: Saddle, weight: Tensor, output: Tensor, rows: Tensor, *, whole: bool) -> tuple[Tensor, ...]:
    leaves = [value.detach().requires_grad_() for value in (weight, output)]
    return torch.autograd.grad(saddle.loss(leaves[0], leaves[1], rows, whole=whole), leaves)


def _noise_sizes(saddle: Saddle, batch: int, draws: int = 64) -> list[float]:
    """Return the root mean square of a mini-batch gradient's entries near the saddle, for W and for v.

    Near, not at it: there v = 0 and W has no gradient. The distance is that of the start.
    """
    source = generator(99)
    output = OFFSET * torch.randn(HIDDEN, generator=source, dtype=torch.float64)
    totals = [0.0, 0.0]
    for _ in range(draws):
        rows = torch.randperm(SAMPLES, generator=source)[:batch]
        for index, slope in enumerate(_gradient(saddle, saddle.weight, output, rows, whole=False)):
            totals[index] += float(slope.square().mean()) / draws
    return [math.sqrt(total) for total in totals]


def most_negative(saddle: Saddle) -> float:
    """Return the smallest eigenvalue of the full-batch Hessian at the saddle."""
    point = torch.cat([saddle.weight.reshape(-1), torch.zeros(HIDDEN, dtype=torch.float64)])

    def flat(values: Tensor) -> Tensor:
        weight = values[: saddle.weight.numel()].reshape(saddle.weight.shape)
        return saddle.loss(weight, values[saddle.weight.numel() :], torch.arange(SAMPLES))

    hessian = torch.autograd.functional.hessian(flat, point)
    return float(torch.linalg.eigvalsh(hessian)[0])


@empirical(
    "S0-noise",
    place="sec 5.1, 7.2",
    printed="BN batch noise helps escape saddles and enlarges margins",
    study="saddle-escape",
    criterion="with BN: fewer steps to leave the saddle with mini-batch statistics than without noise, and than with "
    "full-batch statistics and gradient noise of the same size",
    cite=CITE,
    note="The half about saddles; the half about margins is S0-noisem.",
)
def _escape(table: StudyTable) -> Margins:
    return {
        f"log10 of steps, noise {other} over noise batch": table.paired_log10(
            "steps_to_escape", other, "batch", knob="noise", norm="batch"
        )
        for other in ("none", "gradient")
    }


@finding(
    "saddle-escape",
    printed="it is the noise of the statistics: sampling alone leaves later, and so does the network without BN",
    criterion="mini-batches: more steps to leave the saddle with BN under the statistics of all samples, and without "
    "BN, than with BN under the batches' own statistics",
)
def _statistics_noise(table: StudyTable) -> Margins:
    return {
        "BN: log10 of steps, noise sampling over noise batch": table.paired_log10(
            "steps_to_escape", "sampling", "batch", knob="noise", norm="batch"
        ),
        "batch noise: log10 of steps, without BN over with": table.paired_log10(
            "steps_to_escape", "none", "batch", noise="batch"
        ),
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw steps to escape per arm and the losses over steps."""
    rows = []
    for norm in NORMS:
        for noise in NOISES:
            interval = table.mean("steps_to_escape", norm=norm, noise=noise)
            low = max(interval.low, 1.0) if math.isfinite(interval.low) else interval.mean
            high = interval.high if math.isfinite(interval.high) else interval.mean
            name = f"{'BN' if norm == 'batch' else 'none'}, {NAMES[noise]}"
            rows.append({"series": name, "value": interval.mean, "low": low, "high": high})
    course = table.band("loss", lambda row: f"{row['norm']}, {row['noise']}", seed=0)
    return [
        Figure(
            "steps",
            intervals(rows, x_title="steps to leave the saddle", scale="log"),
            "Mean steps until the loss is 5 % below the saddle's, with 95 % intervals. Matched noise: full batch with "
            "Gaussian noise of the mini-batch gradient's size; sampling only: mini-batches under the statistics of all "
            "samples; fresh batches: drawn anew each step.",
        ),
        Figure(
            "loss",
            curves(course, y="mean", y_title="loss over the saddle's", y_scale="linear"),
            "Loss over steps until it has left, seed 0; legend: norm, noise.",
        ),
    ]


NAMES = {
    "none": "full batch",
    "gradient": "matched noise",
    "sampling": "sampling only",
    "batch": "mini-batch",
    "independent": "fresh batches",
}


def remarks(table: StudyTable) -> list[str]:
    """Say steps per arm and the curvature that decides without noise."""
    lines = []
    for norm in NORMS:
        steps = {noise: table.mean("steps_to_escape", norm=norm, noise=noise).mean for noise in NOISES}
        bottom = table.mean("lambda_min", norm=norm, noise="none").mean
        lines.append(
            f"{'With' if norm == 'batch' else 'Without'} BN (most negative curvature {bottom:.3g}): "
            + ", ".join(f"{NAMES[noise]} {steps[noise]:.3g} steps" for noise in NOISES)
            + "."
        )
    anew = {norm: table.mean("steps_to_escape", norm=norm, noise="independent").mean for norm in NORMS}
    lines.append(
        "Matched Gaussian noise leaves first, partly because it is independent from step to step: the batches of an "
        "epoch share out the samples, so that their pushes nearly cancel. Batches drawn anew each step leave after "
        f"{anew['batch']:.3g} steps with BN and {anew['none']:.3g} without."
    )
    share = min(table.mean("escaped", norm=norm, noise=noise).mean for norm in NORMS for noise in NOISES)
    lines.append(
        "Sampling only (mini-batches under the statistics of all samples) shows what is not BN's statistics: "
        f"compare its steps with those of the whole mini-batch noise. At least {100 * share:.3g} % of the runs of each "
        "arm left within the budget; the others count as the budget."
    )
    return lines


def _study(seeds: int, steps: int, rate: float) -> Study:
    return Study(
        "saddle-escape",
        "Does the noise of batch statistics help to leave saddles?",
        scientific={"norm": list(NORMS), "noise": list(NOISES)},
        fixed={"steps": steps, "batch": 32, "lr": rate},
        seeds=seeds,
    )


register(
    Experiment(
        name="saddle-escape",
        papers=("S0",),
        place="sec. 5.1 (saddle-point escape), 7.2",
        question="Does BN, by the noise of its batch statistics, leave a saddle sooner?",
        finding="At a saddle of the full loss BN's batch statistics make each mini-batch gradient a random push, so "
        "that training leaves sooner; noise of the statistics is said to do what sampling noise might not.",
        proxy="The paper has no experiment. Ours: 10-8-1 with tanh at output weights 0 and targets orthogonal to the "
        "hidden units (an exact saddle of the full loss in both arms), all runs 1e-6 off it, 512 samples, batches of "
        "32, one rate; matched noise is Gaussian with the mini-batch gradient's mean square per tensor. "
        "Fresh batches were added after the first result, to explain it; no criterion uses them.",
        sizes={"smoke": _study(3, 60, 1.0), "small": _study(16, 3000, 0.1), "paper": _study(16, 3000, 0.1)},
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("steps_to_escape", "escaped", "lambda_min", "noise_size"),
        minutes={"small": 0.3},
        cite=CITE,
    )
)
