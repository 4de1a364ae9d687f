"""Evaluation under stored, recalibrated and batch statistics: against sums by hand; nothing is changed by looking."""

import copy
import math
from dataclasses import replace
from statistics import fmean

import pytest
import torch
from torch import nn

from normgauge.errors import UnknownNameError
from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.evaluate import evaluate, recalibrated_copy
from normgauge.nn import LpBatchNorm


@pytest.fixture
def task():
    source = torch.Generator().manual_seed(0)
    pairs = [(3 + 2 * torch.randn(100, 6, generator=source), torch.arange(100) % 2) for _ in range(3)]
    return Dataset("toy", "classification", *pairs, classes=2)


@pytest.fixture
def network(task):
    return models.build("mlp", "batch", task.shape, task.classes, 0)


def by_hand(network, inputs, targets):
    with torch.no_grad():
        output = network(inputs)
    return float(nn.functional.cross_entropy(output, targets)), float((output.argmax(1) == targets).double().mean())


@pytest.mark.parametrize("statistics", ["stored", "batch", "recalibrated"])
@pytest.mark.parametrize("training", [True, False])
def test_the_network_is_left_as_it_was(task, network, statistics, training):
    network.train(training)
    network[1].train(not training)
    before, modes = copy.deepcopy(network.state_dict()), [part.training for part in network.modules()]
    evaluate(network, task, statistics=statistics)
    assert [part.training for part in network.modules()] == modes
    assert all(torch.equal(value, network.state_dict()[name]) for name, value in before.items())


def test_the_modes_come_back_after_an_error(task):
    network = nn.Sequential(nn.Linear(5, 2))
    with pytest.raises(RuntimeError):
        evaluate(network, task)
    assert network.training and network[0].training


def test_stored_statistics_do_not_depend_on_the_batch(task, network):
    expected = by_hand(copy.deepcopy(network).eval(), *task.test)
    for batch in (7, 512):
        found = evaluate(network, task, batch=batch)
        assert (found.loss, found.accuracy) == pytest.approx(expected, rel=1e-9)
    few = by_hand(copy.deepcopy(network).eval(), *(part[:30] for part in task.validation))
    found = evaluate(network, task, "validation", limit=30)
    assert (found.loss, found.accuracy) == pytest.approx(few, rel=1e-9)


@pytest.mark.parametrize(("rest", "ends"), [(False, [40, 80]), (True, [40, 80, 100])])
def test_batch_statistics_are_those_of_whole_batches(task, network, rest, ends):
    inputs, targets = task.train
    starts = [0, *ends[:-1]]
    pieces = [by_hand(copy.deepcopy(network), inputs[a:b], targets[a:b]) for a, b in zip(starts, ends, strict=True)]
    found = evaluate(network, task, "train", statistics="batch", batch=40, rest=rest)
    sizes = [b - a for a, b in zip(starts, ends, strict=True)]
    loss, accuracy = (fmean(values, sizes) for values in zip(*pieces, strict=True))
    assert (found.loss, found.accuracy) == pytest.approx((loss, accuracy), rel=1e-9)


def test_a_single_sample_has_no_batch_statistics(task, network):
    found = evaluate(network, task, statistics="batch", batch=33, rest=True)  # 33, 33, 33 and 1
    assert round(found.accuracy * 99, 9) == round(found.accuracy * 99)


def test_statistics_are_taken_anew_on_a_copy(task, network):
    twin = recalibrated_copy(network, task.train[0][:80].split(40))
    first = next(part for part in network.modules() if isinstance(part, models.Normalized))
    seen = first.layer(task.train[0][:80]).detach()
    norm = next(part for part in twin.modules() if isinstance(part, models.Normalized)).norm
    assert torch.allclose(norm.running_mean, seen.mean(0))
    assert torch.allclose(norm.running_var, (seen[:40].var(0) + seen[40:].var(0)) / 2)
    assert not any(part.training for part in twin.modules())
    moved = replace(task, test=(task.test[0] * 5, task.test[1]))
    own, given = (evaluate(network, moved, statistics="recalibrated", inputs=i) for i in (None, [moved.test[0]]))
    assert own == given == evaluate(recalibrated_copy(network, [moved.test[0]]), moved)


def test_recalibration_takes_all_layers_that_store_statistics_and_no_dropout(task):
    network = nn.Sequential(nn.Dropout(0.9), LpBatchNorm(6, 1), nn.BatchNorm1d(6), nn.Linear(6, 2))
    network[2].running_mean.fill_(math.nan)  # what was there does not matter
    twin = recalibrated_copy(network, [task.train[0]])
    assert torch.allclose(twin[1].running_mean, task.train[0].mean(0))
    assert torch.isfinite(twin[2].running_mean).all() and math.isfinite(evaluate(twin, task).loss)


def test_regressions_have_no_accuracy_and_other_words_are_refused(task, network):
    inputs, targets = task.test
    regression = Dataset("toy", "regression", *[(inputs, torch.stack([targets, targets], 1) * 1.0)] * 3, classes=2)
    assert math.isnan(evaluate(network, regression).accuracy) and evaluate(network, regression).loss > 0
    with pytest.raises(UnknownNameError, match="unknown statistics 'store'. Did you mean 'stored'"):
        evaluate(network, task, statistics="store")
