"""The optimizer GDNP: equal to `gdnp` on least squares, BN's ellipsoid, convolutions, states, wrong use."""

import copy
import itertools

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError


def problem(outputs=1):
    x = torch.randn(200, 5) * torch.tensor([1.0, 2.0, 3.0, 0.5, 1.0])
    return x, x @ torch.randn(5, outputs) + 0.1 * torch.randn(200, outputs)


def closure_of(model, optimizer, x, y, loss=F.mse_loss):
    def closure():
        optimizer.zero_grad()
        value = loss(model(x), y)
        value.backward()
        return value

    return closure


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_is_gdnp_on_least_squares(steps):
    torch.manual_seed(steps)
    x, y = problem()
    layer = nn.Linear(5, 1, bias=False)
    run = ng.optim.gdnp(ng.optim.least_squares(x, y[:, 0]), iterations=steps, start=layer.weight[0].detach().clone())
    optimizer = ng.optim.GDNP(layer, damping=1.0)
    for _ in range(steps):
        optimizer.step(closure_of(layer, optimizer, x, y))
    S = x.T @ x / len(x)
    unit = layer.weight[0].detach() / (layer.weight[0] @ S @ layer.weight[0]).sqrt().detach()
    wanted = run.weights / (run.weights @ S @ run.weights).sqrt()
    assert torch.allclose(unit, wanted, atol=1e-10)
    assert optimizer.evaluations == 2 * steps + 1
    assert optimizer.state[layer.weight]["curvature"] == pytest.approx(2.0)  # of the square


@pytest.mark.parametrize("steps", [1, 4, 12])
def test_is_gdnp_on_least_squares_with_lengths_searched(steps):
    torch.manual_seed(steps)
    x, y = problem()
    layer = nn.Linear(5, 1, bias=False)
    run = ng.optim.gdnp(ng.optim.least_squares(x, y[:, 0]), iterations=steps, start=layer.weight[0].detach().clone())
    optimizer = ng.optim.GDNP(layer, damping=1.0, gain="search")
    for _ in range(steps):
        optimizer.step(closure_of(layer, optimizer, x, y))
    assert torch.allclose(layer.weight[0], run.weights, atol=1e-10)  # the lengths too
    assert optimizer.evaluations == 3 * steps + 3


def test_a_searched_length_is_flat_where_newton_overshoots():
    """Logistic loss along one direction: the curvature at a far point is nearly zero, Newton's step much too long."""
    torch.manual_seed(0)
    x, y = torch.randn(60, 1), torch.randint(2, (60, 1)).to(torch.get_default_dtype())
    slopes = {}
    for gain in ("newton", "search"):
        layer = nn.Linear(1, 1, bias=False)
        nn.init.constant_(layer.weight, 6.0)
        optimizer = ng.optim.GDNP(layer, gain=gain, tries=12)
        optimizer.step(closure_of(layer, optimizer, x, y, F.binary_cross_entropy_with_logits))
        slopes[gain] = abs(float(torch.autograd.grad(F.binary_cross_entropy_with_logits(layer(x), y), layer.weight)[0]))
    assert slopes["search"] < 0.02 < slopes["newton"]


def test_rows_are_independent_on_least_squares_and_the_metric_of_S_is_faster():
    torch.manual_seed(0)
    x, y = problem(3)
    errors = {}
    for damping in (1.0, 0.01):
        torch.manual_seed(1)
        layer = nn.Linear(5, 3, bias=False)
        best = torch.linalg.lstsq(x, y).solution.T
        optimizer = ng.optim.GDNP(layer, damping=damping)
        for _ in range(20):
            optimizer.step(closure_of(layer, optimizer, x, y))
        errors[damping] = float((layer.weight.detach() - best).norm() / best.norm())
    assert errors[0.01] < 1e-6 < errors[1.0] < 0.5


@pytest.mark.parametrize("gain", ["newton", "search"])
@pytest.mark.parametrize("norm", [True, False])
def test_trains_networks_with_convolutions_and_never_raises_the_loss_of_a_batch(norm, gain):
    torch.manual_seed(0)
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3, padding=1),
        nn.BatchNorm2d(4) if norm else nn.Identity(),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(64, 3),
    )
    x, y = torch.randn(48, 1, 4, 4), torch.randint(3, (48,))
    optimizer = ng.optim.GDNP(model, gain=gain)
    losses = [float(optimizer.step(closure_of(model, optimizer, x, y, F.cross_entropy))) for _ in range(30)]
    assert all(b <= a + 1e-12 for a, b in itertools.pairwise(losses))
    assert losses[-1] < 0.2 * losses[0]
    assert not any(m._forward_pre_hooks for m in model.modules())


def test_before_batchnorm_the_length_in_the_metric_stays():
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(6, 8, bias=False), nn.BatchNorm1d(8, eps=1e-30), nn.Tanh(), nn.Linear(8, 2))
    x, y = torch.randn(64, 6), torch.randint(2, (64,))
    S = x.T @ x / 64

    def lengths():
        return ((model[0].weight @ S) * model[0].weight).sum(1).detach()

    before = lengths()
    optimizer = ng.optim.GDNP(model)
    for _ in range(5):
        optimizer.step(closure_of(model, optimizer, x, y, F.cross_entropy))
    assert torch.allclose(lengths(), before, rtol=1e-9)


def test_resumes_where_it_was():
    torch.manual_seed(0)
    x, y = problem(2)
    model = nn.Sequential(nn.Linear(5, 6), nn.Tanh(), nn.Linear(6, 2))
    optimizer = ng.optim.GDNP(model, refresh=1)
    for _ in range(3):
        optimizer.step(closure_of(model, optimizer, x, y))
    other = copy.deepcopy(model)
    again = ng.optim.GDNP(other, refresh=1)
    again.load_state_dict(copy.deepcopy(optimizer.state_dict()))
    for m, o in ((model, optimizer), (other, again)):
        o.step(closure_of(m, o, x, y))
    assert torch.equal(model[0].weight, other[0].weight)


def test_a_step_that_cannot_descend_is_taken_back():
    torch.manual_seed(0)
    layer = nn.Linear(3, 1)
    optimizer = ng.optim.GDNP(layer)
    calls = iter(range(100))

    def closure():
        optimizer.zero_grad()
        layer(torch.randn(4, 3)).square().mean().backward()
        return torch.tensor(float(next(calls)))  # the loss rises whatever is done

    before = layer.weight.detach().clone()
    optimizer.step(closure)
    assert torch.equal(layer.weight, before)


def test_wrong_use():
    with pytest.raises(InputError, match="0 < damping <= 1"):
        ng.optim.GDNP(nn.Linear(2, 2), damping=0.0)
    with pytest.raises(InputError, match="gain newton or search"):
        ng.optim.GDNP(nn.Linear(2, 2), gain="bisection")
    with pytest.raises(InputError, match="no closure"):
        ng.optim.GDNP(nn.Linear(2, 2)).step()
