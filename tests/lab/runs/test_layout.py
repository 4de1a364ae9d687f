"""Channels-last memory in training: used where it was measured to be faster, and nothing else changes."""

import json
from pathlib import Path

import pytest
import torch
from torch import nn

from normgauge.lab import models
from normgauge.lab.data import Dataset
from normgauge.lab.runs.train import Layout, gains_from_channels_last, train

RESULTS = Path(__file__).parents[3] / "benchmarks" / "results" / "layout.json"
IMAGES = torch.randn(48, 3, 16, 16, generator=torch.Generator().manual_seed(0), dtype=torch.float64)


def task() -> Dataset:
    targets = torch.arange(len(IMAGES)) % 3
    return Dataset("drawn", "classification", (IMAGES, targets), (IMAGES, targets), (IMAGES, targets), 3)


class Foreign(nn.Module):
    def __init__(self):
        super().__init__()
        self.conv = nn.Conv2d(3, 4, 3)

    def forward(self, x):
        return self.conv(x).view(len(x), -1)  # fails on channels-last memory


class ForeignWeight(nn.Module):
    def forward(self, weight):
        return weight.view(len(weight), -1).view(weight.shape)  # fails on channels-last memory


class ForeignConv(nn.Conv2d):
    def forward(self, x):
        return super().forward(x.view(x.shape))


@pytest.mark.parametrize("norm", ["none", "batch", "layer", "weight", "weight_standardization", "lpinf_batch"])
def test_where_it_is_faster_training_is_the_same_up_to_rounding(norm, monkeypatch):
    def losses() -> tuple[list[float], nn.Module]:
        network = models.build("vgg8", norm, (3, 16, 16), 3, 0)
        optimizer = torch.optim.SGD(network.parameters(), lr=0.05, momentum=0.9)
        return train(network, task(), optimizer, steps=6, batch=16, seed=0).losses, network

    assert gains_from_channels_last(models.build("vgg8", norm, (3, 16, 16), 3, 0), IMAGES)
    moved, network = losses()
    assert all(p.is_contiguous() for p in network.parameters())
    monkeypatch.setattr("normgauge.lab.runs.train.SMALLEST_IMAGE", 10**6)
    usual, _ = losses()
    torch.testing.assert_close(torch.tensor(moved), torch.tensor(usual), rtol=1e-9, atol=0)


def test_steps_see_channels_last_memory_and_watchers_the_usual_one():
    network = models.build("vgg8", "batch", (3, 16, 16), 3, 0)
    convolution = next(module for module in network.modules() if isinstance(module, nn.Conv2d))
    seen = []
    convolution.register_forward_pre_hook(
        lambda module, inputs: seen.append(inputs[0].is_contiguous(memory_format=torch.channels_last))
    )
    watched = []

    def watch(step, network):
        watched.append(all(p.is_contiguous() for p in network.parameters()))

    optimizer = torch.optim.SGD(network.parameters(), lr=0.01)
    train(network, task(), optimizer, steps=2, batch=16, seed=0, at=range(3), watch=watch)
    assert seen == [True, True] and watched == [True] * 3


@pytest.mark.parametrize("norm", ["group", "instance", "rms", "ghost_batch", "noisy_batch", "whitening"])
def test_normalizers_that_lose_by_it_keep_the_usual_layout(norm):
    assert not gains_from_channels_last(models.build("vgg", norm, (3, 16, 16), 3, 0), IMAGES)


def test_small_images_flat_inputs_and_foreign_modules_keep_the_usual_layout():
    assert not gains_from_channels_last(models.build("vgg8", "batch", (3, 16, 16), 3, 0), IMAGES[..., :8, :8])
    assert not gains_from_channels_last(models.build("mlp", "batch", (12,), 3, 0), torch.zeros(4, 12))
    assert not gains_from_channels_last(nn.Sequential(nn.Flatten(), nn.Linear(768, 3)), IMAGES)
    assert not gains_from_channels_last(Foreign(), IMAGES)
    assert not gains_from_channels_last(nn.Sequential(nn.Conv2d(3, 4, 3), nn.GroupNorm(2, 4)), IMAGES)


def test_foreign_parametrizations_and_parametrized_foreign_layers_keep_the_usual_layout():
    own = nn.Conv2d(3, 4, 3)
    nn.utils.parametrize.register_parametrization(own, "weight", ForeignWeight())
    assert not gains_from_channels_last(nn.Sequential(own), IMAGES)
    theirs = nn.utils.parametrizations.weight_norm(ForeignConv(3, 4, 3))
    assert not gains_from_channels_last(nn.Sequential(theirs), IMAGES)
    assert gains_from_channels_last(nn.Sequential(nn.utils.parametrizations.weight_norm(nn.Conv2d(3, 4, 3))), IMAGES)


def test_an_error_leaves_the_usual_layout():
    network = models.build("vgg8", "batch", (3, 16, 16), 3, 0)
    layout = Layout(network, IMAGES)
    with pytest.raises(RuntimeError, match="stop"), layout.hold():
        raise RuntimeError("stop")
    assert layout.channels_last and all(p.is_contiguous() for p in network.parameters())


def test_the_rule_is_what_was_measured():
    rows = json.loads(RESULTS.read_text())["rows"]
    large = [row for row in rows if row["image"] >= 16]
    assert len(large) > 30 and {row["used"] for row in large} == {True, False}
    for row in large:
        shape = (3, row["image"], row["image"])
        used = gains_from_channels_last(models.build(row["model"], row["norm"], shape, 10, 0), torch.zeros(1, *shape))
        assert used == row["used"] == (row["speedup"] > 1), row
