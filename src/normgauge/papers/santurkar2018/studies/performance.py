"""Fig. 1: training and test performance of VGG on CIFAR-10 with and without BN, with and without augmentation."""

from statistics import fmean

from torch import nn

from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, record_accuracies, register
from normgauge.papers.santurkar2018.studies import _setting as setting


@register("performance")
def run(spec: Spec, record: Record) -> None:
    """Train, recording loss and test accuracy over training, and every accuracy at the end."""
    network, dataset = setting.prepare(spec)
    steps = int(spec["steps"])
    window = max(1, steps // 15)

    def watch(step: int, network: nn.Module) -> None:
        record(step, "test_accuracy_now", evaluate(network, dataset, limit=500).accuracy)
        setting.record_distribution(record, step, setting.batch_objective(network, dataset, spec), histogram=False)

    at, augment = range(window, steps + 1, window), bool(spec["augmentation"])
    result = setting.follow(spec, network, dataset, watch, at=at, augment=augment)
    for end in range(window, len(result.losses) + 1, window):
        record(end, "loss", fmean(result.losses[end - window : end]))
    record(steps, "train_loss", fmean(result.losses[-window:]))
    record(steps, "train_accuracy", evaluate(network, dataset, batch=int(spec["batch"]), **setting.AS_TRAINED).accuracy)
    record_accuracies(record, steps, network, dataset, "validation", "test")
    result.whole()
