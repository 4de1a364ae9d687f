"""Recipes: every optimizer, schedule and own function trains in the one loop; bad ones are refused in a sentence."""

import json
import math
import sys
import textwrap

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import DataError, InputError, ModelError, UnknownNameError
from normgauge.lab import Recipe
from normgauge.lab.comparison import name_arms
from normgauge.lab.data import load
from normgauge.lab.question import comparison_study, first_round
from normgauge.lab.runs.recipe import RATES, SCHEDULES, Joined, make_optimizer, make_schedule
from normgauge.lab.runs.run import build_arm, execute, measure_costs
from normgauge.store import Store

MINE = """
import torch
from torch import nn

def factory(norm, width=8):
    layers = [nn.Flatten(), nn.Linear(64, width)] + ([nn.BatchNorm1d(width)] if norm == "batch" else [])
    return nn.Sequential(*layers, nn.ReLU(), nn.Linear(width, 10))

def deaf(norm):
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def bare():
    return nn.Sequential(nn.Flatten(), nn.Linear(64, 10))

def network():
    return nn.Sequential(nn.Conv2d(1, 8, 3), nn.BatchNorm2d(8), nn.ReLU(), nn.Flatten(), nn.Linear(288, 10))

def loss(outputs, targets):
    return nn.functional.multi_margin_loss(outputs, targets)

def error(outputs, targets):
    return (outputs.argmax(1) != targets).float().mean()

def broken_metric(outputs, targets):
    return outputs

def chance(outputs, targets):
    return 0.5

def step(network, batch, optimizer):
    optimizer.zero_grad()
    value = nn.functional.cross_entropy(network(batch[0]), batch[1])
    value.backward()
    optimizer.step()
    return value.detach()

def optimizer(network, lr):
    return torch.optim.RMSprop(network.parameters(), lr=lr)

def pictures():
    x = torch.randn(64, 1, 8, 8, generator=torch.Generator().manual_seed(0))
    return [(x, 0.5 * x), (x, 0.5 * x), (x, 0.5 * x)]

def holes():
    x = torch.randn(32, 64)
    x[3, 5] = float("nan")
    return [(x, torch.zeros(32).long())] * 3
"""


@pytest.fixture(autouse=True)
def mine(tmp_path, monkeypatch, double_precision):
    torch.set_default_dtype(torch.float32)
    (tmp_path / "recipes.py").write_text(textwrap.dedent(MINE))
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(tmp_path)
    sys.modules.pop("recipes", None)


SMALL = {"model": "mlp", "norms": ["batch"], "steps": 4, "size": "smoke", "seeds": 1, "rates": [0.01]}


def run(**settings):
    study = comparison_study(**{**SMALL, **settings})
    return execute(first_round(study)[0])


@pytest.mark.parametrize("name", [*RATES, "recipes:optimizer"])
def test_every_optimizer_trains(name):
    done = run(recipe=Recipe(optimizer=name, weight_decay=0.01))
    assert done.ok, done.sentence
    assert done.series("test_loss")[-1] < done.series("test_loss")[0]


def test_muon_takes_matrices_and_spheres_what_has_a_free_scale():
    data = load("digits")
    network = build_arm({"model": "mlp", "norm": "batch", "seed": 0}, data)
    muon = make_optimizer(network, {"optimizer": "muon", "lr": 0.02, "weight_decay": 0.0})
    assert isinstance(muon, Joined)
    assert [len(group["params"]) for group in muon.param_groups] == [4, 4 + 6]
    twin = build_arm({"model": "mlp", "norm": "batch", "seed": 0}, data)
    alone = torch.optim.Muon(
        [p for p in twin.parameters() if p.ndim == 2], lr=0.02, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"
    )
    for net, optimizer in ((network, muon), (twin, alone)):
        data.loss(net(data.train[0][:32]), data.train[1][:32]).backward()
        optimizer.step()
    pairs = zip(network.parameters(), twin.parameters(), strict=True)
    assert all(torch.equal(a, b) == (a.ndim == 2) for a, b in pairs if a.grad.abs().max() > 1e-6)
    spheres = make_optimizer(network, {"optimizer": "sphere-sgd", "lr": 0.1}, data)
    on_spheres = [group["params"] for group in spheres.param_groups if group["geometry"] == "sphere"]
    assert sum(map(len, on_spheres)) == 3, "three hidden layers before batch norm; the last one is flat"


def test_schedules():
    for name in SCHEDULES:
        factor = make_schedule({"schedule": name, "steps": 20}) or (lambda _: 1.0)
        values = [factor(step) for step in range(20)]
        assert 0 <= min(values) <= max(values) <= 1 and max(values) > 0.9, name
        assert ("warmup" in name) == (values[0] < 0.6)
    assert make_schedule({"schedule": "cosine", "steps": 2})(1) == pytest.approx(0.5)


def test_clip_augment_schedule_and_own_functions_reach_the_loop():
    plain = run()
    for changed in (
        Recipe(clip=1e-3),
        Recipe(augment=True),
        Recipe(schedule="cosine"),
        Recipe(loss="recipes:loss"),
    ):
        other = run(recipe=changed, model="vgg" if changed.augment else "mlp")
        assert other.ok and other.last("test_loss") != plain.last("test_loss"), changed
    assert run(recipe=Recipe(train_step="recipes:step")).last("test_loss") == plain.last("test_loss")
    judged = run(recipe=Recipe(metric="recipes:error", better="lower"))
    assert judged.last("test_metric") == pytest.approx(1 - judged.last("test_accuracy"))


def test_own_metric_regression_of_images_and_text_are_compared_by_what_they_have(tmp_path):
    asked = {"rates": [0.05], "seeds": 1, "steps": 3, "size": "smoke", "executor": 1, "progress": False}
    own = ng.compare(
        model="recipes:factory", norms=["batch"], recipe=Recipe(metric="recipes:error", better="lower"), **asked,
        out="own",
    )  # fmt: skip
    assert "test error" in own.readings()[0].name and own.document.metrics[0].better == "lower"
    text = ng.compare(model="gpt", norms=["layer"], arms={"place": ["pre", "post"]}, **asked, batch=4, out="text")
    assert [row["place"] for row in text.rows] and set(text.chosen) == {"pre", "post"}
    assert text.document.metrics[0].name == "test_loss" and "test loss" in text.answer
    assert "--arm place=pre,post" in text.document.command
    row = text.rows[0]
    assert row["step_time"] > 0 and row["memory"] > 0
    pictures = comparison_study(model="recipes:network", data="recipes:pictures", norms=["as built"], rates=[0.1])
    assert pictures.fixed["target_loss"] is not None


def test_arms_are_any_knobs_and_names_say_what_differs():
    study = comparison_study(
        model="recipes:factory", norms=["none", "batch"], size="smoke", seeds=1,
        arms={"optimizer": ["sgd", "adamw"], "width": [4, 8], "clip": [None, 1.0]},
    )  # fmt: skip
    plan = first_round(study)
    assert len(plan) == 2 * 2 * 2 * 2 * 2 and study.fixed["factory_knobs"] == ["width"]
    assert {spec["lr"] for spec in plan if spec["optimizer"] == "adamw"} == {1e-3, 1e-2}, "each its own grid"
    assert name_arms([{"norm": "batch", "width": 4}, {"norm": "batch", "width": 8}]) == ["width 4", "width 8"]
    network = build_arm({**plan[0], "width": 8}, load("digits"))
    assert network[1].out_features == 8
    longer = comparison_study(model="mlp", norms=["batch"], arms={"steps": [2, 5]}, rates=[0.1], size="smoke", seeds=1)
    assert [execute(spec).readings[-1].step for spec in first_round(longer)] == [2, 5]
    with pytest.raises(InputError, match="It is tuned for each arm"):
        comparison_study(arms={"lr": [1.0]})
    with pytest.raises(UnknownNameError, match="knob of gpt"):
        comparison_study(model="gpt", norms=["layer"], arms={"plaice": ["pre"]})


def test_a_network_without_a_factory_has_its_normalizers_exchanged():
    study = comparison_study(model="recipes:network", rates=[0.1], size="smoke", seeds=1)
    assert study.scientific["norm"] == ["as built", "none", "batch", "layer", "group", "instance"]
    data = load("digits")
    kinds = {s["norm"]: type(build_arm(s, data)[1]).__name__ for s in first_round(study)}
    assert kinds["as built"] == "BatchNorm2d" and kinds["group"] == "GroupNorm" and kinds["none"] == "Identity"
    weights = [build_arm(s, data)[0].weight for s in first_round(study)]
    assert all(torch.equal(weights[0], other) for other in weights), "arms share their weights"


def test_a_live_module_is_compared_from_its_weights_and_goes_on(tmp_path, monkeypatch):
    torch.manual_seed(5)
    net = nn.Sequential(nn.Flatten(), nn.Linear(64, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 10))
    before = {name: value.clone() for name, value in net.state_dict().items()}
    asked = {"norms": ["as built", "layer"], "rates": [0.3], "seeds": 2, "steps": 4, "size": "smoke"}
    asked |= {"out": "live", "executor": 1, "progress": False}
    found = ng.compare(model=net, **asked)
    assert [row["norm"] for row in found.rows if row["n"] == 2] and len(found.rows) == 2 and found.counts == {"ok": 4}
    assert all(torch.equal(value, before[name]) for name, value in net.state_dict().items()), "it is left as it was"
    with Store(found.store, write=False) as store:
        specs = [run.spec for run in store.runs()]
    arms = [build_arm(spec, load("digits")) for spec in specs]
    assert all(torch.equal(arm[1].weight, net[1].weight) for arm in arms), "every seed starts from its weights"
    assert {type(arm[2]).__name__ for arm in arms} == {"BatchNorm1d", "LayerNorm"}
    assert ng.compare(model=specs[0]["model"], **asked).document.runs == found.document.runs, (
        "its file is the same model"
    )
    with torch.no_grad():
        net[1].weight[0, 0] += 1
    assert not set(ng.compare(model=net, **asked).document.runs) & set(found.document.runs), "other weights, other runs"
    local = type("Local", (nn.Sequential,), {"__module__": "__main__"})(*net)
    with pytest.raises(InputError, match="its class stands in a file of its own"):
        ng.compare(model=local, **{**asked, "executor": 2})
    assert ng.compare(model=local, **{**asked, "executor": None}).counts == {"ok": 4}, "in this process it is known"
    (tmp_path / "state.pt").write_bytes(b"no pickle")
    with pytest.raises(InputError, match="can be read here"):
        comparison_study(model=str(tmp_path / "state.pt"))
    with pytest.raises(InputError, match="a module has no knobs"):
        comparison_study(model=specs[0]["model"], arms={"width": [1, 2]})


def test_costs_grow_with_what_is_kept():
    spec = {"model": "mlp", "norm": "batch", "data": "digits", "lr": 0.1, "seed": 0, "steps": 4, "batch": 64}
    costs = measure_costs(
        {"small": spec, "large": {**spec, "batch": 512}, "adam": {**spec, "optimizer": "adamw"}}, seconds=0.5
    )
    assert costs["large"]["memory"].mean > 2 * costs["small"]["memory"].mean
    weights = sum(p.nbytes for p in build_arm(spec, load("digits")).parameters()) / 1e6
    gained = costs["adam"]["memory"].mean - costs["small"]["memory"].mean
    assert gained == pytest.approx(2 * weights, rel=0.01), "AdamW remembers two numbers per weight"
    assert costs["small"]["step_time"].mean > 0 and costs["small"]["step_time"].n > 1


@pytest.mark.parametrize(
    "settings, error, words",
    [
        ({"model": "recipes:deaf"}, InputError, "another network for each normalizer"),
        ({"data": "recipes:holes"}, DataError, "1 of 2048 numbers in the inputs nan or infinite"),
        ({"model": "recipes:network", "norms": ["weight", "group"]}, InputError, "of weights"),
        ({"recipe": Recipe(optimizer="adamm")}, UnknownNameError, "Did you mean 'adamw'"),
        ({"recipe": Recipe(schedule="cosin")}, UnknownNameError, "Did you mean 'cosine'"),
        ({"recipe": Recipe(optimizer="recipes:optimizer")}, InputError, "Pass --rates"),
        ({"recipe": Recipe(train_step="recipes:step", clip=1.0)}, InputError, "takes the place of clipping"),
        ({"recipe": Recipe(clip=-1.0)}, InputError, "not negative"),
        ({"seeds": 2, "raced": True}, InputError, "a race has 4 seeds or more"),
        ({"arms": {"clip": [1.0]}, "ddp": 2, "batch": 64}, InputError, "plain steps"),
    ],
)
def test_bad_input_is_one_sentence_before_the_first_run(settings, error, words):
    with pytest.raises(error, match=words):
        comparison_study(**{"model": "recipes:factory", "norms": ["none", "batch"], **settings})


def test_a_model_that_cannot_take_a_normalizer_is_named(monkeypatch):
    refusing = lambda *a, **k: type("S", (), {"refused": [("1", "its class")]})  # noqa: E731
    monkeypatch.setattr(sys.modules["normgauge.lab.models.build"], "swap_norms", refusing)
    with pytest.raises(ModelError, match="Leave group out"):
        comparison_study(model="recipes:network", norms=["group"])


def test_a_network_without_normalizers_is_not_called_normalized():
    with pytest.raises(ModelError, match="has normalizers to exchange"):
        comparison_study(model="recipes:bare", norms=["batch"])
    assert comparison_study(model="recipes:bare", norms=["none"], rates=[0.1]).scientific["norm"] == ["none"]


def test_a_metric_at_chance_or_without_a_number_is_said(tmp_path):
    asked = {"model": "recipes:factory", "norms": ["none", "batch"], "rates": [0.1], "steps": 2, "size": "smoke"}
    asked |= {"executor": 1, "progress": False, "seeds": 3}
    flat = ng.compare(**asked, recipe=Recipe(metric="recipes:chance"), out="flat")
    assert flat.answer.startswith("No recommendation") and "the same answer to every input gets 0.5" in flat.answer
    broken = ng.compare(**asked, recipe=Recipe(metric="recipes:broken_metric"), out="broken")
    assert set(broken.counts) == {"error"} and "returns one number" in broken.answer


def test_a_race_ends_in_a_sentence_keeps_what_it_ran_and_goes_on(tmp_path):
    asked = {"model": "recipes:factory", "norms": ["none", "batch"], "steps": 6, "seeds": 6, "rates": [0.3]}
    asked |= {"executor": 1, "progress": False, "out": "race"}
    poor = ng.compare(**asked, minutes=1e-9)
    assert not poor.decided and poor.answer.startswith("No recommendation") and "with more --minutes" in poor.answer
    rich = ng.compare(**asked, minutes=5)
    assert rich.counts["ok"] in (8, 12) and rich.answer, "one rate needs no tuning"
    assert "--minutes 5" in rich.document.command and rich.rows[0]["n"] in (4, 6)
    before = {run.provenance.machine and run.seconds for run in Store(rich.store).runs()}
    again = ng.compare(**asked, minutes=5)
    assert again.answer == rich.answer and {run.seconds for run in Store(rich.store).runs()} == before
    json.dumps(again.rows)
    assert math.isfinite(again.rows[0]["step_time"])


def test_a_module_is_not_left_in_float64():
    network = build_arm({"model": "recipes:network", "norm": "group", "seed": 0}, load("digits"))
    assert all(p.dtype == torch.float32 for p in network.parameters()) and isinstance(network[1], nn.GroupNorm)
