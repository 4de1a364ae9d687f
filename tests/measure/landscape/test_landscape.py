"""The landscape along the gradient against the twin that moves copies of the model."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError, NonFiniteError
from reference.landscape import landscape_by_copies

STEPS = [0.01, 0.1, 1.0]


@pytest.mark.parametrize("mode", ["train", "eval"])
@pytest.mark.parametrize("norm", [nn.Identity, lambda: nn.BatchNorm1d(5), lambda: nn.LayerNorm(5)])
def test_equals_the_twin(norm, mode):
    model = nn.Sequential(nn.Linear(3, 5), norm(), nn.ReLU(), nn.Linear(5, 2))
    batch = (torch.randn(9, 3), torch.randint(2, (9,)))
    found = ng.landscape(ng.Objective(model, F.cross_entropy, batch, mode=mode), steps=STEPS)
    losses, distances, betas = landscape_by_copies(model, F.cross_entropy, batch, STEPS, training=mode == "train")
    assert found.losses == pytest.approx(losses, rel=1e-10)
    assert found.gradient_distances == pytest.approx(distances, rel=1e-10)
    assert found.effective_beta == pytest.approx(betas, rel=1e-10)
    assert found.max_effective_beta == pytest.approx(max(betas))
    assert found.max_gradient_distance == pytest.approx(max(distances))
    assert found.loss_variation == pytest.approx(max(losses) - min(losses))


def test_effective_beta_of_a_quadratic_lies_in_its_spectrum():
    matrix = torch.randn(6, 6)
    matrix = matrix @ matrix.T

    class Point(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.randn(6))

        def forward(self, _):
            return 0.5 * self.w @ matrix @ self.w

    objective = ng.Objective(Point(), lambda out, _: out, (torch.zeros(1, 1), torch.zeros(1)), mode="eval")
    found = ng.landscape(objective, steps=STEPS)
    spectrum = torch.linalg.eigvalsh(matrix)
    assert spectrum[0] <= min(found.effective_beta) and max(found.effective_beta) <= spectrum[-1] * (1 + 1e-12)
    assert max(found.effective_beta) == pytest.approx(min(found.effective_beta))


def test_a_loss_that_stops_being_finite_is_a_status_not_a_crash():
    model = nn.Linear(1, 1, bias=False)
    nn.init.ones_(model.weight)
    data = (torch.ones(2, 1), torch.zeros(2, 1))
    objective = ng.Objective(model, lambda out, _: out.log().mean(), data, mode="eval")
    found = ng.landscape(objective, steps=[0.5, 2.0])
    assert found.statuses == ("ok", "diverged")
    assert math.isnan(found.losses[1]) and math.isfinite(found.max_effective_beta)


def test_three_ways_out():
    model, data = nn.Linear(2, 2), (torch.randn(5, 2), torch.randint(2, (5,)))
    found = ng.landscape(ng.Objective(model, F.cross_entropy, data, mode="eval"), steps=[0.1, 1.0])
    text = str(found)
    assert "effective beta" in text and "mode eval" in text and "(3 gradients)" in text
    assert list(found.frame()["step"]) == [0.1, 1.0]
    assert len(found.chart().to_dict()["hconcat"]) == 3


def test_errors():
    objective = ng.Objective(nn.Linear(1, 1), F.mse_loss, (torch.ones(2, 1), torch.ones(2, 1)), mode="eval")
    for steps in ([], [0.0], [float("nan")]):
        with pytest.raises(InputError, match="steps must be non-zero finite numbers"):
            ng.landscape(objective, steps=steps)
    flat = ng.Objective(
        nn.Linear(1, 1), lambda out, _: (out * 0.0).mean(), (torch.ones(2, 1), torch.ones(2, 1)), mode="eval"
    )
    with pytest.raises(NonFiniteError, match="finite and not zero"):
        ng.landscape(flat, steps=[1.0])


def test_random_directions_have_the_gradients_length_and_see_the_spectrum():
    model, data = (
        nn.Sequential(nn.Linear(3, 4), nn.Tanh(), nn.Linear(4, 2)),
        (torch.randn(9, 3), torch.randint(2, (9,))),
    )
    objective = ng.Objective(model, F.cross_entropy, data, mode="eval")
    plain = ng.landscape(objective, steps=STEPS)
    found = ng.landscape(objective, steps=STEPS, random=3, seed=5)
    assert found.losses == plain.losses and [view.direction for view in found.random] == [
        "random 1",
        "random 2",
        "random 3",
    ]
    source = torch.Generator().manual_seed(5001)
    draw = torch.cat([torch.randn(p.shape, generator=source).reshape(-1) for p in model.parameters()])
    theta, gradient = objective.flatten(objective.parameters), objective.flatten(objective.gradient())
    step = draw / draw.norm() * gradient.norm()
    there = objective.at(theta - 0.1 * step)
    view = found.random[0]
    assert view.losses[1] == pytest.approx(float(there.loss()))
    change = objective.flatten(there.gradient()) - gradient
    assert view.gradient_distances[1] == pytest.approx(float(change.norm()))
    assert view.effective_beta[1] == pytest.approx(float(change.norm() / (0.1 * step.norm())))
    assert len(found.frame()) == 12 and found.cost.gradients == 13
    assert found.chart().to_dict()
    with pytest.raises(InputError, match="random counts directions"):
        ng.landscape(objective, steps=STEPS, random=-1)


def test_bands_over_training():
    from normgauge.measure.landscape.landscape import landscape_bands

    model, data = nn.Linear(2, 2), (torch.randn(5, 2), torch.randint(2, (5,)))
    objective = ng.Objective(model, F.cross_entropy, data, mode="eval")
    views = {step: ng.landscape(objective.at({"weight": (1 + step) * torch.eye(2)}), steps=STEPS) for step in (3, 0)}
    bands = landscape_bands(views)
    assert bands.steps == (0, 3)
    assert list(bands.frame()["max_loss"]) == [max(views[0].losses), max(views[3].losses)]
    assert list(bands.frame()["min_loss"]) == [min(views[0].losses), min(views[3].losses)]
    assert bands.cost.gradients == 4 * len(bands.steps)
    assert "variation" in bands.chart().to_dict()["title"]
    with pytest.raises(InputError, match="at least one landscape"):
        landscape_bands({})
