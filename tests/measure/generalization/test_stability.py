"""`ng.stability` against ridge regression, where the retrained model is known in closed form."""

import math

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import DataError, InputError
from reference.generalization import ridge


def squared(output, target):
    return (output - target).square().squeeze(1)


def ridge_model(penalty):
    def train(data, seed):
        model = nn.Linear(data[0].shape[1], 1, bias=False)
        with torch.no_grad():
            model.weight.copy_(ridge(*data, penalty).T)
        return model

    return train


def sample(count, seed):
    source = torch.Generator().manual_seed(seed)
    x = torch.randn(count, 3, generator=source)
    return x, x.sum(1, keepdim=True) + 0.1 * torch.randn(count, 1, generator=source)


def test_ridge_is_the_closed_form_for_every_pair():
    data, fresh, points = sample(30, 0), sample(8, 1), sample(50, 2)
    found = ng.stability(ridge_model(0.1), data, fresh, loss=squared, points=points, pairs=5, seed=3)
    w = ridge(*data, 0.1)
    for number, pair in enumerate(found.pairs):
        x, y = data[0].clone(), data[1].clone()
        x[pair.replaced], y[pair.replaced] = fresh[0][number], fresh[1][number]
        v = ridge(x, y, 0.1)
        away = ((points[0] @ v - points[1]) ** 2 - (points[0] @ w - points[1]) ** 2).abs()
        assert pair.largest == pytest.approx(float(away.max())) and pair.mean == pytest.approx(float(away.mean()))
        z, t = data[0][pair.replaced], data[1][pair.replaced]
        assert pair.at_replaced == pytest.approx(float(((z @ v - t) ** 2 - (z @ w - t) ** 2).abs()))
    assert found.uniform == max(p.largest for p in found.pairs)
    assert found.mean == pytest.approx(sum(p.mean for p in found.pairs) / 5)
    spread = torch.tensor([p.mean for p in found.pairs]).std() / math.sqrt(5)
    assert found.mean_error == pytest.approx(float(spread))
    assert len({p.replaced for p in found.pairs}) == 5


def test_more_penalty_and_more_samples_are_more_stable():
    base = ng.stability(ridge_model(0.1), sample(30, 0), sample(8, 1), loss=squared).mean
    assert ng.stability(ridge_model(1e4), sample(30, 0), sample(8, 1), loss=squared).mean < base
    assert ng.stability(ridge_model(0.1), sample(600, 0), sample(8, 1), loss=squared).mean < base / 5


def test_seeds_are_compared_and_the_global_stream_is_left_alone():
    def train(data, seed):
        torch.manual_seed(seed)
        model = nn.Sequential(nn.Linear(3, 4), nn.Dropout(0.5), nn.Linear(4, 1))
        return model.train()

    state = torch.get_rng_state()
    found = ng.stability(train, sample(10, 0), sample(4, 1), loss=squared, pairs=2, seeds=2)
    assert torch.equal(state, torch.get_rng_state())
    assert found.uniform == 0.0  # the data are not used, the seed is the same, dropout is off
    assert found.seed_noise > 0 and len(found.seeds) == 2 and math.isnan(found.seeds[0].at_replaced)
    assert found.points == 14


def test_the_model_comes_back_in_the_mode_it_came():
    kept = nn.Linear(3, 1).train()
    ng.stability(lambda data, seed: kept, sample(5, 0), sample(2, 1), loss=squared, pairs=1)
    assert kept.training


def test_it_prints_frames_and_draws():
    pytest.importorskip("altair")
    found = ng.stability(ridge_model(0.1), sample(30, 0), sample(8, 1), loss=squared, pairs=2, seeds=1)
    text = str(found)
    assert "another seed alone" in text and "4 trainings" in text and "seed 0" in text
    assert list(found.frame()["changed"]) == ["sample", "sample", "seed"]
    assert found.chart().to_dict()["mark"]
    one = ng.stability(ridge_model(0.1), sample(30, 0), sample(8, 1), loss=squared, pairs=1)
    assert math.isnan(one.mean_error) and math.isnan(one.seed_noise) and "another seed" not in str(one)


def test_wrong_use_is_explained():
    with pytest.raises(InputError, match="fewer pairs"):
        ng.stability(ridge_model(0.1), sample(30, 0), sample(2, 1), loss=squared, pairs=3)
    with pytest.raises(DataError, match="one value for each"):
        ng.stability(ridge_model(0.1), sample(30, 0), sample(8, 1), loss=lambda o, t: (o - t).square().mean())
