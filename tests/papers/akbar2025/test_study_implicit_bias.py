"""The mathematics of the implicit-bias study: its written-out gradient and its maximum-margin direction."""

import math

import numpy as np
import pytest
import torch
from scipy.optimize import minimize

from normgauge.papers.akbar2025.studies.implicit_bias import EPS, degrees, loss_gradients, max_margin
from normgauge.papers.court import shipped
from normgauge.rng import generator


def separable(seed):
    source = generator(seed)
    inputs = torch.randn(30, 3, generator=source)
    labels = torch.where(inputs[:, 0] - 0.5 * inputs[:, 2] > 0, 1.0, -1.0)
    return inputs + 0.4 * labels[:, None] * torch.tensor([1.0, 0.0, -0.5]) + 0.7, labels


def loss(leaves, inputs, labels):
    scores = inputs @ leaves[0]
    if len(leaves) == 3:
        centred = scores - scores.mean()
        scores = leaves[1] * centred / (centred.square().mean() + EPS).sqrt()
    return torch.nn.functional.softplus(-labels * (scores + leaves[-1])).mean()


@pytest.mark.parametrize("numbers", [2, 3])
def test_written_gradient_is_autograds(numbers):
    inputs, labels = separable(0)
    leaves = [torch.tensor([0.3, -1.0, 0.5]), torch.tensor(1.7), torch.tensor(-0.2)][3 - numbers :]
    leaves = [torch.tensor([0.3, -1.0, 0.5]), *leaves[-(numbers - 1) :]]
    leaves = [leaf.requires_grad_() for leaf in leaves]
    truth = torch.autograd.grad(loss(leaves, inputs, labels), leaves)
    found = loss_gradients([leaf.detach() for leaf in leaves], inputs, labels)
    for a, b in zip(found, truth, strict=True):
        assert torch.allclose(a, b, rtol=1e-12, atol=1e-14)


@pytest.mark.parametrize("seed", [1, 2, 3])
def test_max_margin_is_the_constrained_minimum(seed):
    inputs, labels = separable(seed)
    rows = (torch.cat([inputs, torch.ones(len(labels), 1)], 1) * labels[:, None]).numpy()
    found = max_margin(inputs, labels)
    problem = minimize(
        lambda u: u[:3] @ u[:3] / 2,
        np.append(found.numpy() * 2, 0.0),
        jac=lambda u: np.append(u[:3], 0.0),
        constraints={"type": "ineq", "fun": lambda u: rows @ u - 1, "jac": lambda u: rows},
        method="SLSQP",
        options={"ftol": 1e-14, "maxiter": 500},
    )
    assert degrees(found, torch.as_tensor(problem.x[:3])) < 0.01
    assert abs(float(found.norm()) / np.linalg.norm(problem.x[:3]) - 1) < 1e-5


def test_the_share_of_the_margin_certifies_the_angle():
    """w* = sum a y x with a >= 0 and sum a y = 0, so cos(w, w*) >= margin(w) / margin(w*) for every w."""
    rows = shipped()["implicit-bias"].table.where(decay=False)
    assert len(rows) >= 24
    for row in rows:
        assert math.cos(math.radians(row["angle"])) >= row["margin_share"] - 1e-6
