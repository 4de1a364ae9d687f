"""Predicted against measured growth on whole networks, and the depth that follows."""

import math
from dataclasses import replace

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError
from normgauge.measure.signal.signal_propagation import depth_of
from normgauge.testing import check_result


class Skip(nn.Module):
    """x + body(x), then `after`."""

    def __init__(self, *body, after=None):
        super().__init__()
        self.body, self.after = nn.Sequential(*body), after or nn.Identity()

    def forward(self, x):
        return self.after(x + self.body(x))


def mlp(width, layers, activation=nn.ReLU, norm=nn.BatchNorm1d, gain=1.0):
    parts = [m for _ in range(layers) for m in (nn.Linear(width, width), norm(width), activation())]
    for part in parts:
        if norm is not nn.Identity and isinstance(part, norm):
            nn.init.constant_(part.weight, gain)
    return nn.Sequential(*parts, nn.Linear(width, 10))


def conv(width, layers, activation=nn.ReLU, padding="zeros"):
    def one(c):
        return nn.Conv2d(c, width, 3, padding=1, bias=False, padding_mode=padding), nn.BatchNorm2d(width), activation()

    parts = [m for i in range(layers) for m in one(width if i else 3)]
    return nn.Sequential(*parts, nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10))


def residual(width, layers, norm=nn.BatchNorm1d, activation=nn.ReLU):
    blocks = [Skip(norm(width), activation(), nn.Linear(width, width)) for _ in range(layers - 1)]
    return nn.Sequential(nn.Linear(width, width), *blocks, norm(width), nn.Linear(width, 10))


def conv_residual(width, layers):
    blocks = [
        Skip(nn.BatchNorm2d(width), nn.ReLU(), nn.Conv2d(width, width, 3, padding=1, bias=False))
        for _ in range(layers - 1)
    ]
    head = [nn.AdaptiveAvgPool2d(1), nn.Flatten(), nn.Linear(width, 10)]
    return nn.Sequential(nn.Conv2d(3, width, 3, padding=1), *blocks, *head)


def transformer_like(width, layers, *, post=False):
    def block():
        body = nn.Linear(width, 2 * width), nn.GELU(), nn.Linear(2 * width, width)
        return Skip(*body, after=nn.LayerNorm(width)) if post else Skip(nn.LayerNorm(width), *body)

    return nn.Sequential(nn.Linear(width, width), *(block() for _ in range(layers // 2)), nn.Linear(width, 10))


CASES = {
    "mlp": lambda w, n: mlp(w, n),
    "mlp, tanh, gain 0.1": lambda w, n: mlp(w, n, nn.Tanh, gain=0.1),
    "mlp, layer norm": lambda w, n: mlp(w, n, nn.Tanh, nn.LayerNorm),
    "mlp, no norm": lambda w, n: mlp(w, n, nn.ReLU, nn.Identity),
    "conv": lambda w, n: conv(w // 4, n),
    "conv, circular": lambda w, n: conv(w // 4, n, padding="circular"),
    "residual": lambda w, n: residual(w, n),
    "conv, residual": lambda w, n: conv_residual(w // 4, n),
    "pre-norm": lambda w, n: transformer_like(w, n),
    "post-norm": lambda w, n: transformer_like(w, n, post=True),
}


def growths(name, width, layers, seeds):
    """Return the predicted growth and the geometric mean of the measured ones."""
    logs, predicted = [], []
    for seed in range(seeds):
        torch.manual_seed(seed)
        model = CASES[name](width, layers)
        inputs = torch.randn(16, 3, 8, 8) if name.startswith("conv") else torch.randn(64, width)
        objective = ng.Objective(model, F.cross_entropy, (inputs, torch.randint(10, (len(inputs),))), mode="train")
        found = ng.signal_propagation(objective, theory=True)
        assert found.theory is not None, found.withheld
        assert found.theory.layers == found.fitted
        logs.append(math.log(found.growth))
        predicted.append(found.theory.square_growth)
    return sum(predicted) / seeds, math.exp(sum(logs) / seeds)


@pytest.mark.heavy
@pytest.mark.parametrize("name", CASES)
def test_predicted_growth_of_fifty_layers_within_five_percent(name):
    predicted, measured = growths(name, 256, 50, 2)
    assert predicted == pytest.approx(measured, rel=0.05)


@pytest.mark.parametrize("name", ["mlp", "mlp, tanh, gain 0.1", "residual", "pre-norm", "post-norm", "conv"])
def test_predicted_growth_of_shallow_networks(name):
    predicted, measured = growths(name, 96, 14, 2)
    assert predicted == pytest.approx(measured, rel=0.07)


def test_the_stream_grows_as_predicted():
    torch.manual_seed(0)
    model = residual(256, 20)
    data = (torch.randn(64, 256), torch.randint(10, (64,)))
    found = ng.signal_propagation(ng.Objective(model, F.cross_entropy, data, mode="train"), theory=True)
    measured = {entry.layer: entry.variance for entry in found.layers}
    for name, variance in zip(found.theory.layers, found.theory.variances, strict=True):
        assert measured[name] == pytest.approx(variance, rel=0.15)
    assert ng.trainable_depth(model, data[0]).law == "power"


def test_healthy_and_sick():
    torch.manual_seed(0)
    sick = ng.trainable_depth(mlp(64, 40), torch.randn(48, 64))
    check_result(sick)
    assert sick.depth == pytest.approx(math.log(1000) / math.log(sick.predicted), rel=0.02) and 14 < sick.depth < 20
    assert "too deep" in sick.meaning() and not sick.withheld and sick.correlation < 0.5
    assert "shattered" in replace(sick, correlation=0.05).meaning()
    well = ng.trainable_depth(residual(64, 12), torch.randn(48, 64))
    check_result(well)
    assert "no obstacle" in well.meaning() and "shattered" not in well.meaning() and well.correlation > 0.8
    assert well.cost.gradients == pytest.approx(3) and well.cost.forwards == pytest.approx(1)
    assert {row["series"] for rows in well.chart().to_dict()["datasets"].values() for row in rows} == {
        "measured",
        "infinite width",
    }


def test_where_no_theory_speaks_the_measured_gradients_do():
    class Swap(nn.Module):
        def forward(self, x):
            return x.flip(-1) * x

    torch.manual_seed(0)
    model = nn.Sequential(
        *(m for _ in range(6) for m in (nn.Linear(32, 32), nn.LayerNorm(32), Swap())), nn.Linear(32, 2)
    )
    found = ng.trainable_depth(model, torch.randn(16, 32), mode="eval")
    check_result(found)
    assert math.isnan(found.predicted) and "no prediction" in str(found) and math.isfinite(found.depth)
    assert depth_of(found.gradients, 1000.0)[2] == found.depth


def test_no_depth_is_told_where_branches_differ_and_not_depths():
    class Branches(nn.Module):
        def __init__(self):
            super().__init__()
            self.quiet, self.loud = nn.Linear(16, 16), nn.Linear(16, 16)
            nn.init.normal_(self.loud.weight, std=1e-3)

        def forward(self, x):
            return x + self.loud(self.quiet(x) * x)

    torch.manual_seed(0)
    model = nn.Sequential(*(Branches() for _ in range(6)), nn.Linear(16, 2))
    found = ng.trainable_depth(model, torch.randn(16, 16), mode="eval")
    check_result(found)
    assert found.withheld and found.explained < 0.5 and math.isnan(found.depth)
    assert "no depth is told" in found.meaning() and "skip" not in found.meaning()
    assert next(r for r in found.readings() if r.name == "trainable depth").status == "skipped"


def test_gradients_that_do_not_change_have_no_infinite_number():
    model = nn.Sequential(*(nn.Linear(4, 4, bias=False) for _ in range(4)))
    for layer in model:
        nn.init.eye_(layer.weight)
    said = ng.trainable_depth(model, torch.randn(8, 4)).meaning()
    assert "no obstacle" in said and "inf" not in said


def test_wrong_use():
    with pytest.raises(InputError, match="three affine layers"):
        ng.trainable_depth(nn.Linear(3, 2), torch.randn(4, 3))
    with pytest.raises(InputError, match="above 1"):
        ng.trainable_depth(mlp(8, 4), torch.randn(8, 8), limit=1.0)
    with pytest.raises(InputError, match="returns a tensor"):
        ng.trainable_depth(mlp(8, 4), torch.randn(8, 8), forward=lambda m, x: None)
