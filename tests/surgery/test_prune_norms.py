"""Pruning by a normalizer's scale: the smaller model is what it claims to be, and the user's model is not touched."""

import copy

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.errors import InputError, ModelError, UnknownNameError
from normgauge.lab import models
from normgauge.surgery import channel_paths, prune_norms, scale_l1


def trained_looking(model, seed=0):
    """Give normalizers scales, shifts and statistics that differ between channels."""
    source = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for module in model.modules():
            if getattr(module, "running_mean", None) is not None:
                count = len(module.weight)
                module.weight.copy_(torch.rand(count, generator=source) + 0.1)
                module.bias.copy_(torch.randn(count, generator=source))
                module.running_mean.copy_(torch.randn(count, generator=source))
                module.running_var.copy_(torch.rand(count, generator=source) + 0.5)
    return model


def chain():
    return nn.Sequential(nn.Linear(5, 8), nn.BatchNorm1d(8), nn.ReLU(), nn.Linear(8, 6), nn.BatchNorm1d(6), nn.Tanh(),
                         nn.Linear(6, 3))  # fmt: skip


def convolutional():
    return nn.Sequential(
        nn.Conv2d(2, 6, 3, padding=1, bias=False), nn.BatchNorm2d(6), nn.ReLU(), nn.MaxPool2d(2),
        nn.Conv2d(6, 5, 3, padding=1), nn.BatchNorm2d(5), nn.GELU(), nn.Flatten(), nn.Linear(5 * 16, 4),
    )  # fmt: skip


@pytest.mark.parametrize("by", ["gamma", "similar", "random", "correlation"])
@pytest.mark.parametrize("build, shape", [(chain, (5,)), (convolutional, (2, 8, 8))])
def test_the_smaller_model_is_the_masked_one(by, build, shape):
    model = trained_looking(build()).double()
    before = copy.deepcopy(model.state_dict())
    done = prune_norms(model, by, 0.4, torch.randn(7, *shape))
    assert done.proof < 1e-12
    assert sum(p.numel() for p in done.model.parameters()) < sum(p.numel() for p in model.parameters())
    assert all(torch.equal(before[name], value) for name, value in model.state_dict().items())
    inputs = torch.randn(3, *shape)
    assert torch.equal(done.undo().eval()(inputs), model.eval()(inputs))
    total = sum(row["channels"] for row in done.rows)
    assert sum(row["kept"] for row in done.rows) == total - round(0.4 * total)


def test_channels_without_scale_cost_nothing():
    model = trained_looking(chain()).double()
    with torch.no_grad():
        model[1].weight[:4] = 0
        model[4].weight[2:5] = 0
    done = prune_norms(model, "gamma", 0.5, torch.randn(7, 5))
    assert done.change < 1e-12
    assert done.model[0].out_features == 4 and done.model[3].out_features == 3
    assert prune_norms(model, "random", 0.5, torch.randn(7, 5)).change > 1e-3


def test_real_twins_cost_nothing_and_equal_scales_alone_do():
    model = trained_looking(chain()).double()
    with torch.no_grad():
        for index in (1, 4):
            for name in ("weight", "bias", "running_mean", "running_var"):
                getattr(model[index], name)[1] = getattr(model[index], name)[0]
    false_twins = prune_norms(model, "similar", 2 / 14, torch.randn(7, 5))
    with torch.no_grad():
        for index in (0, 3):
            model[index].weight[1] = model[index].weight[0]
            model[index].bias[1] = model[index].bias[0]
    assert prune_norms(model, "similar", 2 / 14, torch.randn(7, 5)).change < 1e-12
    assert false_twins.change > 1e-3


def test_training_goes_on_after_pruning():
    done = prune_norms(trained_looking(convolutional()), "gamma", 0.5, torch.randn(3, 2, 8, 8))
    assert done.model.training
    done.model(torch.randn(4, 2, 8, 8)).sum().backward()
    assert all(p.grad is not None for p in done.model.parameters())


def test_residual_additions_and_shared_statistics_are_left_alone():
    network = trained_looking(models.build("resnet", "batch", (1, 8, 8), 10, 0))
    paths = channel_paths(network, torch.randn(2, 1, 8, 8))
    assert any("addition" in path.blocked for path in paths) and any(not path.blocked for path in paths)
    assert prune_norms(network, "gamma", 0.3, torch.randn(2, 1, 8, 8)).proof < 1e-5
    grouped = nn.Sequential(nn.Conv2d(2, 4, 3), nn.GroupNorm(2, 4), nn.Conv2d(4, 2, 3))
    done = prune_norms(grouped, "gamma", 0.5, torch.randn(2, 2, 8, 8))
    assert "shared" in done.rows[0]["what"] and done.change == 0
    assert done.meaning().startswith("Nothing was done") and "the function with them" not in done.meaning()
    assert "shared" in str(done)


def test_wrong_use_is_explained():
    with pytest.raises(UnknownNameError, match="gamma"):
        prune_norms(chain(), "gama", 0.5, torch.randn(2, 5))
    with pytest.raises(InputError, match="share"):
        prune_norms(chain(), "gamma", 1.0, torch.randn(2, 5))

    class Branching(nn.Module):
        def forward(self, x):
            return x if x.sum() > 0 else -x

    with pytest.raises(ModelError, match="trace"):
        prune_norms(Branching(), "gamma", 0.5, torch.randn(2, 5))


def test_every_layer_keeps_a_channel_and_the_facade_has_it():
    done = ng.prune_norms(trained_looking(chain()), "gamma", 0.99, torch.randn(2, 5))
    assert all(row["kept"] >= 1 for row in done.rows)
    drawn = done.chart().to_dict()["datasets"].values()
    assert {row["y"] for rows in drawn for row in rows} == {1, 6, 8}
    assert len(done.frame()) == 3


def test_scale_l1_is_the_sum_of_absolute_scales():
    model = trained_looking(chain())
    assert scale_l1(model).item() == pytest.approx((model[1].weight.abs().sum() + model[4].weight.abs().sum()).item())
    assert scale_l1(nn.Linear(2, 2)).item() == 0


def widened(model, seed=0):
    """Return a network of twice the hidden units and the same function: copies at other scales, in another order."""
    source, wide = torch.Generator().manual_seed(seed), copy.deepcopy(model)
    for index in (0, 3):
        layer, norm, reader = (wide[index + k] for k in (0, 1, 3))
        count = layer.out_features
        order = torch.randperm(2 * count, generator=source)
        scales, shares = torch.exp(0.5 * torch.randn(count, generator=source)), torch.rand(count, generator=source)
        wide[index], wide[index + 1] = nn.Linear(layer.in_features, 2 * count), nn.BatchNorm1d(2 * count)
        wide[index + 3] = nn.Linear(2 * count, reader.out_features)
        with torch.no_grad():
            for name in ("weight", "bias"):
                getattr(wide[index], name).copy_(torch.cat([getattr(layer, name)] * 2)[order])
                copies = [getattr(norm, name), getattr(norm, name) * scales]
                getattr(wide[index + 1], name).copy_(torch.cat(copies)[order])
            for name in ("running_mean", "running_var"):
                getattr(wide[index + 1], name).copy_(torch.cat([getattr(norm, name)] * 2)[order])
            parts = [reader.weight * shares, reader.weight * (1 - shares) / scales]
            wide[index + 3].weight.copy_(torch.cat(parts, 1)[:, order])
            wide[index + 3].bias.copy_(reader.bias)
    return wide


def test_correlation_finds_what_a_widening_added_and_the_others_do_not():
    torch.manual_seed(0)
    model = trained_looking(chain()).eval()
    model[5] = nn.ReLU()
    wide, inputs = widened(model).eval(), torch.randn(300, 5)
    assert torch.allclose(wide(inputs), model(inputs))
    changes = {by: prune_norms(wide, by, 0.5, inputs).change for by in ("correlation", "gamma", "random", "similar")}
    assert changes["correlation"] < 1e-6 < 0.1 < min(changes[by] for by in ("gamma", "random", "similar"))


def test_the_bound_of_correlation_holds_for_what_the_reader_gets():
    model = nn.Sequential(nn.Linear(5, 12), nn.BatchNorm1d(12), nn.ReLU(), nn.Linear(12, 4))
    model, inputs = trained_looking(model).eval(), torch.randn(200, 5)
    for share in (0.25, 0.5, 0.75):
        done = prune_norms(model, "correlation", share, inputs)
        moved = (done.model.eval()(inputs) - model(inputs)).square().sum(1).mean().sqrt()
        assert moved <= (done.rows[0]["bound"] or 1e-9) * (1 + 1e-9)
