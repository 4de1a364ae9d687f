"""The stable rate on quadratics, where it is known, and on nets, against SGD in the open."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normgauge.errors import InputError, UnknownNameError
from normgauge.measure.curvature.stable_rate import stable_rate
from normgauge.objective import Objective
from reference.stable_rate import descends
from reference.tracks import same, tracks


@pytest.mark.parametrize("seed", range(3))
def test_on_a_quadratic_prediction_and_observation_agree(seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(30, 5, generator=source) * torch.tensor([0.3, 0.5, 1.0, 2.0, 4.0])
    model = nn.Linear(5, 1)
    batch = (x, torch.randn(30, 1, generator=source))
    found = stable_rate(Objective(model, F.mse_loss, batch, mode="eval"))
    design = torch.cat([x, torch.ones(30, 1)], dim=1)
    top = float(torch.linalg.eigvalsh(2 * design.T @ design / 30)[-1])
    assert found.predicted == pytest.approx(2 / top, rel=1e-3)
    assert 0.95 < found.ratio < 1.08
    assert found.observed_low <= found.observed <= found.observed_high <= 1.06 * found.observed_low


def test_above_the_observed_rate_sgd_in_the_open_blows_up_and_below_it_does_not():
    torch.manual_seed(1)
    model = nn.Sequential(nn.Linear(3, 8), nn.Tanh(), nn.Linear(8, 1))
    batch = (torch.randn(20, 3), torch.randn(20, 1))
    found = stable_rate(Objective(model, F.mse_loss, batch, mode="train"), iterations=30)
    calm = descends(model, F.mse_loss, batch, 0.5 * found.observed_low, 60, training=True)
    wild = descends(model, F.mse_loss, batch, 2.0 * found.observed_high, 60, training=True)
    assert calm[-1] < calm[0] and max(calm[30:]) <= calm[15]
    assert not wild[-1] < 0.5 * calm[-1]
    assert 0.3 < found.ratio < 6


def at_its_minimum():
    torch.manual_seed(0)
    model = nn.Linear(4, 1, bias=False).double()
    x = torch.randn(32, 4, dtype=torch.float64)
    y = model(x).detach()
    return model, Objective(model, F.mse_loss, (x, y), mode="train"), x, y


def test_decay_that_leads_away_from_a_minimum_is_no_instability():
    model, objective, x, _ = at_its_minimum()
    found = stable_rate(objective, torch.optim.SGD(model.parameters(), lr=0.1, weight_decay=0.1))
    top = float(torch.linalg.eigvalsh(2 * x.T @ x / 32)[-1]) + 0.1
    assert found.status == "ok" and found.predicted == pytest.approx(2 / top, rel=1e-3) and 0.95 < found.ratio < 1.08
    assert found.first_loss == pytest.approx(0.05 * float(model.weight.detach().square().sum()), rel=0.01)


def test_no_rate_is_named_where_every_run_climbs():
    model, objective, _, _ = at_its_minimum()
    model.weight.data *= 0.9
    found = stable_rate(objective, torch.optim.SGD(model.parameters(), lr=0.1, maximize=True))
    assert found.status == "nonconverged" and math.isnan(found.limit) and math.isnan(found.rate)
    assert "No rate of SGD can be named" in found.meaning() and "Use a" not in found.meaning()
    assert {r.name: r.status for r in found.readings()}["rate to use"] == "skipped"


def test_larger_rates_that_reach_less_are_not_called_no_good_training():
    model, objective, x, y = at_its_minimum()
    model.weight.data *= 1 + 1e-6
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    F.mse_loss(model(x), y).backward()
    optimizer.step()
    found = stable_rate(objective, optimizer)
    far = min((run for run in found.runs if run.stable and run.rate > found.limit), key=lambda run: run.loss)
    assert far.loss < found.best.loss
    assert "no good training" not in found.meaning() and f"{far.rate:.3g}" in found.meaning()


def test_of_the_quotient_drops_what_symmetries_add():
    model = nn.Sequential(nn.Linear(3, 4), nn.ReLU(), nn.Linear(4, 1))
    batch = (torch.randn(12, 3), torch.randn(12, 1))
    objective = Objective(model, F.mse_loss, batch, mode="eval")
    plain, quotient = (stable_rate(objective, of=of, iterations=6, tol=0.5) for of in ("hessian", "quotient"))
    assert quotient.top_eigenvalue <= plain.top_eigenvalue * (1 + 1e-6)
    assert quotient.predicted == pytest.approx(2 / quotient.top_eigenvalue)


def test_a_scale_invariant_loss_has_an_open_bracket():
    class Angle(nn.Module):
        def __init__(self):
            super().__init__()
            self.w = nn.Parameter(torch.tensor([1.0, 0.4]))

        def forward(self, x):
            return x @ (self.w / self.w.norm())

    batch = (torch.tensor([[1.0, 0.0]]), torch.tensor([-1.0]))
    found = stable_rate(Objective(Angle(), lambda out, y: (out - y).square().mean(), batch, mode="eval"), iterations=20)
    assert found.status == "nonconverged" and math.isnan(found.observed)
    assert "every run was stable" in found.sentence and found.observed_low > 1000 * found.predicted


def test_no_trace_three_ways_out_and_errors():
    model = nn.Sequential(nn.Linear(2, 3), nn.BatchNorm1d(3), nn.Linear(3, 1))
    objective = Objective(model, F.mse_loss, (torch.randn(6, 2), torch.randn(6, 1)), mode="train")
    before = tracks(model)
    found = stable_rate(objective, iterations=6, tol=0.3)
    assert same(before, tracks(model))
    assert "bracket [" in str(found) and found.cost.products > 0
    assert len(found.frame()) == len(found.runs)
    title = found.chart().to_dict()["title"]
    assert "stable up to" in " ".join([title] if isinstance(title, str) else title)
    with pytest.raises(InputError, match="iterations must be at least 4"):
        stable_rate(objective, iterations=2)
    with pytest.raises(UnknownNameError, match="unknown curvature 'fisher'"):
        stable_rate(objective, of="fisher")
