"""Enclosures of Jacobians on balls against dense Jacobians at random points of them, over random networks."""

import random

import pytest
import torch
from torch import nn

import normgauge as ng
from normgauge.measure.lipschitz.enclosure import enclose_jacobian
from normgauge.measure.lipschitz.lipschitz import Domain, Walk, private_copy
from reference.lipschitz import PlainAttention, slope_at


class Added(nn.Module):
    def __init__(self, *parts):
        super().__init__()
        self.part = nn.Sequential(*parts)

    def forward(self, x):
        return x + self.part(x)


class Gate(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.gate, self.value = nn.Linear(width, width), nn.Linear(width, width)

    def forward(self, x):
        return torch.cat([torch.sigmoid(self.gate(x)) * self.value(x), x], -1)[..., : x.shape[-1]]


class Spheres(nn.Module):
    """Rows of length 1, as on nGPT's streams."""

    def forward(self, x):
        return nn.functional.normalize(x, dim=-1)


class Groups(nn.GroupNorm):
    def forward(self, x):
        return super().forward(x.flatten(0, 1)).unflatten(0, x.shape[:2])


def drawn(seed):
    draw, width = random.Random(seed), 6
    steps = (
        nn.ReLU,
        nn.GELU,
        nn.Tanh,
        nn.SiLU,
        nn.Softplus,
        lambda: PlainAttention(width, seed % 2),
        lambda: Gate(width),
    )
    norms = (nn.Identity, lambda: nn.LayerNorm(width), lambda: nn.RMSNorm(width, 1e-3), lambda: Groups(2, width))
    torch.manual_seed(seed)
    layers = [nn.Linear(4, width)]
    for _ in range(draw.randint(1, 3)):
        parts = draw.choice(norms)(), draw.choice(steps)(), nn.Linear(width, width)
        layers.append(Added(*parts) if draw.random() < 0.5 else nn.Sequential(*parts))
    net, scale = nn.Sequential(*layers, nn.Linear(width, 2)).double(), 10 ** draw.uniform(-2, 1)
    for parameter in net.parameters():
        parameter.data.mul_(scale if parameter.ndim > 1 else 1.0)
    return net, torch.randn(1, 3, 4).double(), 10 ** draw.uniform(-4, 0.5)


@pytest.mark.parametrize("seed", range(16))
def test_no_jacobian_of_the_ball_is_above_its_bound(seed):
    net, data, radius = drawn(seed)
    walk = Walk(private_copy(net), Domain(data))
    bound, why = enclose_jacobian(walk, walk.values(0), radius)
    steps = torch.randn(30, 3, 4).double()
    steps = steps / steps.flatten(1).norm(dim=1)[:, None, None] * radius * torch.rand(30, 1, 1).double() ** 0.1
    assert not why and max(slope_at(net, data[0] + step) for step in steps) <= bound


class Mixed(nn.Module):
    def forward(self, x, given):
        return torch.relu(x - 0.5) @ given


class Gated(nn.Module):
    def __init__(self):
        super().__init__()
        self.layer = nn.Linear(3, 3, bias=False)
        self.layer.weight.data = torch.eye(3)

    def forward(self, x, given):
        return torch.relu(self.layer(x) * given.diagonal(dim1=1, dim2=2)[:, None])


def test_streams_on_spheres_are_bounded_near_the_data():
    torch.manual_seed(0)
    parts = [Added(nn.Linear(6, 6), Spheres()) for _ in range(2)]
    net, data = nn.Sequential(Spheres(), *parts, Spheres(), nn.Linear(6, 3)).double(), torch.randn(2, 3, 6).double()
    found = ng.lipschitz(net, data, radius=0.01, climbs=1)
    assert found.upper <= 1.2 * found.lower and not found.fallback
    small = ng.lipschitz(net, 1e-13 * data, radius=1e-14, climbs=0)  # where normalize divides by its floor
    assert small.lower <= small.upper


@pytest.mark.parametrize("make", [Mixed, Gated])
@pytest.mark.parametrize("radius", [None, 0.1])
def test_weights_that_come_with_each_datum_have_their_own_norm(make, radius):
    matrices = torch.stack([torch.eye(3), 100 * torch.eye(3), 10 * torch.eye(3)])
    data = {"x": torch.full((3, 2, 3), 0.5), "given": matrices}
    found = ng.lipschitz(make().double(), data, radius=radius, forward=lambda m, x: m(**x), climbs=0)
    assert (10**found.per_datum).tolist() == pytest.approx([1, 100, 10], rel=1e-6)


def test_a_gate_of_the_datum_is_no_weight_of_the_layer_before_it():
    class Own(nn.Module):
        def __init__(self):
            super().__init__()
            self.layer, self.next = nn.Linear(1, 2, bias=False), nn.Linear(2, 2, bias=False)
            self.next.weight.data = torch.eye(2)

        def forward(self, x):
            return self.next(self.layer(x[:, :1])) * x[:, 1:]

    data = torch.tensor([[1.0, 0.1, 0.1], [1.0, 10.0, 10.0]]), torch.zeros(2, 2)
    layer = ng.weight_lipschitz(ng.Objective(Own(), nn.functional.mse_loss, data, mode="eval")).layers[0]
    assert 10**layer.log10_output == pytest.approx(10, rel=1e-6)  # x times the gate
