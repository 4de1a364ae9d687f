"""Fig. 2, 8: batch normalization with covariate shift put back on purpose, and the same noise without it."""

import copy
from statistics import fmean

import torch
from torch import Tensor, nn

from normgauge.errors import NonFiniteError
from normgauge.lab.data import Dataset
from normgauge.lab.models.normalized import normalized_layers
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, register
from normgauge.papers.santurkar2018.studies import _setting as setting

CHANGES = ("mean_change", "variance_change", "relative_mean_change")
WINDOW = 10


@register("noisy-batchnorm")
def run(spec: Spec, record: Record) -> None:
    """Train, and take the middle layer's moments on one batch before and after single steps of training."""
    network, dataset = setting.prepare(spec)
    steps = int(spec["steps"])
    before = setting.spaced_steps(max(steps - 1, 1), int(spec["measures"]))
    last: dict[str, Tensor] = {}
    history: dict[str, list[float]] = {name: [] for name in CHANGES}

    def watch(step: int, network: nn.Module) -> None:
        mean, variance = _moments(network, dataset, int(spec["batch"]))
        if step - 1 in before and "mean" in last:
            change = float((mean - last["mean"]).square().mean().sqrt())
            spread = float((variance - last["variance"]).square().mean().sqrt())
            for name, value in zip(CHANGES, (change, spread, change / float(variance.mean().sqrt())), strict=True):
                history[name].append(value)
                record(step, f"{name}_now", value)
            objective = setting.batch_objective(copy.deepcopy(network), dataset, spec)
            setting.record_distribution(record, step, objective, histogram=False)
        last.update(mean=mean, variance=variance)

    result = setting.follow(spec, network, dataset, watch, at={step + more for step in before for more in (0, 1)})
    for end in range(WINDOW, len(result.losses) + 1, WINDOW):
        record(end, "loss", fmean(result.losses[end - WINDOW : end]))
    setting.record_medians(record, steps, history)
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **setting.AS_TRAINED).accuracy)
    record(steps, "test_accuracy", evaluate(network, dataset).accuracy)
    record(steps, "diverged", float(result.diverged))
    if result.diverged and spec["norm"] != "noise":  # that noise alone prevents training is what is measured
        raise NonFiniteError(f"noisy-batchnorm: training diverged at step {result.diverged_at}")


def _moments(network: nn.Module, dataset: Dataset, batch: int) -> tuple[Tensor, Tensor]:
    """Return mean and variance per unit of the middle layer as training would see them; nothing is written back."""
    twin = copy.deepcopy(network).train()
    layers = normalized_layers(twin)
    outputs: list[Tensor] = []
    layers[len(layers) // 2].register_forward_hook(lambda module, inputs, output: outputs.append(output))
    with torch.no_grad():
        twin(dataset.train[0][:batch])
    units = outputs[0].transpose(0, 1).flatten(1).double()
    return units.mean(1), units.var(1, unbiased=False)
