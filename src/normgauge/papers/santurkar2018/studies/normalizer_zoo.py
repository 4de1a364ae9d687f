"""Every registered normalizer on one task, and which of its properties predict the result.

Santurkar et al. 2018, sec. 3.3, and Akbar 2025, sec. 9.5.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from statistics import fmean

import torch

from normgauge.charts import intervals
from normgauge.errors import NonFiniteError
from normgauge.lab import data, models
from normgauge.lab.runs.evaluate import evaluate
from normgauge.lab.runs.train import train
from normgauge.lab.study import Study
from normgauge.nn import registry
from normgauge.nn.registry import Declaration
from normgauge.papers.court import Margins, StudyTable, differences, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec

RATES = (0.03, 0.1, 0.3, 1.0)
# StatNorm's design space: which centre, which scale, over which axes (names of the registry's points)
DESIGN = tuple(
    f"stat:axes={axes},center={center},scale={scale}"
    for axes, center, scale in (
        ("batch", "median", "l1"),
        ("batch", "mean", "linf"),
        ("batch", "none", "rms"),
        ("layer", "median", "std"),
        ("group", "mean", "l1"),
    )
)
PROPERTIES: dict[str, Callable[[Declaration], bool]] = {
    "weights scale-invariant": lambda d: any(i.of == "weights" and i.kind == "scale" for i in d.invariances),
    "acts on activations": lambda d: d.placement == "activation",
    "statistics of the batch": lambda d: d.statistics == "batch",
    "centres its input": lambda d: any(i.of == "input" and i.kind == "shift" for i in d.invariances),
    "free of noise": lambda d: not d.noise,
}


def run(spec: Spec, record: Record) -> None:
    """Train the same network under one normalizer at one rate."""
    dataset = data.load(spec["data"])
    network = models.build(spec["model"], spec["norm"], dataset.shape, dataset.classes, int(spec["seed"]))
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]))
    steps = int(spec["steps"])
    result = train(network, dataset, optimizer, steps=steps, batch=int(spec["batch"]), seed=int(spec["seed"]))
    for split in ("validation", "test"):
        record(steps, f"{split}_accuracy", evaluate(network, dataset, split).accuracy)
    record(steps, "train_loss", fmean(result.losses[-10:]))
    if result.diverged:
        raise NonFiniteError(f"zoo: the training loss left every reasonable range at step {result.diverged_at}")


@finding(
    "normalizer-zoo",
    printed="networks train better under normalizers that make weights scale-invariant, act on activations, take "
    "statistics of the batch, centre their input, or are free of noise",
    criterion="for each property: test accuracy, averaged over the normalizers with it, minus that averaged over the "
    "others, is above 0",
)
def _properties_help(table: StudyTable) -> Margins:
    accuracies = {norm: table.by_seed("test_accuracy", norm=norm) for norm in _norms(table)}
    seeds = set.intersection(*map(set, accuracies.values())) if accuracies else set()
    margins = {}
    for name, has in PROPERTIES.items():
        with_it = [norm for norm in accuracies if has(registry.get(norm))]
        without = [norm for norm in accuracies if norm not in with_it]
        if with_it and without:
            means = [{seed: fmean(accuracies[n][seed] for n in side) for seed in seeds} for side in (with_it, without)]
            margins[f"test accuracy, {name} minus the others"] = differences(*means)
    return margins


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracy per normalizer at its best rate."""
    rows = []
    for norm in sorted(_norms(table), key=lambda norm: -table.mean("test_accuracy", norm=norm).mean):
        mean = table.mean("test_accuracy", norm=norm)
        rows.append({"series": norm, "value": mean.mean, "low": mean.low, "high": mean.high})
    chart = intervals(rows, x_title="test accuracy", row_height=18)
    return [Figure("accuracy", chart, "Test accuracy of every registered normalizer at its best rate, 95 % intervals.")]


def remarks(table: StudyTable) -> list[str]:
    """Name the best, the worst, and the rate each kind likes."""
    means = {norm: table.mean("test_accuracy", norm=norm).mean for norm in _norms(table)}
    ranked = sorted(means, key=lambda norm: -means[norm])
    top, last = ranked[0], ranked[-1]
    bare = means.get("none")
    lines = [f"Best {top} ({means[top]:.3f}), worst {last} ({means[last]:.3f}), none {bare:.3f}." if bare else ""]
    rates = {norm: table.where(norm=norm)[0]["lr"] for norm in means}
    invariant = [rates[n] for n in means if PROPERTIES["weights scale-invariant"](registry.get(n))]
    others = [rates[n] for n in means if not PROPERTIES["weights scale-invariant"](registry.get(n))]
    if invariant and others:
        lines.append(
            f"Mean of the chosen rates: {fmean(invariant):.2g} where weights are scale-invariant, {fmean(others):.2g} "
            "where they are not."
        )
    unfinished = {row["norm"] for row in table.trials} - means.keys()
    if unfinished:
        lines.append(f"Left out, because no run finished: {', '.join(sorted(unfinished))}.")
    return [line for line in lines if line]


def _norms(table: StudyTable) -> list[str]:
    return list(dict.fromkeys(row["norm"] for row in table.rows if row.get("test_accuracy") is not None))


def _study(norms: Sequence[str], rates: Sequence[float], seeds: int, tuning: int, steps: int, name: str) -> Study:
    return Study(
        "normalizer-zoo",
        "Which property of a normalizer predicts how well it trains?",
        scientific={"norm": list(norms)},
        nuisance={"lr": list(rates)},
        fixed={"model": "mlp", "data": name, "steps": steps, "batch": 128},
        seeds=seeds,
        tuning_seeds=tuning,
    )


register(
    Experiment(
        name="normalizer-zoo",
        papers=("S1", "S0"),
        place="Santurkar et al. 2018, sec. 3.3; Akbar 2025, sec. 9.5",
        question="Which properties of a normalizer predict how well a network trains under it?",
        finding="Santurkar et al. 2018: normalizers by other averages do as well as batch normalization, so the effect "
        "is not tied to controlling moments; Akbar 2025 lists alternatives that keep scale invariance.",
        proxy="An MLP with three hidden layers on digits; Santurkar et al. 2018 use a VGG on CIFAR-10.",
        sizes={
            "smoke": _study(("none", "batch", "rms", "weight"), (0.1, 1.0), 3, 1, 10, "digits"),
            "small": _study((*registry.names(), *DESIGN), RATES, 6, 1, 100, "digits"),
            "paper": _study((*registry.names(), *DESIGN), RATES, 5, 2, 15_000, "cifar10"),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=("test_accuracy", "train_loss"),
        choose_by="validation_accuracy",
        minutes={"small": 0.8},
        cite=("santurkar2018", "akbar2025"),
    )
)
