"""Margins against one sample at a time, their laws under rescaling, and inputs that are no classification."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import CASES
from normgauge.measure.decisions.margins import margins
from normgauge.objective import Objective
from reference.margins import margins_one_by_one
from reference.tracks import same, tracks


def net():
    return nn.Sequential(nn.Linear(4, 6), nn.BatchNorm1d(6), nn.Tanh(), nn.Linear(6, 3))


def test_equals_one_sample_at_a_time():
    model, x, y = net(), torch.randn(8, 4), torch.randint(3, (8,))
    found = margins(Objective(model, F.cross_entropy, [(x[:5], y[:5]), (x[5:], y[5:])], mode="eval"))
    raw, slopes = margins_one_by_one(copy.deepcopy(model), x, y)
    torch.testing.assert_close(found.raw, raw)
    torch.testing.assert_close(found.values["input_gradient"], raw / slopes)
    last, first = (float(layer.weight.detach().norm()) for layer in (model[3], model[0]))
    torch.testing.assert_close(found.values["last_layer"], raw / last)
    torch.testing.assert_close(found.values["norm_product"], raw / (last * first))
    assert found.accuracy == pytest.approx(float((model.eval()(x).argmax(1) == y).double().mean()))
    assert found.quantile(0.5) == pytest.approx(float(raw.quantile(0.5)))


def test_scaling_the_last_layer_changes_raw_margins_only():
    model, batch = nn.Sequential(nn.Linear(4, 6), nn.ReLU(), nn.Linear(6, 3, bias=False)), None
    batch = (torch.randn(6, 4), torch.randint(3, (6,)))
    objective = Objective(model, F.cross_entropy, batch, mode="eval")
    before = margins(objective)
    after = margins(objective.at({"2.weight": 7 * model[2].weight.detach()}))
    torch.testing.assert_close(after.raw, 7 * before.raw)
    for by in ("last_layer", "norm_product", "input_gradient"):
        torch.testing.assert_close(after.values[by], before.values[by])
    assert "raw margins change when the last layer is scaled" in str(before)


def test_train_mode_with_batch_statistics_has_no_gradient_per_sample():
    batch = (torch.randn(8, 4), torch.randint(3, (8,)))
    found = margins(Objective(net(), F.cross_entropy, batch, mode="train"))
    assert (
        found.statuses["input_gradient"] == "skipped" and "share batch statistics" in found.sentences["input_gradient"]
    )
    assert found.statuses["raw"] == "ok" and found.raw.shape == (8,)


def test_targets_of_the_wrong_kind_are_statuses():
    x = torch.randn(5, 4)
    for loss, target, words in (
        (lambda out, y: (out - y).square().mean(), torch.randn(5, 3), "a class is a whole number"),
        (lambda out, y: out.mean(), torch.tensor([0, 1, 2, 3, 9]), "lie between 0 and 2"),
        (lambda out, y: out.mean(), torch.zeros(5, 2, 2).long(), "one axis more"),
    ):
        found = margins(Objective(net(), loss, (x, target), mode="eval"))
        assert set(found.statuses.values()) == {"skipped"} and words in found.sentences["raw"]
        assert math.isnan(found.accuracy) and "skipped" in str(found)


def test_shapes_of_sequences_images_and_single_logits():
    tokens, labels = torch.randn(3, 5, 4), torch.randint(3, (3, 5))
    labels[0, 0] = -100
    head = nn.Linear(4, 3)
    found = margins(
        Objective(head, lambda out, y: nn.functional.cross_entropy(out.mT, y), (tokens, labels), mode="eval")
    )
    assert found.raw.shape == (14,) and "one decision per sample" in found.sentences["input_gradient"]
    channels = Objective(head, F.cross_entropy, (tokens, labels), mode="eval", forward=_channels_first)
    torch.testing.assert_close(margins(channels).raw, found.raw)
    single, signs = nn.Linear(4, 1), torch.tensor([0, 1, 1])
    one = margins(Objective(single, lambda out, y: out.mean(), (torch.randn(3, 4), signs), mode="eval"))
    assert one.raw.shape == (3,) and one.statuses["input_gradient"] == "ok"
    words = nn.Sequential(nn.Embedding(7, 4), nn.Flatten(), nn.Linear(8, 3))
    ids = Objective(words, F.cross_entropy, (torch.randint(7, (3, 2)), torch.tensor([0, 1, 2])), mode="eval")
    assert "whole numbers" in margins(ids).sentences["input_gradient"]


def _channels_first(model, x):
    return model(x).movedim(-1, 1)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_on_every_kind_of_model_without_a_trace(case):
    objective = case.make("eval")
    before = tracks(objective.model)
    found = margins(objective)
    assert same(before, tracks(objective.model))
    assert found.statuses["raw"] in ("ok", "skipped")


def test_three_ways_out():
    found = margins(Objective(net(), F.cross_entropy, (torch.randn(8, 4), torch.randint(3, (8,))), mode="eval"))
    assert "(1 gradient)" in str(found)
    assert list(found.frame()["by"]) == ["raw", "last_layer", "norm_product", "input_gradient"]
    assert found.chart().to_dict()["title"] == "margins (input gradient)"


def test_inputs_without_effect_and_inputs_with_some():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 2)).double()
    nn.init.constant_(model[0].bias, -100.0)
    data = (torch.randn(8, 2, dtype=torch.float64), torch.arange(8) % 2)
    dead = margins(Objective(model, F.cross_entropy, data, mode="eval"))
    assert dead.statuses["input_gradient"] == "skipped" and "zero" in dead.sentences["input_gradient"]
    assert "in logits" in dead.meaning()
    nn.init.constant_(model[0].weight, 1.0)
    data[0][0] = 200.0  # one sample wakes the units, the others have no slope
    some = margins(Objective(model, F.cross_entropy, data, mode="eval"))
    assert not math.isnan(some.quantile(0.5, "input_gradient")) and some.statuses["input_gradient"] == "ok"


def test_a_margin_in_logits_says_nothing_of_inputs():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Embedding(7, 8), nn.Linear(8, 7)).double()
    with torch.no_grad():
        model[0].weight.copy_(torch.eye(7, 8))
        model[1].weight.copy_(9 * torch.eye(7, 8).roll(1, 0))
        model[1].bias.zero_()
    tokens = torch.arange(5).repeat(4, 1)
    loss = lambda out, y: F.cross_entropy(out.flatten(0, 1), y.flatten())  # noqa: E731
    found = margins(Objective(model, loss, (tokens, (tokens + 1) % 7), mode="eval"))
    assert found.accuracy == 1 and "at least 9" in found.meaning() and "may move by" not in found.meaning()


def test_one_wrong_sample_of_twenty_is_not_more_than_five_percent():
    model = nn.Linear(1, 2, bias=False)
    model.weight.data.copy_(torch.tensor([[-1.0], [1.0]]))
    x, y = torch.ones(20, 1), torch.ones(20, dtype=torch.long)
    x[0] = -50
    said = margins(Objective(model, F.cross_entropy, (x, y), mode="eval")).meaning()
    assert "5.0% are on the wrong side" in said and "more than" not in said


def test_logits_that_are_not_finite_have_no_margin():
    model = nn.Linear(2, 2)
    model.weight.data[0, 0] = math.nan
    data = (torch.randn(4, 2), torch.zeros(4, dtype=torch.long))
    found = margins(Objective(model, F.cross_entropy, data, mode="eval"))
    assert found.status == "skipped" and "finite logits" in found.sentence and math.isnan(found.accuracy)
