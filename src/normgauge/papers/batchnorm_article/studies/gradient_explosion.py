"""S3 Vanishing/exploding gradients: how gradients grow with depth under BN and whether it still trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence

import torch

from normgauge.charts import against
from normgauge.lab import data as datasets
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.batchnorm_article.studies._deep_batchnorm import DeepBatchNorm, squared_gradients
from normgauge.papers.court import Margins, StudyTable, empirical, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Row, Spec
from normgauge.theory.gradient_explosion import RELU_LIMIT, squared_gradient_growth
from normgauge.theory.mean_field import batchnorm_layer

CITE = ("batchnorm_article", "yang2019")
CHANCE = 0.1  # ten classes
PRINTED = math.pi / (math.pi - 1)
ACTIVATIONS = ("relu", "identity", "tanh", "gelu")


def run(spec: Spec, record: Record) -> None:
    """Measure growth at the start, or train: the knob `part` says which."""
    if spec["part"] == "train":
        _train(spec, record)
    else:
        _grow(spec, record)


def _grow(spec: Spec, record: Record) -> None:
    activation, batch, depth = spec["activation"], int(spec["batch_size"]), int(spec["depth"])
    skip, width = bool(spec["skip"]), int(spec["width"])
    by_weights, by_states = squared_gradients(activation, batch, width, depth, skip=skip, seed=int(spec["seed"]))
    for layer, value in enumerate(by_weights):
        record(layer, "log10_gradient", math.log10(value) / 2)
    square = squared_gradient_growth(torch.tensor(by_states, dtype=torch.float64))
    record(depth, "norm_growth", math.sqrt(square))
    record(depth, "square_growth", square)
    if not skip:
        record(depth, "mean_field", batchnorm_layer(activation, batch).norm_growth)


def _train(spec: Spec, record: Record) -> None:
    dataset = datasets.load(spec["data"])
    seed, steps = int(spec["seed"]), int(spec["steps"])
    network = DeepBatchNorm(
        math.prod(dataset.shape), int(spec["width"]), int(spec["depth"]), dataset.classes, skip=spec["skip"], seed=seed
    )
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    done = train(network, dataset, optimizer, steps=steps, batch=int(spec["batch"]), seed=seed)
    for step in range(0, len(done.losses), max(1, steps // 40)):
        record(step, "train_loss", done.losses[step])
    settled = recalibrated_copy(network, [dataset.train[0]])
    # a network that broke answers all the same: whatever it says is its accuracy
    record(steps, "diverged", float(done.diverged))
    for split in ("train", "validation"):
        record(steps, f"{split}_accuracy", evaluate(settled, dataset, split).accuracy)


@empirical(
    "S3-lamfull",
    place="Vanishing/exploding gradients (full sweep)",
    printed="ReLU: the gradient of the first-layer weights has norm > c lambda^L, lambda decreasing to pi/(pi-1) = "
    "1.467 as the batch size tends to infinity",
    study="gradient-explosion",
    criterion="per-layer growth of the gradient norm (not its square) at initialization: at the largest batch size "
    "above 0.95 pi/(pi-1), and log growth falling from the smallest batch size to the largest",
    cite=CITE,
    note="S3-lam is the same sentence judged from theory and small networks: pi/(pi-1) belongs to the squared norm, so "
    "the first half of this criterion is expected to fail. Rows: `part` = batch, `activation` = relu, `batch_size`, "
    "`norm_growth` (per layer).",
)
def _explosion_sweep(table: StudyTable) -> Margins:
    small, large = _batch_sizes(table)
    growths = table.by_seed("norm_growth", part="batch", activation="relu", batch_size=large)
    return {
        "growth of the norm at the largest batch minus 0.95 pi/(pi-1)": [g - 0.95 * PRINTED for g in growths.values()],
        "log10 growth, smallest batch minus largest": table.paired_log10(
            "norm_growth", small, large, knob="batch_size", part="batch", activation="relu"
        ),
    }


@empirical(
    "S3-train",
    place="Vanishing/exploding gradients",
    printed="very deep batchnorm networks are untrainable; this is only relieved by skip connections",
    study="gradient-explosion",
    criterion="at the largest depth, learning rate tuned per arm: training accuracy without skip connections below "
    "chance + 0.1, and with them at least 0.2 higher",
    cite=CITE,
    note="The word only is about remedies; the criterion tests skips alone. Rows: `part` = train, `depth`, `skip` "
    "(True, False), `train_accuracy` at the tuned learning rate.",
)
def _very_deep(table: StudyTable) -> Margins:
    depth = max(row["depth"] for row in table.where(part="train"))
    plain = table.by_seed("train_accuracy", part="train", depth=depth, skip=False)
    gains = table.paired("train_accuracy", True, False, knob="skip", part="train", depth=depth)
    return {
        "chance + 0.1 minus training accuracy without skips": [CHANCE + 0.1 - value for value in plain.values()],
        "training accuracy with skips minus without, minus 0.2": [gain - 0.2 for gain in gains],
    }


@finding(
    "gradient-explosion",
    printed="with other activations too the gradient grows towards the input, less with larger batches",
    criterion="for every activation but ReLU: growth of the gradient norm per layer above 1 at the largest batch size, "
    "and log growth falling from the smallest batch size to the largest",
)
def _other_activations(table: StudyTable) -> Margins:
    small, large = _batch_sizes(table)
    margins = {}
    for activation in dict.fromkeys(row["activation"] for row in table.where(part="batch")):
        if activation == "relu":
            continue
        growths = table.by_seed("norm_growth", part="batch", activation=activation, batch_size=large)
        margins[f"{activation}: growth of the norm per layer at batch {large}, minus 1"] = [
            growth - 1 for growth in growths.values()
        ]
        margins[f"{activation}: log10 growth, batch {small} minus {large}"] = table.paired_log10(
            "norm_growth", small, large, knob="batch_size", part="batch", activation=activation
        )
    return margins


def _batch_sizes(table: StudyTable) -> tuple[int, int]:
    """Return the smallest and the largest that were swept."""
    sizes = [row["batch_size"] for row in table.where(part="batch")]
    return min(sizes), max(sizes)


def _points(table: StudyTable, part: str, knob: str, reading: str, series: str, **where: object) -> list[Row]:
    rows: list[Row] = []
    for value in sorted({row[knob] for row in table.where(part=part, **where)}):
        span = table.mean(reading, part=part, **{knob: value}, **where)
        rows.append({"series": series, knob: value, "value": span.mean, "low": span.low, "high": span.high})
    return rows


def figures(table: StudyTable) -> list[Figure]:
    """Draw growth over batch size, width and depth against mean field, and accuracy over depth."""
    batch = []
    for activation in dict.fromkeys(row["activation"] for row in table.where(part="batch")):
        batch += _points(table, "batch", "batch_size", "norm_growth", activation, activation=activation)
        batch += [
            {**row, "low": None, "high": None}
            for row in _points(
                table, "batch", "batch_size", "mean_field", f"{activation}, mean field", activation=activation
            )
        ]
    shape = []
    for skip, name in ((False, "no skips"), (True, "skips")):
        shape += _points(table, "depth", "depth", "norm_growth", name, skip=skip)
    shape += [{**r, "low": None, "high": None} for r in _points(table, "depth", "depth", "mean_field", "mean field")]
    wide = _points(table, "width", "width", "norm_growth", "no skips")
    wide += [{**r, "low": None, "high": None} for r in _points(table, "width", "width", "mean_field", "mean field")]
    trained = []
    for skip, name in ((False, "no skips"), (True, "skips")):
        trained += _points(table, "train", "depth", "train_accuracy", name, skip=skip)
    shared = {"low": "low", "high": "high", "x_scale": "log", "y_scale": "linear"}
    growth = "growth of the gradient norm per layer"
    return [
        Figure(
            "batch",
            against(batch, x="batch_size", x_title="batch size", y_title=growth, **shared),  # type: ignore[arg-type]
            "Growth per layer towards the input at the start, with intervals over seeds, and mean field (no interval).",
        ),
        Figure(
            "depth",
            against(shape, x="depth", x_title="depth", y_title=growth, **shared),  # type: ignore[arg-type]
            "ReLU: growth per layer over depth, with and without skip connections.",
        ),
        Figure(
            "width",
            against(wide, x="width", x_title="width", y_title=growth, **shared),  # type: ignore[arg-type]
            "ReLU: growth per layer over width; mean field is the limit of infinite width.",
        ),
        Figure(
            "training",
            against(trained, x="depth", x_title="depth", y_title="training accuracy", **shared),  # type: ignore[arg-type]
            "Accuracy on the training data at the best learning rate of each arm; chance is 0.1.",
        ),
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say the factors beside mean field, what the printed 1.467 is, and which depths train."""
    lines = []
    swept = table.where(part="batch")
    large = max(row["batch_size"] for row in swept)
    for activation in dict.fromkeys(row["activation"] for row in swept):
        told = []
        for size in sorted({row["batch_size"] for row in swept}):
            measured = table.mean("norm_growth", part="batch", activation=activation, batch_size=size)
            promised = table.mean("mean_field", part="batch", activation=activation, batch_size=size)
            told.append(f"{measured.mean:.4g} ({promised.mean:.4g}) at batch {size}")
        lines.append(f"{activation}: growth of the gradient norm per layer, mean field in brackets: {', '.join(told)}.")
    square = table.mean("square_growth", part="batch", activation="relu", batch_size=large)
    lines.append(
        f"ReLU at batch {large}: the squared norm grows by {square.mean:.4g} per layer. The article's pi/(pi-1) = "
        f"{RELU_LIMIT:.4g} is the limit of the square; the norm itself grows by its root, {math.sqrt(RELU_LIMIT):.4g}."
    )
    for skip, name in ((False, "without"), (True, "with")):
        depths = sorted({row["depth"] for row in table.where(part="depth", skip=skip)})
        told = [f"{table.mean('norm_growth', part='depth', skip=skip, depth=d).mean:.4g} at depth {d}" for d in depths]
        lines.append(f"Growth per layer {name} skips: {', '.join(told)}.")
    for depth in sorted({row["depth"] for row in table.where(part="train")}):
        told = []
        for skip, name in ((False, "without"), (True, "with")):
            accuracy = table.mean("train_accuracy", part="train", depth=depth, skip=skip)
            rate = next((row["lr"] for row in table.where(part="train", depth=depth, skip=skip)), math.nan)
            told.append(f"{accuracy.mean:.3f} {name} skips (rate {rate:g})")
        lines.append(f"Training accuracy at depth {depth}: {', '.join(told)}.")
    return lines


def _parts(seeds: int, width: int, depth: int, wide: Mapping[str, Sequence[int]], train: Study) -> list[Study]:
    base = {"activation": "relu", "batch_size": wide["base"][0], "width": width, "depth": depth, "skip": False}

    def part(name: str, **swept: Sequence[object]) -> Study:
        fixed = {key: value for key, value in base.items() if key not in swept}
        question = f"How does the growth depend on {name}?"
        return Study(
            f"gradient-explosion-{name}", question, scientific=swept, fixed={**fixed, "part": name}, seeds=seeds
        )

    return [
        part("batch", activation=ACTIVATIONS, batch_size=wide["batch"]),
        part("width", width=wide["width"]),
        part("depth", depth=wide["depth"], skip=[False, True]),
        train,
    ]


def _training(
    seeds: int, depths: Sequence[int], rates: Sequence[float], steps: int, width: int, **more: object
) -> Study:
    return Study(
        "gradient-explosion-train",
        "Which depths train?",
        scientific={"depth": list(depths), "skip": [False, True]},
        nuisance={"lr": list(rates)},
        fixed={"part": "train", "data": "digits", "batch": 64, "steps": steps, "width": width, **more},
        seeds=seeds,
        tuning_seeds=min(2, seeds),
    )


SMOKE = {"base": [16], "batch": [8, 32], "width": [16, 32], "depth": [10, 16]}
SMALL = {"base": [64], "batch": [6, 8, 16, 64, 256], "width": [32, 64, 128, 256, 512], "depth": [10, 20, 40, 80]}

register(
    Experiment(
        name="gradient-explosion",
        papers=("S3",),
        place="Vanishing/exploding gradients",
        question="How fast do gradients grow with depth under BN at the start, and are deep BN networks untrainable?",
        finding="The gradient of the first layer has norm > c lambda^L; lambda falls with the batch size, for ReLU to "
        "pi/(pi-1) = 1.467; very deep batchnorm networks are untrainable, only skip connections relieve it.",
        proxy="The article gives no setting (its source trains on MNIST and CIFAR-10). Growth: Gaussian batches, width "
        "256, depth 30, the mean-field network itself. Training: digits, width 32, SGD with momentum, 150 steps, batch "
        "64, learning rate tuned per arm on validation accuracy; statistics of the training data.",
        sizes={
            "smoke": _parts(3, 32, 12, SMOKE, _training(3, (4, 12), (0.1,), 5, 16)),
            "small": _parts(5, 256, 30, SMALL, _training(4, (10, 30, 100), (0.003, 0.03, 0.3), 150, 32)),
            "paper": _parts(
                10, 1000, 50, SMALL, _training(5, (10, 30, 50, 100, 200), (1e-4, 1e-3, 1e-2, 1e-1), 5000, 384)
            ),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("norm_growth", "mean_field", "square_growth", "train_accuracy", "validation_accuracy"),
        choose_by="validation_accuracy",
        minutes={"small": 1.1},
        cite=CITE,
    )
)
