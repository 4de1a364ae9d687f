"""Flatness against noisy copies, its invariances, and sharpness against dense Hessians."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import CASES
from normgauge.errors import InputError, UnknownNameError
from normgauge.measure.landscape.flatness import flatness
from normgauge.objective import Objective
from reference.flatness import noisy_losses
from reference.tracks import same, tracks


def problem(norm=None, mode="train", last_bias=True):
    layers = [nn.Linear(4, 6), norm or nn.Identity(), nn.ReLU(), nn.Linear(6, 3, bias=last_bias)]
    model = nn.Sequential(*layers)
    batch = (torch.randn(10, 4), torch.randint(3, (10,)))
    return model, batch, Objective(model, F.cross_entropy, batch, mode=mode)


@pytest.mark.parametrize("noise", ["absolute", "filter"])
def test_equals_noisy_copies(noise):
    model, batch, objective = problem(nn.BatchNorm1d(6))
    found = flatness(objective, sigmas=[0.1, 0.5], samples=4, seed=3, noises=[noise]).entries
    for entry in found:
        losses = torch.tensor(noisy_losses(model, F.cross_entropy, batch, noise, entry.sigma, 4, 3, training=True))
        assert entry.loss == pytest.approx(float(losses.mean()))
        assert entry.loss_error == pytest.approx(float(losses.std() / 2))


def test_filter_noise_is_blind_to_the_scale_of_normalized_filters_and_absolute_noise_is_not():
    objective = problem(nn.BatchNorm1d(6, eps=1e-12))[2].replace(parameters="0.*")
    scaled = objective.at({name: 10 * objective.parameters[name] for name in ("0.weight", "0.bias")})
    assert float(scaled.loss()) == pytest.approx(float(objective.loss()))
    options = {"sigmas": [0.3], "samples": 5, "sharpness": []}
    a, b = (flatness(o, noises=["absolute", "filter"], **options).entries for o in (objective, scaled))
    assert a[1].loss == pytest.approx(b[1].loss, rel=1e-6)
    assert abs(b[0].loss - objective.loss()) < 0.2 * abs(a[0].loss - objective.loss())


def test_quotient_noise_is_blind_to_moving_scale_between_layers():
    _, _, objective = problem()
    options = {"sigmas": [0.2], "samples": 3, "noises": ["quotient"], "sharpness": []}
    p = objective.parameters
    moved = objective.at({"0.weight": 5 * p["0.weight"], "0.bias": 5 * p["0.bias"], "3.weight": p["3.weight"] / 5})
    assert float(moved.loss()) == pytest.approx(float(objective.loss()))
    a, b = (flatness(o, **options).entries[0] for o in (objective, moved))
    assert a.loss == pytest.approx(b.loss, rel=1e-6)


def test_adaptive_sharpness_follows_its_formula_and_is_blind_to_scale():
    _, _, objective = problem()
    reading = flatness(objective, sigmas=[0.1], samples=1, radius=0.2).sharpness[0]
    w, g = objective.flatten(objective.parameters), objective.flatten(objective.gradient())
    there = objective.at(w + 0.2 * w.square() * g / (w * g).norm()).loss()
    assert reading.value == pytest.approx(float(there - objective.loss())) and reading.kind == "lower"
    p = objective.parameters
    moved = objective.at({"0.weight": 3 * p["0.weight"], "0.bias": 3 * p["0.bias"], "3.weight": p["3.weight"] / 3})
    assert flatness(moved, sigmas=[0.1], samples=1, radius=0.2).sharpness[0].value == pytest.approx(reading.value)


def test_spherical_sharpness_is_the_curvature_on_the_unit_sphere():
    _, _, objective = problem(nn.BatchNorm1d(6, eps=1e-12))
    objective = objective.replace(parameters="0.weight")
    reading = flatness(objective, sigmas=[0.1], samples=1, sharpness=["spherical"]).sharpness[0]
    w = objective.flatten(objective.parameters)
    unit = objective.at(w / w.norm())
    dense = unit.hessian() @ torch.eye(len(w))[:, 0]  # products first: the operator is linear
    matrix = torch.stack([unit.hessian() @ e for e in torch.eye(len(w))])
    assert torch.allclose(matrix[0], dense)
    assert reading.value == pytest.approx(float(torch.linalg.eigvalsh(matrix)[-1]), rel=0.02)
    plain = flatness(problem()[2], sigmas=[0.1], samples=1, sharpness=["spherical"]).sharpness[0]
    assert plain.status == "skipped" and "not scale invariant" in plain.sentence


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_on_every_kind_of_model_without_a_trace(case):
    objective = case.make("train")
    before = tracks(objective.model)
    found = flatness(objective, sigmas=[0.1], samples=2)
    assert same(before, tracks(objective.model))
    assert all(math.isfinite(entry.loss) for entry in found.entries)


def test_losses_that_are_not_finite_are_counted():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    ones = torch.ones(2, 1)
    objective = Objective(model, lambda out, _: out.log().mean(), (ones, ones), mode="eval")
    entry = flatness(objective, sigmas=[2.0], samples=30, noises=["absolute"], sharpness=[]).entries[0]
    assert 0 < entry.diverged < 30 and math.isfinite(entry.loss)
    assert math.isnan(entry.accuracy)


def test_three_ways_out_and_errors():
    _, _, objective = problem()
    found = flatness(objective, sigmas=[0.1, 0.2], samples=2)
    assert "(10 forwards, 1 gradient)" in str(found) and "adaptive sharpness" in str(found)
    assert list(found.frame()["noise"]) == ["absolute", "absolute", "filter", "filter"]
    assert found.chart().to_dict()["title"] == "loss under noise"
    with pytest.raises(InputError, match="sigmas must be positive"):
        flatness(objective, sigmas=[0.0])
    with pytest.raises(InputError, match="samples must be at least 1"):
        flatness(objective, samples=0)
    with pytest.raises(UnknownNameError, match="unknown noise 'filters'"):
        flatness(objective, noises=["filters"])
