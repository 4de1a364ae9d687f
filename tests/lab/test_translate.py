"""Settings of another optimizer: angles and shrinkage kept per layer, closed forms where there are any, no trace."""

import copy
import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError, UnknownNameError
from normgauge.testing import check_result


def problem(norm=True):
    torch.manual_seed(0)
    body = [nn.Linear(6, 12), *([nn.BatchNorm1d(12)] if norm else []), nn.ReLU(), nn.Linear(12, 3)]
    model = nn.Sequential(*body)
    data = [(torch.randn(16, 6), torch.arange(16) % 3) for _ in range(8)]
    return model, ng.Objective(model, F.cross_entropy, data, mode="train")


def test_momentum_to_sgd_is_the_sum_of_its_memory_and_decay_shrinks_by_the_same_share():
    model, o = problem(norm=False)
    source = torch.optim.SGD(model.parameters(), lr=1e-3, momentum=0.5, weight_decay=0.01)
    found = ng.translate(source, to="sgd", objective=o)
    check_result(found)
    assert found.equivalent and found.to == "sgd" and found.momentum == 0
    for layer in found.layers:  # a memory of two steps: rate 2e-3, a little less where a window begins
        assert 1.5e-3 < layer.rate <= 2.1e-3
        assert math.isclose(layer.shrink, 1e-3 * 0.01 / 0.5)
        assert math.isclose(layer.rate * layer.decay, layer.shrink)  # plain SGD shrinks by lr decay


def test_sgd_to_itself_changes_nothing():
    model, o = problem()
    source = torch.optim.SGD(model.parameters(), lr=0.05, weight_decay=1e-3)
    found = ng.translate(source, to=torch.optim.SGD, objective=o, momentum=0.0)
    alive = [layer for layer in found.layers if not math.isnan(layer.ratio)]
    assert len(alive) == len(found.layers) - 1  # the bias before BatchNorm is dead
    for layer in alive:
        assert math.isclose(layer.rate, 0.05, rel_tol=1e-6) and math.isclose(layer.decay, 1e-3, rel_tol=1e-6)
        assert math.isclose(layer.ratio, 1.0, rel_tol=1e-6)


@pytest.mark.parametrize("adjust", ["original", "match_rms_adamw"])
def test_muon_takes_matrices_and_its_rate_accounts_for_the_adjustment(adjust):
    model, o = problem()
    source = torch.optim.AdamW(model.parameters(), lr=1e-3, weight_decay=0.1)
    found = ng.translate(source, to="muon", objective=o, adjust_lr_fn=adjust)
    check_result(found)
    kinds = {layer.parameter: layer.optimizer for layer in found.layers}
    assert {name for name, kind in kinds.items() if kind == "muon"} == {"0.weight", "3.weight"}
    first = next(layer for layer in found.layers if layer.parameter == "0.weight")
    factor = {"original": math.sqrt(2), "match_rms_adamw": 0.2 * math.sqrt(12)}[adjust]
    plain = ng.translate(source, to="muon", objective=o)
    same = next(layer for layer in plain.layers if layer.parameter == "0.weight")
    assert math.isclose(first.rate * factor, same.rate * math.sqrt(2), rel_tol=1e-6)
    assert math.isclose(first.rate * first.decay, 1e-3 * 0.1)
    assert 0.5 < first.ratio < 2 and all(layer.rate > 0 for layer in found.layers)


@pytest.mark.parametrize("to", ["sgd", "momentum", "adam", "adamw", "muon"])
def test_the_optimizer_trains_and_the_code_makes_the_same(to):
    model, o = problem()
    source = torch.optim.SGD(model.parameters(), lr=0.05, momentum=0.9, weight_decay=1e-3)
    state = copy.deepcopy(model.state_dict())
    found = ng.translate(source, to=to, objective=o)
    assert all(torch.equal(value, state[name]) for name, value in model.state_dict().items())
    assert not source.state and all(p.grad is None for p in model.parameters())
    scope = {"torch": torch, "model": model}
    exec(found.code, scope)
    made = [scope[name] for name in ("optimizer", "muon", "adamw") if name in scope]
    rates = {id(g["params"][0]): (g["lr"], g["weight_decay"]) for part in made for g in part.param_groups}
    for group in found.optimizer.param_groups:
        rate, decay = rates[id(group["params"][0])]
        assert math.isclose(rate, group["lr"], rel_tol=1e-3)
        assert math.isclose(decay, group["weight_decay"], rel_tol=1e-3)
    before = float(o.loss())
    schedule = torch.optim.lr_scheduler.LambdaLR(found.optimizer, lambda step: 1.0)
    for step in range(30):
        found.optimizer.zero_grad()
        x, y = list(o.batches())[step % 8][1]
        F.cross_entropy(model(x), y).backward()
        found.optimizer.step()
        schedule.step()
    assert float(o.loss()) < before
    found.optimizer.load_state_dict(found.optimizer.state_dict())


def test_where_it_fails_the_call_says_so():
    torch.manual_seed(0)
    model = nn.Linear(4, 1)
    scale = torch.tensor([1.0, 30.0, 900.0, 3e3])  # of such columns SGD learns one, Adam all
    data = [(x := torch.randn(16, 4) * scale, x.sum(1, keepdim=True) / 3e3) for _ in range(8)]
    o = ng.Objective(model, F.mse_loss, data, mode="train")
    found = ng.translate(torch.optim.AdamW(model.parameters(), lr=0.05), to="sgd", objective=o)
    assert not found.equivalent and found.status == "nonconverged" and found.meaning().startswith("Nonconverged: ")
    check_result(found)


def test_bad_input_is_one_sentence():
    model, o = problem()
    source = torch.optim.SGD(model.parameters(), lr=0.05)
    with pytest.raises(UnknownNameError, match="lion"):
        ng.translate(source, to="lion", objective=o)
    with pytest.raises(InputError, match="another model"):
        ng.translate(torch.optim.SGD(nn.Linear(2, 2).parameters(), lr=0.1), to="adamw", objective=o)
    with pytest.raises(InputError, match="options are those of adamw"):
        ng.translate(source, to="adamw", objective=o, adjust_lr_fn="original")
    with pytest.raises(InputError, match="20 steps"):
        ng.translate(source, to="adamw", objective=o, iterations=3)
