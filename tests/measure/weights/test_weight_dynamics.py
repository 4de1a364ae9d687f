"""Laws of weight dynamics against simulations of their assumptions and against real training runs."""

import math

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from normgauge import Objective, optim, weight_dynamics
from normgauge.errors import InputError
from normgauge.theory import weight_dynamics as theory


def noisy_walk(make, d=100, steps=4000, seed=0, start=1.0):
    """Scale-invariant weights under isotropic tangent noise of unit size; the norms and angles of the last half."""
    source = torch.Generator().manual_seed(seed)
    w = nn.Parameter(start * nn.functional.normalize(torch.randn(d, generator=source, dtype=torch.float64), dim=0))
    optimizer = make([w])
    norms, angles = [], []
    for step in range(steps):
        with torch.no_grad():
            unit = w / w.norm()
            noise = torch.randn(d, generator=source, dtype=torch.float64)
            noise -= unit * (unit @ noise)
            w.grad = noise / noise.norm() / w.norm()
            before = unit
        optimizer.step()
        if step >= steps // 2:
            norms.append(float(w.detach().norm()))
            angles.append(float(torch.acos((before @ w.detach() / w.detach().norm()).clamp(-1, 1))) ** 2)
    return sum(norms) / len(norms), math.sqrt(sum(angles) / len(angles))


WALKS = {
    "sgd": (lambda p: torch.optim.SGD(p, lr=0.1, weight_decay=0.05), theory.sgd_equilibrium(0.1, 0.05, 1.0)),
    "momentum": (
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.02),
        theory.sgd_equilibrium(0.02, 0.02, 1.0, momentum=0.9),
    ),
    "dampening": (
        lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.8, dampening=0.8, weight_decay=0.05),
        theory.sgd_equilibrium(0.1, 0.05, 1.0, momentum=0.8, dampening=0.8),
    ),
    "adamw": (
        lambda p: torch.optim.AdamW(p, lr=0.005, weight_decay=0.5),
        theory.adamw_equilibrium(0.005, 0.5, 100),
    ),
    "adam_l2": (
        lambda p: torch.optim.Adam(p, lr=0.005, weight_decay=0.02),
        theory.adam_l2_equilibrium(0.005, 0.02, 100, 1.0),
    ),
}


@pytest.mark.parametrize("name", WALKS)
def test_norms_and_angles_settle_where_the_laws_say(name):
    make, law = WALKS[name]
    norm, angle = noisy_walk(make, start=law.norm)
    assert norm == pytest.approx(law.norm, rel=0.03)
    assert angle == pytest.approx(law.angle, rel=0.05)


def test_relaxation_follows_the_exponential():
    law = theory.sgd_equilibrium(0.1, 0.05, 1.0)
    source = torch.Generator().manual_seed(0)
    w = torch.zeros(100, dtype=torch.float64)
    w[0] = 0.7
    for step in range(1, 81):
        unit = w / w.norm()
        noise = torch.randn(100, generator=source, dtype=torch.float64)
        noise -= unit * (unit @ noise)
        w = w - 0.1 * (noise / noise.norm() / w.norm() + 0.05 * w)
        if step in (10, 40, 80):
            assert float(w.norm()) == pytest.approx(theory.relaxed_norm(0.7, law.norm, law.relaxation, step), rel=0.02)


@settings(max_examples=25, deadline=None, derandomize=True)
@given(st.integers(0, 10**6), st.floats(0, 0.95), st.floats(0.01, 1))
def test_growth_under_momentum_is_exact(seed, momentum, rate):
    source = torch.Generator().manual_seed(seed)
    w = torch.randn(6, generator=source, dtype=torch.float64)
    b, squares = torch.zeros_like(w), []
    for _ in range(6):
        g = torch.randn(6, generator=source, dtype=torch.float64)
        g -= w * (w @ g) / (w @ w)
        b = momentum * b + g
        squares.append(float(b @ b))
        moved = w - rate * b
        assert float(moved @ moved - w @ w) == pytest.approx(
            theory.growth(squares, rate, momentum), rel=1e-8, abs=1e-10
        )
        w = moved


def test_weight_decay_is_an_exponential_rate():
    """Li and Arora: the directions of SGD with decay are those of SGD without, with growing rates."""
    matrix = torch.randn(5, 5, generator=torch.Generator().manual_seed(0), dtype=torch.float64)

    def slope(w):
        w = w.detach().requires_grad_()
        (g,) = torch.autograd.grad(torch.tanh(matrix @ w / w.norm()).sum(), w)
        return g

    a = b = torch.ones(5, dtype=torch.float64)
    for rate in theory.equivalent_rates(0.1, 0.2, 60):
        a, b = a - 0.1 * (slope(a) + 0.2 * a), b - rate * slope(b)
    torch.testing.assert_close(a / a.norm(), b / b.norm(), atol=1e-12, rtol=1e-12)


def net(seed=0, bias=False):
    torch.manual_seed(seed)
    layers = [nn.Linear(20, 5, bias=bias), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 2)]
    return nn.Sequential(*layers)


def objective_of(model, batches=1, size=32, seed=0):
    source = torch.Generator().manual_seed(seed)
    draw = lambda *shape: torch.randn(*shape, generator=source)  # noqa: E731
    data = [(draw(size, 20), draw(size, 2)) for _ in range(batches)]
    return Objective(model, nn.functional.mse_loss, data if batches > 1 else data[0], mode="train")


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_the_next_norm_is_the_norm_after_the_next_step(momentum):
    model = net()
    objective = objective_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.3, momentum=momentum, weight_decay=0.01)
    x, y = next(iter(objective.batches()))[1]
    for _ in range(3):
        told = weight_dynamics(objective, optimizer)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        before = model[0].weight.detach().clone()
        optimizer.step()
        after = model[0].weight.detach()
        assert told["0.weight"].next_norm == pytest.approx(float(after.norm(dim=1).median()), rel=1e-9)
        cosine = (before * after).sum(1) / (before.norm(dim=1) * after.norm(dim=1))
        assert told["0.weight"].angle == pytest.approx(float(torch.acos(cosine).median()), rel=1e-5)
        assert told["0.weight"].radial < 1e-3 and told["0.weight"].scale_invariant
        assert not told["3.weight"].scale_invariant


def train_on_noise(model, optimizer, steps, size=32):
    """Fresh random data at every step: gradients that are noise, as the laws assume."""
    source = torch.Generator().manual_seed(7)
    norms = []
    for step in range(steps):
        x, y = torch.randn(size, 20, generator=source), torch.randn(size, 2, generator=source)
        optimizer.zero_grad()
        nn.functional.mse_loss(model(x), y).backward()
        optimizer.step()
        if step > 0.6 * steps:
            norms.append(float(model[0].weight.detach().norm(dim=1).median()))
    return sum(norms) / len(norms)


RUNS = {
    "SGD": lambda p: torch.optim.SGD(p, lr=0.2, weight_decay=0.02),
    "momentum": lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.02),
    "AdamW": lambda p: torch.optim.AdamW(p, lr=0.01, weight_decay=0.3),
    "Adam": lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.01),
}


@pytest.mark.parametrize("name", RUNS)
def test_predicted_equilibria_are_where_real_training_settles(name):
    model = net()
    optimizer = RUNS[name]([model[0].weight])  # the rest stays, so that the gradients keep their size
    settled = train_on_noise(model, optimizer, 1500)
    told = weight_dynamics(objective_of(model, batches=40), optimizer)["0.weight"]
    # gradients of a net are not isotropic and its rows turn while they are measured, so the laws hold roughly
    assert settled == pytest.approx(told.equilibrium_norm, rel=0.15)


def test_heading_and_steps_follow_the_start():
    model = net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.2, weight_decay=0.02)
    objective = objective_of(model, batches=8)
    goal = weight_dynamics(objective, optimizer)["0.weight"].equilibrium_norm
    for factor, heading in ((0.1, "growing"), (10.0, "shrinking")):
        with torch.no_grad():
            model[0].weight.mul_(factor * goal / model[0].weight.norm(dim=1, keepdim=True))
        block = weight_dynamics(objective, optimizer)["0.weight"]
        assert block.heading == heading and block.steps > 0
        assert block.equilibrium_norm == pytest.approx(goal, rel=0.05)  # G does not depend on the norm


def test_spheres_and_missing_optimizers_keep_the_norm():
    model = net()
    objective = objective_of(model)
    assert weight_dynamics(objective)["0.weight"].heading == "fixed"
    block = weight_dynamics(objective, optim.SphereSGD(model.parameters(), lr=0.1))["0.weight"]
    assert block.heading == "fixed" and block.next_norm == pytest.approx(block.norm, rel=1e-9)
    block = weight_dynamics(objective, torch.optim.RMSprop(model.parameters()))["0.weight"]
    assert block.heading == "unknown" and "no law is known for RMSprop" in block.law
    others = torch.optim.SGD([model[3].weight], lr=0.1)
    assert weight_dynamics(objective, others)["0.weight"].law.startswith("not among")


def test_it_leaves_no_trace_and_has_three_ways_out():
    model = net(bias=True)
    optimizer = torch.optim.AdamW(model.parameters())
    before = {name: value.clone() for name, value in model.state_dict().items()}
    told = weight_dynamics(objective_of(model), optimizer)
    assert all(torch.equal(value, before[name]) for name, value in model.state_dict().items())
    assert all(param.grad is None for param in model.parameters()) and not optimizer.state
    assert "kind exact, estimate" in str(told) and len(told.frame()) == len(told.blocks)
    assert told.chart().to_dict()


def test_the_optimizer_must_be_of_this_model():
    model = nn.Sequential(nn.Linear(3, 4, bias=False), nn.BatchNorm1d(4))
    objective = Objective(model, nn.functional.mse_loss, (torch.randn(8, 3), torch.randn(8, 4)), mode="train")
    with pytest.raises(InputError, match="parameters of the objective's model. Got SGD of 2 others"):
        weight_dynamics(objective, torch.optim.SGD(nn.Linear(3, 3).parameters(), lr=0.1))
    with pytest.raises(InputError, match=r"a torch.optim.Optimizer.*Got float"):
        weight_dynamics(objective, 0.1)
