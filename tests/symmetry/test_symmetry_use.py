"""What symmetries are for: projection, canonical points, distances, files, sentences, parameter groups, errors."""

import copy

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

import normgauge as ng
from architectures import NETS, Transformer, batch_mlp, layer_mlp
from normgauge import errors


def objective_of(net, batch, mode="train"):
    return ng.Objective(net, lambda out, _: out.square().mean(), (batch, torch.zeros(len(batch))), mode=mode)


def setting(name):
    torch.manual_seed(5)
    factory, data = NETS[name]
    net, batch = factory(), data()[0]
    with torch.no_grad():
        for parameter in net.parameters():
            parameter.add_(0.1 * torch.randn_like(parameter))
    objective = objective_of(net, batch)
    return objective, ng.symmetries(objective)


def moved_along(found, parameters, seed):
    """A random point on the same orbit."""
    source = torch.Generator().manual_seed(seed)
    point = {name: value.clone() for name, value in parameters.items()}
    for family in found.families:
        if family.kind != "matrix" and family.counted:
            point = family.act(point, torch.randn(len(family), generator=source))
    return point


USED = ["plain", "batch", "layer", "conv_batch", "residual", "layer_stream", "weight_norm", "pre_norm_transformer"]


@pytest.mark.parametrize("name", USED)
def test_canonical_point_is_that_of_the_orbit(name):
    objective, found = setting(name)
    first = found.canonical(objective.parameters)
    other = found.canonical(moved_along(found, objective.parameters, seed=1))
    for key in first:
        torch.testing.assert_close(other[key], first[key], rtol=1e-7, atol=1e-8)
    torch.testing.assert_close(objective.at(first).loss(), objective.loss(), rtol=1e-7, atol=1e-10)
    again = found.canonical(first)
    for key in first:
        torch.testing.assert_close(again[key], first[key], rtol=1e-9, atol=1e-10)


@pytest.mark.parametrize("name", ["batch", "residual", "layer_stream"])
def test_projection_is_orthogonal_to_every_generator(name):
    objective, found = setting(name)
    vector = torch.randn(objective.dimension)
    flat = found.project(vector)
    assert float(flat.norm()) < float(vector.norm())
    torch.testing.assert_close(found.project(flat), flat, rtol=0, atol=1e-9)
    point, pieces = found.parameters, objective.unflatten(flat)
    for family in found.families:
        if family.kind != "matrix":
            assert float(family.gather(point, pieces).abs().max()) < 1e-8
    slope = objective.gradient()
    kept = found.project(slope)
    for key, value in slope.items():
        torch.testing.assert_close(kept[key], value, rtol=0, atol=1e-8)  # the gradient has no part along a symmetry


@settings(max_examples=5, deadline=None)
@given(st.integers(0, 10**6))
def test_distance_is_zero_on_an_orbit_and_positive_off_it(seed):
    objective, found = setting_cache()
    a = dict(objective.parameters)
    b = {
        name: value + 0.3 * torch.randn(value.shape, generator=torch.Generator().manual_seed(seed))
        for name, value in a.items()
    }
    assert found.distance(a, moved_along(found, a, seed)) < 1e-6
    assert found.distance(a, b) > 1e-3
    moved = found.distance(moved_along(found, a, seed), moved_along(found, b, seed + 1))
    assert abs(moved - found.distance(a, b)) < 1e-6


_CACHE = {}


def setting_cache():
    if not _CACHE:
        _CACHE["residual"] = setting("plain")
    return _CACHE["residual"]


def test_interpolation_on_one_orbit_stays_on_it():
    objective, found = setting("plain")
    a = dict(objective.parameters)
    b = moved_along(found, a, seed=3)
    middle = {name: (a[name] + b[name]) / 2 for name in a}
    here = objective.loss()
    torch.testing.assert_close(objective.at(found.interpolate(a, b, 0.5)).loss(), here, rtol=1e-8, atol=1e-12)
    assert abs(float(objective.at(middle).loss() - here)) > 1e-4 * float(here)


def test_files_hold_everything_but_the_parameters(tmp_path):
    objective, found = setting("pre_norm_transformer")
    found.save(tmp_path / "s.json")
    read = ng.Symmetries.load(tmp_path / "s.json", objective)
    assert list(read.generators) == list(found.generators)
    assert (read.dimension, read.matrix_dimension, read.unobserved) == (found.dimension, found.matrix_dimension, {})
    vector = torch.randn(objective.dimension)
    torch.testing.assert_close(read.project(vector), found.project(vector))
    with pytest.raises(errors.InputError, match="do not hold the parameters"):
        ng.Symmetries.load(tmp_path / "s.json").canonical()
    (tmp_path / "bad.json").write_text("{}")
    with pytest.raises(errors.StoreError, match="one that save wrote"):
        ng.Symmetries.load(tmp_path / "bad.json")


def test_result_prints_frames_charts_and_explains():
    _, found = setting("batch")
    text = str(found)
    assert "mode train" in text and "gradient" in text and "batch_statistics_only" in text
    assert len(found.frame()) == len(found.families)
    assert found.chart().to_dict()["mark"]["type"] == "bar"
    said = found.explain()
    assert "0: 6 free scales in 0.weight; weight decay here sets the learning rate, not the capacity" in said
    assert "0.bias has no effect" in said
    assert found.generators[-1] == list(found.generators)[-1]
    assert len(found.generators[2:5]) == 3


def test_vectors_and_names_of_the_wrong_shape_are_named():
    _, found = setting("plain")
    with pytest.raises(errors.InputError, match="a flat vector has shape"):
        found.project(torch.randn(3))
    with pytest.raises(errors.InputError, match=r"0\.weight"):
        found.canonical({})


def test_groups_of_a_batch_normalized_network():
    net, batch = batch_mlp(1e-5), torch.randn(64, 5)
    groups = ng.param_groups(objective_of(net, batch), {"lr": 0.1, "weight_decay": 0.01})
    where = {name: row[1] for name, row in groups.reasons.items()}
    assert where == {
        "0.weight": "scale_invariant",
        "0.bias": "dead",
        "1.weight": "affine",
        "1.bias": "affine",
        "3.weight": "rest",
        "3.bias": "rest_vectors",
    }
    decays = {group["name"]: group["weight_decay"] for group in groups}
    assert decays == {"scale_invariant": 0.01, "affine": 0.0, "dead": 0.0, "rest": 0.01, "rest_vectors": 0.0}
    held = {id(p) for group in groups for p in group["params"]}
    assert held == {id(p) for p in net.parameters()}
    for optimizer in (torch.optim.SGD(groups, lr=0.1), torch.optim.AdamW(groups)):
        net(batch).square().mean().backward()
        optimizer.step()
    assert "params" in groups[0] and "lr" in groups[0] and "effective learning rate" in str(groups)


def test_a_weight_before_layer_normalization_is_free_with_its_bias():
    groups = ng.param_groups(objective_of(layer_mlp(1e-5), torch.randn(64, 5)), {"weight_decay": 0.1})
    where = {name: row[1] for name, row in groups.reasons.items()}
    assert where["0.weight"] == "scale_invariant" and where["1.weight"] == "affine" and where["3.weight"] == "rest"
    assert "jointly with 0.bias" in groups.reasons["0.weight"][3]


def test_groups_can_be_overridden_and_carry_a_geometry_only_if_asked():
    objective = objective_of(batch_mlp(1e-5), torch.randn(64, 5))
    found = ng.symmetries(objective)
    plain = ng.param_groups(objective, {"weight_decay": 0.1}, symmetries=found)
    assert all("geometry" not in group for group in plain)
    asked = ng.param_groups(objective, symmetries=found, geometry=True)
    assert [g["granularity"] for g in asked if g["geometry"] == "sphere"] == ["row"]
    assert {g["geometry"] for g in asked} == {"sphere", "euclidean"}
    assert ng.optim.SphereSGD(asked, lr=0.1).param_groups[0]["weight_decay"] == 0
    own = ng.param_groups(objective, symmetries=found, overrides={"3.*": {"lr": 7.0}})
    assert [g["lr"] for g in own if g["name"].startswith("override")] == [7.0]
    with pytest.raises(errors.UnknownNameError):
        ng.param_groups(objective, symmetries=found, overrides={"nothing": {}})
    with pytest.raises(errors.InputError, match="options, not params"):
        ng.param_groups(objective, symmetries=found, overrides={"3.*": {"params": []}})


def test_no_trace_is_left():
    net, batch = batch_mlp(1e-5), torch.randn(64, 5)
    net.eval()
    net[0].weight.grad = torch.ones_like(net[0].weight)
    before = copy.deepcopy(net.state_dict())
    flags, state = [m.training for m in net.modules()], torch.get_rng_state()
    ng.symmetries(objective_of(net, batch))
    assert all(torch.equal(before[name], value) for name, value in net.state_dict().items())
    assert flags == [m.training for m in net.modules()] and torch.equal(state, torch.get_rng_state())
    assert bool((net[0].weight.grad == 1).all()) and net[0].bias.grad is None


OUTSIDE = torch.Generator()  # of a module no measurement can restore


class Stochastic(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(5, 3)

    def forward(self, x):
        return self.layer(x) + torch.randn(3, generator=OUTSIDE)


class Detached(nn.Module):
    def __init__(self, how):
        super().__init__()
        self.layer, self.how = nn.Linear(5, 3), how

    def forward(self, x):
        return self.how(self.layer(x))


@pytest.mark.parametrize(
    ("net", "kind", "message"),
    [
        (batch_mlp, errors.DataError, "at least 4 values per channel"),
        (Stochastic, errors.ModelError, "same outputs twice"),
        (lambda: Detached(lambda x: x.detach()), errors.NotDifferentiableError, "differentiable"),
        (lambda: Detached(lambda x: x.argmax(1)), errors.NotDifferentiableError, "floating"),
        (lambda: Detached(lambda x: x / 0), errors.NonFiniteError, "must be finite"),
    ],
)
def test_what_cannot_be_searched_is_named(net, kind, message):
    count = 3 if net is batch_mlp else 32
    objective = ng.Objective(
        net(), lambda out, _: out.double().sum(), (torch.randn(count, 5), torch.zeros(count)), mode="train"
    )
    with pytest.raises(kind, match=message):
        ng.symmetries(objective)


def test_an_unknown_question_is_named():
    with pytest.raises(errors.InputError, match="'outputs' or 'loss'"):
        ng.symmetries(objective_of(layer_mlp(), torch.randn(20, 5)), of="weights")


def test_thousands_of_generators_stay_compact():
    net = nn.Sequential(nn.Linear(8, 900), nn.BatchNorm1d(900), nn.ReLU(), nn.Linear(900, 2))
    found = ng.symmetries(objective_of(net, torch.randn(64, 8)))
    assert len(found.generators) == found.dimension == 2700
    assert len(found.families) == 3


def test_large_models_count_relations_without_writing_vectors():
    from normgauge.symmetry._independence import dimensions, relations

    objective, found = None, None
    torch.manual_seed(0)
    objective = objective_of(Transformer(post=False), torch.randint(0, 7, (40, 4)))
    found = ng.symmetries(objective)
    plain = [family for family in found.families if family.kind != "matrix"]
    count = sum(len(family) for family in plain)
    point = {name: value + 0.1 * torch.randn_like(value) for name, value in found.parameters.items()}
    assert count - relations(plain, point) == dimensions(plain, point)[0] == found.dimension


def test_gains_are_told_by_what_they_do_whatever_follows():
    model = nn.Sequential(
        nn.utils.parametrizations.weight_norm(nn.Linear(6, 8)), nn.BatchNorm1d(8), nn.Tanh(), nn.Linear(8, 3)
    )
    data = (torch.randn(32, 6), torch.randn(32, 3))
    groups = ng.param_groups(ng.Objective(model, nn.functional.mse_loss, data, mode="train"), {"weight_decay": 0.1})
    assert groups.reasons["1.weight"][0] == groups.reasons["1.bias"][0] == "affine"
    assert groups.reasons["3.bias"][1] == "rest_vectors"
    for name in ("1.weight", "1.bias"):
        assert "outside a normalization" not in groups.reasons[name][3]


def test_equal_reasons_are_printed_once():
    layers = [part for _ in range(8) for part in (nn.Linear(5, 5), nn.BatchNorm1d(5), nn.ReLU())]
    data = (torch.randn(32, 5), torch.randn(32, 2))
    objective = ng.Objective(nn.Sequential(*layers, nn.Linear(5, 2)), nn.functional.mse_loss, data, mode="train")
    groups = ng.param_groups(objective)
    text = str(groups)
    assert text.count("decay shrinks what the normalization restored") == 1
    assert "..., 22.bias" in text and len(groups.frame()) == len(groups.reasons) == 34


def test_explain_says_once_what_repeats_over_layers():
    blocks = [nn.Sequential(nn.Linear(6, 6), nn.BatchNorm1d(6), nn.ReLU()) for _ in range(3)]
    data = (torch.randn(64, 6), torch.zeros(64))
    objective = ng.Objective(
        nn.Sequential(*blocks, nn.Linear(6, 2)), lambda out, _: out.square().mean(), data, mode="train"
    )
    lines = ng.symmetries(objective).explain().splitlines()
    assert lines[0].startswith("*.0 (3 times): 6 free scales in *.0.weight;")
    assert sum("free scales" in line for line in lines) == 1


def test_groups_leave_the_optimizers_decay_where_it_belongs():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.ReLU(), nn.Linear(4, 2))
    data = (torch.randn(16, 3), torch.randn(16, 2))
    groups = ng.param_groups(ng.Objective(model, nn.functional.mse_loss, data, mode="train"))
    optimizer = torch.optim.AdamW(groups, lr=0.1, weight_decay=0.3)
    decays = {group["name"]: group["weight_decay"] for group in optimizer.param_groups}
    assert decays == {"scale_invariant": 0.3, "affine": 0.0, "dead": 0.0, "rest": 0.3, "rest_vectors": 0.0}
    assert "optimizer's" in str(groups) and "0.3" not in str(groups)


@pytest.mark.parametrize(
    "text", ["mat1 and mat2 must have the same dtype", "DefaultCPUAllocator: can't allocate memory"]
)
def test_a_layer_that_cannot_be_probed_is_said_with_the_reason(text):
    class Single(nn.Module):
        """A gain whose kernel exists in float32 alone."""

        def __init__(self):
            super().__init__()
            self.gain = nn.Parameter(torch.ones(2, 3))

        def forward(self, x):
            if self.gain.dtype == torch.float64 and stop:
                raise RuntimeError(text)
            return x * self.gain.flatten()

    stop = False
    net = nn.Sequential(nn.Linear(5, 6), Single(), nn.Linear(6, 2)).float()
    objective = objective_of(net, torch.randn(16, 5).float())
    found = ng.symmetries(objective)
    stop = True
    groups = ng.param_groups(objective, symmetries=found)
    why = groups.reasons["1.gain"][3]
    assert "'1' could not be probed" in why and text in why and text in str(groups)
    assert "1 could not be probed, '1.gain' first" in groups.meaning()
