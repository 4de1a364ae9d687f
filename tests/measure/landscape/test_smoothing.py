"""Theorems 4.1, 4.2, 4.4 of S1 on real networks, against dense gradients and Hessians and the explicit twin."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.testing import check_result
from reference.curvature import hand_written
from reference.smoothing import dense_smoothing, twin_gradient
from reference.tracks import same, tracks


class Gemma(nn.Module):
    """An RMS norm that stores its gain as 1 + w."""

    def __init__(self, width):
        super().__init__()
        self.weight, self.eps = nn.Parameter(torch.zeros(width)), 1e-6

    def forward(self, x):
        return x * torch.rsqrt(x.pow(2).mean(-1, keepdim=True) + self.eps) * (1 + self.weight)


Gemma.__name__ = "GemmaRMSNorm"
DENSE = (6,)
IMAGE = (2, 4, 4)
# name -> (layers, position of the norm, input shape)
NETS = {
    "batch": (lambda: [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 3)], 1, DENSE),
    "batch without affine": (
        lambda: [nn.Linear(6, 5), nn.BatchNorm1d(5, affine=False), nn.Tanh(), nn.Linear(5, 3)], 1, DENSE),
    "batch with large eps": (
        lambda: [nn.Linear(6, 5), nn.BatchNorm1d(5, eps=0.5), nn.Tanh(), nn.Linear(5, 3)], 1, DENSE),
    "batch over space": (
        lambda: [nn.Conv2d(2, 3, 3), nn.BatchNorm2d(3), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)], 1, IMAGE),
    "group": (lambda: [nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Tanh(), nn.Flatten(), nn.Linear(16, 3)], 1, IMAGE),
    "instance": (
        lambda: [nn.Conv2d(2, 3, 2), nn.InstanceNorm2d(3, affine=True), nn.Tanh(), nn.Flatten(), nn.Linear(27, 3)],
        1, IMAGE),
    "layer": (lambda: [nn.Linear(6, 5), nn.LayerNorm(5), nn.Tanh(), nn.Linear(5, 3)], 1, DENSE),
    "layer over space": (
        lambda: [nn.Conv2d(2, 3, 3), nn.LayerNorm((3, 2, 2)), nn.Tanh(), nn.Flatten(), nn.Linear(12, 3)], 1, IMAGE),
    "rms": (lambda: [nn.Linear(6, 5), nn.RMSNorm(5, eps=1e-3), nn.Tanh(), nn.Linear(5, 3)], 1, DENSE),
    "rms by hand, 1 + w": (lambda: [nn.Linear(6, 5), Gemma(5), nn.Tanh(), nn.Linear(5, 3)], 1, DENSE),
    "before another norm": (
        lambda: [nn.Linear(6, 5), nn.BatchNorm1d(5), nn.Tanh(), nn.Linear(5, 4), nn.LayerNorm(4), nn.Linear(4, 3)],
        1, DENSE),
}  # fmt: skip


def make(name, seed=0, scale=1.0):
    layers, position, shape = NETS[name]
    torch.manual_seed(seed)
    model = nn.Sequential(*layers()).double()
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.4 * torch.randn_like(parameter)).mul_(scale)
    batch = (torch.randn(6, *shape, dtype=torch.float64), torch.randint(3, (6,)))
    return model, position, batch


@pytest.mark.parametrize("name", NETS)
@pytest.mark.parametrize("scale", [0.1, 1.0, 5.0])
def test_every_number_is_the_dense_one(name, scale):
    model, position, batch = make(name, scale=scale)
    before = tracks(model)
    result = ng.smoothing(ng.Objective(model, F.cross_entropy, batch, mode="train"))
    assert same(before, tracks(model))
    found = result[str(position)]
    twin_model = model if name == "layer over space" else hand_written(model)  # the latter norms one axis
    wanted = dense_smoothing(twin_model, position, F.cross_entropy, batch)
    assert found.reduction == pytest.approx(float(wanted["size"] / wanted["twin"]), rel=1e-8)
    assert found.curvature == pytest.approx(float(wanted["curvature"] / wanted["size"]), rel=1e-7, abs=1e-12)
    assert found.twin_curvature == pytest.approx(float(wanted["twin_curvature"] / wanted["twin"]), rel=1e-8, abs=1e-12)
    assert found.scaled + found.term == pytest.approx(found.curvature) and found.slack >= -1e-12
    twin = twin_gradient(model, position, F.cross_entropy, batch)
    assert twin.square().sum() == pytest.approx(float(wanted["twin"]), rel=1e-9)
    assert result.cost.gradients == 1 and result.cost.products == 2 * len(result.layers)


@pytest.mark.parametrize("name", ["batch", "batch over space"])
def test_shares_are_those_of_the_theorem(name):
    model, position, batch = make(name)
    found = ng.smoothing(ng.Objective(model, F.cross_entropy, batch, mode="train"))[str(position)]
    y, g = model[:position](batch[0]).detach(), twin_gradient(model, position, F.cross_entropy, batch)
    y, g = (x.movedim(1, 0).reshape(x.shape[1], -1) for x in (y, g))
    m, gamma = y.shape[1], model[position].weight.detach()[:, None]
    s = (y.var(1, correction=0, keepdim=True) + model[position].eps).sqrt()
    yh, h = (y - y.mean(1, keepdim=True)) / s, gamma * g
    assert (found.m, found.groups, found.kind) == (m, len(y), "batch")
    assert found.mean_share == pytest.approx(float((h.sum(1) ** 2).sum() / m / h.square().sum()))
    assert found.yhat_share == pytest.approx(float(((h * yh).sum(1) ** 2).sum() / m / h.square().sum()), rel=1e-3)
    assert found.sum_square == pytest.approx(float((h.sum(1) ** 2).sum()))
    assert found.gain == pytest.approx(float((gamma.abs() / s).median())) and found.sigma == pytest.approx(
        float(s.median())
    )
    assert found.sigma_low <= found.sigma <= found.sigma_high
    printed = (
        (gamma / s) ** 2 * (g.square().sum(1) - g.sum(1) ** 2 / m - (g * yh).sum(1) ** 2 / m**0.5)[:, None]
    ).sum()
    exact = ((gamma / s) ** 2 * (g.square().sum(1) - g.sum(1) ** 2 / m - (g * yh).sum(1) ** 2 / m)[:, None]).sum()
    v2 = found.reduction * g.square().sum()
    assert found.printed_slack == pytest.approx(float((printed - v2) / exact), abs=1e-9) and found.printed_slack < 0


def test_the_sign_of_the_term_is_that_of_the_correlation():
    """One unit whose loss pulls it inwards has <g, yhat> > 0, so BN smooths it; pushed outwards it bends."""
    for sign in (1.0, -1.0):
        model = nn.Sequential(nn.Linear(1, 1), nn.BatchNorm1d(1, affine=False)).double()
        batch = (torch.linspace(-2, 3, 9, dtype=torch.float64)[:, None] ** 3, torch.zeros(9, 1, dtype=torch.float64))
        loss = lambda out, _, sign=sign: sign * out.abs().pow(3).mean()  # noqa: E731
        found = ng.smoothing(ng.Objective(model, loss, batch, mode="train"))["1"]
        assert math.copysign(1, found.term) == -sign


def test_several_batches_calls_and_values_elsewhere():
    norm = nn.BatchNorm1d(4)
    model = nn.Sequential(nn.Linear(4, 4), norm, nn.ReLU(inplace=True), nn.Linear(4, 4), norm, nn.Linear(4, 3)).double()
    data = [(torch.randn(n, 4, dtype=torch.float64), torch.randint(3, (n,))) for n in (8, 8)]
    objective = ng.Objective(model, F.cross_entropy, data, mode="train")
    found = ng.smoothing(objective)
    assert [entry.layer for entry in found.layers] == ["1", "1#2"] and found["1"].groups == 8
    other = {name: value + 0.3 for name, value in objective.parameters.items()}
    moved = ng.smoothing(objective.at(other))
    with torch.no_grad():
        for name, parameter in model.named_parameters():
            parameter.copy_(other[name])
    again = ng.smoothing(objective)
    assert moved["1#2"].term == pytest.approx(again["1#2"].term) and moved["1"].gain == pytest.approx(again["1"].gain)


def test_what_has_no_closed_form_is_refused_by_name():
    class OddNorm(nn.Module):
        def forward(self, x):
            return x / x.abs().amax(-1, keepdim=True)

    model = nn.Sequential(nn.Linear(4, 4), OddNorm(), nn.BatchNorm1d(4), nn.Linear(4, 3)).double()
    batch = (torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    found = ng.smoothing(ng.Objective(model, F.cross_entropy, batch, mode="train"))
    check_result(found)
    assert "OddNorm does not compute" in found["1"].sentence and found["2"].status == "ok"
    stored = ng.smoothing(ng.Objective(model, F.cross_entropy, batch, mode="eval"))
    check_result(stored)
    assert stored.status == "skipped" and "stored statistics" in stored["2"].sentence
    none = ng.smoothing(ng.Objective(nn.Linear(4, 3).double(), F.cross_entropy, batch, mode="train"))
    check_result(none)
    assert none.status == "skipped" and "no normalizer was called" in none.meaning()


def test_over_training_and_the_contract():
    model, _, batch = make("batch over space")
    objective = ng.Objective(model, F.cross_entropy, batch, mode="train")
    optimizer, kept, history = torch.optim.SGD(model.parameters(), lr=0.1), {}, {}
    for step in range(6):
        if step % 3 == 0:
            history[step] = ng.smoothing(objective)
            kept[step] = {name: value.detach().clone() for name, value in model.named_parameters()}
        optimizer.zero_grad()
        F.cross_entropy(model(batch[0]), batch[1]).backward()
        optimizer.step()
    found = ng.smoothing(objective, checkpoints=kept)
    for result in (*history.values(), found):
        check_result(result)
    assert [entry.step for entry in found.layers] == [0, 3] and found.cost.gradients == 2
    assert [entry.term for entry in found.layers] == [history[0]["1"].term, history[3]["1"].term]
    assert "At step 3" in found.meaning() and found.chart().to_dict()


def test_in_float32_on_a_transformer():
    torch.manual_seed(0)
    block = nn.TransformerEncoderLayer(8, 2, 16, batch_first=True, dropout=0.0)
    model = nn.Sequential(nn.Linear(4, 8), block, nn.Flatten(), nn.Linear(24, 3)).float()
    data = (torch.randn(5, 3, 4).float(), torch.randint(3, (5,)))
    found = ng.smoothing(ng.Objective(model, F.cross_entropy, data, mode="train"))
    check_result(found)
    assert [entry.kind for entry in found.measured] == ["layer", "layer"]


def test_a_backward_path_of_its_own_is_refused():
    class StoppedNorm(nn.LayerNorm):
        def forward(self, x):
            return (x - x.mean(-1, keepdim=True)) / (x.var(-1, correction=0, keepdim=True) + self.eps).sqrt().detach()

    model = nn.Sequential(nn.Linear(4, 4), StoppedNorm(4), nn.Linear(4, 3)).double()
    batch = (torch.randn(8, 4, dtype=torch.float64), torch.randint(3, (8,)))
    found = ng.smoothing(ng.Objective(model, F.cross_entropy, batch, mode="train"))
    assert "not the derivative" in found["1"].sentence
