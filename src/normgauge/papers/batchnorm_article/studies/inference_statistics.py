"""S3 Inference: population estimates (exponential, cumulative, recalibrated) over batch size and training length."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn

from normgauge.charts import against
from normgauge.lab import data as datasets
from normgauge.lab import models
from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.lab.runs.train import Batches, train
from normgauge.lab.study import Study
from normgauge.papers.court import Margins, StudyTable, differences, finding
from normgauge.papers.experiment import Experiment, Figure, Record
from normgauge.papers.studies import register
from normgauge.records import Spec

# exponential: torch's momentum 0.1; cumulative: all batches of training alike; recalibrated: S3's formula over batches
# with the final weights; biased: the same without m / (m - 1); whole: the training data as one batch.
ESTIMATES = ("exponential", "cumulative", "recalibrated", "biased", "whole")
# Population estimates are compared with those of the whole training data; within this they are as good.
AS_GOOD = 0.01
Statistics = dict[str, tuple[Tensor, Tensor]]


class Tracker:
    """Averages of the batch means and variances of every batch normalization over the batches it has seen."""

    def __init__(self, network: nn.Module) -> None:
        self.layers = {str(k): part.norm for k, part in enumerate(normalized_layers(network))}
        self.sums: dict[str, list[Tensor]] = {}
        self.count = 0
        self._hooks = [
            layer.register_forward_pre_hook(lambda m, inputs, name=name: self._see(name, m, inputs[0].detach()))
            for name, layer in self.layers.items()
        ]

    def _see(self, name: str, layer: nn.Module, x: Tensor) -> None:
        if not layer.training:
            return
        rows = x.transpose(0, 1).flatten(1)
        moments = [rows.mean(1), rows.var(1), rows.var(1, unbiased=False)]
        sums = self.sums.setdefault(name, [torch.zeros_like(value) for value in moments])
        for total, value in zip(sums, moments, strict=True):
            total += value
        self.count += name == "0"

    def close(self) -> None:
        """Stop looking."""
        for hook in self._hooks:
            hook.remove()

    def averages(self, *, biased: bool = False) -> Statistics:
        """Return mean and variance per layer: `E_B[mean_B]` and `m / (m - 1) E_B[var_B]`, or without the factor."""
        return {
            name: (mean / self.count, (plain if biased else corrected) / self.count)
            for name, (mean, corrected, plain) in self.sums.items()
        }


def run(spec: Spec, record: Record) -> None:
    """Train once, then evaluate the same weights with every estimate of the population."""
    dataset = datasets.load(spec["data"])
    seed, steps, size = int(spec["seed"]), int(spec["steps"]), int(spec["batch"])
    network = models.build(spec["model"], "batch", dataset.shape, dataset.classes, seed)
    rate = float(spec["lr"]) * min(1.0, size / 64)  # small batches are noisy: the usual linear scaling
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    training = Tracker(network)
    done = train(network, dataset, optimizer, steps=steps, batch=size, seed=seed)
    training.close()
    done.whole()
    estimates = {"exponential": _stored_statistics(network), "cumulative": training.averages()}
    after, batches = Tracker(network), Batches(len(dataset.train[1]), size, 77 + seed)
    network.train()
    with torch.no_grad():
        for _ in range(max(1, min(int(spec["passes"]), len(dataset.train[1]) // size))):
            network(dataset.train[0][next(batches)])
    after.close()
    estimates |= {"recalibrated": after.averages(), "biased": after.averages(biased=True)}
    estimates["whole"] = _stored_statistics(recalibrated_copy(network, [dataset.train[0]]))
    for name in ESTIMATES:
        _write(network, estimates[name])
        means, variances = _errors(estimates[name], estimates["whole"])
        tested = evaluate(network, dataset)
        record(steps, f"accuracy_{name}", tested.accuracy)
        record(steps, f"loss_{name}", tested.loss)
        record(steps, f"mean_error_{name}", means)
        record(steps, f"variance_error_{name}", variances)
    by_batches = evaluate(
        network, dataset, statistics="batch", batch=size, rest=True
    )  # depends on a sample's neighbours
    record(steps, "accuracy_batch", by_batches.accuracy)


def _stored_statistics(network: nn.Module) -> Statistics:
    parts = enumerate(normalized_layers(network))
    return {
        str(k): tuple(part.norm.get_buffer(name).clone() for name in ("running_mean", "running_var"))  # type: ignore[misc]
        for k, part in parts
    }


def _write(network: nn.Module, statistics: Statistics) -> None:
    for k, part in enumerate(normalized_layers(network)):
        for name, value in zip(("running_mean", "running_var"), statistics[str(k)], strict=True):
            part.norm.get_buffer(name).copy_(value)


def _errors(estimate: Statistics, truth: Statistics) -> tuple[float, float]:
    """Return means over units of |mean - mean*| / sigma* and |log(var / var*)|; dead units are left out."""
    means, variances = [], []
    for name, (mean, variance) in estimate.items():
        true_mean, true_variance = truth[name]
        alive = true_variance > 1e-8
        means.append(((mean - true_mean).abs() / true_variance.sqrt())[alive])
        variances.append((variance / true_variance).clamp_min(1e-12).log().abs()[alive])
    return float(torch.cat(means).mean()), float(torch.cat(variances).mean())


def _cells(table: StudyTable) -> tuple[list[int], list[int]]:
    sizes, lengths = ({row[knob] for row in table.rows} for knob in ("batch", "steps"))
    return sorted(sizes), sorted(lengths)


@finding(
    "inference-statistics",
    printed="E_B[mu_B] and m/(m-1) E_B[sigma_B^2] represent the population completely, and the factor m/(m-1) is right",
    criterion="after the longest training: test accuracy with the printed estimates at most "
    f"{AS_GOOD} below that with the statistics of the whole training data, at every batch size; at the smallest, the "
    "error of the log variance is smaller with the factor than without",
)
def _complete(table: StudyTable) -> Margins:
    sizes, lengths = _cells(table)

    def error(estimate: str) -> dict[int, float]:
        return table.by_seed(f"variance_error_{estimate}", batch=sizes[0], steps=lengths[-1])

    margins = {}
    for size in sizes:
        printed, whole = (
            table.by_seed(f"accuracy_{name}", batch=size, steps=lengths[-1]) for name in ("recalibrated", "whole")
        )
        name = f"batch {size}: accuracy recalibrated - whole + {AS_GOOD}"
        margins[name] = [value + AS_GOOD for value in differences(printed, whole)]
    name = f"batch {sizes[0]}: error of the variance, without the factor minus with"
    return {**margins, name: differences(error("biased"), error("recalibrated"))}


def figures(table: StudyTable) -> list[Figure]:
    """Draw accuracy over batch size and over training length, and the error of the variance, per estimate."""
    sizes, lengths = _cells(table)

    def points(
        knob: str, values: Sequence[int], reading: str, names: Sequence[str], **held: int
    ) -> list[dict[str, object]]:
        rows = []
        for name in names:
            for value in values:
                span = table.mean(f"{reading}_{name}", **{knob: value}, **held)
                rows.append({"series": name, knob: value, "value": span.mean, "low": span.low, "high": span.high})
        return rows

    wide = against(
        points("batch", sizes, "accuracy", (*ESTIMATES, "batch"), steps=lengths[-1]),
        x="batch",
        low="low",
        high="high",
        x_scale="log",
        y_scale="linear",
        x_title="batch size",
        y_title="test accuracy",
    )
    smallest = sizes[len(sizes) // 2]
    long = against(
        points("steps", lengths, "accuracy", ESTIMATES, batch=smallest),
        x="steps",
        low="low",
        high="high",
        x_scale="log",
        y_scale="linear",
        x_title="steps",
        y_title="test accuracy",
    )
    error = against(
        points("batch", sizes, "variance_error", ESTIMATES[:-1], steps=lengths[-1]),
        x="batch",
        low="low",
        high="high",
        x_scale="log",
        y_scale="log",
        x_title="batch size",
        y_title="|log variance ratio|",
    )
    return [
        Figure(
            "batch",
            wide,
            f"Test accuracy of the same weights after {lengths[-1]} steps, by estimate of the population.",
        ),
        Figure("length", long, f"Test accuracy over the length of training, batches of {smallest}."),
        Figure("variance", error, "Mean error of the stored variance against that of the whole training data."),
    ]


def remarks(table: StudyTable) -> list[str]:
    """Say accuracies and errors per estimate at the ends of the grid."""
    sizes, lengths = _cells(table)
    lines = []
    for size in (sizes[0], sizes[-1]):
        for length in (lengths[0], lengths[-1]):
            told = []
            for name in (*ESTIMATES, "batch"):
                accuracy = table.mean(f"accuracy_{name}", batch=size, steps=length).mean
                told.append(f"{name} {accuracy:.3f}")
            lines.append(f"Batch {size}, {length} steps: test accuracy {', '.join(told)}.")
    for size in (sizes[0], sizes[-1]):
        told = []
        for name in ESTIMATES[:-1]:
            mean, variance = (
                table.mean(f"{kind}_error_{name}", batch=size, steps=lengths[-1]).mean for kind in ("mean", "variance")
            )
            told.append(f"{name} {mean:.3g} and {variance:.3g}")
        lines.append(
            f"Batch {size}, {lengths[-1]} steps: error of means (in sigma) and of log variances: {'; '.join(told)}."
        )
    lines.append(
        "m / (m - 1) makes the variance unbiased for independent inputs, which the first layer has; deeper layers see "
        "what batch statistics made of the batch, so small batches describe another network than inference runs."
    )
    return lines


def _study(seeds: int, sizes: Sequence[int], lengths: Sequence[int], **knobs: object) -> Study:
    return Study(
        "inference-statistics",
        "Which estimate of the population serves inference?",
        scientific={"batch": list(sizes), "steps": list(lengths)},
        fixed={"model": "mlp", "data": "digits", "lr": 0.05, "passes": 100, **knobs},
        seeds=seeds,
    )


register(
    Experiment(
        name="inference-statistics",
        papers=("S3",),
        place="Inference",
        question="Which estimate of the population statistics serves inference, over batch size and training length?",
        finding="At inference the population mean E_B[mu_B] and variance m/(m-1) E_B[sigma_B^2] replace those of the "
        "batch; they are a complete representation of the mini-batches.",
        proxy="The article gives no setting. Ours: an MLP of three hidden layers on digits, SGD with momentum; the "
        "estimates are taken from the same training run, so that they share every weight.",
        sizes={
            "smoke": _study(3, (4, 32), (5, 15), passes=10),
            "small": _study(5, (2, 4, 8, 32, 128), (20, 100, 500)),
            "paper": _study(5, (2, 4, 8, 32, 128), (1000, 10000), model="vgg", data="cifar10"),
        },
        run=run,
        figures=figures,
        remarks=remarks,
        columns=(
            *(f"accuracy_{name}" for name in ESTIMATES),
            "accuracy_batch",
            "variance_error_biased",
            "variance_error_recalibrated",
            "variance_error_exponential",
            "variance_error_cumulative",
        ),
        minutes={"small": 0.3},
        cite=("batchnorm_article", "ioffe2015"),
    )
)
