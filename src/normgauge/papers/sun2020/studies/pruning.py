"""Sec. 2.2: pruning channels by small gamma, by similar gamma and beta (the paper's proposal), and at random."""

import copy
from statistics import fmean

import torch
from torch import nn

from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate
from normgauge.papers.language import Record, Spec, build, fit, register
from normgauge.surgery import prune_norms, scale_l1

WAYS = ("gamma", "similar", "random")
TUNED_AT = 50  # percent at which the pruned network is trained on for a while


@register("pruning")
def run(spec: Spec, record: Record) -> None:
    """Train a VGG with or without an l1 penalty on gamma, prune it in three ways at every sparsity, and tune."""
    network, dataset = build(spec, norm="batch")
    optimizer = torch.optim.SGD(network.parameters(), lr=float(spec["lr"]), momentum=0.9)
    strength = float(spec["l1"])
    penalty = (lambda model: strength * scale_l1(model)) if strength else None
    fit(spec, network, dataset, optimizer, penalty=penalty).whole()
    record(0, "full_accuracy", evaluate(network, dataset).accuracy)
    example = dataset.validation[0][:32]
    for way in WAYS:
        accuracies = []
        record(0, f"{way}_accuracy", evaluate(network, dataset).accuracy)
        for sparsity in spec["sparsities"]:
            done = prune_norms(network, way, sparsity / 100, example, seed=int(spec["seed"]))  # type: ignore[arg-type]
            accuracies.append(evaluate(done.model, dataset).accuracy)
            record(sparsity, f"{way}_accuracy", accuracies[-1])
            record(sparsity, f"{way}_proof", done.proof)
            if sparsity == TUNED_AT:
                record(sparsity, f"{way}_tuned_accuracy", _tuned_accuracy(done.model, dataset, spec))
        record(spec["sparsities"][-1], f"{way}_mean_accuracy", fmean(accuracies))


def _tuned_accuracy(network: nn.Module, dataset: Dataset, spec: Spec) -> float:
    model = copy.deepcopy(network)
    optimizer = torch.optim.SGD(model.parameters(), lr=float(spec["lr"]) / 3, momentum=0.9)
    fit(spec, model, dataset, optimizer, steps=max(1, int(spec["steps"]) // 4)).whole()
    return evaluate(model, dataset).accuracy
