"""Drift against moments computed in the open and a really recalibrated copy."""

import math

import pytest
import torch
from torch import nn

from normgauge.errors import DataError
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
    assert none.layers == () and "no normalizer stores statistics" in str(none)


def test_three_ways_out():
    found = drift(network(), loader(1.0))
    assert "(3 forwards)" in str(found) and "recalibration changes the outputs by" in str(found)
    assert list(found.frame()["layer"]) == ["1", "5"]
    assert "shift of the mean" in found.chart().to_dict()["title"]
