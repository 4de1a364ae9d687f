"""Drift against moments computed in the open and a really recalibrated copy."""

import math

import pytest
import torch
from torch import nn

from normgauge.errors import DataError
from normgauge.lab import data, models
from normgauge.lab.runs.train import train
from normgauge.measure.decisions.drift import drift
from reference.drift import recalibrated_by_inputs
from reference.tracks import same, tracks


def network():
    model = nn.Sequential(
        nn.Conv2d(1, 3, 3),
        nn.BatchNorm2d(3),
        nn.ReLU(),
        nn.Flatten(),
        nn.Linear(27, 4),
        nn.BatchNorm1d(4),
        nn.Linear(4, 3),
    )
    for _ in range(30):
        model(torch.randn(16, 1, 5, 5))
    return model.eval()


def loader(shift=0.0, scale=1.0):
    source = torch.Generator().manual_seed(1)
    return [
        (shift + scale * torch.randn(8, 1, 5, 5, generator=source), torch.randint(3, (8,), generator=source))
        for _ in range(3)
    ]


def test_equals_moments_and_recalibration_in_the_open():
    model, data = network(), loader(1.0, 2.0)
    before = tracks(model)
    found = drift(model, data)
    assert same(before, tracks(model))
    with torch.no_grad():
        hidden = torch.cat([model[0](x) for x, _ in data])
        old = model[1].running_var + model[1].eps
        shift = (hidden.mean((0, 2, 3)) - model[1].running_mean) / old.sqrt()
        ratio = (hidden.movedim(1, -1).reshape(-1, 3).var(0) + model[1].eps) / old
        twin = recalibrated_by_inputs(model, [x for x, _ in data])
        x, y = (torch.cat(part) for part in zip(*data, strict=True))
        stored, renewed = model(x), twin(x)
    first, second = found.layers
    assert first.layer == "1" and second.layer == "5"
    assert first.mean_shift == pytest.approx(float(shift.square().mean().sqrt()))
    assert first.worst_shift == pytest.approx(float(shift.abs().max()))
    assert first.log_variance_ratio == pytest.approx(float(ratio.log().square().mean().sqrt()))
    assert first.divergence == pytest.approx(float((ratio - 1 - ratio.log() + shift.square()).mean() / 2))
    moved = (twin[5].running_mean - model[5].running_mean) / (model[5].running_var + model[5].eps).sqrt()
    assert second.recalibrated_shift == pytest.approx(float(moved.square().mean().sqrt()))
    assert found.output_change == pytest.approx(float((renewed - stored).norm() / stored.norm()))
    assert found.decisions_changed == pytest.approx(float((renewed.argmax(1) != stored.argmax(1)).double().mean()))
    assert found.accuracy == pytest.approx(float((stored.argmax(1) == y).double().mean()))
    assert found.recalibrated_accuracy == pytest.approx(float((renewed.argmax(1) == y).double().mean()))


def test_farther_data_drift_farther():
    model = network()
    shifts = [drift(model, loader(shift)).layers[0].mean_shift for shift in (0.0, 1.0, 3.0)]
    assert shifts == sorted(shifts) and shifts[0] < 3 * drift(model, loader()).layers[0].floor + 0.2


def trained(kind, batch, rate):
    """A network trained on the digits, and unseen digits in batches."""
    torch.set_default_dtype(torch.float32)
    digits = data.load("digits")
    model = models.build(kind, "batch", digits.shape, digits.classes, 0)
    train(model, digits, torch.optim.SGD(model.parameters(), lr=rate), steps=60, batch=batch, seed=0)
    return model, list(zip(*(part[:256].split(batch) for part in digits.test), strict=True))


@pytest.mark.parametrize(("kind", "batch", "rate"), [("mlp", 128, 0.1), ("vgg", 128, 0.1), ("vgg", 16, 0.03)])
def test_a_healthy_network_is_near_the_floor_and_a_sick_one_far_above(double_precision, kind, batch, rate):
    model, unseen = trained(kind, batch, rate)
    healthy = drift(model, unseen)
    for entry in healthy.layers:
        assert 0.2 < entry.mean_shift / entry.floor < 5 and entry.cause == "", entry
        assert entry.log_variance_ratio < 3 * entry.variance_floor
    assert "leave them" in healthy.meaning()
    for shift, scale in ((2.0, 1.0), (0.0, 10.0), (0.0, 0.01)):
        sick = drift(model, [(shift + scale * x, y) for x, y in unseen])
        assert sick.layers[0].cause == "shifted" and "the data shifted" in sick.meaning(), (shift, scale)


def test_the_floor_is_what_sampling_gives():
    """Statistics stored from batches of 16 and fresh data of the same law: the mean of many shifts is the floor."""
    torch.manual_seed(0)
    shifts, floors = [], []
    for _ in range(40):
        layer = nn.BatchNorm2d(3)
        for _ in range(40):
            layer(torch.randn(16, 3, 1, 1) + 0.1 * torch.randn(16, 3, 4, 4))  # pixels of a sample are nearly equal
        fresh = torch.randn(16, 3, 1, 1) + 0.1 * torch.randn(16, 3, 4, 4)
        (entry,) = drift(nn.Sequential(layer, nn.Conv2d(3, 1, 1)), [fresh]).layers
        shifts.append(entry.mean_shift**2)
        floors.append(entry.floor**2)
    assert sum(shifts) / sum(floors) == pytest.approx(1.0, rel=0.3)


def test_the_verdict_names_the_cause():
    far = loader(5.0, 4.0)
    fresh = nn.Sequential(nn.BatchNorm2d(1), nn.Flatten(), nn.Linear(25, 3))
    told = drift(fresh, far)
    assert told.layers[0].cause == "never updated" and "as they were made" in told.meaning()
    still = network()
    still[1].momentum = 0.0
    assert "its momentum is 0" in drift(still, loader(50.0)).meaning()
    part = network()
    for _ in range(3):
        part[1].eval(), part[5].train()
        part(torch.randn(16, 1, 5, 5))
    part.eval()
    told = drift(part, loader(50.0)).layers[0]
    assert (told.cause, told.sentence) == ("frozen", "it was updated 30 times, others 33 times")
    sick = network()
    sick[1].running_var[0] = math.nan
    told = drift(sick, loader())
    assert told.layers[0].cause == "poisoned" and "'1' is poisoned" in told.meaning() and told.status == "diverged"
    assert math.isnan(told.accuracy) and told.recalibrated and "nan" not in str(told).replace("finite", "")
    sick.load_state_dict(told.recalibrated, strict=False)
    assert drift(sick, loader()).layers[0].cause == ""


def test_recalibrated_statistics_can_be_kept():
    model, data = network(), loader(1.0, 2.0)
    twin = recalibrated_by_inputs(model, [x for x, _ in data])
    before = tracks(model)
    found = drift(model, data)
    assert same(before, tracks(model))
    model.load_state_dict(found.recalibrated, strict=False)
    for name in found.recalibrated:
        torch.testing.assert_close(model.state_dict()[name], twin.state_dict()[name])
    whole = nn.BatchNorm1d(2)
    assert set(drift(whole, [torch.randn(8, 2)]).recalibrated) == {"running_mean", "running_var"}


def test_data_that_are_not_finite_are_named():
    data = loader()
    data[1][0][0, 0, 0, :2] = math.nan
    with pytest.raises(DataError, match="2 of 200 numbers in batch 1 nan or infinite"):
        drift(network(), data)


def test_data_of_any_form():
    model, data = network(), loader()
    dataset = torch.utils.data.TensorDataset(*(torch.cat(part) for part in zip(*data, strict=True)))
    shuffled = torch.utils.data.DataLoader(dataset, batch_size=8, shuffle=True)
    whole = drift(model, (torch.cat([x for x, _ in data]), torch.cat([y for _, y in data])))
    assert drift(model, shuffled).layers[0].mean_shift == pytest.approx(whole.layers[0].mean_shift)
    alone = drift(model, iter([x for x, _ in data]))
    assert alone.layers[0].mean_shift == pytest.approx(whole.layers[0].mean_shift) and math.isnan(alone.accuracy)
    assert drift(model, data, batches=1).samples == 8
    with pytest.raises(DataError, match="at least one batch"):
        drift(model, [])
    with pytest.raises(DataError, match="loader gives batches"):
        drift(model, 3)


def test_what_cannot_be_measured_is_said():
    class Idle(nn.Module):
        def __init__(self):
            super().__init__()
            self.used, self.idle, self.head = nn.BatchNorm1d(2), nn.BatchNorm1d(2), nn.Linear(2, 2)

        def forward(self, x):
            return self.head(self.used(x))

    found = drift(Idle(), [(torch.randn(4, 2), torch.zeros(4).long())])
    assert [entry.status for entry in found.layers] == ["ok", "skipped"] and "not called" in found.layers[1].sentence
    single = drift(Idle(), [(torch.randn(1, 2), torch.zeros(1).long()), (torch.randn(1, 2), torch.zeros(1).long())])
    assert "no recalibration" in single.sentence and math.isfinite(single.layers[0].mean_shift)
    none = drift(nn.Sequential(nn.Linear(2, 2), nn.LayerNorm(2)), [torch.randn(4, 2)])
    assert none.layers == () and "no normalizer stores statistics" in str(none) and "nan" not in str(none)


def test_three_ways_out():
    found = drift(network(), loader(1.0))
    assert "(3 forwards)" in str(found) and "recalibration changes the outputs by" in str(found)
    assert list(found.frame()["layer"]) == ["1", "5"]
    assert "shift of the mean" in found.chart().to_dict()["title"]


@pytest.mark.parametrize("samples", [1, 2])
def test_few_samples_fit_no_statistics(samples):
    torch.manual_seed(0)
    model = nn.Sequential(nn.Conv2d(3, 4, 3), nn.BatchNorm2d(4))
    nn.init.constant_(model[1].running_var, 0.3)  # ten times what these have, but two samples cannot know
    said = drift(model, 0.3 * torch.randn(samples, 3, 4, 4)).meaning()
    assert "too few to tell" in said and "leave them" not in said
