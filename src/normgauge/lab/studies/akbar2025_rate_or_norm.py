"""S0 sec. 2.3, 7.2 after Bjorck et al.: is it the normalization or the learning rate it allows?"""

from __future__ import annotations

import functools
import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import replace

import torch
from torch import nn

from normgauge.charts import curves, intervals
from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.experiment import Experiment, Figure, Record, Spec
from normgauge.lab.fitting import DIVERGENCE_FACTOR, Batches, evaluate
from normgauge.lab.studies._networks import dataset
from normgauge.lab.studies._registry import register
from normgauge.lab.study import Study
from normgauge.lab.table import StudyTable
from normgauge.measure import quotient_spectrum
from normgauge.objective import Objective
from normgauge.symmetry import Symmetries
from normgauge.symmetry import symmetries as discover

ARMS = (("none", "plain"), ("batch", "plain"), ("batch", "own"))
TUNING_SEEDS = (1000, 1001)  # not among the seeds of the comparison
Losses = list[float]


def run(spec: Spec, record: Record) -> None:
    """Train at the plain network's best rate or at the arm's own; measure at equal training loss and at the end."""
    norm = "none" if spec["rate"] == "plain" else spec["norm"]
    settings = tuple((name, spec[name]) for name in ("data", "samples", "model", "steps", "batch", "rates"))
    rate = best_rate(norm, tuple((k, tuple(v) if isinstance(v, list) else v) for k, v in settings))
    task = _task(spec["data"], int(spec["samples"]))
    network = models.build(spec["model"], spec["norm"], task.shape, task.classes, int(spec["seed"])).float()
    target, steps = float(spec["target_loss"]), int(spec["steps"])
    record(0, "lr", rate)
    reached = None
    losses: Losses = []
    for step in _train(network, task, spec, rate, int(spec["seed"]), losses):
        recent = losses[-10:]
        if step % max(1, steps // 40) == 0:
            record(step, "loss", sum(recent) / len(recent))
        if reached is None and len(losses) >= 10 and sum(recent) / len(recent) <= target:
            reached = step
            _record_equal_loss(record, step, network, task, spec)
    if reached is None:  # the end of training stands in where the common loss was never met
        _record_equal_loss(record, steps, network, task, spec)
    record(steps, "reached", float(reached is not None))
    record(steps, "steps_to_target", steps if reached is None else reached)
    record(steps, "final_test_accuracy", evaluate(network, task)[1])


def _train(network: nn.Module, task: Dataset, spec: Spec, rate: float, seed: int, losses: Losses) -> Iterator[int]:
    """Yield the number of steps done, after each one; ends early where the loss leaves every range."""
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    batches = Batches(len(task.train[1]), int(spec["batch"]), seed)
    for step in range(int(spec["steps"])):
        rows = next(batches)
        network.train()
        optimizer.zero_grad()
        loss = task.loss(network(task.train[0][rows]), task.train[1][rows])
        loss.backward()
        optimizer.step()
        losses.append(float(loss.detach()))
        yield step + 1
        if not math.isfinite(losses[-1]) or losses[-1] > DIVERGENCE_FACTOR * max(losses[0], 1.0):
            return


def _record_equal_loss(record: Record, step: int, network: nn.Module, task: Dataset, spec: Spec) -> None:
    record(step, "test_accuracy", evaluate(network, task)[1])
    rows = int(spec["measured"])
    batch = (task.train[0][:rows], task.train[1][:rows])
    objective = Objective(network, nn.functional.cross_entropy, batch, mode="train")
    symmetries = _symmetries(spec["model"], spec["norm"], spec["data"], int(spec["samples"]))
    found = quotient_spectrum(objective, symmetries=symmetries, top=1, tol=1e-2)
    record(step, "quotient_sharpness", found.sharpness, kind="estimate", status=found.status)


@functools.lru_cache(maxsize=4)
def _symmetries(model: str, norm: str, data: str, samples: int) -> Symmetries:
    """Return the symmetries of the architecture; found once, since finding them costs more than using them."""
    task = _task(data, samples)
    network = models.build(model, norm, task.shape, task.classes, 0).float()
    batch = (task.train[0][:32], task.train[1][:32])
    return discover(Objective(network, nn.functional.cross_entropy, batch, mode="train"))


@functools.lru_cache(maxsize=8)
def best_rate(norm: str, settings: tuple[tuple[str, object], ...]) -> float:
    """Return the rate with the best mean validation accuracy after training, the same search for every arm.

    Searched in each process that needs it, with seeds of its own; the comparison never sees these runs.
    """
    spec = dict(settings)
    task = _task(str(spec["data"]), int(spec["samples"]))  # type: ignore[call-overload]
    scores: dict[float, float] = {}
    for rate in spec["rates"]:  # type: ignore[attr-defined]
        for seed in TUNING_SEEDS:
            network = models.build(str(spec["model"]), norm, task.shape, task.classes, seed).float()
            for _ in _train(network, task, spec, rate, seed, []):
                pass
            scores[rate] = scores.get(rate, 0.0) + evaluate(network, task, "validation")[1]
    return max(scores, key=lambda rate: scores[rate])


@functools.lru_cache(maxsize=2)
def _task(name: str, samples: int) -> Dataset:
    """Return the data with a short training split; of the digits, what is cut off is tested on as well."""
    full = dataset(name)
    cut = [(part[:samples], part[samples:]) for part in full.train]
    train = (cut[0][0], cut[1][0])
    if name != "digits":
        return replace(full, train=train)
    test = tuple(torch.cat([part, rest]) for part, (_, rest) in zip(full.test, cut, strict=True))
    return replace(full, train=train, test=(test[0], test[1]))


def contrasts(table: StudyTable) -> Mapping[str, Sequence[float]]:
    """Positive: no gain at the plain net's rate, a gain from BN's own rate, and a flatter minimum there."""
    same = table.paired("test_accuracy", "batch", "none", rate="plain")
    own, plain = (table.by_seed("quotient_sharpness", norm="batch", rate=rate) for rate in ("own", "plain"))
    return {
        "0.01 - (BN minus none) at the plain net's rate": [0.01 - value for value in same],
        "BN: test accuracy, own minus plain rate": table.paired(
            "test_accuracy", "own", "plain", knob="rate", norm="batch"
        ),
        "BN: log10 of the quotient sharpness, plain over own rate": [
            math.log10(plain[s] / own[s]) for s in sorted(plain.keys() & own.keys())
        ],
    }


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracies and sharpness per arm, and the training loss."""
    drawn = []
    for reading, title in (("test_accuracy", "test accuracy at equal training loss"), ("quotient_sharpness", "")):
        rows = []
        for norm, rate in ARMS:
            found = table.mean(reading, norm=norm, rate=rate)
            rows.append({"series": _arm(norm, rate), "value": found.mean, "low": found.low, "high": found.high})
        words = title or "quotient sharpness at equal training loss"
        drawn.append(
            Figure(reading.split("_")[0], intervals(rows, x_title=words), f"{words.capitalize()}, 95 % intervals.")
        )
    course = table.band("loss", lambda row: _arm(row["norm"], row["rate"]))
    chart = curves(course, y="mean", low="low", high="high", y_scale="log", y_title="training loss")
    return [*drawn, Figure("loss", chart, "Training loss (mean of ten steps); band: range over seeds.")]


def _arm(norm: str, rate: str) -> str:
    if norm == "none":
        return "no BN, its best rate"
    return "BN, the plain net's rate" if rate == "plain" else "BN, its own best rate"


def remarks(table: StudyTable) -> list[str]:
    """Say accuracy, sharpness and steps per arm."""
    lines = []
    for norm, rate in ARMS:
        mean = {name: table.mean(name, norm=norm, rate=rate).mean for name in (*COLUMNS, "reached")}
        lines.append(
            f"{_arm(norm, rate)} ({mean['lr']:g}): at equal training loss ({100 * mean['reached']:.3g} % of the runs "
            f"reached it, after {mean['steps_to_target']:.3g} steps) test accuracy {mean['test_accuracy']:.4f}, "
            f"quotient sharpness {mean['quotient_sharpness']:.3g}; at the end {mean['final_test_accuracy']:.4f}."
        )
    return lines


COLUMNS = ("lr", "test_accuracy", "final_test_accuracy", "quotient_sharpness", "steps_to_target")


def _parts(seeds: int, fixed: Mapping[str, object]) -> list[Study]:
    ask = "Is it the rate or the normalization?"
    return [
        Study("rate-or-norm", ask, scientific={"norm": norms, "rate": [rate]}, fixed=fixed, seeds=seeds)
        for rate, norms in (("plain", ["none", "batch"]), ("own", ["batch"]))
    ]


def _fixed(data: str, samples: int, model: str, steps: int, batch: int, rates: Sequence[float]) -> dict[str, object]:
    fixed = {"data": data, "samples": samples, "model": model, "steps": steps, "batch": batch, "rates": list(rates)}
    return {**fixed, "target_loss": 0.1, "measured": 32 if steps < 50 else 128}


register(
    Experiment(
        name="rate-or-norm",
        papers=("S0",),
        place="sec. 2.3, 7.2 (after Bjorck et al.)",
        question="Does BN test better because it normalizes, or because it allows a larger learning rate?",
        finding="At the plain network's learning rate BN has no gain in test accuracy; its gain comes from the larger "
        "rate, which finds flatter minima.",
        proxy="Bjorck et al. train a ResNet on CIFAR-10; ours is the small VGG (four convolutions, 16-32 channels) on "
        "400 of the 8x8 digits, tested on the 1109 others, SGD with batches of 32. The plain net's and BN's own rate "
        "are the best of the same grid by validation accuracy on two other seeds. Equal loss is 0.1.",
        sizes={
            "smoke": _parts(3, _fixed("digits", 128, "mlp", 20, 32, (0.1,))),
            "small": _parts(8, _fixed("digits", 400, "vgg", 200, 32, (0.01, 0.03, 0.1, 0.3, 1.0))),
            "paper": _parts(5, _fixed("cifar10", 45_000, "resnet", 60_000, 128, (0.001, 0.01, 0.1))),
        },
        run=run,
        contrasts=contrasts,
        figures=figures,
        remarks=remarks,
        columns=COLUMNS,
        minutes={"small": 1.3},
        cite=("akbar2025",),
    )
)
