"""Internal covariate shift against S1 Definition 2.1 by hand, on every kind of layer and update."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from cases import CASES
from normgauge.errors import InputError, UnknownNameError
from normgauge.measure.signal.covariate_shift import covariate_shift
from normgauge.measure.signal.layer_statistics import execution_order
from normgauge.objective import Objective
from reference.covariate_shift import shift_by_copies, stepped_copy
from reference.tracks import same, tracks


class Backwards(nn.Module):
    """Registers its layers in another order than it runs them."""

    def __init__(self):
        super().__init__()
        self.head = nn.Linear(5, 3)
        self.norm = nn.BatchNorm1d(5)
        self.stem = nn.Linear(4, 5)

    def forward(self, x):
        return self.head(torch.tanh(self.norm(self.stem(x))))


ORDER = [["stem.weight", "stem.bias"], ["norm.weight", "norm.bias"], ["head.weight", "head.bias"]]


def make(mode="train"):
    model = Backwards()
    batch = (torch.randn(9, 4), torch.randint(3, (9,)))
    return model, batch, Objective(model, F.cross_entropy, batch, mode=mode)


@pytest.mark.parametrize("mode", ["train", "eval"])
def test_equals_the_twin_in_the_order_of_execution(mode):
    model, batch, objective = make(mode)
    gradient = objective.gradient()
    new = {name: value - 0.3 * gradient[name] for name, value in objective.parameters.items()}
    found = covariate_shift(objective, 0.3)
    twin = shift_by_copies(model, F.cross_entropy, batch, ORDER, new, training=mode == "train")
    assert list(found.l2) == ["stem", "norm", "head"]
    assert list(found.l2.values()) == pytest.approx([l2 for l2, _ in twin], abs=1e-12)
    assert list(found.cosine.values()) == pytest.approx([cosine for _, cosine in twin], abs=1e-12)
    assert covariate_shift(objective, new).l2 == pytest.approx(found.l2, abs=1e-12)


OPTIMIZERS = {
    "momentum": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9),
    "adam": lambda p: torch.optim.AdamW(p, lr=0.01),
    "rmsprop": lambda p: torch.optim.RMSprop(p, lr=0.01),
    "lbfgs": lambda p: torch.optim.LBFGS(p, lr=0.1, max_iter=2),
}


@pytest.mark.parametrize("name", OPTIMIZERS)
def test_an_optimizer_steps_with_its_state_and_stays_as_it_was(name):
    model, batch, objective = make()
    optimizer = OPTIMIZERS[name](model.parameters())
    for _ in range(3):

        def closure():
            optimizer.zero_grad()
            loss = F.cross_entropy(model(batch[0]), batch[1])
            loss.backward()
            return loss

        optimizer.step(closure)
    before, state = tracks(model), str(optimizer.state_dict())
    found = covariate_shift(objective, optimizer)
    assert same(before, tracks(model)) and str(optimizer.state_dict()) == state
    if name != "lbfgs":
        new = stepped_copy(model, optimizer, F.cross_entropy, batch, training=True)
        twin = shift_by_copies(model, F.cross_entropy, batch, ORDER, new, training=True)
        assert list(found.l2.values()) == pytest.approx([l2 for l2, _ in twin], abs=1e-10)


def test_a_scheduler_on_the_optimizer_does_not_move_the_model():
    model, _, objective = make()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    torch.optim.lr_scheduler.StepLR(optimizer, 1)  # replaces optimizer.step by a function bound to the original
    before = tracks(model)
    assert covariate_shift(objective, optimizer).l2 == pytest.approx(covariate_shift(objective, 0.1).l2)
    assert same(before, tracks(model))


def test_groups_join_layers():
    model, batch, objective = make()
    found = covariate_shift(objective, 0.3, groups={"rest": ["stem.*", "norm.*"], "head": "head.*"})
    gradient = objective.gradient()
    new = {name: value - 0.3 * gradient[name] for name, value in objective.parameters.items()}
    twin = shift_by_copies(model, F.cross_entropy, batch, [ORDER[0] + ORDER[1], ORDER[2]], new, training=True)
    assert found["head"].l2 == pytest.approx(twin[1][0])
    with pytest.raises(InputError, match="a group must match a variable"):
        covariate_shift(objective, 0.3, groups={"none": "nothing.*"})
    with pytest.raises(InputError, match="belongs to one group"):
        covariate_shift(objective, 0.3, groups={"a": "stem.*", "b": "*.weight"})


def test_moments_of_the_outputs_before_and_after():
    model, batch, objective = make()
    found = covariate_shift(objective, 0.5)
    gradient = objective.gradient()
    before = F.linear(batch[0], model.stem.weight, model.stem.bias).detach()
    moved = [getattr(model.stem, n) - 0.5 * gradient[f"stem.{n}"] for n in ("weight", "bias")]
    after = F.linear(batch[0], *moved).detach()
    change = (after.mean(0) - before.mean(0)).square().mean().sqrt()
    spread = (after.var(0, unbiased=False) - before.var(0, unbiased=False)).square().mean().sqrt()
    assert found["stem"].mean_change == pytest.approx(float(change))
    assert found["stem"].variance_change == pytest.approx(float(spread))


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_on_every_kind_of_model_without_a_trace(case):
    objective = case.make("train")
    before = tracks(objective.model)
    found = covariate_shift(objective, 0.1)
    assert same(before, tracks(objective.model))
    assert {name for layer in execution_order(objective) for name in layer.parameters} == set(objective.names)
    assert any(entry.status == "ok" for entry in found.layers)
    first = found.layers[0]
    assert first.l2 == 0.0 and first.cosine == 1.0


def test_bad_entries_are_statuses():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.unused, self.last = nn.Linear(2, 2), nn.Linear(2, 2), nn.Linear(2, 1)

        def forward(self, x):
            x = self.used(self.used(x))
            return self.last(x)

    batch = (torch.randn(4, 2), torch.randn(4, 1))
    found = covariate_shift(Objective(Odd(), F.mse_loss, batch, mode="eval"), 0.1)
    assert [e.layer for e in found.layers] == ["used", "last", "unused"]
    assert found["used"].uses == 2
    assert found["unused"].status == "skipped" and "not used" in found["unused"].sentence
    cut = covariate_shift(Objective(Odd(), lambda out, _: out.detach().mean(), batch, mode="eval"), 0.1)
    assert {e.status for e in cut.layers} == {"skipped"} and "differentiable" in cut.layers[0].sentence
    log = Objective(nn.Sequential(nn.Linear(1, 1, bias=False), nn.Linear(1, 1, bias=False)), _log, _ones(), mode="eval")
    log = log.at({name: torch.ones(1, 1) for name in log.names})
    burst = covariate_shift(log, 5.0)
    assert burst.layers[1].status == "diverged" and math.isnan(burst.layers[1].l2)


def _log(out, _):
    return out.log().mean()


def _ones():
    return torch.ones(2, 1), torch.ones(2, 1)


def test_three_ways_out_and_errors():
    objective = make()[2]
    found = covariate_shift(objective, 0.1)
    assert "(3 forwards, 3 gradients)" in str(found)
    assert list(found.frame()["layer"]) == ["stem", "norm", "head"]
    assert len(found.chart().to_dict()["hconcat"]) == 2
    with pytest.raises(UnknownNameError, match="unknown layer 'stemm'"):
        found["stemm"]
    with pytest.raises(InputError, match="learning rate, a torch optimizer or a dict"):
        covariate_shift(objective, "sgd")
    with pytest.raises(InputError, match="must hold parameters of the objective's model"):
        covariate_shift(objective, torch.optim.SGD(nn.Linear(1, 1).parameters(), lr=0.1))
