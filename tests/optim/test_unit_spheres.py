"""Unit spheres: the rate that turns as far as SGD, and training that does not see the scale of the initial weights."""

import math

import pytest
import torch
from torch import nn
from torch.nn import functional as F

from normgauge import optim
from normgauge.errors import InputError


@pytest.mark.parametrize("scale", [0.1, 1.0, 10.0])
def test_the_rate_turns_as_far_as_sgd(scale):
    torch.manual_seed(0)
    x, y = torch.randn(64, 6), torch.randint(3, (64,))
    start = scale * torch.randn(1, 6)  # one row, so that the mean over rows is its own
    rate, head, angles = optim.unit_sphere_rate(0.01, [start]), torch.tensor([[1.0, -1.0, 0.5]]), []
    for first, make in (
        (start, lambda w: torch.optim.SGD([w], lr=0.01)),
        (start / start.norm(), lambda w: optim.SphereSGD([w], lr=rate, radius=1.0)),
    ):
        weight = nn.Parameter(first.clone())
        z = x @ weight.T
        F.cross_entropy((z - z.mean()) / z.std() * head, y).backward()
        make(weight).step()
        angles.append(math.acos(min(float(F.cosine_similarity(first[0], weight.detach()[0], dim=0)), 1.0)))
    assert angles[0] == pytest.approx(angles[1], rel=1e-3)


def test_the_default_initialization_has_rate_three():
    torch.manual_seed(0)
    weights = [nn.Linear(256, 512).weight, nn.Conv2d(64, 128, 3).weight]
    assert optim.unit_sphere_rate(0.1, weights) == pytest.approx(0.3, rel=0.02)
    with pytest.raises(InputError, match="none of them zero"):
        optim.unit_sphere_rate(0.1, [torch.zeros(2, 3)])
    with pytest.raises(InputError, match="weights have rows"):
        optim.unit_sphere_rate(0.1, [])


def accuracy(scale, seed, make):
    """Train a CNN on the digits; return the share of test images it gets right."""
    from sklearn.datasets import load_digits

    images, labels = load_digits(return_X_y=True)
    x, y = torch.tensor(images / 16.0, dtype=torch.float32).reshape(-1, 1, 8, 8), torch.tensor(labels)
    order = torch.randperm(len(y), generator=torch.Generator().manual_seed(0))
    x, y = x[order], y[order]
    torch.manual_seed(seed)
    options = {"padding": 1, "bias": False, "dtype": torch.float32}
    convs = [nn.Conv2d(1, 16, 3, **options), nn.Conv2d(16, 32, 3, stride=2, **options)]
    rate = optim.unit_sphere_rate(0.1, [conv.weight for conv in convs])  # of the usual initialization
    parts = [m for c in convs for m in (c, nn.BatchNorm2d(c.out_channels, dtype=torch.float32), nn.ReLU())]
    model = nn.Sequential(*parts, nn.Flatten(), nn.Linear(512, 10, dtype=torch.float32))
    with torch.no_grad():
        for conv in convs:
            conv.weight.mul_(scale)
    optimizer = make(convs, [p for p in model.parameters() if all(p is not c.weight for c in convs)], rate)
    for _ in range(8):
        for part in torch.randperm(1297)[:1280].split(64):
            optimizer.zero_grad()
            F.cross_entropy(model(x[part]), y[part]).backward()
            optimizer.step()
    model.eval()
    with torch.no_grad():
        return float((model(x[1297:]).argmax(1) == y[1297:]).float().mean())


def on_spheres(convs, rest, rate):
    spheres = {"params": [c.weight for c in convs], "geometry": "sphere", "lr": rate, "radius": 1.0}
    return optim.SphereSGD([spheres, {"params": rest, "geometry": "euclidean"}], lr=0.1, momentum=0.9)


@pytest.mark.heavy
def test_training_does_not_see_the_scale_of_the_initial_weights():
    means = [sum(accuracy(scale, seed, on_spheres) for seed in range(3)) / 3 for scale in (0.1, 1.0, 10.0)]
    assert max(means) - min(means) <= 0.01 and min(means) > 0.95


def test_a_radial_gradient_does_not_amplify_the_rounding_of_the_norm():
    weight = nn.Parameter(torch.tensor([[0.25, -0.97]], dtype=torch.float64))
    start, optimizer = weight.norm().item(), optim.SphereSGD([weight], lr=1.0)
    for _ in range(200):
        weight.grad = 0.9 * weight.detach() + 1e-9
        optimizer.step()
    assert weight.norm().item() == pytest.approx(start, rel=1e-14)
