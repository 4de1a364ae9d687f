"""S0 sec. 9.5, S3: dropout with and without BN, and the shift of variances that the two make together."""

from __future__ import annotations

import copy
from collections.abc import Sequence
from statistics import fmean
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm

from normgauge.charts import against
from normgauge.errors import NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, differences, empirical
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec
from normgauge.stats import choose

NORMS = ("none", "batch")
RATES = (0.0, 0.1, 0.3, 0.5)
ON = 0.3  # what the sentence of Akbar 2025 is judged at


class SeededDropout(nn.Module):
    """Dropout from a generator of its own, so that runs are the same whatever else draws random numbers.

    Args:
        rate: the share of activations set to zero in training; the others are divided by 1 - rate.
        seed: of the generator.
    """

    def __init__(self, rate: float, seed: int) -> None:
        super().__init__()
        self.rate = rate
        self._source = torch.Generator().manual_seed(seed)

    def __deepcopy__(self, memo: dict[int, object]) -> SeededDropout:
        """Return a copy with the same stream; generators cannot be copied by themselves."""
        twin = SeededDropout(self.rate, 0)
        twin._source.set_state(self._source.get_state())
        twin.training = self.training
        return twin

    def forward(self, x: Tensor) -> Tensor:
        """Return x with a fresh mask in training, x itself in evaluation."""
        if not self.training or self.rate == 0:
            return x
        kept = torch.rand(x.shape, generator=self._source) >= self.rate
        return x * kept / (1 - self.rate)


def run(spec: Spec, record: Record) -> None:
    """Train an MLP with dropout behind every ReLU; record accuracies and the shift of the stored variances."""
    dataset = data.load(spec["data"])
    seed, steps, rate = int(spec["seed"]), int(spec["steps"]), float(spec["dropout"])
    network = _insert_dropout(models.build("mlp", spec["norm"], dataset.shape, dataset.classes, seed), rate, seed)
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    result = train(network, dataset, optimizer, steps=steps, batch=int(spec["batch"]), seed=seed)
    record(steps, "train_accuracy", evaluate(network, dataset, "train").accuracy)
    record(steps, "validation_accuracy", evaluate(network, dataset, "validation").accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    if spec["norm"] == "batch":
        ratios = _variance_ratios(network, dataset)
        for number, ratio in enumerate(ratios, start=1):
            record(steps, "layer_variance_ratio", ratio, layer=str(number))
        record(steps, "variance_ratio", ratios[-1])  # dropout stands before all layers but the first
        again = evaluate(network, dataset, statistics="recalibrated", inputs=[dataset.train[0]])  # without dropout
        record(steps, "recalibrated_accuracy", again.accuracy)
    if result.diverged:
        raise NonFiniteError(f"dropout: training diverged at step {result.diverged_at}")


def _insert_dropout(network: nn.Module, rate: float, seed: int) -> nn.Sequential:
    layers: list[nn.Module] = []
    for part in network.children():
        layers.append(part)
        if isinstance(part, nn.ReLU):
            layers.append(SeededDropout(rate, 100 * seed + len(layers)))
    return nn.Sequential(*layers)


def _variance_ratios(network: nn.Module, dataset: Dataset) -> list[float]:
    """Return, per BN layer, the mean over units of (variance in evaluation on training data) / (stored variance)."""
    twin = copy.deepcopy(network).eval()
    ratios: list[float] = []

    def look(module: nn.Module, inputs: tuple[Tensor, ...]) -> None:
        stored = module.running_var
        assert isinstance(stored, Tensor)
        ratios.append(float((inputs[0].var(0) / stored).mean()))

    for part in twin.modules():
        if isinstance(part, _BatchNorm):
            part.register_forward_pre_hook(look)
    with torch.no_grad():
        twin(dataset.train[0])
    return ratios


@empirical(
    "S0-dropout",
    place="sec 9.5",
    printed="dropout and BN somewhat reduce each other's effect",
    study="dropout",
    criterion="what dropout adds to the test accuracy is smaller with BN than without",
    cite=("akbar2025",),
    note="Not in the list the ledger started from. The paper says that some have noted it. Dropout is on at the rate "
    "0.3: one rate, and one direction of the "
    "two.",
)
def _less_together(table: StudyTable) -> Margins:
    gain = {norm: _gain(table, norm) for norm in NORMS}
    return {"dropout's gain, none minus batch": differences(gain["none"], gain["batch"])}


def _gain(table: StudyTable, norm: str) -> dict[int, float]:
    on, off = (table.by_seed("test_accuracy", norm=norm, dropout=rate) for rate in (ON, 0.0))
    return {seed: on[seed] - off[seed] for seed in sorted(on.keys() & off.keys())}


@empirical(
    "S3-dropout",
    place="Internal covariate shift, benefits",
    printed="batch normalization seems to have a regularizing effect ... it is thus unnecessary to use dropout to "
    "mitigate overfitting",
    study="dropout",
    criterion="test accuracy with BN and no dropout at most 0.005 below BN with the best dropout rate, and above that "
    "of the network without BN and without dropout",
    cite=("batchnorm_article", "ioffe2015"),
    note="Not in the list the ledger started from. Rows: `norm`, `dropout` (the rate), `test_accuracy`.",
)
def _unnecessary(table: StudyTable) -> Margins:
    plain = table.by_seed("test_accuracy", norm="batch", dropout=0.0)
    rates = sorted({row["dropout"] for row in table.rows} - {0.0})
    arms = [table.by_seed("test_accuracy", norm="batch", dropout=rate) for rate in rates]
    seeds = [seed for seed in sorted(plain) if all(seed in arm for arm in arms)]
    return {
        "0.005 + BN alone minus BN with the best dropout": [
            0.005 + plain[seed] - max(arm[seed] for arm in arms) for seed in seeds
        ],
        "BN alone minus nothing": table.paired("test_accuracy", "batch", "none", dropout=0.0),
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracy and the ratio of variances against the rate of dropout."""
    ratios = _means(table, "variance_ratio", ("batch",))
    accuracies = _means(table, "test_accuracy", NORMS)
    again = [{**row, "series": "batch, recalibrated"} for row in _means(table, "recalibrated_accuracy", ("batch",))]
    scales: dict[str, Any] = {"x_scale": "linear", "y_scale": "linear"}
    return [
        Figure(
            "accuracy",
            against([*accuracies, *again], x="dropout", y="mean", low="low", high="high", y_title="accuracy", **scales),
            "Test accuracy against the rate of dropout, each arm at its tuned learning rate; 95 % intervals. "
            "Recalibrated: stored statistics taken anew without dropout.",
        ),
        Figure(
            "variance",
            against(ratios, x="dropout", y="mean", low="low", high="high", y_title="variance / stored", **scales),
            "Variance of the last BN layer's input in evaluation over the stored one: below 1 where dropout inflated "
            "what was stored.",
        ),
    ]


def _means(table: StudyTable, reading: str, norms: Sequence[str]) -> list[dict[str, float | str]]:
    rows: list[dict[str, float | str]] = []
    for norm in norms:
        for rate in RATES:
            interval = table.mean(reading, norm=norm, dropout=rate)
            if interval.n:
                rows.append(
                    {"series": norm, "dropout": rate, "mean": interval.mean, "low": interval.low, "high": interval.high}
                )
    return rows


def remarks(table: StudyTable) -> list[str]:
    """Say what dropout adds, the shift of variances, and the advice."""
    lines = []
    for norm in NORMS:
        shown = ", ".join(
            f"{rate:g}: {table.mean('test_accuracy', norm=norm, dropout=rate).mean:.3f}" for rate in RATES
        )
        fitted = fmean(table.by_seed("train_accuracy", norm=norm, dropout=0.0).values())
        lines.append(
            f"{norm}: test accuracy by rate of dropout {shown}; training accuracy without dropout {fitted:.3f}."
        )
    ratios = ", ".join(
        f"{rate:g}: {table.mean('variance_ratio', norm='batch', dropout=rate).mean:.3f}" for rate in RATES
    )
    lines.append(f"Variance in evaluation over the stored one, last BN layer, by rate of dropout: {ratios}.")
    moved = table.mean("recalibrated_accuracy", norm="batch", dropout=RATES[-1]).mean
    kept = table.mean("test_accuracy", norm="batch", dropout=RATES[-1]).mean
    lines.append(
        f"Taking the stored statistics anew without dropout changes the accuracy at rate {RATES[-1]:g} by "
        f"{moved - kept:+.4f}: that is the price of the variance shift here."
    )
    best = choose(table.rows, by="test_accuracy", over=["dropout"], within=["norm"])
    advice = {choice.arm["norm"]: choice.setting["dropout"] for choice in best}
    lines.append(f"Advice of this table: dropout {advice['none']:g} without BN, {advice['batch']:g} with it.")
    return lines


def _study(rates: Sequence[float], seeds: int, tried: int, **fixed: object) -> Study:
    return Study(
        "dropout",
        "Do dropout and BN reduce each other's effect?",
        scientific={"norm": list(NORMS), "dropout": list(RATES)},
        nuisance={"lr": list(rates)},
        fixed=fixed,
        seeds=seeds,
        tuning_seeds=tried,
    )


register(
    Experiment(
        name="dropout",
        papers=("S0", "S3"),
        place="Akbar 2025 sec. 9.5; the encyclopedia article, Internal covariate shift, benefits",
        question="Does dropout add less where there is BN, and what do the two do to the stored variances?",
        finding="Akbar 2025: the two somewhat reduce each other's effect. The encyclopedia article: with BN dropout is "
        "unnecessary.",
        proxy="Neither paper gives an experiment. Small size: an MLP with three hidden layers of 64 units on 2000 "
        "images of CIFAR-10, 500 steps of batch 64 (it overfits), SGD with momentum 0.9, the rate tuned for every arm "
        "on validation accuracy of the first seed; dropout behind every ReLU. Paper size: the same on all of CIFAR-10.",
        sizes={
            "smoke": _study((0.03,), 2, 1, data="digits", steps=12, batch=64),
            "small": _study((0.003, 0.01, 0.03), 6, 1, data="cifar10:2000/1000/2000", steps=500, batch=64),
            "paper": _study((0.003, 0.01, 0.03, 0.1), 8, 2, data="cifar10", steps=20000, batch=128),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("test_accuracy", "recalibrated_accuracy", "variance_ratio", "train_accuracy"),
        choose_by="validation_accuracy",
        data=("cifar10",),
        minutes={"small": 0.9},
        cite=("akbar2025", "batchnorm_article"),
    )
)
