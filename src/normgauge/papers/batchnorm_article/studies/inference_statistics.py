"""S3 Inference: population estimates (exponential, cumulative, recalibrated) over batch size and training length."""

import torch
from torch import Tensor, nn

from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.lab.runs.train import Batches
from normgauge.papers.language import Record, Spec, build, fit, register

# exponential: torch's momentum 0.1; cumulative: all batches of training alike; recalibrated: S3's formula over batches
# with the final weights; biased: the same without m / (m - 1); whole: the training data as one batch.
ESTIMATES = ("exponential", "cumulative", "recalibrated", "biased", "whole")
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


@register("inference-statistics")
def run(spec: Spec, record: Record) -> None:
    """Train once, then evaluate the same weights with every estimate of the population."""
    network, dataset = build(spec, norm="batch")
    seed, steps, size = int(spec["seed"]), int(spec["steps"]), int(spec["batch"])
    rate = float(spec["lr"]) * min(1.0, size / 64)  # small batches are noisy: the usual linear scaling
    optimizer = torch.optim.SGD(network.parameters(), lr=rate, momentum=0.9)
    training = Tracker(network)
    done = fit(spec, network, dataset, optimizer)
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
    by_batches = evaluate(network, dataset, statistics="batch", batch=size, rest=True)  # by a sample's neighbours
    record(steps, "accuracy_batch", by_batches.accuracy)


def _stored_statistics(network: nn.Module) -> Statistics:
    norms = [part.norm for part in normalized_layers(network)]
    copies = ((norm.get_buffer("running_mean").clone(), norm.get_buffer("running_var").clone()) for norm in norms)
    return {str(k): pair for k, pair in enumerate(copies)}


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
