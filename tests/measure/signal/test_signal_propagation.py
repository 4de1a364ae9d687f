"""Signal propagation against layers run by hand, and against the theory at infinite width."""

import math
from dataclasses import replace

import numpy as np
import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from cases import CASES
from normgauge.errors import InputError, UnknownNameError
from normgauge.measure.signal.signal_propagation import signal_propagation
from normgauge.objective import Objective
from normgauge.theory import mean_field
from normgauge.theory.gradient_explosion import relu_rate
from reference.signal_propagation import ablated_accuracy, deep_batchnorm, layer_by_layer, monte_carlo_layer
from reference.tracks import same, tracks


class Erf(nn.Module):
    def forward(self, x):
        return torch.erf(x)


PHI = {
    "identity": lambda x: x,
    "relu": torch.relu,
    "leaky_relu": F.leaky_relu,
    "tanh": torch.tanh,
    "erf": torch.erf,
    "gelu": F.gelu,
}


def test_equals_the_layers_run_by_hand():
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.BatchNorm2d(4), nn.ReLU(), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3)
    )
    with torch.no_grad():
        model[1].bias[2] = -100.0  # one dead unit
    batch = (torch.randn(7, 1, 5, 5), torch.randint(3, (7,)))
    found = signal_propagation(Objective(model, F.cross_entropy, batch, mode="train"))
    by_name = {entry.layer: entry for entry in found.layers}
    by_hand = layer_by_layer(model.train(), F.cross_entropy, batch)
    for i in (0, 1, 2, 4, 5, 6):
        out, gradient = by_hand[i]
        entry = by_name[str(i)]
        assert entry.mean == pytest.approx(float(out.mean()), abs=1e-12)
        assert entry.variance == pytest.approx(float(out.var(unbiased=False)))
        assert entry.gradient == pytest.approx(float(gradient.square().sum()))
    assert by_name["1"].pre_variance == pytest.approx(float(by_hand[0][0].var(dim=(0, 2, 3), unbiased=False).mean()))
    assert by_name["2"].dead == 0.25
    assert by_name["5"].saturated == pytest.approx(float((by_hand[5][0].abs() > 0.98).double().mean()))
    assert by_name["4"].weight_gradient == pytest.approx(float(model[4].weight.grad.square().sum()))
    assert [entry.role for entry in found.layers] == [
        *("affine", "normalizer", "activation", "affine", "activation", "affine")
    ]


@pytest.mark.parametrize("inplace", [False, True])
def test_ablated_accuracies_equal_the_layers_run_by_hand(inplace):
    model = nn.Sequential(
        nn.Conv2d(1, 4, 3), nn.ReLU(inplace=inplace), nn.Flatten(), nn.Linear(36, 6), nn.Tanh(), nn.Linear(6, 3)
    )
    batch = (torch.randn(60, 1, 5, 5), torch.randint(3, (60,)))
    with torch.no_grad():
        intact = ablated_accuracy(model, batch, 0, [])
        wanted = {
            layer: intact - min(ablated_accuracy(model, batch, layer, [unit]) for unit in range(width))
            for layer, width in ((1, 4), (4, 6))
        }
    halves = [(batch[0][:25], batch[1][:25]), (batch[0][25:], batch[1][25:])]  # means are those of all of the data
    found = signal_propagation(Objective(model, F.cross_entropy, halves, mode="eval"), ablations=6)
    entries = {entry.layer: entry for entry in found.layers}
    assert {layer: entries[str(layer)].unit_lost for layer in wanted} == pytest.approx(wanted)
    assert math.isnan(entries["0"].unit_lost) and entries["1"].half_left > 0
    assert found.cost.forwards == pytest.approx(1 + (4 + 6) + (6 + 6))
    assert {r.kind for r in found.readings() if r.name == "accuracy lost by one unit"} == {"lower"}


def test_a_network_that_hangs_on_one_unit_is_told_from_one_that_shares():
    x = torch.randn(400, 1)
    batch, lost = (x, (x[:, 0] > 0.5).long()), {}
    for name, strong in (("healthy", 20), ("sick", 1)):
        model = nn.Sequential(nn.Linear(1, 20), nn.ReLU(), nn.Linear(20, 2))
        with torch.no_grad():
            model[0].weight.fill_(1.0)
            model[0].bias.zero_()
            model[2].weight.zero_()
            model[2].weight[1, :strong] = 1 / strong
            model[2].bias.copy_(torch.tensor([0.5, 0.0]))
        found = signal_propagation(Objective(model, F.cross_entropy, batch, mode="eval"), ablations=20)
        entry = next(entry for entry in found.layers if entry.layer == "1")
        lost[name] = entry.unit_lost
        assert ("hang on single units" in found.meaning()) == (name == "sick")
        assert (entry.half_left < 0.95) == (name == "sick"), entry
    assert lost["healthy"] < 0.05 and lost["sick"] > 0.2
    with pytest.raises(InputError, match="class label"):
        signal_propagation(Objective(nn.Linear(1, 1), F.mse_loss, (x, x), mode="eval"), ablations=2)


def test_what_each_normalizer_divides_by():
    x = torch.randn(6, 4, 3)
    expected = {
        nn.LayerNorm(3): x.var(-1, unbiased=False),
        nn.RMSNorm(3): x.square().mean(-1),
        nn.GroupNorm(2, 4): x.reshape(6, 2, 6).var(-1, unbiased=False),
        nn.InstanceNorm1d(4): x.var(-1, unbiased=False),
        nn.BatchNorm1d(4): x.var((0, 2), unbiased=False),
    }
    for norm, variance in expected.items():
        model = nn.Sequential(norm, nn.Flatten(), nn.Linear(12, 1))
        objective = Objective(model, F.mse_loss, (x, torch.randn(6, 1)), mode="train")
        assert signal_propagation(objective).layers[0].pre_variance == pytest.approx(float(variance.mean()))


def test_in_place_activations_do_not_change_the_gradients():
    batch = (torch.randn(7, 4), torch.randint(3, (7,)))
    model = nn.Sequential(nn.Linear(4, 5), nn.ReLU(), nn.Linear(5, 3))
    plain = signal_propagation(Objective(model, F.cross_entropy, batch, mode="eval"))
    model[1] = nn.ReLU(inplace=True)
    again = signal_propagation(Objective(model, F.cross_entropy, batch, mode="eval"))
    assert [e.gradient for e in plain.layers] == pytest.approx([e.gradient for e in again.layers])
    assert plain.layers[0].mean == pytest.approx(again.layers[0].mean)


def test_several_batches_are_one_mean_loss():
    model = nn.Sequential(nn.Linear(4, 5), nn.Tanh(), nn.Linear(5, 3))
    x, y = torch.randn(9, 4), torch.randint(3, (9,))
    whole = signal_propagation(Objective(model, F.cross_entropy, (x, y), mode="eval"))
    parts = signal_propagation(Objective(model, F.cross_entropy, [(x[:6], y[:6]), (x[6:], y[6:])], mode="eval"))
    for a, b in zip(whole.layers, parts.layers, strict=True):
        assert (a.mean, a.variance, a.gradient) == pytest.approx((b.mean, b.variance, b.gradient))
        assert a.weight_gradient == pytest.approx(b.weight_gradient, nan_ok=True)


def test_functions_shared_and_idle_layers():
    class Odd(nn.Module):
        def __init__(self):
            super().__init__()
            self.shared, self.idle, self.last = nn.Linear(3, 3), nn.Linear(3, 3), nn.Linear(3, 2)

        def forward(self, x):
            x = F.relu(self.shared(x))
            return self.last(torch.tanh(self.shared(x)))

    objective = Objective(Odd(), F.cross_entropy, (torch.randn(5, 3), torch.randint(2, (5,))), mode="eval")
    found = {entry.layer: entry for entry in signal_propagation(objective).layers}
    assert list(found) == ["shared", "(model).relu()", "shared#2", "(model).tanh()", "last", "idle"]
    assert math.isfinite(found["(model).relu()"].dead) and math.isfinite(found["(model).tanh()"].saturated)
    assert found["shared"].gradient != found["shared#2"].gradient
    assert found["idle"].status == "skipped" and "not called" in found["idle"].sentence


def test_losses_that_are_not_finite_or_not_differentiable_are_statuses():
    model = nn.Sequential(nn.Linear(2, 3), nn.ReLU(), nn.Linear(3, 1))
    batch = (torch.randn(4, 2), torch.randn(4, 1))
    stopped = signal_propagation(Objective(model, lambda out, _: out.detach().mean(), batch, mode="eval"))
    assert {entry.status for entry in stopped.layers} == {"skipped"}
    assert math.isfinite(stopped.layers[0].variance) and math.isnan(stopped.growth)
    with torch.no_grad():
        model[2].weight.fill_(float("inf"))
    burst = signal_propagation(Objective(model, F.mse_loss, batch, mode="eval"))
    assert burst.layers[2].status == "diverged" and math.isfinite(burst.layers[0].variance)


@pytest.mark.parametrize("case", CASES, ids=str)
def test_runs_on_every_kind_of_model_without_a_trace(case):
    objective = case.make("train")
    before = tracks(objective.model)
    found = signal_propagation(objective)
    assert same(before, tracks(objective.model))
    assert any(entry.status == "ok" for entry in found.layers)


@pytest.mark.parametrize("batch", [5, 12])
@pytest.mark.parametrize("name", PHI)
def test_theory_against_monte_carlo(name, batch):
    exact = mean_field.batchnorm_layer(name, batch)
    growth, q, c = monte_carlo_layer(PHI[name], batch, 60_000)
    assert exact.second_moment == pytest.approx(q, rel=0.01)
    assert exact.overlap == pytest.approx(c, abs=0.01)
    # at batch 5 the inverse variance has heavy tails
    assert exact.square_growth == pytest.approx(growth, rel=0.1 if batch == 5 else 0.02)


@pytest.mark.parametrize(("name", "activation"), [("relu", nn.ReLU), ("identity", nn.Identity), ("erf", Erf)])
def test_theory_against_wide_networks(name, activation):
    batch, growths, variances = 12, [], []
    for seed in range(3):
        model = deep_batchnorm(activation, 160, 10, seed)
        inputs = torch.randn(batch, 160, generator=torch.Generator().manual_seed(seed))
        objective = Objective(
            model, lambda out, y: (out[:, 0] * y).mean(), (inputs, torch.arange(batch) * 1.0), mode="train"
        )
        found = signal_propagation(objective, theory=True)
        growths.append(math.log(found.growth))
        variances += [entry.pre_variance for entry in found.layers if entry.role == "normalizer"][3:]
    assert math.exp(sum(growths) / 3) == pytest.approx(found.theory.square_growth, rel=0.06)
    layer = mean_field.batchnorm_layer(name, batch)
    assert found.theory.square_growth == pytest.approx(layer.square_growth, rel=0.07)  # over 10 layers the ends count
    assert sum(variances) / len(variances) == pytest.approx(layer.pre_variance, rel=0.05)
    assert found.norm_growth == pytest.approx(math.sqrt(found.growth))


def test_theory_laws():
    for name in PHI:
        growths = [mean_field.batchnorm_layer(name, size).square_growth for size in (4, 8, 64, 1024, math.inf)]
        assert growths == sorted(growths, reverse=True), "larger batches explode less"
        assert growths[-1] == pytest.approx(growths[-2], rel=0.01)
        # Cauchy-Schwarz in Hermite space: only the identity does not explode
        assert growths[-1] == pytest.approx(1.0) if name == "identity" else growths[-1] > 1.05
    for size in (4, 8, 64):  # the closed form, from two Gaussians of correlation -1 / (B - 1)
        assert mean_field.batchnorm_layer("relu", size).square_growth == pytest.approx(relu_rate(size), rel=1e-5)
    tanh = (np.tanh, lambda y: 1 / np.cosh(y) ** 2)
    assert mean_field.batchnorm_layer(tanh, 16) == replace(mean_field.batchnorm_layer("tanh", 16), activation="")
    gained = mean_field.batchnorm_layer(tanh, 16, gain=0.01).square_growth  # near 0 tanh is linear
    assert gained == pytest.approx(mean_field.batchnorm_layer("identity", 16).square_growth, rel=1e-3)
    assert mean_field.batchnorm_layer("gelu", 64).stability > 1 > mean_field.batchnorm_layer("tanh", 64).stability
    with pytest.raises(InputError, match="at least 4"):
        mean_field.batchnorm_layer("relu", 3)
    with pytest.raises(UnknownNameError, match="unknown activation 'swish'"):
        mean_field.batchnorm_layer("swish", 8)


def test_three_ways_out():
    objective = Objective(
        deep_batchnorm(nn.ReLU, 20, 4, 0), F.mse_loss, (torch.randn(8, 20), torch.randn(8, 1)), mode="train"
    )
    found = signal_propagation(objective, theory=True)
    assert "towards the input" in str(found) and found.cost.gradients == 1 and found.cost.forwards <= 1
    assert len(found.frame()) == len(found.layers)
    drawn = found.chart().to_dict()
    assert {row["series"] for rows in drawn["datasets"].values() for row in rows} == {"measured", "infinite width"}
    assert found.growth_low < found.growth < found.growth_high


class Skipped(nn.Module):
    def __init__(self, body):
        super().__init__()
        self.body = body

    def forward(self, x):
        return x + self.body(x)


class Cube(nn.Module):
    def forward(self, x):
        return x**3


def chain(*, activation=nn.ReLU, skip=False, conv=False, norm=nn.BatchNorm1d, between=nn.Identity):
    layers = []
    for _ in range(4):
        linear = nn.Conv1d(6, 6, 1) if conv else nn.Linear(6, 6)
        part = [linear, norm(6), activation(), between()]
        layers += [Skipped(nn.Sequential(*part))] if skip else part
    return nn.Sequential(*layers, nn.Flatten(), nn.Linear(6 * (3 if conv else 1), 2))


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({}, ""),
        ({"activation": Erf}, ""),
        ({"activation": nn.SiLU}, ""),
        ({"activation": nn.PReLU}, ""),
        ({"conv": True}, ""),
        ({"norm": nn.Identity}, ""),
        ({"norm": nn.LayerNorm}, ""),
        ({"mode": "eval"}, ""),
        ({"skip": True}, "adds what an activation"),
        ({"activation": Cube}, "treats all samples alike repels"),
        ({"activation": lambda: nn.Softmax(-1)}, "no linear map"),
        ({"between": lambda: nn.Dropout(0.5)}, "no linear map"),
        ({"between": lambda: nn.BatchNorm1d(6)}, "not the output of linear maps"),
    ],
)
def test_predictions_are_withheld_where_the_theory_does_not_speak(options, words):
    options = dict(options)
    mode = options.pop("mode", "train")
    shape = (8, 6, 3) if options.get("conv") else (8, 6)
    objective = Objective(chain(**options), F.mse_loss, (torch.randn(shape), torch.randn(8, 2)), mode=mode)
    found = signal_propagation(objective, theory=True)
    assert (found.theory is None) == bool(words) and words in found.withheld
    assert ("the theory covers" in str(found)) == bool(words)


@pytest.mark.parametrize(("scale", "way"), [(0.5, "shrink by a factor of 4 "), (2.0, "grow by a factor of 4 ")])
def test_what_shrinks_is_said_to_shrink(scale, way):
    model = nn.Sequential(*(nn.Linear(1, 1, bias=False) for _ in range(8)))
    for layer in model:
        nn.init.constant_(layer.weight, scale)
    data = (torch.ones(4, 1), torch.ones(4, 1))
    meaning = signal_propagation(Objective(model, lambda out, _: out.mean(), data, mode="eval")).meaning()
    assert way in meaning and ("vanish" if scale < 1 else "explode") in meaning


class Mixed(nn.Module):
    """Linear layers along the axis of tokens."""

    def __init__(self):
        super().__init__()
        self.parts = nn.ModuleList([nn.Linear(8, 8), nn.Linear(5, 5), nn.Linear(8, 8), nn.Linear(8, 2)])

    def forward(self, x):
        x = self.parts[1](self.parts[0](x).transpose(1, 2)).transpose(1, 2)
        return self.parts[3](self.parts[2](x)).mean(1)


def constant(model):
    for name, parameter in model.named_parameters():
        if name.endswith("weight") and parameter.ndim > 1:
            nn.init.constant_(parameter, 0.1)
    return model


def hostile():
    linear, others, more = ([nn.Linear(12, 12) for _ in range(4)] for _ in range(3))
    shared = nn.Linear(12, 12)
    picture = [nn.Unflatten(1, (12, 1)), nn.Conv1d(12, 12, 1), nn.Flatten(), nn.Linear(12, 2)]
    return {
        "tokens": (Mixed(), (6, 5, 8), "train", ""),
        "constant": (constant(nn.Sequential(*linear)), (6, 12), "train", "not of mean zero"),
        "shared": (nn.Sequential(shared, nn.ReLU(), shared, shared), (6, 12), "train", "more than once"),
        "picture": (nn.Sequential(nn.Linear(12, 12), nn.ReLU(), nn.Linear(12, 12), *picture), (6, 12), "train", ""),
        "instance": (
            nn.Sequential(nn.Conv2d(2, 8, 1), nn.GroupNorm(8, 8), nn.Conv2d(8, 8, 1), nn.Conv2d(8, 2, 1), nn.Flatten()),
            (4, 2, 3, 3),
            "train",
            "too few channels",
        ),
        "dropout": (nn.Sequential(others[0], nn.Dropout(), *others[1:]).eval(), (6, 12), "train", "no linear map"),
        "evaluated dropout": (nn.Sequential(more[0], nn.Dropout(), *more[1:]).train(), (6, 12), "eval", None),
        "attention": (
            nn.Sequential(nn.Linear(8, 8), nn.TransformerEncoderLayer(8, 2, batch_first=True), nn.Linear(8, 2)),
            (4, 3, 8),
            "train",
            "",
        ),
    }


@pytest.mark.parametrize("name", hostile())
def test_what_looks_alike_is_not_predicted(name):
    torch.manual_seed(0)
    model, shape, mode, words = hostile()[name]
    objective = Objective(
        model, lambda out, _: out.square().mean(), (torch.randn(shape), torch.zeros(shape[0])), mode=mode
    )
    found = signal_propagation(objective, theory=True)
    assert (found.theory is not None) == (words is None)
    assert (words or "") in found.withheld and (words is None or found.withheld)


def test_selectivity_of_single_units():
    """Units that fire for one class have 1, units that fire for all alike 0; without labels there is none."""
    inputs = torch.cat([torch.eye(3), torch.eye(3)])
    labels = torch.tensor([0, 1, 2, 0, 1, 2])

    def found(weight, targets, loss):
        model = nn.Sequential(nn.Linear(3, 3, bias=False), nn.ReLU(), nn.Linear(3, 3))
        model[0].weight.data.copy_(weight)
        return signal_propagation(Objective(model, loss, [(inputs, targets)] * 2, mode="eval")).layers[1].selectivity

    assert found(torch.eye(3), labels, F.cross_entropy) == pytest.approx(1.0)
    assert found(torch.ones(3, 3), labels, F.cross_entropy) == pytest.approx(0.0)
    assert found(torch.ones(3, 3) + torch.eye(3), labels, F.cross_entropy) == pytest.approx(1 / 3)
    assert math.isnan(found(torch.eye(3), torch.randn(6, 3), F.mse_loss))


@pytest.mark.parametrize("scale", [1.0, 1e20])
def test_an_absurd_size_is_no_healthy_signal(scale):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(8, 16), nn.ReLU(), nn.Linear(16, 16), nn.ReLU(), nn.Linear(16, 3))
    data = (scale * torch.randn(32, 8), torch.randint(0, 3, (32,)))
    here = ng.Objective(model.to(data[0].dtype), nn.functional.cross_entropy, data, mode="train")
    for found in (ng.signal_propagation(here), ng.activations(here)):
        assert ("over 65504" in found.meaning() and "no healthy signal" in found.meaning()) is (scale > 1)
