"""Thresholds against torch's own optimizers on quadratics, the critical rate against a scan, the preconditioned matrix
against a dense one, tracks in a loop and afterwards."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError
from normgauge.measure.curvature.edge import EdgeOperator, critical_factor, critical_rate, edge_of
from normgauge.measure.signal.updates import apply_update
from normgauge.testing import check_result
from reference.curvature import dense_hessian, hand_written
from reference.edge import edge_by_running, first_rise
from reference.tracks import same, tracks

STEPS = 3000


def network(seed=0, norm=True):
    torch.manual_seed(seed)
    layers = [nn.Linear(4, 6), *([nn.BatchNorm1d(6)] if norm else []), nn.Tanh(), nn.Linear(6, 3)]
    return nn.Sequential(*layers)


def batch(seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(24, 4, generator=source), torch.randint(3, (24,), generator=source)


def objective(model, mode="train"):
    return ng.Objective(model, F.cross_entropy, batch(), mode=mode)


def train(model, optimizer, steps, each=lambda step: None):
    inputs, labels = batch()
    for step in range(steps):
        each(step)
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()


MAKES = {
    "plain": lambda p, lr: torch.optim.SGD(p, lr=lr),
    "heavy ball": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9),
    "small momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.3),
    "dampened": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.8, dampening=0.5),
    "dampening without momentum": lambda p, lr: torch.optim.SGD(p, lr=lr, dampening=0.5),
    "nesterov": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.9, nesterov=True),
    "decay": lambda p, lr: torch.optim.SGD(p, lr=lr, momentum=0.5, weight_decay=1.5),
}


@pytest.mark.parametrize("name", MAKES)
@pytest.mark.parametrize("curvature", [0.2, 7.0])
def test_thresholds_of_sgd_are_those_of_torch_on_a_quadratic(name, curvature):
    model = nn.Linear(1, 1, bias=False)
    step = lambda m, _: curvature * m.weight.square().sum() / 2  # noqa: E731
    here = ng.Objective.from_step(model, step, torch.ones(1), mode="eval")
    optimizer = MAKES[name](model.parameters(), 0.01)
    edge = edge_of(here, optimizer)
    top = EdgeOperator(here, edge).largest().top[0]
    assert edge.multiple / top == pytest.approx(edge_by_running(MAKES[name], curvature), rel=2e-3)
    assert edge.threshold == pytest.approx(edge.multiple / 0.01)


@pytest.mark.parametrize("decay", [0.0, 1.0])
@pytest.mark.parametrize("beta", [0.5, 0.9])
def test_thresholds_of_adam_with_a_frozen_preconditioner(beta, decay):
    """With beta2 = 1 after a warm start v never moves, so Adam is linear and its edge can be run into."""
    curvature, v = 3.0, 4.0
    frozen = {"betas": (beta, 1 - 1e-15), "eps": 1e-9, "weight_decay": decay}

    def warm(parameters, lr):
        optimizer = torch.optim.AdamW(parameters, lr=lr, **frozen)
        for parameter in optimizer.param_groups[0]["params"]:
            settled = {"exp_avg": torch.zeros_like(parameter), "exp_avg_sq": torch.full_like(parameter, v)}
            optimizer.state[parameter] = {"step": torch.tensor(1e17), **settled}
        return optimizer

    model = nn.Linear(1, 1, bias=False)
    step = lambda m, _: curvature * m.weight.square().sum() / 2  # noqa: E731
    here = ng.Objective.from_step(model, step, torch.ones(1), mode="eval")
    rate = edge_by_running(warm, curvature)
    edge = edge_of(here, warm(model.parameters(), rate))
    assert EdgeOperator(here, edge).largest().top[0] == pytest.approx(edge.threshold, rel=5e-3)
    if not decay:
        assert edge.multiple == pytest.approx(2 * (1 + beta) / (1 - beta))


def test_the_preconditioned_matrix_is_the_dense_one():
    for make in (
        lambda p: torch.optim.Adam(p, lr=0.01, weight_decay=0.3),
        lambda p: torch.optim.AdamW(p, lr=0.01, amsgrad=True),
        lambda p: torch.optim.RMSprop(p, lr=0.01, momentum=0.4),
    ):
        model = network()
        optimizer = make([{"params": model[0].parameters(), "lr": 0.003}, {"params": model[1:].parameters()}])
        train(model, optimizer, 5)
        here = objective(model)
        edge = edge_of(here, optimizer)
        dense = dense_hessian(hand_written(model), F.cross_entropy, [batch()], "train")
        rows = []
        for name, parameter in model.named_parameters():
            state, group = optimizer.state[parameter], optimizer.param_groups[0 if name.startswith("0.") else 1]
            if "betas" in group:
                t, (b1, b2) = float(state["step"]), group["betas"]
                v = state["max_exp_avg_sq"] if group["amsgrad"] else state["exp_avg_sq"]
                root = (1 - b1**t) * ((v / (1 - b2**t)).sqrt() + group["eps"])
            else:
                root = state["square_avg"].sqrt() + group["eps"]
            rows.append((group["lr"] / 0.01 / root).reshape(-1))
        decay = 0.3 if isinstance(optimizer, torch.optim.Adam) and not isinstance(optimizer, torch.optim.AdamW) else 0.0
        whole = torch.diag(torch.cat(rows)) @ (dense + decay * torch.eye(len(dense)))
        largest = torch.linalg.eigvals(whole).real.max()
        assert EdgeOperator(here, edge).largest(tol=1e-6).top[0] == pytest.approx(float(largest), rel=1e-6)


@pytest.mark.parametrize("seed", range(5))
@pytest.mark.parametrize("name", ["gd", "momentum", "adam"])
def test_the_critical_rate_is_where_the_loss_first_rises(seed, name):
    model = network(seed)
    optimizer = {
        "gd": lambda p: torch.optim.SGD(p, lr=0.1),
        "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
        "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    }[name](model.parameters())
    train(model, optimizer, 4)
    here, before = objective(model), tracks(model)
    rate = optimizer.param_groups[0]["lr"]
    moved = apply_update(here, optimizer, here.gradient())
    step = {key: moved[key] - value for key, value in here.parameters.items()}
    found = critical_rate(here, optimizer)
    scanned = rate * first_rise(here, step, [1.02**k for k in range(-200, 500)])
    assert found == pytest.approx(scanned, rel=0.12) and same(before, tracks(model))
    assert critical_rate(here, optimizer, start=3 * found, tol=0.01) == pytest.approx(scanned, rel=0.04)


def test_along_the_gradient_of_a_quadratic_it_is_two_over_the_curvature():
    model = nn.Linear(3, 1, bias=False)
    curvatures = torch.tensor([1.0, 2.0, 5.0])
    step = lambda m, _: (curvatures * m.weight[0].square()).sum() / 2  # noqa: E731
    here = ng.Objective.from_step(model, step, torch.ones(1), mode="eval")
    g = here.flatten(here.gradient())
    assert critical_rate(here, tol=1e-4) == pytest.approx(float(2 * g @ g / (g @ (curvatures * g))), rel=1e-3)
    assert critical_factor(lambda s: s, 0.0) == 0.0 and critical_factor(lambda s: -s, 0.0) == math.inf
    assert critical_factor(lambda s: math.nan if s > 3 else 0.0, 1.0) == pytest.approx(3.0, rel=0.1)
    assert math.isnan(critical_rate(here, torch.optim.SGD(model.parameters(), lr=0.0)))


def test_a_track_in_a_loop_equals_one_made_afterwards():
    model = network(3)
    here, optimizer = objective(model), torch.optim.SGD(model.parameters(), lr=0.2, momentum=0.5)
    symmetries = ng.symmetries(here)
    live = ng.sharpness_track(here, optimizer, symmetries=symmetries)
    assert "Nothing was measured" in live.meaning()
    check_result(live)
    kept = {}

    def each(step):
        if step % 10 == 0:
            before = tracks(model)
            live.measure(step)
            assert same(before, tracks(model))
            kept[step] = {name: value.detach().clone() for name, value in model.named_parameters()}

    train(model, optimizer, 31, each)
    check_result(live)
    after = ng.sharpness_track(here, optimizer, symmetries=symmetries, checkpoints=kept)
    check_result(after)
    for one, two in zip(live.points, after.points, strict=True):
        assert (one.step, one.sharpness) == (two.step, pytest.approx(two.sharpness, rel=1e-3))
        assert one.quotient <= one.sharpness * (1 + 1e-2) and one.threshold == pytest.approx(3 / 0.2)
        dense = dense_hessian(hand_written(network(3)), F.cross_entropy, [batch()], "train") if one.step == 0 else None
        if dense is not None:
            assert one.sharpness == pytest.approx(float(torch.linalg.eigvalsh(dense)[-1]), rel=1e-3)
    assert live.cost.gradients >= 4 and live.cost.products > 0
    quick = ng.sharpness_track(here, optimizer, curvature=False, checkpoints={0: kept[0]})
    check_result(quick)
    assert quick.cost.products == 0 and quick.cost.gradients == 1 and quick.cost.forwards <= 12
    assert quick.points[0].critical_rate == pytest.approx(after.points[0].critical_rate, rel=0.1)


def test_full_batch_descent_ends_at_the_edge_and_rates_explain_the_difference():
    """Trained long enough, both rates sit at lambda rate / 2 = 1: the sharper one is only the slower one."""
    ends = {}
    x = torch.linspace(-1, 1, 20)[:, None]
    data = (x, 8 * x**4 - 8 * x**2 + 1)
    for rate in (0.1, 0.2):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(1, 30), nn.Tanh(), nn.Linear(30, 30), nn.Tanh(), nn.Linear(30, 1))
        optimizer = torch.optim.SGD(model.parameters(), lr=rate)
        ends[rate] = ng.sharpness_track(ng.Objective(model, F.mse_loss, data, mode="train"), optimizer)
        for step in range(STEPS + 20):
            if step >= STEPS and step % 4 == 0:
                ends[rate].measure(step)
            optimizer.zero_grad()
            F.mse_loss(model(data[0]), data[1]).backward()
            optimizer.step()
    found = ends[0.1].against(ends[0.2])
    assert found.threshold == pytest.approx(2.0) and found.sharpness == pytest.approx(found.threshold * found.ratio)
    assert all(abs(place - 1) < 0.2 for place in found.places) and abs(found.sharpness / 2 - 1) < 0.2
    assert "rates alone" in found.meaning() and "at the edge" in ends[0.1].meaning()


def test_what_is_refused_and_what_is_said():
    model, other = network(), network(1)
    here = objective(model)
    with pytest.raises(InputError, match="holds parameters of the objective's model"):
        ng.sharpness_track(here, torch.optim.SGD(other.parameters(), lr=0.1))
    adam = torch.optim.Adam(model.parameters(), lr=0.01)
    track = ng.sharpness_track(here, adam)
    assert "taken no step yet" in track.measure(0).why
    check_result(track)
    train(model, adam, 2)
    with pytest.raises(InputError, match="Call .measure"):
        ng.sharpness_track(here, adam, checkpoints={0: here.parameters})
    with pytest.raises(InputError, match="not of a preconditioned one"):
        ng.stable_rate(here, adam, of="quotient")
    with pytest.raises(InputError, match="without a closure"):
        ng.stable_rate(here, torch.optim.LBFGS(model.parameters(), lr=0.1))
    mixed = torch.optim.SGD(
        [{"params": model[0].parameters(), "momentum": 0.9}, {"params": model[3].parameters()}], lr=0.1
    )
    assert "other momentum" in edge_of(here, mixed).why
    sphere = ng.optim.SphereSGD(model.parameters(), lr=0.1)
    assert "no threshold is known for SphereSGD" in ng.stable_rate(here, sphere, iterations=4, tol=1.0).meaning()
    with pytest.raises(InputError, match="common step"):
        track.against(track)


@pytest.mark.parametrize("name", ["heavy ball", "nesterov"])
def test_runs_of_momentum_on_a_quadratic_agree_with_the_threshold(name):
    model = nn.Linear(5, 1)
    source = torch.Generator().manual_seed(0)
    data = (torch.randn(30, 5, generator=source), torch.randn(30, 1, generator=source))
    here = ng.Objective(model, F.mse_loss, data, mode="eval")
    found = ng.stable_rate(here, MAKES[name](model.parameters(), 0.01))
    check_result(found)
    assert 0.85 < found.ratio < 1.15 and found.rate <= found.limit <= found.predicted
    assert found.best.loss == min(run.loss for run in found.runs if run.stable) and found.rate == found.best.rate
    assert f"{found.rate:.4g}" in str(found).splitlines()[0]


def test_a_step_that_climbs_at_any_rate_is_not_told_to_be_larger():
    model = nn.Linear(3, 1, bias=False).double()
    x = torch.randn(16, 3, dtype=torch.float64)
    here = ng.Objective(model, F.mse_loss, (x, model(x).detach()), mode="train")
    track = ng.sharpness_track(here, torch.optim.SGD(model.parameters(), lr=0.01, weight_decay=0.1))
    point = track.measure(0)
    assert point.ratio < 0.8 and point.critical_ratio == math.inf
    assert "could be" not in track.meaning() and "raises the loss at rates above 0" in track.meaning()


def test_before_training_no_larger_rate_is_recommended_and_no_edge_is_a_habit():
    model = nn.Linear(3, 1, bias=False).double()
    source = torch.Generator().manual_seed(0)
    data = torch.randn(16, 3, generator=source).double(), torch.randn(16, 1, generator=source).double()
    here = ng.Objective(model, F.mse_loss, data, mode="train")
    limit = 2 / ng.spectrum(here, top=1).top[0]
    for rate, said in ((0.1, "inside the edge"), (1.0, "at the edge"), (2.0, "beyond the edge")):
        optimizer = torch.optim.SGD(model.parameters(), lr=rate * limit)
        track = ng.sharpness_track(here, optimizer)
        for step in (0, 3):  # nothing was trained between them
            track.measure(step)
            meaning = track.meaning()
            assert said in meaning and "before training" in meaning
            assert "could be" not in meaning and "sets the sharpness" not in meaning
    track = ng.sharpness_track(here, torch.optim.SGD(model.parameters(), lr=0.1 * limit))
    track.measure(0)
    with torch.no_grad():
        model.weight *= 0.9
    track.measure(3)
    assert "could be 10 times" in track.meaning()
