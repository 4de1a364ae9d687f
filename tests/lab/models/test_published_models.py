"""The papers' networks at their published size: they are what they are called, and train for one step."""

import pytest
import torch

from normgauge.lab import models
from normgauge.lab.models.build import FACTORIES

# Parameters of the published networks with 1000 classes and 224x224 images (VGG-16 with its biases).
PUBLISHED_SIZES = {
    "resnet18": 11_689_512,
    "resnet101": 44_549_160,
    "vgg16": 138_357_544,
    "efficientnet_b3": 12_233_232,
}


@pytest.mark.parametrize("name", ["resnet18", "resnet101", "efficientnet_b3"])
def test_parameters_are_those_of_the_published_network(name):
    with torch.device("meta"):
        network = FACTORIES[name]("batch", (3, 224, 224), 1000)
    biases = sum(
        m.layer.bias.numel() for m in network.modules() if isinstance(m, models.Normalized) and m.layer.bias is not None
    )
    assert sum(p.numel() for p in network.parameters()) - biases == PUBLISHED_SIZES[name]


def test_vgg16_without_normalizer_has_the_published_parameters():
    with torch.device("meta"):
        network = FACTORIES["vgg16"]("none", (3, 224, 224), 1000)
    assert sum(p.numel() for p in network.parameters()) == PUBLISHED_SIZES["vgg16"]


@pytest.mark.parametrize("name", ["resnet18", "relu10", "efficientnet_narrow"])
@pytest.mark.parametrize("norm", ["batch", "group"])
def test_one_step(name, norm):
    one_step(name, norm)


@pytest.mark.heavy
@pytest.mark.parametrize("name", ["resnet101", "vgg16", "efficientnet_b3"])
def test_one_step_at_paper_size(name):
    one_step(name, "batch")


def one_step(name, norm):
    torch.set_default_dtype(torch.float32)
    network = models.build(name, norm, (3, 32, 32), 10, 0)
    optimizer = torch.optim.SGD(network.parameters(), lr=1e-3)
    inputs, targets = torch.randn(4, 3, 32, 32), torch.arange(4)
    before = [p.detach().clone() for p in network.parameters()]
    loss = torch.nn.functional.cross_entropy(network(inputs), targets)
    loss.backward()
    optimizer.step()
    assert torch.isfinite(loss)
    moved = [not torch.equal(a, b) for a, b in zip(before, network.parameters(), strict=True)]
    assert sum(moved) > 0.5 * len(moved)
