"""Distributions of single activations against the layers run by hand."""

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normgauge.errors import InputError, UnknownNameError
from normgauge.measure.signal.activations import activation_history, activations
from normgauge.objective import Objective
from reference.tracks import same, tracks


def problem():
    model = nn.Sequential(nn.Conv2d(1, 3, 3), nn.BatchNorm2d(3), nn.ReLU(), nn.Flatten(), nn.Linear(27, 2))
    batch = (torch.randn(6, 1, 5, 5), torch.randint(2, (6,)))
    return model, batch, Objective(model, F.cross_entropy, [batch, batch], mode="train")


def test_equals_the_layers_run_by_hand():
    model, batch, objective = problem()
    before = tracks(model)
    found = activations(objective, layers=["0", "2", "4"], units=2, seed=1)
    assert same(before, tracks(model))
    assert {layer for layer, _ in found.values} == {"0", "2", "4"} and len(found.values) == 6
    with torch.no_grad():
        outputs = {"0": model[0](batch[0])}
        outputs["2"] = F.relu(model[1](outputs["0"]))
        outputs["4"] = model[4](outputs["2"].flatten(1))
    for (layer, unit), values in found.values.items():
        once = outputs[layer][:, unit].reshape(-1)
        torch.testing.assert_close(values, torch.cat([once, once]))


def test_the_same_units_over_training_in_common_bins():
    _, _, objective = problem()
    other = objective.at({"4.weight": 3 * objective.parameters["4.weight"]})
    history = activation_history({10: activations(other, layers="4"), 0: activations(objective, layers="4")}, bins=7)
    assert history.steps == (0, 10)
    ((key, table),) = history.counts.items()
    for step, counts in zip((objective, other), table, strict=True):
        values = activations(step, layers="4").values[key].numpy()
        assert list(counts) == list(np.histogram(values, bins=np.array(history.edges[key]))[0])
    assert len(history.frame()) == 14
    assert history.chart().to_dict()["title"].endswith("of 4")
    with pytest.raises(UnknownNameError, match="unknown layer 'x'"):
        history.chart("x")


def test_three_ways_out_and_errors():
    _, _, objective = problem()
    found = activations(objective)
    assert "(1 forward)" in str(found) and "0" in set(found.frame()["layer"])
    assert found.chart().to_dict()["title"] == "activations"
    with pytest.raises(InputError, match="must match a called module"):
        activations(objective, layers="nothing")
    with pytest.raises(InputError, match="at least one step"):
        activation_history({})
