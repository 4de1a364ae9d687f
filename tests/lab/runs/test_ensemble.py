"""The ensemble equals runs one by one: losses, parameters, stored statistics, readings; the dead disturb nobody."""

import copy

import pytest
import torch
from torch import nn

from normgauge.errors import InputError, ModelError
from normgauge.lab import data, models
from normgauge.lab.runs import ensemble
from normgauge.lab.runs.ensemble import fit_ensemble, train_ensemble
from normgauge.lab.runs.run import execute
from normgauge.lab.runs.stacking import Stack
from normgauge.lab.runs.train import train

SPEC = {
    "model": "mlp",
    "norm": "batch",
    "data": "digits",
    "steps": 5,
    "batch": 32,
    "measure_at": [0, 5],
    "measure_batch": 32,
    "target_loss": 2.2,
}


def points(task):
    """Return float64 data of a task, small enough for a tight comparison."""
    source = torch.Generator().manual_seed(1)
    inputs = torch.randn(90, 6, generator=source)
    targets = (inputs[:, 0] > 0).long() + (inputs[:, 1] > 0).long() if task == "classification" else inputs[:, :3] * 2
    parts = [(inputs[rows], targets[rows]) for rows in (slice(0, 60), slice(60, 75), slice(75, 90))]
    return data.Dataset(task, task, *parts, classes=3)


def alone(network, dataset, rate, seed, steps, batch):
    """Return the losses of a run on its own, by the loop of `lab.runs.train`."""
    optimizer = torch.optim.SGD(network.parameters(), lr=rate)
    return train(network, dataset, optimizer, steps=steps, batch=batch, seed=seed).losses


def flat_net(norm):
    """Return a 2-D net as the valley studies use it: one neuron, no bias."""
    layers = [nn.Linear(6, 3, bias=False)]
    layers += {"batch": [nn.BatchNorm1d(3, affine=False)], "layer": [nn.LayerNorm(3)], "none": []}[norm]
    return nn.Sequential(*layers)


def make(model, norm, seed):
    torch.manual_seed(seed)
    return flat_net(norm) if model == "flat" else models.build(model, norm, (6,), 3, seed)


@pytest.mark.parametrize("task", ["classification", "regression"])
@pytest.mark.parametrize("norm", ["none", "batch", "layer"])
@pytest.mark.parametrize("model", ["mlp", "dln", "flat"])
def test_members_equal_separate_runs(model, norm, task, monkeypatch):
    monkeypatch.setattr(ensemble, "CACHE_BYTES", 2 * 64 * 20 * 8)  # two or more chunks
    dataset = points(task)
    rates, seeds = [0.001, 0.002, 0.005, 0.01, 0.002], [0, 1, 2, 0, 3]
    networks = [make(model, norm, seed) for seed in seeds]
    twins = copy.deepcopy(networks)
    fits = fit_ensemble(networks, dataset, rates=rates, seeds=seeds, steps=7, batch=20)
    assert not any(fit.diverged for fit in fits)
    for fit, network, twin, rate, seed in zip(fits, networks, twins, rates, seeds, strict=True):
        losses = alone(twin, dataset, rate, seed, 7, 20)
        torch.testing.assert_close(torch.tensor(fit.losses), torch.tensor(losses), rtol=1e-9, atol=1e-11)
        for (name, ours), theirs in zip(network.state_dict().items(), twin.state_dict().values(), strict=True):
            torch.testing.assert_close(ours, theirs, rtol=1e-8, atol=1e-10, msg=name)


def test_full_batches_and_shared_seeds():
    dataset = points("regression")
    networks = [make("dln", "batch", 4) for _ in range(3)]
    twin = copy.deepcopy(networks[1])
    fits = fit_ensemble(networks, dataset, rates=[1e-3, 1e-2, 1e-1], seeds=[5, 5, 5], steps=4, batch=10_000)
    losses = alone(twin, dataset, 1e-2, 5, 4, 10_000)
    torch.testing.assert_close(torch.tensor(fits[1].losses), torch.tensor(losses), rtol=1e-9, atol=1e-11)
    assert fits[0].losses[0] == pytest.approx(fits[2].losses[0]) and fits[0].losses[-1] != fits[2].losses[-1]


@pytest.mark.parametrize("norm", ["none", "batch"])
def test_a_member_that_diverges_disturbs_nobody(norm):
    dataset = points("regression")
    calm = [1e-3, 1e-3, 2e-3]
    quiet = fit_ensemble(
        [make("dln", norm, s) for s in range(3)], dataset, rates=calm, seeds=[0, 1, 2], steps=6, batch=20
    )
    networks = [make("dln", norm, s) for s in (0, 7, 1, 8, 2)]
    wild = fit_ensemble(
        networks, dataset, rates=[1e-3, 1e9, 1e-3, float("inf"), 2e-3], seeds=[0, 7, 1, 8, 2], steps=6, batch=20
    )
    for calm_fit, place in zip(quiet, (0, 2, 4), strict=True):
        torch.testing.assert_close(torch.tensor(wild[place].losses), torch.tensor(calm_fit.losses), rtol=1e-12, atol=0)
    assert wild[1].diverged and wild[3].diverged and wild[1].diverged_at <= 6
    assert len(wild[1].losses) == wild[1].diverged_at
    assert not any(fit.diverged for fit in quiet)


def test_specs_give_the_readings_of_execute():
    torch.set_default_dtype(torch.float32)
    specs = [{**SPEC, "lr": rate, "seed": seed} for rate in (0.05, 0.2) for seed in (0, 1)]
    specs.insert(2, {**SPEC, "norm": "none", "lr": 1e8, "seed": 0})
    specs.insert(3, {**SPEC, "norm": "none", "lr": 0.1, "seed": 0})
    specs.append({**SPEC, "model": "nothing", "lr": 0.1, "seed": 0})
    for ours, spec in zip(train_ensemble(specs), specs, strict=True):
        theirs = execute(spec)
        assert (ours.spec, ours.status) == (theirs.spec, theirs.status)
        assert [(r.step, r.name, r.status) for r in ours.readings] == [
            (r.step, r.name, r.status) for r in theirs.readings
        ]
        for mine, other in zip(ours.readings, theirs.readings, strict=True):
            if mine.status == "ok" and mine.name in (
                "validation_loss",
                "test_loss",
                "train_loss",
                "weight_norm",
                "steps_to_target",
            ):
                assert mine.value == pytest.approx(other.value, rel=1e-3), mine.name
        assert ours.provenance == theirs.provenance


def test_watching_sees_each_member_up_to_date():
    dataset, seen = points("classification"), []
    networks = [make("mlp", "batch", seed) for seed in (0, 1)]

    def watch(member, step, network):
        assert network is networks[member]
        seen.append((member, step, float(network[-1].weight.detach().norm())))

    fit_ensemble(networks, dataset, rates=[0.1, 0.1], seeds=[0, 1], steps=2, batch=20, at={0, 1, 2}, watch=watch)
    assert [(member, step) for member, step, _ in seen] == [(m, s) for s in (0, 1, 2) for m in (0, 1)]
    assert len({value for member, _, value in seen if member == 0}) == 3


def test_what_cannot_be_stacked_is_refused_or_run_alone():
    with pytest.raises(ModelError, match="Got Conv2d"):
        Stack([nn.Sequential(nn.Conv2d(1, 1, 3))])
    with pytest.raises(ModelError, match="one structure"):
        Stack([nn.Linear(2, 3), nn.Linear(2, 4)])
    with pytest.raises(ModelError, match="Got ParametrizedLinear"):
        Stack([nn.utils.parametrizations.weight_norm(nn.Linear(2, 3))])
    with pytest.raises(InputError, match="one rate and one seed"):
        fit_ensemble([nn.Linear(6, 3)], points("regression"), rates=[], seeds=[0], steps=1, batch=4)
    torch.set_default_dtype(torch.float32)
    specs = [{**SPEC, "norm": "weight", "lr": 0.1, "seed": s, "steps": 1, "measure_at": [1]} for s in (0, 1)]
    ours = train_ensemble(specs)
    assert [run.readings for run in ours] == [execute(spec).readings for spec in specs]
