"""S3 Vanishing/exploding gradients: how gradients grow with depth under BN and whether it still trains."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from normgauge.lab import data as datasets
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.batchnorm_article.studies._deep_batchnorm import DeepBatchNorm, squared_gradients
from normgauge.papers.language import (
    LARGEST,
    SMALLEST,
    Contrast,
    Figure,
    Record,
    Spec,
    each_but,
    empirical,
    finding,
    grid,
    register,
)
from normgauge.theory.gradient_explosion import squared_gradient_growth
from normgauge.theory.mean_field import batchnorm_layer

CHANCE = 0.1  # ten classes
PRINTED = math.pi / (math.pi - 1)
#: What the article calls the only relief, and what else could be one.
REMEDIES = ("none", "skip", "near-linear", "orthogonal", "near-linear, orthogonal", "adam", "large batch")
ACTIVATIONS = ("relu", "identity", "tanh", "gelu")


def run(spec: Spec, record: Record) -> None:
    """Measure growth at the start, or train: the knob `part` says which."""
    if spec["part"] in ("train", "remedies"):
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
    remedy = str(spec.get("remedy", "skip" if spec.get("skip") else "none"))
    network = DeepBatchNorm(
        math.prod(dataset.shape), int(spec["width"]), int(spec["depth"]), dataset.classes, seed=seed
    )
    network.skip = remedy == "skip"
    if "near-linear" in remedy:
        network.slope = 0.9
    if "orthogonal" in remedy:
        network.make_orthogonal(seed)
    optimizer: torch.optim.Optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    if remedy == "adam":
        optimizer = torch.optim.Adam(network.parameters(), lr=float(spec["lr"]))
    done = train(
        network,
        dataset,
        optimizer,
        steps=steps,
        batch=int(spec["batch"]) * (8 if remedy == "large batch" else 1),
        seed=seed,
    )
    for step in range(0, len(done.losses), max(1, steps // 40)):
        record(step, "train_loss", done.losses[step])
    settled = recalibrated_copy(network, [dataset.train[0]])
    # a network that broke answers all the same: whatever it says is its accuracy
    record(steps, "diverged", float(done.diverged))
    for split in ("train", "validation"):
        record(steps, f"{split}_accuracy", evaluate(settled, dataset, split).accuracy)


def _parts(
    seeds: int, width: int, depth: int, wide: Mapping[str, Sequence[int]], train: Sequence[Study]
) -> list[Study]:
    base = {"activation": "relu", "batch_size": wide["base"][0], "width": width, "depth": depth, "skip": False}

    def part(name: str, **swept: Sequence[object]) -> Study:
        fixed = {key: value for key, value in base.items() if key not in swept}
        return grid(f"gradient-explosion-{name}", swept, one={**fixed, "part": name, "seeds": seeds})["one"]

    return [
        part("batch", activation=ACTIVATIONS, batch_size=wide["batch"]),
        part("width", width=wide["width"]),
        part("depth", depth=wide["depth"], skip=[False, True]),
        *train,
    ]


def _training(
    count: int, depths: Sequence[int], rates: Sequence[float], length: int, width: int, **changed: Any
) -> list[Study]:
    fixed = {"data": "digits", "batch": 64, "steps": length, "width": width, "seeds": count}
    arms: dict[str, dict[str, Sequence[object]]] = {
        "train": {"depth": depths, "skip": [False, True]},
        "remedies": {"depth": [max(depths)], "remedy": REMEDIES},
    }
    return [
        grid(
            f"gradient-explosion-{part}",
            knobs,
            {"lr": rates},
            one={**fixed, **(changed if part == "remedies" else {}), "part": part},
        )["one"]
        for part, knobs in arms.items()
    ]


RATES = (0.001, 0.01, 0.1)
SMOKE = {"base": [16], "batch": [8, 32], "width": [16, 32], "depth": [10, 16]}
SMALL = {"base": [64], "batch": [6, 8, 16, 64, 256], "width": [32, 64, 128, 256, 512], "depth": [10, 20, 40, 80]}


empirical(
    "S3-lamfull",
    "gradient-explosion",
    contrasts=(
        Contrast(
            "norm_growth", {}, least=0.95 * PRINTED, at={"part": "batch", "activation": "relu", "batch_size": LARGEST}
        ),
        Contrast(
            "norm_growth",
            {"batch_size": SMALLEST},
            {"batch_size": LARGEST},
            least=0.01,
            at={"part": "batch", "activation": "relu"},
            log=True,
        ),
    ),
)

empirical(
    "S3-train",
    "gradient-explosion",
    contrasts=(
        Contrast("train_accuracy", less={"remedy": "none"}, least=-(CHANCE + 0.1), at={"part": "remedies"}),
        Contrast("train_accuracy", {"remedy": "skip"}, {"remedy": "none"}, least=0.2, at={"part": "remedies"}),
        Contrast(
            "train_accuracy",
            less={},
            least=-(CHANCE + 0.2),
            at={"part": "remedies", "remedy": each_but("none", "skip")},
        ),
    ),
)

finding(
    "gradient-explosion",
    contrasts=(
        Contrast(
            "norm_growth", {}, least=1.0, at={"part": "batch", "activation": each_but("relu"), "batch_size": LARGEST}
        ),
        Contrast(
            "norm_growth",
            {"batch_size": SMALLEST},
            {"batch_size": LARGEST},
            least=0.01,
            at={"part": "batch", "activation": each_but("relu")},
            log=True,
        ),
    ),
)

register(
    "gradient-explosion",
    sizes={
        "smoke": _parts(3, 32, 12, SMOKE, _training(3, (4, 12), (0.1,), 5, 16)),
        "small": _parts(
            5,
            256,
            30,
            SMALL,
            _training(4, (10, 30, 100), RATES, 600, 32, seeds=3, tuning_seeds=1, steps=100, lr=RATES[1:]),
        ),
        "medium": _parts(10, 1000, 50, SMALL, _training(10, (10, 30, 50, 100), (1e-4, 1e-3, 1e-2, 1e-1), 3000, 64)),
        "paper": _parts(10, 1000, 50, SMALL, _training(5, (10, 30, 50, 100, 200), (1e-4, 1e-3, 1e-2, 1e-1), 5000, 384)),
    },
    run=run,
    figures=(
        Figure(
            {"norm_growth": "measured", "mean_field": "mean field"},
            x="batch_size",
            series=("activation",),
            where={"part": "batch"},
        ),
        Figure("norm_growth", x="depth", series=("skip",), where={"part": "depth"}),
        Figure({"norm_growth": "measured", "mean_field": "mean field"}, x="width", series=(), where={"part": "width"}),
        Figure("train_accuracy", x="depth", series=("skip",), where={"part": "train"}),
        Figure("train_accuracy", series=("remedy",), where={"part": "remedies"}, kind="intervals"),
    ),
    choose_by="validation_accuracy",
)
