"""Worked examples of the text that no claim judges: the instruments give what it writes."""

import torch
from torch import nn

import normgauge as ng


def test_least_squares_on_one_input_has_the_hessian_of_rank_one_that_section_4_1_writes():
    x, target = torch.tensor([[1.0, -2.0, 0.5]], dtype=torch.float64), torch.tensor([[0.3]], dtype=torch.float64)
    model = nn.Linear(3, 1, bias=False).double()
    objective = ng.Objective(model, lambda out, y: 0.5 * (out - y).square().sum(), (x, target), mode="eval")
    residual = model(x) - target
    slope = objective.flatten(objective.gradient())
    torch.testing.assert_close(slope, (residual * x)[0].detach())
    torch.testing.assert_close(objective.hessian().matmat(torch.eye(3, dtype=torch.float64)), x.T @ x)
    assert abs(ng.spectrum(objective, top=1).top[0] - float(x.square().sum())) < 1e-9
