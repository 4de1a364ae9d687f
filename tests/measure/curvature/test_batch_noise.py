"""Mini-batch noise against the enumeration of every mini-batch of tiny data sets."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

import normgauge as ng
from normgauge.errors import InputError, OutOfMemoryError
from normgauge.testing import check_result
from reference.batch_noise import all_batches
from reference.curvature import dense_hessian, hand_written
from reference.tracks import same, tracks


def network(seed, norm=True):
    torch.manual_seed(seed)
    layers = [nn.Linear(3, 4), *([nn.BatchNorm1d(4)] if norm else [nn.LayerNorm(4)]), nn.Tanh(), nn.Linear(4, 3)]
    return nn.Sequential(*layers).double()


def batch(count=9, seed=0):
    source = torch.Generator().manual_seed(seed)
    return torch.randn(count, 3, generator=source).double(), torch.arange(count) % 3


@pytest.mark.parametrize("seed", range(10))
def test_every_estimate_is_within_its_error_of_the_enumeration(seed):
    model, data = network(seed), batch(seed=seed)
    objective = ng.Objective(model, F.cross_entropy, data, mode="train")
    before = tracks(model)
    found = ng.batch_noise(objective, sizes=[3, 6], draws=60, seed=seed)
    assert same(before, tracks(model))
    check_result(found)
    dense = dense_hessian(hand_written(network(seed)), F.cross_entropy, [data], "train")
    for entry in found.sizes:
        wanted = all_batches(network(seed), F.cross_entropy, data, entry.size)
        for name in ("bias", "sampling", "statistics", "cross", "total", "jitter"):
            value, error = getattr(entry, name)
            assert abs(value - float(wanted[name])) <= 4.5 * error + 1e-9, (entry.size, name)
        noise = wanted["noise"]
        curvature = float(torch.einsum("ki,ij,kj->", noise, dense, noise) / noise.square().sum())
        assert abs(entry.curvature.value - curvature) <= 6 * entry.curvature.error + 1e-9
    mean, error = found.mean_curvature
    assert abs(mean - float(dense.trace()) / len(dense)) <= 5 * error + 1e-9


def test_without_batch_statistics_there_is_no_bias_and_sampling_goes_as_one_over_the_size():
    objective = ng.Objective(network(1, norm=False), F.cross_entropy, batch(64), mode="train")
    found = ng.batch_noise(objective, draws=30)
    check_result(found)
    assert [entry.size for entry in found.sizes] == [4, 8, 16, 32]
    assert all(entry.bias.value == entry.statistics.value == entry.jitter.value == 0 for entry in found.sizes)
    power, error = found.exponents["sampling"]
    assert abs(power + 1) < 3 * error < 0.5 and "statistics" not in found.exponents
    assert "no batch statistics are seen" in found.meaning()


def test_small_batches_are_biased_and_larger_ones_less():
    model, (inputs, _) = network(2), batch(96)
    labels = inputs.argmax(-1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
    for _ in range(150):  # near a minimum of the whole loss its gradient is small, that of small batches is not
        optimizer.zero_grad()
        F.cross_entropy(model(inputs), labels).backward()
        optimizer.step()
    objective = ng.Objective(model, F.cross_entropy, (inputs, labels), mode="train")
    found = ng.batch_noise(objective, sizes=[3, 6, 12], draws=60)
    small, *_, large = found.sizes
    assert small.bias.value > 2 * large.bias.value and small.statistics > large.statistics
    assert found.exponents["bias"][0] < -0.5 and found.exponents["statistics"][0] < -0.5
    assert "biased beyond 0.1" in found.meaning()


def test_batches_are_joined_costs_are_those_stated_and_bad_input_is_refused():
    data = batch(24)
    pieces = [(data[0][:10], data[1][:10]), (data[0][10:], data[1][10:])]
    model = network(3)
    one, two = (
        ng.batch_noise(ng.Objective(model, F.cross_entropy, d, mode="train"), sizes=[6]) for d in (data, pieces)
    )
    assert one.sizes == two.sizes
    draws, share = 16, 6 / 24
    assert one.cost.gradients == pytest.approx(2 + draws * (2 / 3 + share), rel=0.1)
    assert one.cost.forwards == pytest.approx(draws * share, rel=0.1) and one.cost.products == 16 + draws
    objective = ng.Objective(model, F.cross_entropy, data, mode="train")
    for settings in ({"sizes": [1]}, {"sizes": [24]}, {"draws": 2}):
        with pytest.raises(InputError, match="sizes lie between 2 and 23"):
            ng.batch_noise(objective, **settings)
    step = ng.Objective.from_step(model, lambda m, b: m(b[0]).sum(), data, mode="train")
    with pytest.raises(InputError, match="has a loss"):
        ng.batch_noise(step)


def test_regression_has_no_decisions():
    model = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1)).float()
    data = (torch.randn(16, 3).float(), torch.randn(16, 1).float())
    found = ng.batch_noise(ng.Objective(model, F.mse_loss, data, mode="train"), sizes=[4, 8])
    check_result(found)
    assert math.isnan(found.sizes[0].jitter.value) and "decisions" not in found.meaning()


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_sees_the_statistics_too(dtype):
    def measured(kind, norm):
        torch.manual_seed(0)
        model = nn.Sequential(nn.Linear(3, 8), norm, nn.ReLU(), nn.Linear(8, 3)).to(kind)
        data = (torch.randn(32, 3).to(kind), torch.randint(3, (32,)))
        objective = ng.Objective(model, F.cross_entropy, data, mode="train")
        return ng.batch_noise(objective, sizes=[8]).sizes[0].statistics.value

    full = measured(torch.float32, nn.BatchNorm1d(8))
    assert measured(dtype, nn.BatchNorm1d(8)) == pytest.approx(full, rel=0.1) and full > 0.1
    assert measured(dtype, nn.LayerNorm(8)) == 0


def test_statistics_are_never_more_than_all_of_the_noise():
    torch.manual_seed(0)
    data = (torch.randn(8, 4), torch.randn(8, 4))
    found = ng.batch_noise(ng.Objective(nn.BatchNorm1d(4), F.mse_loss, data, mode="train"), sizes=[2], draws=4)
    part = found.sizes[0].statistics.value / (found.sizes[0].statistics.value + found.sizes[0].sampling.value)
    assert found.sizes[0].statistics.value > found.sizes[0].total.value  # the cross term is negative
    assert f"{part:.0%} of the noise" in found.meaning()


def test_memory_is_kept_refused_before_the_work_and_changes_no_number(monkeypatch):
    objective = ng.Objective(network(4), F.cross_entropy, batch(24), mode="train")
    row = objective.dimension * 8
    free, tight = (ng.batch_noise(objective, sizes=[4, 8], memory=memory) for memory in (None, 8 * row))
    assert tight.sizes == free.sizes and free.cost.gradients < tight.cost.gradients
    monkeypatch.setattr("normgauge.objective.Objective.graph", None)  # no work
    with pytest.raises(OutOfMemoryError, match=rf"8 vectors of {objective.dimension} entries .*memory={8 * row}"):
        ng.batch_noise(objective, sizes=[4], memory=8 * row - 1)
