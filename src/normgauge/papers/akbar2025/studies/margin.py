"""S0 Experiment 3: margins and stability under parameter noise of a 50-20-1 network trained to zero training error."""

from __future__ import annotations

import math
from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normgauge.charts import against, histogram
from normgauge.errors import NonFiniteError
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.akbar2025.studies._networks import relu_network
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.rng import generator

CITE = ("akbar2025",)
NORMS = ("none", "batch")
SIZES = {"mini": 32, "full": 400}
RELATIVE = (0.1, 0.2, 0.4, 0.6, 0.8, 1.0)  # of the root mean square of each tensor's entries
ABSOLUTE = (0.05, 0.1, 0.2, 0.4)
DRAWS = 10
CHECK = 10  # steps between two looks at the training error


def run(spec: Spec, record: Record) -> None:
    """Train until no training point is wrong and measure there, then train on and measure the margins again."""
    seed, steps = int(spec["seed"]), int(spec["steps"])
    training, validation, test = _data(seed)
    network = relu_network((50, 20, 1), spec["norm"], seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    size = SIZES[spec["batch"]] if spec["batch"] in SIZES else int(spec["batch"])
    measured = False

    def watch(step: int, network: nn.Module) -> None:
        nonlocal measured
        if measured or (step < steps and _accuracy(network, *training) < 1.0):
            return
        measured = True
        record(step, "steps_to_zero_error", step)
        record(step, "train_accuracy", _accuracy(network, *training))
        record(step, "validation_accuracy", _accuracy(network, *validation))
        record(step, "test_accuracy", _accuracy(network, *test))
        _record_margins(record, step, network, training, "", keep=seed == 0)
        _record_noise(record, step, network, training, seed)

    done = train(
        network,
        training,
        optimizer,
        steps=steps,
        batch=size,
        seed=seed,
        at={*range(0, steps, CHECK), steps},
        watch=watch,
        loss=lambda outputs, labels: nn.functional.softplus(-labels * outputs[:, 0]).mean(),
        ceiling=math.inf,
    )
    if done.diverged:
        raise NonFiniteError(f"margin: the loss was not finite at step {done.diverged_at}")
    record(steps, "late_test_accuracy", _accuracy(network, *test))
    _record_margins(record, steps, network, training, "late_", keep=False)


def _data(seed: int) -> list[tuple[Tensor, Tensor]]:
    """Return Gaussian inputs in 50 dimensions labelled by |a.x| > |b.x|: four ReLU units separate them, no line does.

    400 points to train on, 400 to tune on, 2000 to test.
    """
    source = generator(seed)
    ends = torch.randn(2, 50, generator=source, dtype=torch.float64)
    parts = []
    for count in (400, 400, 2000):
        inputs = torch.randn(count, 50, generator=source, dtype=torch.float64)
        far = (inputs @ ends.T).abs()
        parts.append((inputs, torch.where(far[:, 0] > far[:, 1], 1.0, -1.0).to(torch.float64)))
    return parts


def _outputs(network: nn.Module, inputs: Tensor) -> Tensor:
    """Return the logits with stored statistics, as the trained network would be used."""
    network.eval()
    logits = network(inputs)[:, 0]
    network.train()
    return logits


def _accuracy(network: nn.Module, inputs: Tensor, labels: Tensor) -> float:
    with torch.no_grad():
        return float((_outputs(network, inputs) * labels > 0).double().mean())


def _record_margins(
    record: Record, step: int, network: nn.Module, data: tuple[Tensor, Tensor], prefix: str, *, keep: bool
) -> None:
    """Record the mean of f(x) y and the median of f(x) y / |df/dx|, the distance to the boundary to first order."""
    inputs, labels = data[0].clone().requires_grad_(), data[1]
    raw = _outputs(network, inputs) * labels
    (slopes,) = torch.autograd.grad(raw.sum(), inputs)
    distances = raw.detach() / slopes.norm(dim=1).clamp_min(1e-12)
    record(step, f"{prefix}mean_margin", float(raw.detach().mean()))
    record(step, f"{prefix}normalized_margin", float(distances.median()))
    if keep:
        for number, (a, b) in enumerate(zip(raw.tolist(), distances.tolist(), strict=True)):
            record(step, "raw", a, layer=str(number))
            record(step, "distance", b, layer=str(number))


def _record_noise(record: Record, step: int, network: nn.Module, data: tuple[Tensor, Tensor], seed: int) -> None:
    """Record the training accuracy with Gaussian noise on the parameters, relative to each tensor and absolute."""
    parameters = list(network.parameters())
    before = [value.detach().clone() for value in parameters]
    for name, levels in (("noisy_accuracy", RELATIVE), ("absolute_noise_accuracy", ABSOLUTE)):
        source = generator(5000 + seed)
        means = []
        for level in levels:
            accuracies = []
            for _ in range(DRAWS):
                with torch.no_grad():
                    for value, old in zip(parameters, before, strict=True):
                        unit = float(old.square().mean().sqrt()) if name == "noisy_accuracy" else 1.0
                        value.add_(torch.randn(old.shape, generator=source, dtype=old.dtype), alpha=level * unit)
                accuracies.append(_accuracy(network, *data))
                with torch.no_grad():
                    for value, old in zip(parameters, before, strict=True):
                        value.copy_(old)
            means.append(sum(accuracies) / len(accuracies))
            record(step, f"{name}_at", means[-1], layer=f"{level:g}")
        record(step, name, sum(means) / len(means), kind="estimate")


@empirical(
    "S0-E3",
    place="Experiment 3",
    printed="50-20-1 ReLU net, zero training error: mean margin f(x)y 1.8 (BN) vs 1.2 (none); BN flatter",
    study="margin",
    criterion="the mean raw margin and the training accuracy under relative parameter noise are larger with BN",
    cite=CITE,
    note="The raw margin scales with the last layer (S0-margin); the study reports the normalized one as well.",
)
def _margins(table: StudyTable) -> Margins:
    return {
        f"{name}, batch minus none": table.paired(name, "batch", "none", batch="mini")
        for name in ("mean_margin", "noisy_accuracy")
    }


@empirical(
    "S0-noisem",
    place="sec 7.2",
    printed="the stochasticity of BN's batch statistics enlarges the margin",
    study="margin",
    criterion="with BN: the normalized margin is larger with mini-batch than with full-batch statistics",
    cite=CITE,
    note="Not in the list the ledger started from. The second half of S0-noise. 'Margin' is read as normalized, since "
    "the raw one has no scale.",
)
def _noise_margin(table: StudyTable) -> Margins:
    gain = table.paired("normalized_margin", "mini", "full", knob="batch", norm="batch")
    return {"normalized margin with BN, mini minus full batch": gain}


@finding(
    "margin",
    printed="the normalized margin and the test accuracy are larger with BN as well",
    criterion="at zero training error, mini-batches: the median of f(x) y / |df/dx| over the training points and the "
    "test accuracy are larger with BN",
)
def _without_scale(table: StudyTable) -> Margins:
    return {
        f"{name.replace('_', ' ')}, BN minus none": table.paired(name, "batch", "none", batch="mini")
        for name in ("normalized_margin", "test_accuracy")
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw the two histograms of margins and the accuracy under noise."""
    drawn = []
    for reading, title in (("raw", "f(x) y"), ("distance", "f(x) y / |df/dx|")):
        rows = [{"norm": r["norm"], "margin": r["value"]} for r in table.curve(reading, batch="mini", seed=0)]
        chart = histogram(rows, value="margin", series="norm", x_title=title, bins=40)
        drawn.append(Figure(reading, chart, f"Margins of the training points at zero training error, {title}, seed 0."))
    noisy = []
    for norm in NORMS:
        levels: dict[float, list[float]] = {}
        for row in table.curve("noisy_accuracy_at", norm=norm, batch="mini"):
            levels.setdefault(float(row["layer"]), []).append(row["value"])
        noisy += [
            {"series": norm, "noise": k, "value": sum(v) / len(v), "low": min(v), "high": max(v)}
            for k, v in sorted(levels.items())
        ]
    chart = against(
        noisy,
        x="noise",
        low="low",
        high="high",
        x_scale="linear",
        y_scale="linear",
        x_title="noise relative to each tensor",
        y_title="training accuracy",
    )
    return [*drawn, Figure("noise", chart, "Training accuracy under parameter noise; bars: range over seeds.")]


def remarks(table: StudyTable) -> list[str]:
    """Say margins beside the paper's, and what the scale-free ones and longer training say."""
    arms = {(n, b): {c: table.mean(c, norm=n, batch=b).mean for c in COLUMNS} for n in NORMS for b in SIZES}
    bn, plain, full = arms["batch", "mini"], arms["none", "mini"], arms["batch", "full"]
    return [
        (
            f"At zero training error the mean of f(x) y is {bn['mean_margin']:.3g} with BN and "
            f"{plain['mean_margin']:.3g} without (Akbar 2025: 1.8 and 1.2); divided by |df/dx| the median is "
            f"{bn['normalized_margin']:.3g} and {plain['normalized_margin']:.3g}; test accuracy "
            f"{bn['test_accuracy']:.3f} and {plain['test_accuracy']:.3f}."
        ),
        (
            f"With {bn['steps_to_zero_error']:.3g} (BN) and {plain['steps_to_zero_error']:.3g} steps behind them the "
            f"arms stop at different times. After the whole budget the raw margins are {bn['late_mean_margin']:.3g} "
            f"and {plain['late_mean_margin']:.3g}, the normalized ones {bn['late_normalized_margin']:.3g} and "
            f"{plain['late_normalized_margin']:.3g}: the raw margin measures how long and how fast one trained."
        ),
        (
            f"Training accuracy under noise relative to each tensor: {bn['noisy_accuracy']:.3f} with BN, "
            f"{plain['noisy_accuracy']:.3f} without; under noise of absolute size {bn['absolute_noise_accuracy']:.3f} "
            f"and {plain['absolute_noise_accuracy']:.3f}, which rescaling rows would change at will."
        ),
        (
            f"With BN the normalized margin is {bn['normalized_margin']:.3g} from mini-batches of {SIZES['mini']} and "
            f"{full['normalized_margin']:.3g} from full batches; without BN, where no statistics are drawn, it is "
            f"{plain['normalized_margin']:.3g} and {arms['none', 'full']['normalized_margin']:.3g}. What the network "
            "without BN gains from mini-batches cannot be an effect of batch statistics."
        ),
    ]


COLUMNS = (
    "steps_to_zero_error",
    "train_accuracy",
    "test_accuracy",
    "mean_margin",
    "normalized_margin",
    "noisy_accuracy",
    "absolute_noise_accuracy",
    "late_mean_margin",
    "late_normalized_margin",
    "late_test_accuracy",
)


def _study(seeds: int, steps: int, rates: Sequence[float]) -> Study:
    return Study(
        "margin",
        "Does BN enlarge margins?",
        scientific={"norm": list(NORMS), "batch": list(SIZES)},
        nuisance={"lr": list(rates)},
        fixed={"steps": steps},
        seeds=seeds,
        tuning_seeds=min(seeds, 2),
    )


RATES = (0.1, 0.3, 1.0)
register(
    Experiment(
        name="margin",
        papers=("S0",),
        place="Experiment 3, Fig. 8.2, sec. 7.2",
        question="Are margins larger and decisions stabler under parameter noise with BN, and is it the batch noise?",
        finding="At zero training error the mean margin f(x) y is 1.8 with BN and 1.2 without, and the accuracy under "
        "parameter noise falls more slowly with BN; the noise of batch statistics is said to enlarge the margin.",
        proxy="The paper gives no data or rates. Ours: 400 Gaussian points in 50 dimensions labelled by |a.x| > |b.x|, "
        "the 50-20-1 network, SGD, each arm at its best rate by validation accuracy at zero training error; "
        "three of four arms are best at the largest rate tried, 1.",
        sizes={
            "smoke": _study(3, 100, (0.3,)),
            "small": _study(8, 1500, RATES),
            "paper": _study(8, 3000, RATES),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=COLUMNS,
        choose_by="validation_accuracy",
        minutes={"small": 0.5},
        cite=CITE,
    )
)
