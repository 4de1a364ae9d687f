"""Gradient flow: conserved quantities, order of the integrators, departure of gradient descent, kinks."""

import math

import pytest
import torch
from torch import nn

from normgauge import Objective, gradient_flow
from normgauge.errors import InputError, NormgaugeWarning, UnknownNameError
from normgauge.measure.weights.gradient_flow import dormand_prince, runge_kutta
from normgauge.symmetry import symmetries


def objective_of(activation, mode="train"):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(4, 3, bias=False), nn.BatchNorm1d(3, eps=1e-12), activation, nn.Linear(3, 2))
    data = (torch.randn(24, 4), torch.randn(24, 2))
    return Objective(model, nn.functional.mse_loss, data, mode=mode)


def test_row_norms_and_rescalings_are_conserved_and_descent_departs_by_the_rate():
    objective = objective_of(nn.Identity())
    flow = gradient_flow(objective, 1.0, tol=1e-8, rates=[0.02, 0.002])
    kinds = {item.kind for item in flow.conserved}
    assert {"scale", "rescale"} <= kinds
    rows = next(item for item in flow.conserved if item.kind == "scale")
    assert rows.drift < 1e-6 and flow.status == "ok"
    assert rows.discrete[0.02] > 1e3 * rows.drift
    assert rows.discrete[0.02] / rows.discrete[0.002] == pytest.approx(10, rel=0.2)
    assert flow.distances[0.02] / flow.distances[0.002] == pytest.approx(10, rel=0.3)
    balance = [item for item in flow.conserved if item.kind == "rescale"]
    assert max(item.drift for item in balance) < 1e-6


def test_the_balance_is_gamma_and_beta_against_the_next_columns():
    objective = objective_of(nn.Identity())
    start = objective.parameters
    first = start["1.weight"] ** 2 + start["1.bias"] ** 2 - start["3.weight"].square().sum(0)
    end = gradient_flow(objective, 1.0, tol=1e-8).parameters
    last = end["1.weight"] ** 2 + end["1.bias"] ** 2 - end["3.weight"].square().sum(0)
    torch.testing.assert_close(last, first, atol=1e-6, rtol=0)
    assert float((end["1.weight"] - start["1.weight"]).abs().max()) > 1e-2  # it is not that nothing moved


def test_both_integrators_agree_and_have_their_order():
    matrix = torch.tensor([[2.0, 0.3], [0.3, 1.0]])

    def slope(theta):
        return float(theta @ matrix @ theta) / 2, -(matrix @ theta)

    start = torch.tensor([1.0, -2.0])
    exact = torch.linalg.matrix_exp(-matrix * 2.0) @ start
    gaps = [float((runge_kutta(slope, start, 2.0, steps=n).points[-1] - exact).norm()) for n in (20, 40)]
    assert math.log2(gaps[0] / gaps[1]) == pytest.approx(4, abs=0.3)
    adaptive = dormand_prince(slope, start, 2.0, rtol=1e-9, max_evaluations=5000)
    assert float((adaptive.points[-1] - exact).norm()) < 1e-7 and adaptive.times[-1] == pytest.approx(2.0)


def test_smaller_tolerances_drift_less():
    objective = objective_of(nn.Tanh())
    found = symmetries(objective)
    coarse = gradient_flow(objective, 1.0, tol=1e-4, symmetries=found)
    fine = gradient_flow(objective, 1.0, tol=1e-8, symmetries=found)
    assert fine.drift < 0.01 * coarse.drift and fine.losses[-1] < fine.losses[0]


def test_kinks_are_told_and_warned_about_when_they_hurt():
    objective = objective_of(nn.ReLU())
    found = symmetries(objective)
    with pytest.warns(NormgaugeWarning, match="kinks of ReLU"):
        stuck = gradient_flow(objective, 5.0, tol=1e-9, max_gradients=200, symmetries=found)
    assert stuck.status == "nonconverged" and stuck.times[-1] < 5.0
    fixed = gradient_flow(objective, 0.5, integrator="runge_kutta", iterations=60, symmetries=found)
    assert fixed.kinks == ("ReLU",) and "kinks at ReLU" in str(fixed) and fixed.drift < 1e-3


def test_it_leaves_no_trace_and_has_three_ways_out():
    objective = objective_of(nn.Tanh())
    before = {name: value.clone() for name, value in objective.model.state_dict().items()}
    flow = gradient_flow(objective, 0.2, integrator="runge_kutta", iterations=5)
    assert all(torch.equal(value, before[name]) for name, value in objective.model.state_dict().items())
    assert "kind estimate" in str(flow) and len(flow.frame()) == len(flow.conserved) and flow.chart().to_dict()


def test_bad_arguments_are_refused():
    objective = objective_of(nn.Tanh())
    with pytest.raises(InputError, match="time must be positive"):
        gradient_flow(objective, 0.0)
    with pytest.raises(InputError, match="rates must be positive"):
        gradient_flow(objective, 1.0, rates=[-0.1])
    with pytest.raises(UnknownNameError, match="integrator 'euler'"):
        gradient_flow(objective, 1.0, integrator="euler")
