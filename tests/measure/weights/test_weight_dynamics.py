"""Laws of weight dynamics against simulations of their assumptions and against real training runs."""

import itertools
import math

import pytest
import torch
from torch import nn

from normgauge import Objective, optim, weight_dynamics
from normgauge.errors import InputError
from normgauge.measure.weights.weight_dynamics import UpdateRecord, law_of
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
    "nesterov": (
        lambda p: torch.optim.SGD(p, lr=0.02, momentum=0.9, weight_decay=0.02, nesterov=True),
        theory.sgd_equilibrium(0.02, 0.02, 1.0, momentum=0.9, nesterov=True),
    ),
    "large steps": (
        lambda p: torch.optim.AdamW(p, lr=0.1, weight_decay=1.0),  # where 2 decay - rate decay^2 is not 2 decay
        theory.adamw_equilibrium(0.1, 1.0, 100),
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


class MuonH(torch.optim.Optimizer):
    """Hyperball: the norm is held, and the momentum's direction has a fixed share of it."""

    def __init__(self, params, lr, momentum=0.9):
        super().__init__(params, {"lr": lr, "momentum": momentum})

    @torch.no_grad()
    def step(self, closure=None):
        for group in self.param_groups:
            for w in group["params"]:
                buffer = self.state[w].setdefault("buffer", torch.zeros_like(w))
                buffer.mul_(group["momentum"]).add_(w.grad)
                radius = w.norm()
                w.sub_(group["lr"] * radius * buffer / buffer.norm())
                w.mul_(radius / w.norm())


@pytest.mark.parametrize("momentum", [0.0, 0.9])
def test_hyperball_keeps_the_norm_and_turns_by_its_rate(momentum):
    law = theory.hyperball_equilibrium(0.05, 2.0, momentum)
    norm, angle = noisy_walk(lambda p: MuonH(p, 0.05, momentum), start=2.0)
    assert norm == pytest.approx(law.norm, rel=1e-9)
    assert angle == pytest.approx(law.angle, rel=0.01)
    model = net()
    told = weight_dynamics(objective_of(model), MuonH(model.parameters(), 0.05, momentum))["0.weight"]
    assert told.heading == "fixed" and told.equilibrium_norm == pytest.approx(told.norm)


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")
@pytest.mark.parametrize(("shape", "momentum", "nesterov"), [((48, 48), 0.9, False), ((64, 24), 0.9, True)])
def test_muon_settles_where_its_law_says_and_not_where_orthogonality_would(shape, momentum, nesterov):
    rate, decay, steps = 0.1, 0.1, 1500
    law = theory.muon_equilibrium(rate, decay, shape, momentum, nesterov)
    torch.manual_seed(0)
    w = nn.Parameter(nn.functional.normalize(torch.randn(shape).flatten(), dim=0).view(shape) * law.norm)
    optimizer = torch.optim.Muon([w], lr=rate, weight_decay=decay, momentum=momentum, nesterov=nesterov)
    norms, angles = [], []
    for step in range(steps):
        before = w.detach().clone()
        noise = torch.randn(shape)
        w.grad = noise - before * (before * noise).sum() / before.square().sum()
        optimizer.step()
        if step > 200:
            after = w.detach()
            norms.append(float(after.norm()))
            cosine = (before * after).sum() / (before.norm() * after.norm())
            angles.append(float(torch.acos(cosine.clamp(max=1))) ** 2)
    measured = sum(norms) / len(norms)
    assert measured == pytest.approx(law.norm, rel=0.05)
    assert math.sqrt(sum(angles) / len(angles)) == pytest.approx(law.angle, rel=0.05)
    scale = max(1, shape[0] / shape[1])
    square = scale * theory.orthogonalized_noise(*shape)[0] * shape[0] * shape[1]
    assert measured > 2 * theory.decoupled_equilibrium(rate, decay, square).norm  # <w, u> = 0 is far off


@pytest.mark.skipif(not hasattr(torch.optim, "Muon"), reason="Muon came with torch 2.9")
def test_rows_of_a_matrix_share_what_muon_gives_it():
    model = net()
    optimizer = torch.optim.Muon([model[0].weight], lr=0.01, weight_decay=0.1)
    told = weight_dynamics(objective_of(model), optimizer)["0.weight"]
    whole = theory.muon_equilibrium(0.01, 0.1, (5, 20)).norm
    assert told.blocks == 5 and told.equilibrium_norm == pytest.approx(whole / math.sqrt(5))


def test_momentum_filter_is_what_torch_does():
    for nesterov in (False, True):
        w = nn.Parameter(torch.zeros(1))
        optimizer = torch.optim.SGD([w], lr=1.0, momentum=0.8, nesterov=nesterov)
        steps, last = [], 0.0
        for step in range(60):
            w.grad = torch.tensor([1.0 if step == 0 else 0.0])
            optimizer.step()
            steps.append(last - float(w.detach()))
            last = float(w.detach())
        square = sum(value**2 for value in steps)
        first = sum(a * b for a, b in itertools.pairwise(steps)) / square
        third = sum(a * b for a, b in zip(steps, steps[3:], strict=False)) / square
        assert theory.momentum_filter(0.8, nesterov) == pytest.approx((square, first), rel=1e-5)
        assert third == pytest.approx(first * 0.8**2, rel=1e-5)


@pytest.mark.parametrize(("momentum", "nesterov"), [(0.0, False), (0.9, False), (0.9, True)])
def test_the_first_tenth_predicts_the_norm_at_the_end(momentum, nesterov):
    made = []

    def make(parameters):
        made.append(torch.optim.SGD(parameters, lr=0.05, momentum=momentum, nesterov=nesterov, weight_decay=0.05))
        return made[-1]

    class Recorded:
        """Records the first 400 steps of what it wraps."""

        def __init__(self, parameters):
            self.inner, self.taken = make(parameters), 0
            self.record = UpdateRecord(self.inner).__enter__()

        def step(self):
            self.inner.step()
            self.taken += 1
            if self.taken == 400:
                self.record.__exit__(None, None, None)

    walks = []
    norm, angle = noisy_walk(lambda p: walks.append(Recorded(p)) or walks[-1], start=3.0)
    record, law = walks[0].record, law_of(made[0], made[0].param_groups[0])
    ((weight, product),) = record.means.values()
    squares = float(weight.sum()), float(product.sum() / weight.sum())
    told = theory.recorded_equilibrium(law.rate, law.keep, squares, law.memory, law.power)
    assert record.steps == 400 and not made[0]._optimizer_step_post_hooks
    assert told.norm == pytest.approx(norm, rel=0.1) and told.angle == pytest.approx(angle, rel=0.1)


def test_a_record_takes_the_place_of_the_gradients():
    model = net()
    objective = objective_of(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.05)
    with UpdateRecord(optimizer) as record:
        train_on_noise(model, optimizer, 50)
    found = weight_dynamics(objective, optimizer, record=record)
    told, law = found["0.weight"], law_of(optimizer, optimizer.param_groups[0])
    assert "seen in 50 recorded steps: norms are rough" in str(found)
    assert "seen in 1 batch (few: under 50)" in str(weight_dynamics(objective, optimizer))
    rows = zip(*(mean.sum(1).tolist() for mean in record.of(objective)["0.weight"]), strict=True)
    norms = [theory.recorded_equilibrium(law.rate, law.keep, pair, law.memory, 4.0).norm for pair in rows]
    assert told.equilibria == pytest.approx(norms)
    assert told.equilibrium_norm != weight_dynamics(objective, optimizer)["0.weight"].equilibrium_norm
    with pytest.raises(InputError, match="records a torch"):
        UpdateRecord(model)


def test_every_matrix_has_its_angle_and_relative_update():
    model = net()
    objective = objective_of(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.01, weight_decay=0.1)
    told = weight_dynamics(objective, optimizer)
    x, y = next(iter(objective.batches()))[1]
    nn.functional.mse_loss(model(x), y).backward()
    before = model[3].weight.detach().clone()
    optimizer.step()
    after = model[3].weight.detach()
    block = told["3.weight"]
    assert not block.scale_invariant
    assert block.relative_update == pytest.approx(float((after - before).norm() / before.norm()), rel=1e-6)
    cosine = float((after * before).sum() / (after.norm() * before.norm()))
    assert block.angle == pytest.approx(math.acos(cosine), rel=1e-4)
    assert {reading.name for reading in told.readings() if reading.layer == "3.weight"} >= {"angle", "relative update"}


def test_rows_of_zeros_have_no_direction_and_spoil_no_median():
    model = net()
    whole = weight_dynamics(objective_of(model), torch.optim.SGD(model.parameters(), lr=0.1))["0.weight"]
    with torch.no_grad():
        model[0].weight[0] = 0
    block = weight_dynamics(objective_of(model), torch.optim.SGD(model.parameters(), lr=0.1))["0.weight"]
    assert block.scale_invariant and block.norms == pytest.approx(whole.norms[1:])
    assert all(math.isfinite(value) for value in (block.norm, block.effective_rate, block.angle, block.relative_update))
    torch.nn.init.zeros_(model[0].weight)
    dead = weight_dynamics(objective_of(model), torch.optim.AdamW(model.parameters()))["0.weight"]
    assert dead.norm == 0 and math.isnan(dead.relative_update)
